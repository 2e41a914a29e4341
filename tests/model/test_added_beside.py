"""An adapter that is added or loaded beside a trained one is frozen, until it is made active."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from families import tiny_config
from transformers import LlamaForCausalLM

import adapterzoo
import adapterzoo.peft
from adapterzoo import Fuse


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config("llama"))


def trained(model: Any) -> set[str]:
    """Names of adapters with parameters that get gradients."""
    return {n for n in "abcxyz" for k, p in model.named_parameters()
            if p.requires_grad and f".{n}." in k}  # fmt: skip


@pytest.mark.parametrize("method", ["lora", "seq_bn", "loreft", "prefix_tuning"])
def test_it_is_frozen_until_it_is_trained(tmp_path, method):
    model = adapterzoo.init(llama())
    model.add_adapter("a", method)
    model.train_adapter("a")
    model.save_adapter(tmp_path, "a")
    model.add_adapter("b", method)
    assert trained(model) == {"a"}
    model.load_adapter(tmp_path, load_as="c")
    assert trained(model) == {"a"}
    model.train_adapter("b")
    assert trained(model) == {"b"}
    # one that replaces the trained one takes its place
    model.add_adapter("b", method, overwrite_ok=True)
    assert trained(model) == {"b"}


def test_it_is_frozen_beside_a_trained_fusion():
    model = adapterzoo.init(llama())
    for name in ("a", "b"):
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(Fuse("a", "b"))
    model.train_adapter_fusion(Fuse("a", "b"))
    model.add_adapter("c", "seq_bn")
    assert trained(model) == set()


def test_where_nothing_is_trained_yet_it_is_trainable():
    """A loop of one's own trains what `add_adapter` made, with the base or without it."""
    for freezes in (False, True):
        model = adapterzoo.init(llama())
        if freezes:
            model.freeze_model()
        for name in ("a", "b"):
            model.add_adapter(name, "lora", set_active=True)
        assert trained(model) == {"a", "b"}
    model.train_adapter("a")
    for name in ("a", "b"):
        model.delete_adapter(name)
    model.add_adapter("c", "lora", set_active=True)
    assert trained(model) == {"c"}


@pytest.mark.needs("peft>=0.21", "its load_adapter froze all adapters")
def test_it_is_frozen_as_in_peft(tmp_path):
    config = peft.LoraConfig(r=2)
    found = {}
    for library in (peft, adapterzoo.peft):
        model = library.get_peft_model(llama(), config, "x")
        steps = [trained(model)]
        model.add_adapter("y", config)
        steps.append(trained(model))
        model.set_adapter("y")
        steps.append(trained(model))
        model.save_pretrained(tmp_path / library.__name__)
        model.load_adapter(tmp_path / library.__name__ / "x", "z")
        steps.append(trained(model))
        model.load_adapter(tmp_path / library.__name__ / "x", "z", is_trainable=True)
        found[library.__name__] = steps
    assert found["adapterzoo.peft"] == found["peft"] == [{"x"}, {"x"}, {"y"}, {"y"}]


def test_the_words_of_transformers_train_the_adapter_that_is_added():
    model = adapterzoo.init(llama())
    model.add_adapter(peft.LoraConfig(r=2), adapter_name="a")
    model.add_adapter(peft.LoraConfig(r=2), adapter_name="b")
    assert trained(model) == {"b"}
    model.add_adapter(peft.LoraConfig(r=2, inference_mode=True), adapter_name="c")
    assert trained(model) == set()
