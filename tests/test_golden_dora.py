"""DoRA checkpoints of PEFT 0.21 and of `adapters` 1.3.0 give the outputs that lie beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_golden_adapterhub import LORA_PLACE, check, fill_head, lora_place, tensors
from torch import Tensor

import adapterzoo
from adapterzoo import AutoAdapterModel, DoRAConfig

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"
# what each family's checkpoint adapts: the class whose logits lie beside it
TASKS = {
    "bert": "BertForSequenceClassification",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
ADAPTERHUB = ("bert", "llama", "roberta", "t5", "vit")


def golden(peer: str, family: str) -> Path:
    folder = GOLDEN / peer / family / "dora"
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoint in {peer}/{family}/dora")
    return folder


def fill(model: Any, file: dict[str, dict[str, Tensor]]) -> None:
    """Copy tensors by path of the layer; all of them, into all of the adapter."""
    modules = dict(model.adapter_modules("golden"))
    assert set(modules) == set(file)
    for path, module in modules.items():
        module.load_state_dict(file[path])


@pytest.mark.parametrize("family", TASKS)
def test_peft_checkpoints_give_the_golden_logits(family: str):
    folder = golden("peft", family)
    theirs = json.loads((folder / "adapter_config.json").read_text())
    assert theirs["use_dora"]
    assert not theirs["use_rslora"]
    model = getattr(transformers, TASKS[family]).from_pretrained(folder.parent / "base").eval()
    adapterzoo.init(model)
    config = DoRAConfig(
        r=theirs["r"], alpha=theirs["lora_alpha"], target_modules=tuple(theirs["target_modules"])
    )
    model.add_adapter("golden", config)
    names = {"lora_A.weight": "lora_A", "lora_B.weight": "lora_B", "lora_magnitude_vector": "m"}
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    file: dict[str, dict[str, Tensor]] = {}
    head: dict[str, Tensor] = {}
    for key, value in load_file(folder / "adapter_model.safetensors").items():
        place = key.removeprefix("base_model.model.")
        suffix = next((s for s in names if place.endswith(f".{s}")), None)
        if suffix is None:
            head[place] = value
        else:
            path = place.removesuffix(f".{suffix}").removeprefix(prefix)
            file.setdefault(path, {})[names[suffix]] = value
    expected = load_file(folder / "expected.safetensors")
    outputs = {name: expected.pop(name) for name in ("logits", "logits_base")}
    fill(model, file)
    with torch.no_grad():
        base = model(**expected).logits
        for key, value in head.items():
            model.get_parameter(key).copy_(value)
        model.set_active_adapters("golden")
        logits = model(**expected).logits
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(base, outputs["logits_base"], rtol=0, atol=1e-5)
    assert (outputs["logits"] - outputs["logits_base"]).abs().max() > 1e-3
    model.merge_adapter("golden")
    with torch.no_grad():
        merged = model(**expected).logits
    torch.testing.assert_close(merged, outputs["logits"], rtol=0, atol=1e-5)


def adapterhub_model(folder: Path, convention: str) -> Any:
    model = AutoAdapterModel.from_pretrained(folder.parent / "base").eval()
    theirs = json.loads((folder / "adapter_config.json").read_text())["config"]
    assert theirs["use_dora"]
    head = json.loads((folder / "head_config.json").read_text())
    fields = ("alpha", "attn_matrices", "r", "selfattn_lora", "intermediate_lora", "output_lora")
    config = DoRAConfig(convention=convention, **{name: theirs[name] for name in fields})
    model.add_adapter("golden", config=config)
    model.add_prediction_head_from_config("golden", head["config"])
    model.set_active_adapters("golden")
    sites = {
        (site.layer, site.role, site.cross): site.path
        for role in ("query", "key", "value", "mlp_in", "mlp_out")
        for site in model.anatomy.select(role, cross=None)
    }
    file: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors(folder, "pytorch_adapter.bin").items():
        stem, magnitude, _ = key.partition(".m.weight")
        if not magnitude:
            assert LORA_PLACE.match(key)
        place, suffix = lora_place(f"{stem}.lora_A" if magnitude else key)
        values = file.setdefault(sites[place], {})
        values["m" if magnitude else suffix] = value.squeeze(-1) if magnitude else value
    fill(model, file)
    fill_head(model, folder)
    return model


@pytest.mark.parametrize("family", ADAPTERHUB)
def test_adapterhub_checkpoints_give_the_golden_outputs(family: str):
    folder = golden("adapterhub", family)
    check(adapterhub_model(folder, "adapterhub"), folder)


@pytest.mark.parametrize("family", ADAPTERHUB)
def test_adapterhub_checkpoints_give_the_golden_outputs_when_merged(family: str):
    # in the peer itself, merged and unmerged differ by 1e-1
    folder = golden("adapterhub", family)
    model = adapterhub_model(folder, "adapterhub")
    model.merge_adapter("golden")
    expected = load_file(folder / "expected.safetensors")
    outputs = {key: expected.pop(key) for key in ("hidden", "hidden_base", "logits")}
    with torch.no_grad():
        torch.testing.assert_close(model(**expected).logits, outputs["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ADAPTERHUB)
def test_the_convention_of_the_paper_does_not_give_them(family: str):
    folder = golden("adapterhub", family)
    with pytest.raises(AssertionError, match="not close"):
        check(adapterhub_model(folder, "paper"), folder)
