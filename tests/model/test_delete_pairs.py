"""Of two adapters one is deleted: the other computes what it computes alone; no trace stays."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from families import tiny_config, tiny_inputs

from adapterzoo import AdapterConfig, AutoAdapterModel
from adapterzoo.config import config_strings

# a method of each kind of place: layers, attention, blocks, their input, embeddings, copies
PLACES = (
    "lora[r=2,bias='all']", "lora[r=2,trainable_token_indices=[3]]", "boft[boft_block_size=4]",
    "seq_bn", "seq_bn_inv", "adapter_plus", "loreft", "prefix_tuning", "prompt_tuning", "mam",
)  # fmt: skip


def methods() -> list[str]:
    """The config strings, but for other names of the same config and those that need fields."""
    needs = {"union": None, "vera": "vera[r=2]", "miss": "miss[r=4]", "mtl_lora": None}
    found: dict[object, str] = {}
    for name in config_strings:
        text = needs.get(name, name)
        if text is not None:
            found.setdefault(AdapterConfig.load(text), text)
    return list(found.values())


def classes(model: torch.nn.Module) -> dict[str, type]:
    """The class of each module."""
    return {path: type(module) for path, module in model.named_modules()}


def outputs(model, family: str, name: str | None) -> torch.Tensor:
    """The last hidden states with an adapter; None: without."""
    model.set_active_adapters(name)
    with torch.no_grad():
        return model(**tiny_inputs(family)).last_hidden_state


def check(family: str, first: str, second: str, alone: dict[str, torch.Tensor], plain) -> None:
    """Delete each of two adapters, in a model that had them in this order."""
    for gone, left, method in (("x", "y", second), ("y", "x", first)):
        model = copy.deepcopy(plain)
        for name, each in (("x", first), ("y", second)):
            torch.manual_seed(3)
            model.add_adapter(name, each)
        model.delete_adapter(gone)
        changed = with_values(model, left)
        assert torch.equal(outputs(changed, family, left), alone[method]), f"{method} alone"
        assert torch.equal(outputs(changed, family, None), alone[""]), "the base model"
        model.delete_adapter(left)
        assert classes(model) == classes(plain)
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert torch.equal(outputs(model, family, None), alone[""])


def with_values(model, name: str):
    """The model, its adapter's parameters filled with values that the names decide."""
    model.train_adapter(name)
    with torch.no_grad():
        for i, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
            shift = torch.linspace(-0.2, 0.3, parameter.numel() or 1).view(parameter.shape)
            parameter.add_(shift * (1 + i % 3))
    return model.eval()


def truths(family: str, chosen, plain) -> dict[str, torch.Tensor]:
    """The output of each method alone, and of the base model."""
    found = {"": outputs(plain, family, None)}
    for method in chosen:
        model = copy.deepcopy(plain)
        torch.manual_seed(3)
        model.add_adapter("x", method)
        found[method] = outputs(with_values(model, "x"), family, "x")
    return found


def pairs(family: str, chosen) -> None:
    """Check all pairs, in both orders."""
    torch.manual_seed(0)
    plain = AutoAdapterModel.from_config(tiny_config(family)).eval()
    alone = truths(family, chosen, plain)
    failed = {}
    for first, second in itertools.product(chosen, chosen):
        try:
            check(family, first, second, alone, plain)
        except Exception as error:  # noqa: BLE001  all pairs are listed
            failed[first, second] = f"{type(error).__name__}: {error}".partition("\n")[0]
    assert not failed, "\n".join(f"{pair}: {why}" for pair, why in failed.items())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_one_of_each_kind_of_place(family):
    pairs(family, PLACES)


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_all_methods(family):
    pairs(family, methods())
