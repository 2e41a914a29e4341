"""Stacks of a mixed batch: kept in evaluation, and never older than their factors."""

import copy
import gc
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
from families import tiny_config

from _measure import operators
from adapterzoo import AutoAdapterModel, BatchSplit
from adapterzoo.configs import AdapterConfig
from adapterzoo.kernels import grouped
from adapterzoo.methods import _stacks

NAMES = "abc"
KINDS = {
    "lora": ["lora[r=4]"] * 3,
    "ranks": ["lora[r=4]", "lora[r=2]", "lora[r=3]"],
    "dora": ["dora[r=4]"] * 3,
}


@pytest.fixture
def made(monkeypatch):
    """How often factors are stacked."""
    calls = []

    for name in ("stacked_down", "stacked_up"):
        plain = getattr(grouped, name)

        def counted(factors, plain=plain):
            calls.append(factors)
            return plain(factors)

        monkeypatch.setattr(_stacks, name, counted)
    return calls


def built(kind="lora"):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("llama"))
    for name, text in zip(NAMES, KINDS[kind], strict=True):
        model.add_adapter(name, replace(AdapterConfig.load(text), target_modules=r".*_proj"))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    model.active_adapters = BatchSplit(*NAMES, batch_sizes=[1, 1, 1])
    return model.eval()


IDS = torch.arange(12).view(3, 4)


@torch.no_grad()
def output(model):
    return model(IDS).last_hidden_state


@torch.no_grad()
def fresh(model):
    """Without anything that is kept."""
    return copy.deepcopy(model)(IDS).last_hidden_state


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_made_once(made, kind):
    model = built(kind)
    first = output(model)
    count = len(made)
    assert count
    assert torch.equal(output(model), first)
    assert len(made) == count


def first_factor(model):
    return next(p for key, p in model.named_parameters() if key.endswith("loras.b.lora_B"))


def written(model):
    with torch.no_grad():
        first_factor(model).mul_(2.0)


def assigned(model):
    factor = first_factor(model)
    factor.data = 2 * factor.data


def loaded(model):
    model.load_state_dict({k: 2 * v if "lora_B" in k else v for k, v in model.state_dict().items()})


def untracked(model):
    first_factor(model).data.mul_(2.0)
    model.eval()


def other_batch(model):
    model.active_adapters = BatchSplit("c", "a", "b", batch_sizes=[1, 1, 1])


def trained_untracked(model):
    """Optimizers with `fused=True` write without a new version, and gradients are gone then."""
    model(IDS).last_hidden_state.sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data.sub_(parameter.grad)
    model.zero_grad()


def stepped_untracked(model):
    """A step of one's own, whose gradients are never accumulated."""
    factor = first_factor(model)
    (grad,) = torch.autograd.grad(model(IDS).last_hidden_state.square().sum(), factor)
    output(model)
    factor.data.sub_(grad)


CHANGES = (written, assigned, loaded, untracked, other_batch, trained_untracked, stepped_untracked)


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_factors_are_seen(change, kind):
    model = built(kind)
    before = output(model)
    change(model)
    after = output(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(model))


def test_an_optimizer_that_is_about_to_write_is_waited_for(made):
    model = built()
    output(model)
    model(IDS).last_hidden_state.sum().backward()
    # a gradient is there: the step may come after this forward
    output(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad)
    assert torch.equal(output(model), fresh(model))


def test_nothing_is_kept_in_training_and_with_gradients(made):
    model = built()
    counts = []
    for train, grad in ((True, False), (False, True)):
        model.train(train)
        for _ in range(2):
            made.clear()
            with torch.set_grad_enabled(grad):
                model(IDS)
            counts.append(len(made))
    assert len(set(counts)) == 1
    assert counts[0]


def kept_stacks(model):
    found = [getattr(module, "kept", None) for module in model.modules()]
    slots = [kept for kept in found if kept is not None]
    return [weakref.ref(kept.stack) for of in slots for kept in of.values()]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.train(),
        lambda model: model.double(),
        lambda model: model.delete_adapter("b"),
        lambda model: (other_batch(model), output(model)),
    ],
)
def test_they_are_freed(change):
    model = built()
    output(model)
    stacks = kept_stacks(model)
    assert stacks
    model.active_adapters = BatchSplit("a", "c", batch_sizes=[2, 1])
    change(model)
    gc.collect()
    assert not any(stack() is not None for stack in stacks)
    hooks = [p._post_accumulate_grad_hooks or {} for p in model.parameters()]
    # one for the stack that has come since, at most
    assert all(len(of) <= 1 for of in hooks)


def test_copies_keep_their_own():
    model = built()
    output(model)
    other = copy.deepcopy(model)
    assert not kept_stacks(other)
    assert kept_stacks(model)
    written(other)
    assert torch.equal(output(other), fresh(other))


def test_kept_stacks_save_operations():
    model = built()
    counts = []
    for _ in range(2):
        counts.append(operators(lambda: output(model)))
    # two stacks for each of seven layers of a block
    assert counts[0] - counts[1] >= 2 * 7


def test_the_same_rows_get_the_same_groups():
    first = grouped.Groups.of([0, None, 1])
    assert grouped.Groups.of(torch.tensor([0, -1, 1])) is first
    numbers = first.numbers("rows", torch.device("cpu"))
    assert first.numbers("rows", torch.device("cpu")) is numbers
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        assert grouped.Groups.of([0, None, 1]) is not first


def test_what_a_batch_keeps_is_bounded():
    groups = grouped.Groups.of([0, 1, 1, 0])
    for tokens in range(1000):
        groups.plan(tokens, 2, torch.device("cpu"))
    assert len(groups._made) <= 64


def test_another_thread_may_have_dropped_an_old_stack(monkeypatch):
    model = built()
    before = output(model)

    def get(slots, slot):
        return slots.pop(slot, None)

    monkeypatch.setattr(_stacks._Slots, "get", get, raising=False)
    monkeypatch.setattr(_stacks._Kept, "holds", lambda kept, sources: False)
    assert torch.equal(output(model), before)
