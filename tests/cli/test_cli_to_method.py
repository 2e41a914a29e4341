"""`convert --to lora`: a checkpoint of one method becomes one of another, with a certificate."""

from __future__ import annotations

import json
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
        (["--to", "lora", "--rank", 2, "--energy", 0.5], 2, "--rank and --energy"),
        (["--to", "lora", "--rank", 0], 2, "--rank"),
        (["--to", "lora", "--energy", 0], 2, "--energy"),
        (["--to", "lora", "--energy", 1.5], 2, "--energy"),
        (["--to", "peft", "--rank", 2], 2, "--rank needs --to with a method"),
        (["--to", "peft", "--report", "x.json"], 2, "--report needs --to with a method"),
        (["--to", "nonsense"], 2, "neither a format"),
        (["--to", "lora", "--report", "/nowhere/at/all/x.json"], 1, "--report"),
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
    for name, says in (("bn", "not a change of a weight"), ("head", "only a head")):
        said = run("convert", tmp_path / name, tmp_path / "lora", "--to", "lora", code=1).stderr
        assert says in said
        assert not (tmp_path / "lora").exists()
