"""Modules that compute with their parameters: changed once in a call, and never kept beyond it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import tiny_inputs
from snapshots import output, stir
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adapterzoo import inject
from adapterzoo.composition import Stack
from adapterzoo.composition.compile import SiteStep
from adapterzoo.contracts import WeightAdapter
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters
from adapterzoo.runtime import ActiveState, Default, Plan

X = torch.arange(8.0).reshape(2, 4) / 8
EXPERTS = 3


class Counted(WeightAdapter):
    """The weight multiplied; counts how often it was asked for it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.asked = 0

    def forward(self, x, base):
        return self.factor * base(x)

    def merged_weight(self, w, base):
        self.asked += 1
        return self.factor * w


class Experts(nn.Module):
    """The sum of all experts; reads its parameter once for each, and calls itself if told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, 4, 4))
        # called with (self, x) between two reads
        self.between: Callable[[Any, Tensor], Tensor | None] = lambda _, x: None

    def forward(self, x):
        y = x @ self.down_proj[0].T
        if (more := self.between(self, x)) is not None:
            y = y + more
        for i in range(1, EXPERTS):
            y = y + x @ self.down_proj[i].T
        return y


def expected(factor=1.0):
    """In float64, without the machinery."""
    weight = Experts().down_proj.detach().double()
    return factor * torch.einsum("bi,eoi->bo", X.double(), weight)


def near(y, truth):
    torch.testing.assert_close(y.detach().double(), truth, rtol=1e-5, atol=1e-5)


def put(experts, name, adapter, selection):
    parts = ExpertAdapters({"down_proj": FusedAdapters([("mlp_out", None, adapter)])})
    inject.put(experts, name, parts, selection, "at")


def adapted(**factors):
    """Experts with an adapter of each name; the first one is active."""
    experts, selection = Experts(), ActiveState(Default(plan(next(iter(factors)))))
    counted = {name: Counted(factor) for name, factor in factors.items()}
    for name, adapter in counted.items():
        put(experts, name, adapter, selection)
    return experts, counted, selection


def plan(*names):
    return Plan(Stack(*names), sites={"at": SiteStep(tuple(range(len(names))), tuple(names))})


def test_all_reads_of_a_call_get_one_weight_and_the_next_call_a_new_one():
    experts, counted, selection = adapted(a=2.0)
    before = set(vars(experts))
    near(experts(X), expected(2.0))
    assert counted["a"].asked == 1
    assert not selection.call.reads
    assert set(vars(experts)) == before
    with torch.no_grad():
        counted["a"].factor.fill_(5.0)
    near(experts(X), expected(5.0))
    with torch.no_grad():
        experts._parameters["down_proj"].mul_(3.0)
    near(experts(X), expected(15.0))
    assert counted["a"].asked == 3


def test_a_stack_is_built_once_too_and_merges_its_changes():
    experts, counted, selection = adapted(a=2.0, b=7.0)
    selection.default.plan = plan("a", "b")
    near(experts(X), expected(14.0))
    assert [adapter.asked for adapter in counted.values()] == [1, 1]
    selection.default.plan = Plan()
    assert torch.equal(experts(X), Experts()(X))
    assert [adapter.asked for adapter in counted.values()] == [1, 1]


def test_a_read_outside_of_a_call_is_not_kept():
    experts, counted, _ = adapted(a=2.0)
    first = experts.down_proj
    with torch.no_grad():
        counted["a"].factor.fill_(3.0)
    assert torch.equal(experts.down_proj, first * 1.5)


def test_nested_calls_of_one_module_have_weights_of_their_own():
    experts, counted, selection = adapted(a=2.0, b=7.0)

    def with_other_adapter(module, x):
        module.between = lambda _, x: None
        with selection.overridden(plan("b")):
            return module(x)

    experts.between = with_other_adapter
    near(experts(X), expected(2.0) + expected(7.0))
    assert [adapter.asked for adapter in counted.values()] == [1, 1]
    assert not selection.call.reads


def test_another_setup_within_a_call_is_seen():
    experts, _, selection = adapted(a=2.0, b=7.0)

    def read_with_b(module, x):
        with selection.overridden(plan("b")):
            return x @ module.down_proj[0].T

    experts.between = read_with_b
    first = X.double() @ Experts().down_proj[0].detach().double().T
    near(experts(X), expected(2.0) + 7.0 * first)


def test_the_reads_of_another_module_do_not_meet():
    outer, counted, selection = adapted(a=2.0)
    inner, adapter = Experts(), Counted(3.0)
    with torch.no_grad():
        inner.down_proj.mul_(10.0)
    put(inner, "a", adapter, selection)
    outer.between = lambda _, x: inner(x)
    near(outer(X), expected(2.0) + expected(30.0))
    assert (counted["a"].asked, adapter.asked) == (1, 1)
    # without a call of the other one too
    outer.between = lambda _, x: torch.einsum("bi,eoi->bo", x, inner.down_proj)
    near(outer(X), expected(2.0) + expected(30.0))


def test_a_call_that_fails_leaves_nothing():
    experts, counted, selection = adapted(a=2.0)

    def fail(module, x):
        raise ArithmeticError

    experts.between = fail
    with pytest.raises(ArithmeticError):
        experts(X)
    assert not selection.call.reads
    experts.between = lambda _, x: None
    with torch.no_grad():
        counted["a"].factor.fill_(4.0)
    near(experts(X), expected(4.0))


def test_what_was_read_without_gradients_does_not_hide_them():
    class Looks(Experts):
        def forward(self, x):
            with torch.no_grad():
                self.down_proj.norm()
            return super().forward(x)

    looks, adapter = Looks(), Counted(2.0)
    put(looks, "a", adapter, ActiveState(Default(plan("a"))))
    looks(X).sum().backward()
    near(adapter.factor.grad, expected().sum())
    assert adapter.asked == 2


def test_threads_on_one_module_do_not_meet():
    experts, counted, selection = adapted(a=2.0, b=7.0)
    both = threading.Barrier(2, timeout=20)
    # each thread has read its first expert when the other reads its second
    experts.between = lambda _, x: both.wait() and None
    found: dict[str, Tensor] = {}

    def run(name):
        with selection.overridden(plan(name)):
            found[name] = experts(X)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    near(found["a"], expected(2.0))
    near(found["b"], expected(7.0))
    assert [adapter.asked for adapter in counted.values()] == [1, 1]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_call_builds_once_more_to_recompute(reentrant):
    experts, counted, selection = adapted(a=2.0)
    experts(X).square().sum().backward()
    plain, counted["a"].factor.grad = counted["a"].factor.grad, None
    counted["a"].asked = 0
    x = X.clone().requires_grad_()
    checkpoint(experts, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(counted["a"].factor.grad, plain)
    assert counted["a"].asked == 2
    assert not selection.call.reads


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_real_model_builds_each_weight_once(tiny, family, monkeypatch):
    model, inputs = tiny(family), tiny_inputs(family)
    # its loop over experts reads the weights anew for each
    model.config._experts_implementation = "eager"
    model.add_adapter("a", "lora[selfattn_lora=False,intermediate_lora=True,output_lora=True]")
    stir(model, "a")
    weight = FusedAdapters.merged_weight
    built: list[int] = []

    def counting(adapters, w, base):
        built.append(id(adapters))
        return weight(adapters, w, base)

    monkeypatch.setattr(FusedAdapters, "merged_weight", counting)
    model.set_active_adapters("a")
    found = output(model, **inputs)
    assert sorted(built) == sorted(set(built))
    assert len(built) == 2 * model.config.num_hidden_layers
    model.set_active_adapters(None)
    model.merge_adapter("a")
    torch.testing.assert_close(found, output(model, **inputs), rtol=1e-4, atol=1e-5)
