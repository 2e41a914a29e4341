"""Layers that read one input share what their adapters compute from it."""

import copy
from dataclasses import replace

import pytest
import torch
from families import first_output, tiny_config, tiny_inputs
from snapshots import changes, output, snapshot, stir
from torch import nn

from adapterzoo import AutoAdapterModel, BOFTConfig, DoRAConfig, LoRAConfig, Stack
from adapterzoo.methods._low_rank import LowRank
from adapterzoo.runtime import SharedInput

ALL = ["query", "key", "value", "attention_out", "mlp_in", "mlp_gate", "mlp_out"]
CONFIGS = {
    "lora": lambda targets: LoRAConfig(r=4, target_modules=targets),
    "dora": lambda targets: DoRAConfig(r=4, target_modules=targets),
    "boft": lambda targets: BOFTConfig(boft_n_butterfly_factor=2, target_modules=targets),
}


@pytest.fixture(autouse=True)
def share_also_of_few_tokens(monkeypatch):
    monkeypatch.setattr("adapterzoo.kernels.mode.FEW", 0)


def built(family, *configs, dtype=torch.float64):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).to(dtype)
    for name, config in zip("abc", configs, strict=False):
        model.add_adapter(name, config)
        stir(model, name, seed=ord(name))
    return model.train()


def apart(model):
    """The same model, in which each adapter computes alone."""
    default = model._active.default
    default.plan = replace(default.plan, shared_inputs={})
    return model


class Calls:
    """Counts calls of `from_input` of a class, and how many adapters each serves."""

    def __init__(self, monkeypatch, cls=LowRank):
        self.sizes: list[int] = []
        plain = cls.from_input.__func__

        def counted(kind, adapters, x):
            self.sizes.append(len(adapters))
            return plain(kind, adapters, x)

        monkeypatch.setattr(cls, "from_input", classmethod(counted))


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "t5", "deberta-v2", "bart"])
@pytest.mark.parametrize("method", CONFIGS)
def test_outputs_and_gradients_are_those_of_adapters_that_compute_alone(method, family):
    results = []
    for prepare in (lambda model: model, apart):
        model = built(family, CONFIGS[method](None))
        model.train_adapter("a")
        prepare(model)
        # dropout of the base model draws the same numbers in both
        torch.manual_seed(1)
        y = first_output(model(**tiny_inputs(family)))
        y.square().sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append({"y": y.detach(), **grads})
    assert len(results[0]) > 4
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "fields", "sizes"),
    [
        # query, key, value · out · gate, up · down, in each of two blocks
        ("llama", {"target_modules": "all-linear"}, [3, 1, 2, 1] * 2),
        ("bert", {"target_modules": "all-linear"}, [3, 1, 1, 1] * 2),
        # an encoder's block, and a decoder's with the query of cross-attention by itself
        (
            "t5",
            {"target_modules": "all-linear"},
            [3, 1, 1, 1] * 2 + [3, 1, 1, 2, 1, 1, 1] * 2,
        ),
        # the parts of a fused layer
        ("gpt2", {"attn_matrices": ["q", "k", "v"], "output_lora": True}, [3, 1] * 2),
    ],
)
def test_one_product_serves_the_layers_that_read_one_input(family, fields, sizes, monkeypatch):
    calls = Calls(monkeypatch)
    model = built(family, LoRAConfig(**fields))
    model.set_active_adapters("a")
    output(model)
    assert calls.sizes == sizes


def test_all_adapters_of_a_stack_share(monkeypatch):
    model = built("llama", *[LoRAConfig(r=r, attn_matrices=["q", "k", "v"]) for r in (2, 3)])
    model.set_active_adapters(Stack("a", "b"))
    calls = Calls(monkeypatch)
    shared = output(model)
    assert calls.sizes == [6] * 2
    torch.testing.assert_close(shared, output(apart(model)), rtol=1e-12, atol=1e-13)


def test_adapters_that_differ_do_not_share(monkeypatch):
    options = [{"dropout": 0.1}, {"dropout": 0.2}, {"dtype": "float32"}]
    model = built("llama", *[LoRAConfig(attn_matrices=["q", "k"], **o) for o in options])
    model.set_active_adapters(Stack("a", "b", "c"))
    calls = Calls(monkeypatch)
    output(model)
    assert calls.sizes == [2, 2, 2] * 2


