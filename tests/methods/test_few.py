"""The short way for few tokens in evaluation: the bits of `forward`, and when it is used."""

from unittest import mock

import pytest
import torch
from families import first_output, tiny_inputs
from made import made
from torch.nn.utils import parametrize

from adapterzoo.contracts import can_take_few
from adapterzoo.methods.lora import LoRA

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


def short_calls(model, family="bert"):
    """How many layers go the short way, in a call after one that may keep what it has computed."""
    output(model, family)
    given = []
    for path, _ in model.adapter_modules("a"):
        site = model._active.plan.sites[path]
        few = site.on_few

        def spied(*args, few=few):
            given.append(None if few is None else few(*args))
            return given[-1]

        object.__setattr__(site, "on_few", spied)
    output(model, family)
    return sum(y is not None for y in given)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
def test_the_bits_are_those_of_forward(method, family):
    model = adapted(method, family)
    output(model, family)
    short = output(model, family)
    with mock.patch("adapterzoo.inject.adapted.is_hooked", return_value=True):
        assert torch.equal(output(model, family), short)
    assert torch.equal(first_output(model(**tiny_inputs(family))), short)


def test_all_layers_of_the_benchmark_go_the_short_way(method):
    model = adapted(method)
    assert short_calls(model) == len([*model.adapter_modules("a")])


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
    with mock.patch("adapterzoo.inject.adapted.is_hooked", return_value=True):
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


def test_a_class_with_a_forward_of_its_own_does_not_take_the_other():
    class Own(LoRA):
        def forward(self, x, base):
            return base(x)

    model = adapted("lora")
    adapter = next(module for _, module in model.adapter_modules("a"))
    assert can_take_few(adapter)
    adapter.__class__ = Own
    assert not can_take_few(adapter)
