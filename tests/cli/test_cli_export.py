"""`export` and `verify --for`: adapters for servers, whole models, and the proof, from a shell."""

from __future__ import annotations

import json
from pathlib import Path

import fresh
import pytest
import torch
import transformers
from families import tiny_config
from peft_world import CONFIG, QUIET, built, change
from safetensors.torch import load_file
from snapshots import stir

import adapterzoo
from adapterzoo import AutoAdapterModel

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
IDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A tiny Llama whose output layer is its embedding."""
    folder = tmp_path_factory.mktemp("llama")
    config = tiny_config("llama")
    config.tie_word_embeddings = True
    built("LlamaForCausalLM", config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory) -> dict[str, Path]:
    """Adapters by name; each folder names its base model."""
    found, folder = {}, tmp_path_factory.mktemp("adapters")
    configs = {
        "lora": "lora[r=4,alpha=6]",
        "dora": "dora[r=4]",
        "table": "lora[r=4,target_modules=['embed_tokens','q_proj']]",
        "bn": "seq_bn",
    }
    for name, config in configs.items():
        model = adapterzoo.init(transformers.LlamaForCausalLM.from_pretrained(llama))
        model.add_adapter(name, config)
        stir(model, name)
        model.save_adapter(folder / name, name)
        found[name] = folder / name
    return found


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def here(llama, folder):
    """What the adapter computes here."""
    model = adapterzoo.init(transformers.LlamaForCausalLM.from_pretrained(llama))
    model.load_adapter(folder, load_as="a", set_active=True)
    return logits(model)


def test_an_export_is_proven_in_a_fresh_process(llama, adapters, tmp_path):
    made = fresh.command("export", adapters["lora"], tmp_path / "served", "--serve", "any")
    first, *commands = made.stdout.splitlines()
    assert first == "lora for any server, exactly, of rank 8"
    assert [line.split()[0] for line in commands] == [
        "vllm", "python", "lorax-launcher", "text-generation-launcher", "python"
    ]  # fmt: skip
    assert f"lora={tmp_path / 'served'}" in commands[0]
    given = ("--model", llama, "--adapter", adapters["lora"])
    proven = fresh.command("verify", tmp_path / "served", "--for", "sglang", *given)
    assert proven.stdout.endswith("computes what the adapter computes here\n")
    change(tmp_path / "served", lora_alpha=9)
    wrong = fresh.command("verify", tmp_path / "served", "--for", "sglang", *given, code=1)
    assert "q_proj.weight: its change differs by 0.12 of the norm" in wrong.stdout
    assert wrong.stdout.endswith("SGLang 0.5.23: is NOT equal\n")


def test_the_proof_as_json(run, llama, adapters, tmp_path):
    run("export", adapters["lora"], tmp_path / "served", "--serve", "vllm")
    given = ("--for", "tgi", "--model", llama, "--json")
    found = json.loads(run("verify", tmp_path / "served", *given).stdout)
    assert found["equal"]
    assert found["version"] == "TGI at db931fc"
    change(tmp_path / "served", peft_type="IA3")
    found = json.loads(run("verify", tmp_path / "served", *given, code=1).stdout)
    assert not found["equal"]
    assert found["refused"]


def test_other_methods_need_a_limit_and_show_their_errors(run, llama, adapters, tmp_path):
    folder = tmp_path / "served"
    said = run("export", adapters["dora"], folder, "--serve", "vllm", code=1).stderr
    assert "Write --rank 16 or --energy 0.99." in said
    assert not folder.exists()
    for hint in (("--rank", 16), ("--energy", 0.99)):
        said = run("export", adapters["dora"], folder, "--serve", "vllm", *hint).stdout
        assert said.splitlines()[0].split() == ["layer", "rank", "‖ΔW‖", "error", "relative"]
        assert "dora for vLLM 0.32, by SVD, of rank" in said
    given = ("--serve", "vllm", "--energy", 1, "--dtype", "bfloat16", "--json", "--name", "b")
    found = json.loads(run("export", adapters["dora"], folder, *given).stdout)
    assert not found["exact"]
    assert 1e-4 < found["rounding"] < 1e-2
    assert f"b={folder}" in found["commands"][0]
    assert {t.dtype for t in load_file(folder / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }
    run("verify", folder, "--for", "vllm", "--model", llama, "--adapter", adapters["dora"])


def test_hints_are_options(run, adapters, tmp_path):
    folder = tmp_path / "served"
    said = run("export", adapters["table"], folder, "--serve", "any", code=1).stderr
    assert "Write --serve vllm or --serve sglang or --serve gguf." in said
    run("export", adapters["table"], folder, "--serve", "sglang")
    said = run("export", adapters["bn"], tmp_path / "bn", "--serve", "any", code=1).stderr
    assert "only LoRA is read" in said
    assert "Write `adapterzoo convert`." in said
    run("convert", adapters["bn"], tmp_path / "bn", "--to", "native")


# --- whole models ---


def test_a_merged_model_is_untied_and_sharded(run, llama, adapters, tmp_path):
    folder = tmp_path / "merged"
    given = ("--serve", "vllm", "--merge", "--max-shard-size", "20KB")
    said = run("export", adapters["table"], folder, *given).stdout
    assert said.splitlines() == [f"{folder}: a LlamaForCausalLM", f"vllm serve {folder}"]
    assert len([*folder.glob("model-*.safetensors")]) > 3
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    plain, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits(plain), here(llama, adapters["table"]), rtol=0, atol=1e-5)
    # the base model is as it was
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    assert base.lm_head.weight is base.model.embed_tokens.weight


def test_a_merged_model_without_tied_changes_stays_tied(run, llama, adapters, tmp_path):
    run("export", adapters["lora"], tmp_path / "merged", "--serve", "gguf", "--merge")
    assert json.loads((tmp_path / "merged/config.json").read_text())["tie_word_embeddings"]
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(plain), here(llama, adapters["lora"]), rtol=0, atol=1e-5)


def test_the_head_of_a_merged_model_is_that_of_its_class(run, llama, tmp_path):
    config = tiny_config("llama")
    config.num_labels, config.tie_word_embeddings = 3, True
    model = adapterzoo.init(built("LlamaForSequenceClassification", config))
    model.add_adapter("a", "lora[r=4]")
    stir(model, "a")
    with torch.no_grad():
        model.score.weight.add_(0.1)
    model.save_adapter(tmp_path / "a", "a", format="peft")
    run("export", tmp_path / "a", tmp_path / "m", "--serve", "vllm", "--merge", "--model", llama)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    assert type(plain).__name__ == "LlamaForSequenceClassification"
    assert torch.equal(plain.score.weight, model.score.weight)


def test_a_bert_s_head_is_a_classifier(run, base, trained, tmp_path):
    run("export", trained["output"], tmp_path / "m", "--serve", "gguf", "--merge", "--model", base)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "m")
    assert type(plain).__name__ == "BertForSequenceClassification"
    model = AutoAdapterModel.from_pretrained(base)
    name = model.load_adapter(trained["output"], set_active=True)
    assert name in model.known_heads()
    torch.testing.assert_close(logits(plain), logits(model), rtol=0, atol=1e-5)


# --- refused ---


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["export", "SRC", "DST"], 2, "--serve"),
        (["export", "SRC", "DST", "--serve", "vlm"], 2, "--serve"),
        (["export", "SRC", "DST", "--serve", "any", "--rank", 0], 2, "--rank"),
        (["export", "SRC", "DST", "--serve", "any", "--dtype", "int8"], 2, "--dtype"),
        (["export", "SRC", "DST", "--serve", "any", "--merge", "--rank", 2], 2, "--rank has no"),
        (["export", "SRC", "DST", "--serve", "any", "--max-shard-size", "1MB"], 2, "needs --merge"),
        (["export", "/nothing/at/all/there", "DST", "--serve", "any"], 1, "no such folder"),
        (["verify", "SRC", "--for", "vllm"], 2, "--for needs --model"),
        (["verify", "SRC", "--adapter", "SRC"], 2, "--adapter needs --for"),
        (["verify", "SRC", "--for", "any", "--model", "BASE"], 2, "--for"),
        (["verify", "SRC", "--for", "vllm", "--model", "BASE"], 1, "not a PEFT folder"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_bad_options_write_nothing(run, llama, adapters, tmp_path, options, code, says):
    names = {"SRC": adapters["lora"], "DST": tmp_path / "served", "BASE": llama}
    said = run(*[names.get(option, option) for option in options], code=code).stderr
    assert says in said
    assert not (tmp_path / "served").exists()


def test_other_folders_are_not_replaced(run, adapters, tmp_path):
    run("convert", adapters["lora"], tmp_path / "native", "--to", "native")
    said = run("export", adapters["lora"], tmp_path / "native", "--serve", "any", code=1).stderr
    assert "Write another folder" in said
    said = run(
        "export", adapters["lora"], tmp_path / "native", "--serve", "any", "--merge", code=1
    ).stderr
    assert "exists already" in said
    assert (tmp_path / "native" / CONFIG).is_file()
