"""Gradient checkpointing of both kinds gives the gradients that it gives without."""

from __future__ import annotations

import threading

import pytest
import torch
from families import tiny_config, tiny_inputs

from adapterzoo import AdapterSetup, AutoAdapterModel

CONFIGS = ('lora[dropout=0.1,init_weights="bert"]', "seq_bn", "double_seq_bn", "par_bn")


def model_with(family, config):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family))
    model.add_adapter("a", config)
    model.add_adapter("b", config)
    model.add_tagging_head("tags", num_labels=3)
    model.train_adapter("a")
    return model


def gradients(model, inputs, backward=torch.Tensor.backward):
    torch.manual_seed(1)
    model.zero_grad()
    backward(model(**inputs, labels=torch.ones_like(inputs["input_ids"])).loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_gradients_are_those_without_checkpointing(family, config, reentrant):
    model = model_with(family, config)
    inputs = tiny_inputs(family)
    expected = gradients(model, inputs)
    assert any(g.count_nonzero() for g in expected.values())
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients(model, inputs)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_backward_pass_recomputes_with_the_setup_of_the_forward(reentrant):
    """On CUDA it recomputes in a thread of its own, which must act as the one of the forward."""
    model = model_with("llama", "lora[init_weights='bert']")
    inputs = tiny_inputs("llama")
    for _, module in model.adapter_modules("b"):
        module.requires_grad_(True)

    def elsewhere(loss):
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    with AdapterSetup("b", head_setup="tags"):
        expected = gradients(model, inputs)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        found = gradients(model, inputs, elsewhere)
    assert found.keys() == expected.keys()
    assert any(".b." in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-8, msg=name)
