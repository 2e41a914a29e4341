"""`info` and `verify`."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from adapterzoo import AutoAdapterModel
from adapterzoo.cli import main

DATA = Path(__file__).parents[1] / "data"
PEFT, HUB = DATA / "golden_peft", DATA / "golden_adapterhub"


def test_info_of_our_own(run, trained, base):
    folder = trained["folder"]
    found = json.loads(run("info", folder, "--json").stdout)
    head = 2 * 32 + 2
    files = ["adapter.safetensors", "adapter_config.json"]
    assert found | {"config": None, "meta": None} == {
        "path": str(folder),
        "format": "native",
        "holds": "adapter",
        "name": "reviews",
        "base_model": str(base),
        "model_type": "bert",
        "method": "lora",
        "head": "classification",
        "labels": ["fresh", "rotten"],
        "parameters": trained["trained_parameters"],
        "tensors": len(load_file(folder / "adapter.safetensors")),
        "dtypes": ["float32"],
        "bytes": sum((folder / file).stat().st_size for file in files),
        "files": {file: (folder / file).stat().st_size for file in files},
        "base_revision": None,
        "base_digest": json.loads((folder / files[1]).read_text())["base_digest"],
        "fingerprint": trained["fingerprint"],
        "pinned": f"{folder}@{trained['fingerprint'][:16]}",
        "config": None,
        "meta": None,
        "compared_with": None,
    }
    assert found["config"]["r"] == 4
    assert found["parameters"] > head
    text = run("info", folder).stdout
    for shown in ("reviews", "native", "fresh, rotten", trained["fingerprint"]):
        assert shown in text


@pytest.mark.parametrize(
    ("folder", "method", "head"),
    [
        (PEFT / "bert/lora", "LORA", None),
        (PEFT / "bert/boft_m2", "BOFT", None),
        (HUB / "bert/lora", "lora", "classification"),
        (HUB / "bert/seq_bn", "bottleneck", "classification"),
    ],
)
def test_info_of_the_peers(run, folder, method, head):
    found = json.loads(run("info", folder, "--json").stdout)
    assert (found["method"] or "bottleneck", found["head"]) == (method, head)
    assert found["format"] == ("peft" if PEFT in folder.parents else "adapterhub")
    assert (found["base_model"], found["fingerprint"]) == ("bert/base", None)
    # with the model it is known what the adapter is here
    base = folder.parent / "base"
    compared = json.loads(run("info", folder, "--model", base, "--json").stdout)
    model = AutoAdapterModel.from_pretrained(base)
    model.load_adapter(folder, load_as="a")
    assert compared["fingerprint"] == model.adapter_fingerprint("a")
    assert compared["config"] == json.loads(json.dumps(model.adapters_config["a"].to_dict()))
    assert compared["head"] == "classification"
    assert compared["labels"] == model.get_labels("a")
    assert compared["parameters"] == found["parameters"]


@pytest.mark.parametrize("command", ["predict", "merge", "verify"])
def test_no_code_of_a_model_runs_and_nobody_is_asked(trained, tmp_path, command):
    folder, ran = tmp_path / "base", tmp_path / "ran"
    folder.mkdir()
    code = {"AutoConfig": "own.Own", "AutoModel": "own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": code}))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    given = {
        "predict": ["predict", trained["folder"], "--text", "fine", "--model", folder],
        "merge": ["merge", folder, trained["folder"], tmp_path / "m"],
        "verify": ["verify", trained["folder"], "--model", folder],
    }
    result = CliRunner().invoke(main, [str(a) for a in given[command]], input="y\n")
    assert result.exit_code == 1
    assert f"the base model {str(folder)!r} cannot be loaded" in result.stderr
    assert "[y/N]" not in result.output
    assert not ran.exists()


def test_verify_says_what_was_looked_at(run, trained, base):
    folder, mark = trained["folder"], trained["fingerprint"]
    text = run("verify", folder, "--model", base, "--fingerprint", mark).stdout
    count = len(load_file(folder / "adapter.safetensors"))
    assert text.splitlines() == [
        f"{folder}: native adapter, {count} tensors: complete, digests correct, all values finite",
        f"fits {base}: every tensor has its layer and shape there",
        f"fingerprint {mark}",
    ]
    found = json.loads(run("verify", folder, "--json").stdout)
    assert (found["ok"], found["digests"], found["holds"]) == (True, True, "adapter")
    assert (found["fingerprint"], found["compared_with"]) == (mark, None)


def test_verify_promises_no_more_than_a_format_can_show(run, trained, tmp_path):
    """A tensor that is missing in a peer's file is seen where it is compared with a model."""
    folder = shutil.copytree(PEFT / "bert/lora", tmp_path / "a")
    count = len(load_file(folder / "adapter_model.safetensors"))
    first = f"{folder}: peft adapter, {count} tensors: readable, all values finite"
    unseen = (
        "this format has no digests: a changed value cannot be detected, and a missing tensor only "
        "with --model"
    )
    said = run("verify", folder, "--model", PEFT / "bert/base").stdout.splitlines()
    assert said[:2] == [first, unseen]
    assert said[2].startswith(f"fits {PEFT / 'bert/base'}: ")
    tensors = load_file(folder / "adapter_model.safetensors")
    key = sorted(key for key in tensors if "lora_A" in key)[0]
    del tensors[key]
    save_file(tensors, folder / "adapter_model.safetensors")
    said = run("verify", folder).stdout.splitlines()
    assert said[1:] == [unseen]
    assert not json.loads(run("verify", folder, "--json").stdout)["digests"]
    said = run("verify", folder, "--model", PEFT / "bert/base", code=1).stderr
    assert "/lora_A" in said
    assert "in the model only" in said


