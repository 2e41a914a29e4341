"""PEFT's methods of a layer, called at every layer as frameworks do, in PEFT and here."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

import adapterzoo.peft
from adapterzoo.errors import StateError
from adapterzoo.inject.adapted import Adapted

# what PEFT says about two adapters, and about calls that change nothing
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning")
    for text in (".*was active", "Already found a `peft_config`", "Already", "All adapters are")
]

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ALL = ["a", "b"]

# each call is made at all layers before the next one
CALLS: dict[str, list[tuple[str, Any]]] = {
    "two": [("set_adapter", (ALL,))],
    "one of two": [("set_adapter", (ALL,)), ("set_adapter", ("a",))],
    "an unknown one beside": [("set_adapter", (["a", "c"],))],
    "weights": [("set_adapter", (ALL,)), ("set_scale", ("a", 0.5)), ("set_scale", ("b", 2.0))],
    "scaled": [("scale_layer", (0.3,))],
    "unscaled": [("scale_layer", (0.3,)), ("unscale_layer", (0.3,))],
    "unscaled at all": [("set_scale", ("b", 3.0)), ("scale_layer", (2.0,)), ("unscale_layer", ())],
    "of no adapter": [("set_scale", ("c", 2.0)), ("delete_adapter", ("c",))],
    "disabled": [("enable_adapters", (False,))],
    "enabled": [("enable_adapters", (False,)), ("enable_adapters", (True,))],
    "merged": [("merge", ())],
    "merged twice": [("merge", ()), ("merge", ())],
    "merged by name": [("merge", (False, ["b"]))],
    "unmerged": [("merge", ()), ("unmerge", ())],
    "merged, then disabled": [("merge", ()), ("enable_adapters", (False,))],
    "scaled after merging": [("merge", ()), ("scale_layer", (0.3,))],
    "deleted": [("delete_adapter", ("b",))],
    "deleted both": [("delete_adapter", ("b",)), ("delete_adapter", ("a",))],
}


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def config(library: Any, kind: str = "LoraConfig") -> Any:
    sizes = {"r": 3, "lora_alpha" if kind == "LoraConfig" else "alpha": 5}
    return getattr(library, kind)(target_modules=["0", "2"], **sizes)


def both(kind: str = "LoraConfig") -> tuple[Any, Any]:
    """A model with two adapters of equal values, in PEFT and here; the second one is active."""
    theirs, ours = plain(), plain()
    for name in ALL:
        peft.inject_adapter_in_model(config(peft, kind), theirs, name)
        adapterzoo.peft.inject_adapter_in_model(config(adapterzoo.peft, kind), ours, name)
        values = peft.get_peft_model_state_dict(theirs, adapter_name=name)
        values = {key: torch.randn_like(tensor) / 2 for key, tensor in values.items()}
        peft.set_peft_model_state_dict(theirs, values, name)
        adapterzoo.peft.set_peft_model_state_dict(ours, values, name)
        found = adapterzoo.peft.get_peft_model_state_dict(ours, adapter_name=name)
        assert found.keys() == values.keys()
    return theirs, ours


def layers(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, (BaseTunerLayer, Adapted))]


@pytest.mark.parametrize("kind", ["LoraConfig", "LoKrConfig", "LoHaConfig"])
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_a_method_does_at_all_layers_what_it_does_in_peft(calls, kind):
    models = both(kind)
    for model in models:
        for name, arguments in calls:
            # without adapters a layer is a plain one
            for layer in model.modules():
                if isinstance(layer, (BaseTunerLayer, Adapted)):
                    getattr(layer, name)(*arguments)
    torch.testing.assert_close(models[1](X), models[0](X), **CLOSE)
    theirs, ours = ([layer.active_adapters for layer in layers(model)] for model in models)
    # PEFT keeps a name that there is not
    assert ours == [[name for name in each if name != "c"] for each in theirs][: len(ours)]


def test_a_merge_at_each_layer_takes_the_scaling_that_the_layer_has_then():
    models = both()
    for model in models:
        for layer in layers(model):
            layer.scale_layer(0.3)
            layer.merge()
    torch.testing.assert_close(models[1](X), models[0](X), **CLOSE)


def test_an_adapter_without_a_scaling_refuses_another_one():
    model = plain()
    bottleneck = adapterzoo.peft.BOFTConfig(boft_block_size=2, target_modules=["0", "2"])
    adapterzoo.peft.inject_adapter_in_model(bottleneck, model)
    layer = layers(model)[0]
    layer.set_scale("default", 1.0)
    layer.unscale_layer()
    with pytest.raises(StateError, match="has no scaling"):
        layer.set_scale("default", 0.5)
    with pytest.raises(StateError, match="has no scaling"):
        layer.scale_layer(0.5)


@pytest.mark.parametrize("get", [lambda m: m.base_layer, lambda m: m.get_base_layer()])
def test_the_base_layer_is_the_layer_without_adapters(get):
    model = both()[1]
    layer, base = layers(model)[0], get(layers(model)[0])
    assert type(base) is nn.Linear
    assert base.weight is layer.weight
    assert not hasattr(base, "base_layer")
    assert torch.equal(base(X), plain()[0](X))
    assert not torch.equal(layer(X), base(X))


def unload(model: nn.Sequential) -> None:
    """Put base layers in place of layers, then delete the configs, as diffusers does."""
    for name, layer in model.named_children():
        if hasattr(layer, "base_layer"):
            setattr(model, name, layer.get_base_layer())
    del model.peft_config


@pytest.mark.parametrize("before", [lambda m: None, lambda m: [x.merge() for x in layers(m)]])
def test_without_configs_a_model_is_a_plain_one_with_the_weights_that_it_has(
    before: Callable[[Any], Any],
):
    theirs, ours = both()
    for model in (theirs, ours):
        before(model)
        unload(model)
    assert type(ours) is nn.Sequential
    assert [type(m) for m in ours.modules()] == [type(m) for m in plain().modules()]
    assert not hasattr(ours, "peft_config")
    torch.testing.assert_close(ours(X), theirs(X), **CLOSE)
    adapterzoo.peft.inject_adapter_in_model(config(adapterzoo.peft), ours, "again")
    assert ours.active_adapters() == ["again"]


def llama() -> Any:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(tiny_config("llama")).eval()
    own = adapterzoo.peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return adapterzoo.peft.inject_adapter_in_model(own, model, "a")


def logits(model: Any) -> Tensor:
    return model(**tiny_inputs("llama"))[0]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_an_injected_model_is_copied_with_its_methods(again):
    model = llama()
    other = again(model)
    assert type(other) is type(model)
    assert other.active_adapters() == model.model.active_adapters() == ["a"]
    assert other.active_adapters == ["a"]
    assert list(other.peft_config) == ["a"]
    assert torch.equal(logits(other), logits(model))
    other.disable_adapters()
    assert other.active_adapters() == ["a"]
    assert not torch.equal(logits(other), logits(model))


def test_an_injected_model_becomes_one_of_peft_and_stays_one():
    model = llama()
    own = adapterzoo.peft.LoraConfig(target_modules=["v_proj"])
    assert adapterzoo.peft.get_peft_model(model, own, "b") is model
    assert isinstance(model, adapterzoo.peft.PeftModel)
    adapterzoo.peft.inject_adapter_in_model(own, model, "c")
    assert isinstance(model, adapterzoo.peft.PeftModel)
    assert sorted(model.peft_config) == ["a", "b", "c"]
    assert type(model.unload()) is transformers.LlamaForCausalLM


def test_layers_answer_whatever_was_imported_first():
    program = """
from torch import nn
import adapterzoo

early = adapterzoo.init(nn.Sequential(nn.Linear(4, 8)))
early.add_adapter("a", adapterzoo.LoRAConfig(target_modules=["0"]))
from adapterzoo.peft import LoraConfig, get_peft_model

late = get_peft_model(nn.Sequential(nn.Linear(4, 8)), LoraConfig(target_modules=["0"]))
assert late[0].lora_A["default"].weight.shape == (8, 4)
assert early[0].lora_A["a"].weight.shape == (8, 4)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
