"""Copies of a whole model by deepcopy, pickle and torch.save; moves to a dtype and a device."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import adapter_bits, bits, changes, output, snapshot, stir
from transformers import AutoModelForSequenceClassification
from variants import VARIANTS

from adapterzoo import AdapterSetup, init
from adapterzoo.inject.adapted import Adapted


def through_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    # pickles too
    "torch.save": through_torch,
}


@pytest.fixture
def made(tiny):
    """A model with two adapters of a variant, `a` active and in training, and a head."""

    def make(variant, family="bert"):
        model = tiny(family)
        for seed, name in enumerate("ab"):
            model.add_adapter(name, VARIANTS.get(variant, variant))
            stir(model, name, seed)
        model.add_classification_head("a", num_labels=3, id2label={0: "x", 1: "y", 2: "z"})
        model.train_adapter("a")
        return model.eval()

    return make


def visible(model):
    """A snapshot without what differs in any copy."""
    return {k: v for k, v in snapshot(model).items() if not k.startswith("identity")}


def train_a_step(model, inputs):
    trained = [p for p in model.parameters() if p.requires_grad]
    model.train()
    loss = model(**inputs, labels=torch.tensor([0, 2])).loss
    loss.backward()
    torch.optim.SGD(trained, lr=1.0).step()
    model.zero_grad()
    model.eval()


def use_up(model):
    """Everything that one can do to a copy: none of it may reach the original."""
    model.set_active_adapters("b")
    model.delete_adapter("a")
    model.add_adapter("c", "lora")
    model.set_active_adapters(None)
    model.merge_adapter("c")
    model.delete_head("a")
    model.half()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_copy_is_the_model_and_shares_nothing_with_it(made, variant, how):
    model, inputs = made(variant), tiny_inputs("bert")
    before = visible(model)
    made_copy = COPIES[how](model)
    assert type(made_copy) is type(model)
    assert not changes(before, visible(made_copy))
    mine = {t.data_ptr() for t in model.state_dict().values() if t.numel()}
    assert not mine & {t.data_ptr() for t in made_copy.state_dict().values() if t.numel()}
    train_a_step(made_copy, inputs)
    assert adapter_bits(made_copy, "a") != adapter_bits(model, "a")
    assert adapter_bits(made_copy, "b") == adapter_bits(model, "b")
    assert not torch.equal(output(made_copy), output(model))
    assert not changes(before, visible(model))
    use_up(made_copy)
    assert not changes(before, visible(model))
    # and the other way round
    kept = COPIES[how](model)
    use_up(model)
    assert not changes(before, visible(kept))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_other_layouts_are_copied(made, family, how):
    """A fused projection, taps of a pre-LN block, and experts whose parameters are read changed."""
    experts = "[intermediate_lora=True,output_lora=True]" if family == "mixtral" else ""
    model = made(f"lora{experts}|par_bn", family)
    before = visible(model)
    made_copy = COPIES[how](model)
    assert not changes(before, visible(made_copy))
    stir(made_copy, "a", seed=9)
    assert not torch.equal(output(made_copy), output(model))
    made_copy.set_active_adapters(None)
    assert not changes(before, visible(model))


@pytest.mark.parametrize("how", COPIES)
def test_a_static_model_is_copied(how):
    torch.manual_seed(0)
    config = tiny_config("bert")
    model = init(AutoModelForSequenceClassification.from_config(config)).eval()
    model.add_adapter("a", "dora", set_active=True)
    stir(model, "a")
    before = visible(model)
    made_copy = COPIES[how](model)
    assert not changes(before, visible(made_copy))
    made_copy.delete_adapter("a")
    assert not any(isinstance(m, Adapted) for m in made_copy.modules())
    assert not changes(before, visible(model))


@pytest.mark.parametrize("how", COPIES)
def test_a_setup_of_the_thread_is_not_copied(made, how):
    model = made("seq_bn")
    default = output(model)
    with AdapterSetup("b", head_setup="a"):
        other = output(model)
        made_copy = COPIES[how](model)
        assert made_copy._active.override is None
        assert torch.equal(output(made_copy), default)
    assert not torch.equal(other, default)
    # a setup that is entered later reaches both
    with AdapterSetup("b", head_setup="a"):
        assert torch.equal(output(made_copy), other)
        assert torch.equal(output(model), other)
    assert torch.equal(output(made_copy), default)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
def test_a_merged_model_is_copied_with_what_resets_it(made, method, how):
    model = made(method)
    model.set_active_adapters(None)
    base = output(model)
    model.merge_adapter("a")
    made_copy = COPIES[how](model)
    assert torch.equal(output(made_copy), output(model))
    made_copy.reset_adapter()
    assert torch.equal(output(made_copy), base)
    assert not torch.equal(output(model), base)
    model.reset_adapter()
    assert torch.equal(output(model), base)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cast_model_computes_in_its_dtype_and_comes_back(made, variant):
    model = made(variant)
    exact = output(model)
    wide = output(model.double())
    assert wide.dtype is torch.float64
    torch.testing.assert_close(wide.float(), exact, rtol=1e-4, atol=1e-5)
    # float64 holds every float32
    assert torch.equal(output(model.float()), exact)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    narrow = output(model.to(torch.bfloat16))
    assert narrow.dtype is torch.bfloat16
    # a method may keep what it must not round
    for name, t in model.state_dict().items():
        assert bits(t) == bits(before[name].to(t.dtype)), name
    torch.testing.assert_close(narrow.float(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_moved_model_leaves_nothing_behind(made, variant):
    model = made(variant).to("meta")
    assert all(t.is_meta for t in model.state_dict().values())
    # transformers looks at the values of a mask
    logits = model(input_ids=tiny_inputs("bert")["input_ids"].to("meta")).logits
    assert logits.is_meta
    assert logits.shape == (2, 3)
