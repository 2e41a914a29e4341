"""Injection: `put` and `take` undo each other, and nothing else of a layer changes."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from adapterzoo import inject
from adapterzoo.anatomy import OutputSlice
from adapterzoo.composition import Stack
from adapterzoo.composition.compile import SiteStep
from adapterzoo.contracts import Adapter, BaseLayer, WeightAdapter
from adapterzoo.errors import DuplicateNameError, StateError
from adapterzoo.inject.adapted import Adapted, base_of
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters, mergeable, put_slice, take_slice
from adapterzoo.runtime import ActiveState, Default, Plan

# each means something to nn.Module, to a layer or to the library
NAMES = ["train", "type", "lora", "weight", "bias", "adapters", "forward", "_link", "0", "a b", "ä"]


class Times(WeightAdapter):
    """The layer with its output multiplied: easy to tell from outside."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        return self.factor * base(x)

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        return self.factor * w

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        return self.factor * b


class Shows(Adapter):
    """An output made of what a base shows of itself."""

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        y = x @ base.weight.T
        return y if base.bias is None else y + base.bias


class AddsResidual(Adapter):
    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        return base(x) + base.residual


def layer(kind: str = "linear") -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = {
        "linear": lambda: nn.Linear(4, 6),
        "no bias": lambda: nn.Linear(4, 6, bias=False),
        "conv1d": lambda: Conv1D(6, 4),
    }[kind]()
    if kind == "conv1d":
        nn.init.normal_(made.bias)
    return made


def plan(*names: str, path: str = "at", **taps: tuple[str, ...]) -> Plan:
    return Plan(
        Stack(*names), sites={path: SiteStep(tuple(range(len(names))), tuple(names))}, captures=taps
    )


def active(*names: str) -> ActiveState:
    selection = ActiveState(Default())
    selection.default.plan = plan(*names)
    return selection


def state_of(module: nn.Module) -> tuple[object, ...]:
    keys = list(module.state_dict())
    return type(module), keys, set(vars(module)), list(module._modules), list(module._parameters)


X = torch.arange(8.0).reshape(2, 4) / 8


# --- put and take ---


@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_take_undoes_put(kind):
    plain = layer(kind)
    before, weights = state_of(plain), copy.deepcopy(plain.state_dict())
    adapter = Times(3.0)
    inject.put(plain, "a", adapter, active("a"), "at")
    assert isinstance(plain, before[0])
    assert list(plain.state_dict())[: len(before[1])] == before[1]
    torch.testing.assert_close(plain(X), 3.0 * layer(kind)(X), rtol=0, atol=0)
    assert inject.take(plain, "a") is adapter
    assert state_of(plain) == before
    assert all(torch.equal(weights[key], t) for key, t in plain.state_dict().items())
    assert torch.equal(plain(X), layer(kind)(X))


def test_the_last_take_restores_whatever_the_order():
    for order in (["a", "b"], ["b", "a"]):
        plain, selection = layer(), active("b")
        inject.put(plain, "a", Times(2.0), selection, "at")
        inject.put(plain, "b", Times(3.0), selection, "at")
        inject.take(plain, order[0])
        assert type(plain) is not nn.Linear
        inject.take(plain, order[1])
        assert type(plain) is nn.Linear


def test_equal_layers_stay_of_one_class():
    one, other = layer(), layer()
    for each in (one, other):
        inject.put(each, "a", Times(1.0), ActiveState(Default()), "at")
    assert type(one) is type(other)


def test_any_name_is_a_name_and_none_meets_another():
    plain, selection = layer(), ActiveState(Default())
    for i, name in enumerate(NAMES):
        inject.put(plain, name, Times(float(i)), selection, "at")
    assert {f"adapters.{name}.factor" for name in NAMES} <= set(plain.state_dict())
    for i, name in enumerate(NAMES):
        selection.default.plan = plan(name)
        assert torch.equal(plain(X), i * layer()(X))
    plain.train().eval().requires_grad_(False).to(torch.float64)
    for name in NAMES:
        assert plain.adapters[name].factor.dtype is torch.float64
        inject.take(plain, name)
    assert type(plain) is nn.Linear


def test_a_taken_name_is_refused_and_the_first_adapter_stays():
    plain, first = layer(), Times(2.0)
    inject.put(plain, "a", first, active("a"), "at")
    with pytest.raises(DuplicateNameError, match="'at' already has an adapter 'a'"):
        inject.put(plain, "a", Times(3.0), ActiveState(Default()), "at")
    assert plain.adapters["a"] is first
    # the layer does not learn which parameters the refused one wanted to change
    kind = type(plain)
    parts = ExpertAdapters({"weight": FusedAdapters([])})
    with pytest.raises(DuplicateNameError, match="'at' already has an adapter 'a'"):
        inject.put(plain, "a", parts, ActiveState(Default()), "at")
    assert type(plain) is kind