def test_layers_of_one_input_drop_the_same_features():
    model = built("llama", LoRAConfig(r=4, dropout=0.5, attn_matrices=["q", "k", "v"]))
    modules = [module for _, module in model.adapter_modules("a")][:3]
    with torch.no_grad():
        for module in modules[1:]:
            module.lora_A.copy_(modules[0].lora_A)
    x = torch.randn(5, 32, dtype=torch.float64)
    first, *others = [t for _, t in LowRank.from_input(modules, x)]
    for other in others:
        assert torch.equal(first, other)
    assert not torch.allclose(first, LowRank.from_input(modules, x)[0][1])


@pytest.fixture
def adapters():
    model = built("llama", LoRAConfig(attn_matrices=["q", "k", "v"]))
    return [module for _, module in model.adapter_modules("a")][:3]


def test_each_gets_its_part_once_and_for_the_very_tensor(adapters, monkeypatch):
    calls = Calls(monkeypatch)
    one, two, three = adapters
    family = SharedInput(lambda: adapters)
    x, other = torch.randn(2, 4, 32, dtype=torch.float64)

    def expect(adapter, source, sizes):
        _, made = family.from_input(adapter, source)
        torch.testing.assert_close(made, source @ adapter.lora_A.T, rtol=1e-12, atol=1e-13)
        assert calls.sizes == sizes

    expect(one, x, [3])
    expect(two, x, [3])
    # asked again: the parameters may have changed since
    with torch.no_grad():
        two.lora_A.add_(1)
    expect(two, x, [3, 3])
    # another tensor, of equal numbers or not
    expect(three, other, [3, 3, 3])
    expect(three, x.clone(), [3, 3, 3, 3])


def test_strangers_and_weights_on_another_device_are_left_out(adapters, monkeypatch):
    calls = Calls(monkeypatch)
    x = torch.randn(4, 32, dtype=torch.float64)
    SharedInput(lambda: adapters[:2]).from_input(adapters[2], x)
    adapters[1].to("meta")
    SharedInput(lambda: adapters).from_input(adapters[0], x)
    assert calls.sizes == [1, 2]


def test_a_forward_that_fails_leaves_nothing_behind():
    model = built("llama", LoRAConfig(attn_matrices=["q", "k", "v"]))
    model.eval().set_active_adapters("a")
    before = output(model)
    layer = model.get_submodule("model.layers.0.self_attn.k_proj")

    def fail(*_):
        raise RuntimeError("planted")

    hook = layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        output(model)
    hook.remove()
    assert model._active.call.shared_input is None
    assert torch.equal(output(model), before)


def test_copies_compute_with_their_own_weights():
    model = built("llama", LoRAConfig())
    model.eval().set_active_adapters("a")
    copied = copy.deepcopy(model)
    stir(copied, "a", seed=9)
    own = output(copied)
    assert not torch.allclose(own, output(model))
    torch.testing.assert_close(own, output(apart(copied)), rtol=1e-12, atol=1e-13)


def test_taking_the_adapters_gives_every_class_back():
    model = built("llama")
    before, classes = snapshot(model), [type(m) for m in model.modules()]
    model.add_adapter("a", LoRAConfig(target_modules="all-linear"))
    model.add_adapter("b", BOFTConfig())
    attention = model.get_submodule("model.layers.0.self_attn")
    assert isinstance(attention, nn.Module)
    assert type(attention) not in classes
    model.delete_adapter("a")
    assert type(attention) not in classes
    model.delete_adapter("b")
    assert [type(m) for m in model.modules()] == classes
    assert changes(before, snapshot(model)) == []


def test_of_few_tokens_each_computes_alone(monkeypatch):
    monkeypatch.undo()
    model = built("llama", LoRAConfig(attn_matrices=["q", "k", "v"]))
    model.set_active_adapters("a")
    calls = Calls(monkeypatch)
    output(model)
    assert calls.sizes == [1, 1, 1] * 2
    many = {key: value.repeat(100, 1) for key, value in tiny_inputs("llama").items()}
    output(model, **many)
    assert calls.sizes[6:] == [3] * 2
