"""`convert --to lora`: a checkpoint of one method becomes one of another, with a certificate."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import QUIET
from safetensors.torch import load_file
from snapshots import stir

import adapterzoo
from adapterzoo import AutoAdapterModel, VeraConfig

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]


@pytest.fixture
def vera(base: Path, tmp_path: Path) -> Path:
    """An adapter with a head."""
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("a", VeraConfig(r=4))
    stir(model, "a")
    model.add_classification_head("a", num_labels=3, use_pooler=True, layers=1)
    model.save_adapter(tmp_path / "vera", "a")
    return tmp_path / "vera"


def logits(model: Any, folder: Path, inputs: Any) -> torch.Tensor:
    model.load_adapter(folder, set_active=True, load_as=folder.name)
    with torch.no_grad():
        return model.eval()(**inputs).logits


def test_vera_becomes_an_equal_lora(run, base, vera, tmp_path):
    report = tmp_path / "report.json"
    said = run(
        "convert", vera, tmp_path / "lora", "--to", "lora", "--report", report, "--text", "a film"
    ).stdout
    facts = json.loads(report.read_text())
    assert facts["exact"]
    assert facts["relative"] < 1e-6
    assert facts["inputs"] == "given"
    assert facts["output_difference"] < 1e-4 < facts["output_change"]
    assert said.splitlines()[0].split() == ["layer", "rank", "‖ΔW‖", "error", "relative"]
    for layer in facts["layers"]:
        assert layer["path"] in said
        assert layer["rank"] == 4
    assert said.splitlines()[-1] == f"{tmp_path / 'lora'}: lora from vera, as 'native'"
    model, inputs = AutoAdapterModel.from_pretrained(base), tiny_inputs("bert")
    found, expected = (logits(model, f, inputs) for f in (tmp_path / "lora", vera))
    assert found.shape == (2, 3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert model.adapters_config.get("lora").architecture == "lora"


def test_dst_has_the_format_of_src_and_peft_loads_it(run, tmp_path):
    plain = transformers.LlamaForCausalLM(tiny_config("llama")).eval()
    plain.save_pretrained(tmp_path / "base")
    model = adapterzoo.init(type(plain).from_pretrained(tmp_path / "base"))
    model.add_adapter("a", VeraConfig(r=4))
    stir(model, "a")
    model.save_adapter(tmp_path / "vera", "a", format="peft")
    options = ["--to", "lora", "--model", tmp_path / "base", "--rank", 3]
    said = run("convert", tmp_path / "vera", tmp_path / "lora", *options).stdout
    assert "as 'peft'" in said
    tensors = load_file(tmp_path / "lora/adapter_model.safetensors")
    assert {t.shape[0] for key, t in tensors.items() if "lora_A" in key} == {3}
    inputs = tiny_inputs("llama")
    expected = logits(model, tmp_path / "lora", inputs)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "lora").eval()
    with torch.no_grad():
        found = theirs(**inputs).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--to", "lora", "--rank", 0], 2, "--rank"),
        (["--to", "lora", "--energy", 0], 2, "--energy"),
        (["--to", "lora", "--energy", 1.5], 2, "--energy"),
        (["--to", "peft", "--rank", 2], 2, "--rank needs --to with a method"),
        (["--to", "peft", "--report", "x.json"], 2, "--report needs --to with a method"),
        (["--to", "nonsense"], 2, "neither a format"),
        (["--to", "lora", "--report", "/nowhere/at/all/x.json"], 1, "x.json"),
    ],
    ids=str,
)
def test_bad_options_write_nothing(run, vera, tmp_path, options, code, says):
    if "/nowhere/at/all/x.json" in options:
        (tmp_path / "file").write_text("")
        options = [*options[:-1], tmp_path / "file" / "x.json"]
    said = run("convert", vera, tmp_path / "lora", *options, code=code).stderr
    assert says in said
    assert not (tmp_path / "lora").exists()


def test_adapters_that_change_no_weight_are_refused(run, base, tmp_path):
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("a", "seq_bn")
    model.save_adapter(tmp_path / "bn", "a")
    model.add_classification_head("h", num_labels=2)
    model.save_head(tmp_path / "head", "h")
    for name, says in (("bn", "not a change of a weight"), ("head", "there is no adapter")):
        said = run("convert", tmp_path / name, tmp_path / "lora", "--to", "lora", code=1).stderr
        assert says in said
        assert not (tmp_path / "lora").exists()


THEIRS = {
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=20, scaling=5.0),
    "randlora": lambda: peft.RandLoraConfig(r=4, randlora_alpha=8),
    "hra": lambda: peft.HRAConfig(r=4),
    "c3a": lambda: peft.C3AConfig(block_size=8),
    "waveft": lambda: peft.WaveFTConfig(n_frequency=20),
}


@pytest.mark.parametrize("name", THEIRS)
def test_files_of_methods_that_only_peft_has(run, tmp_path, name):
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(tiny_config("llama")).eval()
    plain.save_pretrained(tmp_path / "base")
    config = THEIRS[name]()
    config.task_type, config.target_modules = "CAUSAL_LM", {"q_proj", "v_proj"}
    theirs = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape) * 0.1)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    inputs = tiny_inputs("llama")
    with torch.no_grad():
        wanted = theirs(**inputs).logits
    report, out = tmp_path / "report.json", tmp_path / "lora"
    options = ["--to", "lora", "--model", tmp_path / "base", "--report", report]
    run("convert", tmp_path / "theirs", out, *options)
    facts = json.loads(report.read_text())
    assert facts["method"] == config.peft_type.value
    assert not facts["exact"]
    assert facts["relative"] < 1e-5
    assert facts["output_difference"] < 1e-4 < facts["output_change"]
    assert len(facts["layers"]) == 4
    again = type(plain).from_pretrained(tmp_path / "base")
    with torch.no_grad():
        found = peft.PeftModel.from_pretrained(again, out).eval()(**inputs).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    # the error of rank 2 is the tail of the singular values of what PEFT merges
    run("convert", tmp_path / "theirs", tmp_path / "small", *options, "--rank", 2)
    layers = json.loads(report.read_text())["layers"]
    merged = theirs.merge_and_unload()
    untouched = type(plain).from_pretrained(tmp_path / "base").model
    for layer in layers:
        new = merged.model.get_submodule(layer["path"]).weight.detach().double()
        old = untouched.get_submodule(layer["path"]).weight.detach().double()
        values = torch.linalg.svdvals(new - old)
        assert layer["error"] == pytest.approx(float(values[2:].norm()), rel=1e-4)


def test_a_head_that_only_peft_could_load_is_refused(run, tmp_path):
    torch.manual_seed(0)
    plain = transformers.BertForSequenceClassification(tiny_config("bert"))
    plain.save_pretrained(tmp_path / "base")
    config = peft.FourierFTConfig(
        n_frequency=20, scaling=9.0, task_type="SEQ_CLS", target_modules=["query"]
    )
    theirs = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape) * 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    options = ["--to", "lora", "--model", tmp_path / "base"]
    said = run("convert", tmp_path / "theirs", tmp_path / "lora", *options, code=1).stderr
    assert "classifier" in said
    assert "--no-head" in said
    assert not (tmp_path / "lora").exists()
    run("convert", tmp_path / "theirs", tmp_path / "lora", *options, "--no-head")
    assert (tmp_path / "lora/adapter_config.json").is_file()


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.")
def test_an_output_layer_that_is_tied_is_not_taken_for_its_table(run, tmp_path):
    """Merged by PEFT, both change; a LoRA of the table would change the embeddings alone."""
    plain = transformers.GPT2LMHeadModel(tiny_config("gpt2"))
    plain.save_pretrained(tmp_path / "base")
    config = peft.FourierFTConfig(n_frequency=20, target_modules=["lm_head"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(plain, config)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(1)
    theirs.save_pretrained(tmp_path / "theirs")
    options = ["--to", "lora", "--model", tmp_path / "base"]
    said = run("convert", tmp_path / "theirs", tmp_path / "lora", *options, code=1).stderr
    assert "'lm_head.weight'" in said
    assert "merge_and_unload" in said
    assert not (tmp_path / "lora").exists()


def test_without_peft_the_message_says_what_to_install(run, tmp_path, monkeypatch):
    plain = transformers.LlamaForCausalLM(tiny_config("llama"))
    plain.save_pretrained(tmp_path / "base")
    config = peft.FourierFTConfig(n_frequency=20, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "theirs")
    monkeypatch.setitem(sys.modules, "peft", None)
    options = ["--to", "lora", "--model", tmp_path / "base"]
    said = run("convert", tmp_path / "theirs", tmp_path / "lora", *options, code=1).stderr
    assert "FOURIERFT" in said
    assert "pip install peft" in said
    assert not (tmp_path / "lora").exists()


def test_adalora_becomes_an_equal_lora(run, tmp_path):
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(tiny_config("llama")).eval()
    plain.save_pretrained(tmp_path / "base")
    config = peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(plain, config).eval()
    with torch.no_grad():
        for p in theirs.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape) * 0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    report, inputs = tmp_path / "report.json", tiny_inputs("llama")
    options = ["--to", "lora", "--model", tmp_path / "base", "--report", report]
    run("convert", tmp_path / "theirs", tmp_path / "lora", *options)
    assert json.loads(report.read_text())["exact"]
    again = type(plain).from_pretrained(tmp_path / "base")
    found = peft.PeftModel.from_pretrained(again, tmp_path / "lora").eval()
    assert found.peft_config["default"].peft_type == "LORA"
    with torch.no_grad():
        expected = theirs(**inputs).logits
        torch.testing.assert_close(found(**inputs).logits, expected, rtol=0, atol=1e-5)