@pytest.mark.parametrize("where", ["class", "instance", "module", "parameter"])
def test_a_layer_with_adapters_of_its_own_is_left_alone(where):
    class Own(nn.Linear):
        adapters = "mine"

    plain = Own(4, 6) if where == "class" else nn.Linear(4, 6)
    if where == "instance":
        vars(plain)["adapters"] = "mine"
    elif where == "module":
        plain.add_module("adapters", nn.Identity())
    elif where == "parameter":
        plain.register_parameter("adapters", nn.Parameter(torch.zeros(1)))
    before = state_of(plain)
    with pytest.raises(StateError, match=r"has an attribute 'adapters'.*exclude_modules"):
        inject.put(plain, "a", Times(1.0), ActiveState(Default()), "at")
    assert state_of(plain) == before


def test_an_adapter_is_put_in_the_mode_of_its_layer():
    for training in (True, False):
        plain = layer().train(training)
        inject.put(plain, "a", Times(1.0).train(not training), ActiveState(Default()), "at")
        assert plain.adapters["a"].training is training
        assert plain.adapters.training is training


def test_nothing_active_runs_the_layers_own_forward():
    plain, selection = layer(), ActiveState(Default())
    inject.put(plain, "a", Times(2.0), selection, "at")
    for each in (Plan(), plan("a", path="elsewhere")):
        selection.default.plan = each
        assert torch.equal(plain(X), layer()(X))


def test_keyword_arguments_and_tuples_go_through():
    class Block(nn.Module):
        def forward(self, hidden: Tensor, scale: float = 1.0) -> tuple[Tensor, str, float]:
            return hidden * scale, "attention", scale

    block = Block()
    inject.put(block, "a", Times(2.0), active("a"), "at")
    for out in (block(X, 3.0), block(X, scale=3.0), block(hidden=X, scale=3.0)):
        assert torch.equal(out[0], 6.0 * X)
        assert out[1:] == ("attention", 3.0)


# --- what an adapter sees ---


@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_weight_and_bias_are_those_of_a_linear_layer(kind):
    plain = layer(kind)
    inject.put(plain, "a", Shows(), active("a"), "at")
    torch.testing.assert_close(plain(X), layer(kind)(X))
    assert base_of(plain).weight.shape == (6, 4)
    replica = replica_of(plain)
    assert not replica._parameters
    torch.testing.assert_close(replica(X), layer(kind)(X))


def test_a_layer_without_a_matrix_says_so():
    with pytest.raises(StateError, match="LayerNorm: its 'weight' is not a floating-point matrix"):
        _ = base_of(nn.LayerNorm(4)).weight


# --- taps ---


def test_a_tap_passes_the_input_of_one_module_to_another():
    source, reader, selection = nn.LayerNorm(4), nn.Identity(), ActiveState(Default())
    inject.capture_input(source, "reader", "a", selection, "source")
    inject.put(reader, "a", AddsResidual(), selection, "reader")
    selection.default.plan = plan("a", path="reader", source=("reader",))
    normed = source(X)
    assert torch.equal(reader(normed), normed + X)
    with pytest.raises(StateError, match=r"has not run\. Run the whole block"):
        reader(normed)
    selection.default.plan = Plan()
    assert torch.equal(reader(source(X)), normed)


def test_untap_undoes_tap_whatever_else_is_there():
    module, selection = nn.LayerNorm(4), ActiveState(Default())
    before = state_of(module)
    inject.capture_input(module, "one", "a", selection, "at")
    inject.capture_input(module, "one", "b", selection, "at")
    inject.put(module, "a", Times(1.0), selection, "at")
    inject.release_input(module, "one", "a")
    inject.take(module, "a")
    assert isinstance(module, Adapted)
    inject.release_input(module, "one", "b")
    assert state_of(module) == before
    inject.release_input(module, "one", "b")
    assert state_of(module) == before


# --- copies and replicas ---


def replica_of(module: nn.Module) -> nn.Module:
    """A shallow copy with tensors in the place of parameters, as DataParallel makes one."""
    made = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        made._modules[name] = replica_of(child)
    for name, parameter in module._parameters.items():
        setattr(made, name, None if parameter is None else parameter.clone())
    return made


def in_thread(run) -> Tensor:
    out: list[Tensor] = []
    thread = threading.Thread(target=lambda: out.append(run()))
    thread.start()
    thread.join()
    return out[0]


def test_a_replica_sees_the_override_of_the_thread_that_made_it():
    plain, selection = layer(), ActiveState(Default())
    inject.put(plain, "a", Times(2.0), selection, "at")
    with selection.overridden(plan("a")):
        replica = replica_of(plain)
        # the module itself would not: an override belongs to its thread
        assert torch.equal(in_thread(lambda: plain(X)), layer()(X))
        assert torch.equal(in_thread(lambda: replica(X)), 2.0 * layer()(X))