@pytest.mark.parametrize("gone", ["pytorch_model_head.bin", "head_config.json"])
def test_verify_misses_half_a_head(run, tmp_path, gone):
    folder = shutil.copytree(HUB / "bert/lora", tmp_path / "a")
    assert "readable" in run("verify", folder).stdout
    (folder / gone).unlink()
    said = run("verify", folder, code=1).stderr
    assert "is incomplete: there are only" in said
    assert "to drop a head, delete its tensors and config" in said


def spoiled(folder: Path, to: Path, spoil: str) -> Path:
    """A copy with something wrong."""
    shutil.copytree(folder, to)
    file = next(to.glob("adapter*.safetensors"))
    content = file.read_bytes()
    if spoil == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif spoil == "a bit":
        # the last byte belongs to the last tensor
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif spoil == "gone":
        file.unlink()
    else:
        tensors = load_file(file)
        key = next(iter(tensors))
        tensors[key] = tensors[key].clone()
        tensors[key].view(-1)[0] = torch.inf
        save_file(tensors, file)
    return to


@pytest.mark.parametrize(
    ("whose", "spoil", "message"),
    [
        ("ours", "cut", "damaged"),
        ("ours", "a bit", "not what was written"),
        ("ours", "gone", "is incomplete"),
        ("PEFT's", "cut", "damaged"),
        ("PEFT's", "inf", "NaN or infinite"),
    ],
)
def test_verify_finds_what_is_wrong(run, trained, tmp_path, whose, spoil, message):
    source = trained["folder"] if whose == "ours" else PEFT / "bert/lora"
    folder = spoiled(source, tmp_path / "a", spoil)
    result = run("verify", folder, code=1)
    assert message in result.stderr
    assert result.stdout == ""
    result = run("verify", folder, "--json", code=1)
    found = json.loads(result.stdout)
    assert not found["ok"]
    assert message in found["error"]


def test_verify_compares_every_tensor_with_the_model(run, trained, tmp_path):
    config = json.loads((PEFT / "bert/base/config.json").read_text())
    wider = config | {"hidden_size": 64, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(wider))
    said = run("verify", trained["folder"], "--model", tmp_path, code=1).stderr
    assert "differences from this BertAdapterModel" in said
    said = run("verify", trained["folder"], "--model", tmp_path / "no", code=1).stderr
    assert f"the base model {str(tmp_path / 'no')!r} cannot be loaded" in said
    assert "does not fit" not in said


