"""An adapted layer in evaluation: its formula, hooks, and what others put into its place."""

from unittest import mock

import pytest
import torch
from families import first_output, tiny_inputs
from made import made
from torch.nn.utils import parametrize

METHODS = ["lora", "dora", "boft", "dora[convention='adapterhub']"]


@pytest.fixture(params=METHODS)
def method(request):
    return request.param


def adapted(method, family="bert"):
    model = made(family, torch.float32, a=method)
    model.set_active_adapters("a")
    return model


def output(model, family="bert"):
    with torch.no_grad():
        return first_output(model(**tiny_inputs(family)))


def test_hooks_of_an_adapter_run(method):
    model = adapted(method)
    expected = output(model)
    adapter = next(module for _, module in model.adapter_modules("a"))
    seen = []
    handle = adapter.register_forward_hook(lambda *args: seen.append(args))
    assert torch.equal(output(model), expected)
    assert len(seen) == 1
    handle.remove()
    before = torch.nn.modules.module.register_module_forward_pre_hook
    handle = before(lambda module, _: seen.append(module) if module is adapter else None)
    output(model)
    handle.remove()
    assert seen[-1] is adapter
    # as accelerate keeps its hooks
    plain = adapter.forward
    adapter.forward = lambda x, base: plain(x, base) * 0
    assert not torch.equal(output(model), expected)


def test_a_parametrized_factor_acts(method):
    model = adapted(method)
    short = output(model)
    adapter = next(module for _, module in model.adapter_modules("a"))
    name = [*adapter._parameters][-1]
    parametrize.register_parametrization(adapter, name, torch.nn.Hardtanh(-0.1, 0.1), unsafe=True)
    changed = output(model)
    assert not torch.equal(changed, short)
    assert torch.equal(output(model.eval()), changed)
    parametrize.remove_parametrizations(adapter, name, leave_parametrized=False)
    assert torch.equal(output(model), short)


def test_dropout_of_training_is_not_left_out():
    model = adapted("lora[dropout=0.5]")
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert not torch.equal(output(model), output(model))


EXACT = [*METHODS[:3], "oft[oft_block_size=4]"]


def of_weight(adapter, x, w, bias):
    """The formula in float64, with the gradients that the papers give."""
    x, w, bias = x.double(), w.double(), bias.double()
    p = {name: value.double() for name, value in adapter.named_parameters()}
    if "boft_R" in p or "oft_R" in p:
        merged = adapter.double().merged_weight(w, None)
        return x @ merged.T + bias
    whole = w + adapter.scaling * p["lora_B"] @ p["lora_A"]
    if "m" in p:
        whole = (p["m"] / whole.norm(dim=1).detach()).unsqueeze(1) * whole
    return x @ whole.T + bias


@pytest.mark.parametrize("method", EXACT)
def test_outputs_and_gradients_are_those_of_the_formula(method):
    model = adapted(method)
    model.train_adapter("a")
    model.eval()
    path, adapter = next(iter(model.adapter_modules("a")))
    layer = model.base_model.get_submodule(path)
    x = torch.randn(2, 5, layer.in_features)
    y = layer(x)
    (y * y.detach().cos()).sum().backward()
    found = [p.grad.clone() for p in adapter.parameters()]
    model.zero_grad()
    truth = of_weight(adapter, x, layer.weight.detach(), layer.bias.detach())
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)
    (truth * y.detach().double().cos()).sum().backward()
    for grad, p in zip(found, adapter.parameters(), strict=True):
        torch.testing.assert_close(grad.double(), p.grad.double(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_lora_sees_writes_that_leave_no_trace():
    model = adapted("lora")
    before = output(model)
    for _, adapter in model.adapter_modules("a"):
        adapter.lora_B.data.copy_(adapter.lora_B.data * 2)
    assert not torch.equal(before, output(model))


class Doubled(torch.nn.Module):
    def forward(self, value):
        return value * 2


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "method"),
    [("weight", None), ("weight", "lora"), *(("bias", each) for each in (None, *EXACT))],
)
def test_a_parametrization_of_the_layer_acts(name, method):
    model = adapted(method or "lora")
    if method is None:
        model.set_active_adapters(None)
    path, _ = next(iter(model.adapter_modules("a")))
    layer = model.base_model.get_submodule(path)
    x = torch.randn(3, layer.in_features)
    layer.bias.fill_(1.0)
    layer.get_parameter(name).mul_(2)
    expected = layer(x)
    layer.get_parameter(name).div_(2)
    parametrize.register_parametrization(layer, name, Doubled())
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", [None, "lora"])
def test_another_forward_of_linear_layers_acts(method):
    model = adapted("lora")
    model.set_active_adapters(method and "a")
    path, _ = next(iter(model.adapter_modules("a")))
    layer = model.base_model.get_submodule(path)
    x = torch.randn(3, layer.in_features)
    before, own = layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)
    plain = torch.nn.Linear.forward
    # as libraries replace it
    with mock.patch.object(torch.nn.Linear, "forward", lambda self, x: plain(self, x) * 2):
        torch.testing.assert_close(layer(x), before + own, rtol=1e-5, atol=1e-5)