def test_taps_reach_their_reader_in_a_replica():
    block, selection = nn.Sequential(nn.LayerNorm(4), nn.Identity()), ActiveState(Default())
    inject.capture_input(block[0], "1", "a", selection, "0")
    inject.put(block[1], "a", AddsResidual(), selection, "1")
    selection.default.plan = Plan(
        Stack("a"), sites={"1": SiteStep((0,), ("a",))}, captures={"0": ("1",)}
    )
    replica = replica_of(block)
    assert torch.equal(in_thread(lambda: replica(X)), block(X))


class Experts(nn.Module):
    """Computes with a parameter of its own, as fused experts do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down_proj = nn.Parameter(torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->beo", x, self.down_proj)


def test_parameters_that_are_read_changed_are_so_in_a_replica():
    plain, parts = Experts(), FusedAdapters([("mlp_out", None, Times(2.0))])
    inject.put(plain, "a", ExpertAdapters({"down_proj": parts}), active("a"), "at")
    assert torch.equal(plain(X), 2.0 * Experts()(X))
    replica = replica_of(plain)
    assert torch.equal(in_thread(lambda: replica(X)), 2.0 * Experts()(X))
    inject.take(plain, "a")
    assert state_of(plain) == state_of(Experts())


# --- rows ---


@st.composite
def tensors_with_rows(draw: st.DrawFn) -> tuple[Tensor, OutputSlice, int]:
    groups, width = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    start = draw(st.integers(0, width - 1))
    rows = OutputSlice(groups, width, start, draw(st.integers(start + 1, width)))
    dims = draw(st.lists(st.integers(0, 3), max_size=3))
    dim = draw(st.integers(0, len(dims)))
    shape = (*dims[:dim], groups * width, *dims[dim:])
    size = torch.Size(shape).numel()
    tensor = torch.arange(float(size)).reshape(shape)
    return tensor, rows, draw(st.sampled_from([dim, dim - len(shape)]))


@given(tensors_with_rows())
@settings(deadline=None, derandomize=True)
def test_rows_are_those_of_the_definition_and_put_undoes_take(case):
    tensor, rows, dim = case
    before = tensor.clone()
    part = take_slice(tensor, rows, dim)
    chosen = [g * rows.width + i for g in range(rows.groups) for i in range(rows.start, rows.stop)]
    assert torch.equal(part, tensor.index_select(dim, torch.tensor(chosen)))
    assert torch.equal(put_slice(tensor, part, rows, dim), tensor)
    other = -1.0 - part
    changed = put_slice(tensor, other, rows, dim)
    assert torch.equal(take_slice(changed, rows, dim), other)
    # everything else is as it was: exactly the rows differ
    assert int((changed != tensor).sum()) == part.numel()
    assert torch.equal(tensor, before)


# --- parts of fused layers ---

QUERY, VALUE = OutputSlice(1, 6, 0, 2), OutputSlice(1, 6, 4, 6)
PER_HEAD = OutputSlice(2, 3, 1, 2)


def fused(*parts: tuple[str, OutputSlice | None, Adapter]) -> nn.Module:
    plain = layer()
    inject.put(plain, "a", FusedAdapters(list(parts)), active("a"), "at")
    return plain


def test_parts_change_their_rows_and_no_others():
    made = fused(("query", QUERY, Times(2.0)), ("value", VALUE, Times(3.0)))
    expected = layer()(X) * torch.tensor([2.0, 2.0, 1.0, 1.0, 3.0, 3.0])
    assert torch.equal(made(X), expected)
    made = fused(("key", PER_HEAD, Times(2.0)))
    assert torch.equal(made(X), layer()(X) * torch.tensor([1.0, 2.0, 1.0, 1.0, 2.0, 1.0]))


def test_parts_that_meet_act_in_their_order():
    made = fused(("query", QUERY, Times(2.0)), ("all", None, Times(3.0)))
    assert torch.equal(made(X), layer()(X) * torch.tensor([6.0, 6.0, 3.0, 3.0, 3.0, 3.0]))


def test_a_part_sees_its_rows_as_a_layer():
    for rows in (QUERY, VALUE, PER_HEAD):
        torch.testing.assert_close(fused(("part", rows, Shows()))(X), layer()(X))


def test_parts_merge_as_they_act():
    parts = [("query", QUERY, Times(2.0)), ("all", None, Times(3.0)), ("k", PER_HEAD, Times(5.0))]
    made = fused(*parts)
    adapter, base = mergeable(made.adapters["a"]), base_of(made)
    merged = nn.Linear(4, 6)
    with torch.no_grad():
        merged.weight.copy_(adapter.merged_weight(made.weight, base))
        merged.bias.copy_(adapter.merged_bias(made.bias, base))
    torch.testing.assert_close(merged(X), made(X))


def test_what_is_no_change_of_a_weight_is_not_merged():
    with pytest.raises(StateError, match=r"AddsResidual.*Keep it active instead"):
        mergeable(AddsResidual())
    made = fused(("query", QUERY, AddsResidual()))
    with pytest.raises(StateError, match="AddsResidual"):
        mergeable(made.adapters["a"]).merged_weight(made.weight, base_of(made))