def test_verify_compares_fingerprints(run, trained, base, tmp_path):
    said = run("verify", trained["folder"], "--fingerprint", "0" * 64, code=1).stderr
    assert f"the fingerprint is '{trained['fingerprint']}', not" in said
    said = run("verify", PEFT / "bert/lora", "--fingerprint", "0" * 64, code=1).stderr
    assert "the fingerprint is not known without the base model. Write --model." in said
    model = AutoAdapterModel.from_pretrained(base)
    model.add_classification_head("stars", num_labels=5)
    model.save_head(tmp_path, "stars")
    said = run("verify", tmp_path, "--fingerprint", "0" * 64, code=1).stderr
    assert "a head has no fingerprint. Leave out --fingerprint." in said


def test_a_head_alone(run, base, tmp_path):
    model = AutoAdapterModel.from_pretrained(base)
    model.add_classification_head("stars", num_labels=5)
    for form in ("native", "adapterhub"):
        model.save_head(tmp_path / form, "stars", format=form)
        found = json.loads(run("info", tmp_path / form, "--json").stdout)
        assert (found["holds"], found["name"], found["format"]) == ("head", "stars", form)
        assert (found["head"], len(found["labels"])) == ("classification", 5)
        assert (found["method"], found["fingerprint"]) == (None, None)
        assert "fits" in run("verify", tmp_path / form, "--model", base).stdout


HOSTILE = {
    "name": ["a"], "config": [1], "model_name": 7, "model_type": {}, "peft_type": [[]],
    "base_model_name_or_path": {"a": 1},
}  # fmt: skip


@pytest.mark.parametrize("field", HOSTILE)
@pytest.mark.parametrize("case", ["golden_peft", "golden_adapterhub"])
def test_configs_of_wrong_types_give_no_trace(run, tmp_path, case, field):
    """`info` shows what stands there, and what needs a meaning is refused."""
    folder = tmp_path / "a"
    shutil.copytree(DATA / case / "bert/lora", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: HOSTILE[field]}))
    run("info", folder)
    run("info", folder, "--json")
    if field in ("config", "peft_type") and (field == "config") == (case == "golden_adapterhub"):
        base = DATA / case / "bert/base"
        assert run("verify", folder, "--model", base, code=1).stderr.startswith("adapterzoo: ")


@pytest.mark.parametrize("labels", [{"a": 0, "b": "x"}, {"a": None}, [1], "ab"])
def test_labels_of_wrong_types_give_no_trace(run, tmp_path, labels):
    folder = tmp_path / "a"
    shutil.copytree(HUB / "bert/lora", folder)
    file = folder / "head_config.json"
    document = json.loads(file.read_text())
    document["config"] |= {"label2id": labels, "head_type": ["classification"]}
    file.write_text(json.dumps(document))
    assert "golden" in run("info", folder).stdout
    said = run("verify", folder, "--model", HUB / "bert/base", code=1).stderr
    assert said.startswith("adapterzoo: ")


def test_a_terminal_obeys_no_name_and_no_error(run, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(HUB / "bert/lora", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"name": "\x1b[2Jgone\r\n"}))
    said = run("info", folder).stdout
    assert "\\x1b[2Jgone\\r\\n" in said
    assert "\x1b" not in said
    file = folder / "pytorch_adapter.bin"
    torch.save(torch.load(file, weights_only=True) | {"\x1b[2Jgone": torch.ones(1)}, file)
    said = run("verify", folder, "--model", HUB / "bert/base", code=1).stderr
    assert "\\x1b[2Jgone   in the file only" in said
    assert "\x1b" not in said
    # one difference in each line
    assert said.count("\n") > 1


def test_verify_looks_at_the_files_of_the_adapter_alone(run, trained, tmp_path):
    folder = shutil.copytree(trained["folder"], tmp_path / "a")
    save_file({"x": torch.tensor([math.nan])}, folder / "adapter_model.safetensors")
    assert "all values finite" in run("verify", folder).stdout


def test_verify_looks_at_numbers_of_eight_bits(run, tmp_path):
    folder = tmp_path / "a"
    shutil.copytree(HUB / "bert/lora", folder)
    file = folder / "pytorch_adapter.bin"
    tensors = {k: t.to(torch.float8_e4m3fn) for k, t in torch.load(file, weights_only=True).items()}
    torch.save(tensors, file)
    assert "all values finite" in run("verify", folder).stdout
    torch.save({key: torch.full_like(tensor, math.nan) for key, tensor in tensors.items()}, file)
    assert "NaN or infinite" in run("verify", folder, code=1).stderr
