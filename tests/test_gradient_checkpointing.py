"""Gradient checkpointing of both kinds gives the gradients that it gives without."""

from __future__ import annotations

import threading

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import of_adapter, stir
from variants import VARIANTS

from adapterzoo import AdapterSetup, AutoAdapterModel


def model_with(family, config):
    """Adapters `a`, trained, and `b`; the random numbers of dropout matter in both."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family))
    model.add_adapter("a", config)
    model.add_adapter("b", config)
    model.add_tagging_head("tags", num_labels=3)
    model.train_adapter("a")
    for seed, name in enumerate("ab"):
        stir(model, name, seed)
    return model


def gradients(model, inputs, backward=torch.Tensor.backward):
    torch.manual_seed(1)
    model.zero_grad()
    backward(model(**inputs, labels=torch.ones_like(inputs["input_ids"])).loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


def elsewhere(loss):
    """The backward pass in another thread, where CUDA runs it."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("family", "reentrant"), [("bert", False), ("llama", False), ("llama", True)]
)
def test_gradients_are_those_without_checkpointing(family, variant, reentrant):
    model = model_with(family, VARIANTS[variant])
    inputs = tiny_inputs(family)
    expected = gradients(model, inputs)
    trained = {n for n, p in model.named_parameters() if of_adapter(n, "a") and p.requires_grad}
    assert {n for n in trained if n in expected and expected[n].count_nonzero()} == trained
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(gradients(model, inputs), expected)
    # nothing that was on its way to a site or was built for a call is left behind
    assert not model._active.call.captures
    assert not model._active.call.reads


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "variant", ["boft[boft_n_butterfly_factor=2,boft_dropout=0.3]", "lora[dropout=0.1]|par_bn"]
)
@pytest.mark.parametrize("inside", [True, False])
def test_the_backward_pass_recomputes_with_the_setup_of_the_forward(variant, reentrant, inside):
    """Run in a thread of its own, or when the setup has ended, it acts as the forward did."""
    model = model_with("llama", VARIANTS[variant])
    inputs = tiny_inputs("llama")
    for _, module in model.adapter_modules("b"):
        module.requires_grad_(True)

    def run(backward):
        torch.manual_seed(1)
        model.zero_grad()
        with AdapterSetup("b", head_setup="tags"):
            loss = model(**inputs, labels=torch.ones_like(inputs["input_ids"])).loss
            if inside:
                backward(loss)
        if not inside:
            backward(loss)
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = run(torch.Tensor.backward)
    assert any(of_adapter(name, "b") for name in expected)
    assert not any(of_adapter(name, "a") for name in expected)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(run(torch.Tensor.backward), expected)
    same(run(elsewhere), expected)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_backward_pass_recomputes_with_what_was_active_in_the_forward(reentrant):
    model = model_with("llama", "lora")
    for _, module in model.adapter_modules("b"):
        module.requires_grad_(True)
    inputs = tiny_inputs("llama")
    inputs["labels"] = torch.ones_like(inputs["input_ids"])

    def run():
        model.zero_grad()
        model.set_active_adapters("a")
        loss = model(**inputs).loss
        model.set_active_adapters("b")
        (loss + model(**inputs).loss).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = run()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(run(), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["lora", "dora", "boft"])
def test_fused_experts_are_recomputed(method, reentrant):
    model = model_with("mixtral", f"{method}[intermediate_lora=True,output_lora=True]")
    model.config._experts_implementation = "eager"
    inputs = tiny_inputs("mixtral")
    expected = gradients(model, inputs)
    assert any(of_adapter(name.partition(".experts.")[2], "a") for name in expected)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(gradients(model, inputs), expected)
    assert not model._active.call.reads
