"""What a PeftModel says of its adapters, and which of their parameters are trained, as in PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
from families import tiny_inputs
from peft_world import QUIET, plain
from torch import nn

import adapterzoo.peft
from adapterzoo.errors import ConfigError, StateError

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
BOTH: list[Any] = [adapterzoo.peft, peft]
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-6}


def both(family: str, fields: dict[str, Any], kind: str = "LoraConfig") -> list[Any]:
    """The model with an adapter, in both libraries."""
    return [lib.get_peft_model(plain(family), getattr(lib, kind)(**fields)) for lib in BOTH]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.down, self.up = nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.up(self.down(self.norm(x)))
        return y


def test_names_of_targets_are_paths_in_the_model():
    mine, theirs = both("llama", {"target_modules": ["q_proj", "v_proj"], "r": 2})
    assert mine.targeted_module_names == theirs.targeted_module_names
    for lib, model in zip(BOTH, (mine, theirs), strict=True):
        model.add_adapter("b", lib.LoraConfig(target_modules=["o_proj", "q_proj"]))
    assert mine.targeted_module_names == theirs.base_model.targeted_module_names


@pytest.mark.parametrize("copied", [None, ["norm"]])
def test_the_status_of_layers(copied):
    fields = {"target_modules": ["q_proj"], "modules_to_save": copied}
    mine, theirs = (model.get_layer_status() for model in both("llama", fields))
    assert [layer.name for layer in mine] == [layer.name for layer in theirs]
    assert [layer.module_type for layer in mine] == [layer.module_type for layer in theirs]
    assert [layer.requires_grad for layer in mine] == [layer.requires_grad for layer in theirs]


def test_the_status_of_a_model_without_active_adapters():
    status = []
    for model in both("llama", {"target_modules": ["q_proj"]}, "LoHaConfig"):
        with model.disable_adapter():
            status.append(model.get_model_status())
    mine, theirs = status
    assert mine.adapter_model_type == theirs.adapter_model_type
    assert mine.num_adapter_layers == theirs.num_adapter_layers
    assert not mine.enabled
    assert not theirs.enabled


def trained(model: Any) -> list[str]:
    """The names of the adapters whose parameters get gradients."""
    names = ("default", "b", "c")
    grads = [(n, p.requires_grad) for n, p in model.named_parameters()]
    return [name for name in names if any(g and f".{name}" in n for n, g in grads)]


def test_a_second_adapter_is_trained_only_on_request():
    found = []
    for lib, model in zip(BOTH, both("llama", {}), strict=True):
        own = [trained(model)]
        model.add_adapter("b", lib.LoraConfig(r=2))
        own.append(trained(model))
        model.set_requires_grad("b", True)
        model.set_requires_grad("default", False)
        own.append(trained(model))
        model.set_adapter("b", inference_mode=True)
        model.add_adapter("c", lib.LoraConfig(r=2))
        found.append([*own, trained(model)])
    assert found[0] == found[1]
    assert found[0][:2] == [["default"], ["default"]]


def test_merging_twice_warns_and_changes_nothing():
    fields = {"init_lora_weights": False}
    model = both("llama", fields)[0].eval()
    inputs = tiny_inputs("llama")
    expected = model(**inputs).logits
    model.merge_adapter()
    merged = model(**inputs).logits
    for names in (None, ["default"]):
        with pytest.warns(UserWarning, match="already merged"):
            model.merge_adapter(names)
    torch.testing.assert_close(model(**inputs).logits, merged, rtol=0, atol=0)
    model.unmerge_adapter()
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


def test_settings_of_a_run_are_in_no_file(tmp_path):
    config = adapterzoo.peft.LoraConfig(r=2)
    assert config.runtime_config == adapterzoo.peft.LoraRuntimeConfig()
    config.runtime_config.ephemeral_gpu_offload = True
    config.save_pretrained(tmp_path)
    assert "runtime_config" not in json.loads((tmp_path / "adapter_config.json").read_text())
    assert not adapterzoo.peft.LoraConfig.from_pretrained(
        tmp_path
    ).runtime_config.ephemeral_gpu_offload
    model = plain("llama")
    with pytest.raises(ConfigError, match=r"ephemeral_gpu_offload=True.*Leave it out"):
        adapterzoo.peft.get_peft_model(model, config)
    assert not hasattr(model, "peft_config")


@pytest.mark.parametrize("tags", [[], ["law", "short"]])
def test_the_model_card_is_found_on_the_hub(tags, tmp_path):
    cards = []
    for lib in BOTH:
        base = plain("llama")
        base.add_model_tags(tags)
        folder = tmp_path / lib.__name__
        lib.get_peft_model(base, lib.LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder)
        cards.append(huggingface_hub.ModelCard.load(folder / "README.md").data)
    mine, theirs = cards
    # PEFT names a base model without a name, too
    assert {*theirs.tags} - {"base_model:adapter:"} <= {*mine.tags}
    assert {*tags} <= {*mine.tags}
    assert mine.pipeline_tag == theirs.pipeline_tag
    assert mine.library_name == theirs.library_name


@pytest.mark.filterwarnings("ignore:Unsupported layer type")
@pytest.mark.parametrize("target", ["norm", "down", ["norm", "up"]])
def test_layers_of_any_kind_are_tuned_whole(target, tmp_path):
    x = torch.randn(2, 4)
    made = []
    for lib in BOTH:
        model = lib.get_peft_model(Mlp(), lib.LNTuningConfig(target_modules=target))
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.manual_seed(1)
                nn.init.normal_(parameter)
        model.save_pretrained(tmp_path / lib.__name__)
        made.append(model(x))
    torch.testing.assert_close(made[0], made[1], **EXACT)
    for lib, other in zip(BOTH, reversed(BOTH), strict=True):
        model = lib.PeftModel.from_pretrained(Mlp(), tmp_path / other.__name__)
        torch.testing.assert_close(model(x), made[0], **EXACT)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_rows_of_a_table_are_trained_in_float32_beside_half_precision(autocast, alone):
    found = []
    for lib in BOTH:
        config = (
            lib.TrainableTokensConfig(token_indices=[1, 3])
            if alone
            else lib.LoraConfig(trainable_token_indices=[1, 3])
        )
        base = plain("llama").bfloat16()
        model = lib.get_peft_model(base, config, autocast_adapter_dtype=autocast)
        found.append({p.dtype for n, p in model.named_parameters() if "trainable_tokens_" in n})
    assert found[0] == found[1] == {torch.float32 if autocast else torch.bfloat16}


def test_an_adapter_that_a_lora_cannot_hold_is_not_converted(tmp_path: Path):
    model = both("llama", {"modules_to_save": ["norm"]}, "LoHaConfig")[0]
    assert not model.supports_lora_conversion()
    with pytest.raises(StateError, match="not a change of a weight"):
        adapterzoo.peft.convert_to_lora(model, 4)
    with pytest.raises(StateError, match="no adapters"):
        adapterzoo.peft.save_as_lora(tmp_path / "lora", plain("llama"), 4)
    assert not (tmp_path / "lora").exists()
