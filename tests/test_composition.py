"""Compositions: what is one, what it means at a site, and what is refused with which hint."""

from __future__ import annotations

import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from adapterzoo.composition import (
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    RowMap,
    Split,
    Stack,
    compile_rows,
    compile_site,
    evaluate,
    from_json,
    numbered,
    parse,
    rows_of,
    to_json,
    without,
)
from adapterzoo.contracts import Adapter, BaseLayer
from adapterzoo.errors import CompositionError, StateError


class Affine(BaseLayer):
    """y = 2 x + 1."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x + 1

    original = __call__

    @property
    def weight(self) -> Tensor:
        return torch.tensor([[2.0]])

    @property
    def bias(self) -> Tensor:
        return torch.tensor([1.0])

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def residual(self) -> Tensor:
        return torch.tensor([9.0])


class Output(Adapter):
    """Multiplies what the layer gives, and adds."""

    def __init__(self, factor: float, summand: float) -> None:
        super().__init__()
        self.factor, self.summand = factor, summand

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        return self.factor * base(x) + self.summand


class Input(Output):
    """Multiplies what the layer gets, and adds."""

    acts_on: ClassVar[str] = "input"

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        return base(self.factor * x + self.summand)


class Delta(Output):
    """Adds a multiple of the input, and asks the untouched layer for nothing but its weight."""

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        assert torch.equal(base.weight, torch.tensor([[2.0]]))
        assert torch.equal(base.original(x), 2 * x + 1)
        assert base.bias is not None
        assert float(base.residual) == 9.0
        assert base.scale == 1.0
        return base(x) + self.factor * x


ADAPTERS = {
    "o1": Output(3.0, 1.0), "o2": Output(5.0, -2.0),
    "i1": Input(7.0, 1.0), "i2": Input(11.0, -3.0),
    "d1": Delta(0.5, 0.0), "d2": Delta(0.25, 0.0),
}  # fmt: skip
X = torch.tensor([[1.0], [-4.0], [0.5]])


def at_site(*names: str, present: list[str] | None = None) -> Tensor:
    step = compile_site(Stack(*names), present or list(ADAPTERS), ADAPTERS.__getitem__)
    assert step is not None
    return evaluate(step, ADAPTERS, X, Affine())


# --- what is a composition ---


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        (None, None),
        ([], None),
        ((), None),
        ("a", Stack("a")),
        ("a,b", Stack("a,b")),
        (["a"], Stack("a")),
        (["a", "b"], Stack("a", "b")),
        (("b", "a"), Stack("b", "a")),
        (Stack("a", "b"), Stack("a", "b")),
    ],
)
def test_what_a_user_may_pass(setup, expected):
    assert parse(setup) == expected


def test_a_stack_is_its_names_in_order():
    stack = Stack("b", "a")
    assert list(stack) == ["b", "a"]
    assert stack.flatten() == ("b", "a")
    assert len(stack) == 2
    assert "a" in stack
    assert "c" not in stack
    assert stack == Stack("b", "a")
    assert hash(stack) == hash(Stack("b", "a"))
    # compared as a whole: a prefix is another stack
    assert stack not in (Stack("a", "b"), Stack("b"), Stack("b", "a", "c"), ("b", "a"))
    assert eval(repr(stack)) == stack


# --- what it means ---


def test_one_adapter_is_a_function_around_the_layer():
    assert torch.equal(at_site("o1"), 3 * (2 * X + 1) + 1)
    assert torch.equal(at_site("i1"), 2 * (7 * X + 1) + 1)


def test_the_first_adapter_of_a_stack_acts_first():
    y = 2 * X + 1
    assert torch.equal(at_site("o1", "o2"), 5 * (3 * y + 1) - 2)
    assert torch.equal(at_site("o2", "o1"), 3 * (5 * y - 2) + 1)
    # on the input too: what comes out of the first goes into the second
    assert torch.equal(at_site("i1", "i2"), 2 * (11 * (7 * X + 1) - 3) + 1)
    assert torch.equal(at_site("i2", "i1"), 2 * (7 * (11 * X - 3) + 1) + 1)


@pytest.mark.parametrize("names", [("i1", "o1"), ("o1", "i1")])
def test_input_and_output_do_not_depend_on_their_order(names):
    assert torch.equal(at_site(*names), 3 * (2 * (7 * X + 1) + 1) + 1)


def test_deltas_add_in_any_order():
    expected = 2 * X + 1 + 0.5 * X + 0.25 * X
    torch.testing.assert_close(at_site("d1", "d2"), expected)
    torch.testing.assert_close(at_site("d2", "d1"), expected)


def test_a_site_keeps_what_is_present_there():
    assert torch.equal(at_site("o1", "o2", present=["o2"]), at_site("o2"))
    assert torch.equal(at_site("i1", "i2", present=["i2", "o1"]), at_site("i2"))
    assert compile_site(Stack("o1"), ["o2"], ADAPTERS.__getitem__) is None
    assert compile_site(Stack("o1"), [], ADAPTERS.__getitem__) is None


def test_the_innermost_of_a_step_is_first():
    step = compile_site(Stack("i1", "o1", "i2", "o2"), list(ADAPTERS), ADAPTERS.__getitem__)
    assert step == ("o1", "o2", "i2", "i1")


# --- compositions of compositions ---


LEGAL = {
    "Stack": Stack("a", "b"),
    "Fuse": Fuse("a", "b"),
    "Split": Split("a", "b", splits=2),
    "BatchSplit": BatchSplit("a", "b", batch_sizes=2),
    "Parallel": Parallel("a", "b"),
    "Average": Average("a", "b"),
}
# the table of AdapterHub's documentation
MAY_HOLD = {
    "Stack": {"Fuse", "Split", "Parallel", "BatchSplit", "Average"},
    "Fuse": {"Stack"},
    "Split": {"Split", "Stack", "BatchSplit", "Average"},
    "BatchSplit": {"Stack", "Split", "BatchSplit", "Average"},
    "Parallel": {"Stack", "BatchSplit", "Average"},
    "Average": {"Stack", "Split", "BatchSplit"},
}


def made(kind: str, *children: object):
    options = {"Split": {"splits": 2}, "BatchSplit": {"batch_sizes": 4}}
    return KINDS[kind](*children, **options.get(kind, {}))


KINDS = {cls.__name__: cls for cls in (Stack, Fuse, Split, BatchSplit, Parallel, Average)}


@pytest.mark.parametrize("inner", KINDS)
@pytest.mark.parametrize("outer", KINDS)
def test_what_may_stand_in_what(outer, inner):
    if inner in MAY_HOLD[outer]:
        node = made(outer, "c", LEGAL[inner])
        assert node.children == ("c", LEGAL[inner])
        assert node.flatten() == ("c", "a", "b")
        return
    with pytest.raises(CompositionError) as caught:
        made(outer, "c", LEGAL[inner])
    message = str(caught.value)
    assert f"a {outer} cannot contain a {inner}" in message
    shown = message.rpartition("Write ")[2].removesuffix(".")
    assert type(eval(shown)).__name__ == outer


@pytest.mark.parametrize(
    "make",
    [
        lambda: Stack("a", Fuse("b", Stack("c", Fuse("d", "e")))),
        lambda: BatchSplit("a", Stack("b", Average("c", "d")), batch_sizes=1),
        lambda: Split("a", Split("b", Split("c", "d", splits=1), splits=2), splits=3),
        lambda: Stack("a", Average("b", BatchSplit("c", "d", batch_sizes=1))),
    ],
)
def test_what_is_too_deep(make):
    with pytest.raises(CompositionError, match=r"too deep.*Write ") as caught:
        make()
    eval(str(caught.value).rpartition("Write ")[2].removesuffix("."))


def test_two_levels_are_legal():
    assert Stack("a", BatchSplit("b", Stack("c", "d"), batch_sizes=[1, 2])).last() == "d"
    assert Split("a", Split("b", Stack("c", "d"), splits=1), splits=2).flatten() == tuple("abcd")


@pytest.mark.parametrize(
    ("make", "wrong", "hint"),
    [
        (lambda: Stack(), "Stack()", "Write Stack('a', 'b')"),
        (lambda: Stack("a", 3), "Stack('a', 3)", "Write Stack('a', 'b')"),
        (lambda: Stack("a", None), "Stack('a', None)", "Write Stack('a', 'b')"),
        (lambda: Stack(["a", "b"]), "Stack(['a', 'b']", "Write Stack('a', 'b')"),
        (lambda: Stack(Stack("a")), "Stack(Stack('a')", "Write Stack('a', 'b')"),
        (lambda: Stack("a", "b", "a"), "'a', 'b', 'a'", "Write Stack('a', 'b')."),
        (lambda: parse(["b", "b"]), "'b', 'b'", "Write Stack('b')."),
        (lambda: parse(["a", 1]), "'a', 1", "Write Stack('a', 'b')"),
        (lambda: parse(3), "active adapters 3", "got a int. Write 'a' or Stack('a', 'b')"),
        (lambda: parse({"a": 1}), "{'a': 1}", "got a dict. Write 'a' or Stack('a', 'b')"),
        (lambda: parse({"a"}), "{'a'}", "got a set. Write 'a' or Stack('a', 'b')"),
        (lambda: Split("a", "b", splits=[1]), "splits=[1]", "Write splits=[2, 2]"),
        (lambda: Split("a", "b", splits=[1, 0]), "splits=[1, 0]", "positive"),
        (lambda: BatchSplit("a", batch_sizes=[1, 2]), "[1, 2]", "Write batch_sizes=[2]"),
        (lambda: BatchSplit("a", batch_sizes=True), "True", "Write batch_sizes=[2]"),
        (lambda: Average("a", "b", weights=[1]), "weights=[1]", "Write weights=[0.5, 0.5]"),
        (lambda: Average("a", "b", weights=[1, -1]), "sum to 0", "normalize_weights=False"),
        (lambda: Average("a", "b", weights=["1", 2]), "'1'", "Write weights=[0.5, 0.5]"),
        (lambda: Split("a", "b", splits=None), "splits=None", "Write splits=[2, 2]"),
        (lambda: Split("a", "b", splits=2.5), "splits=2.5", "Write splits=[2, 2]"),
        (lambda: Average("a", weights=0.5), "weights=0.5", "Write weights=[1.0]"),
        (lambda: Average("a", weights=object), "<class 'object'>", "Write weights=[1.0]"),
        (lambda: Average("a", weights=[float("nan")]), "[nan]", "Write weights=[1.0]"),
        (
            lambda: Average("a", None),
            "None is neither the name of an adapter nor",
            "Write Average('a'",
        ),
        (lambda: Parallel(), "Parallel()", "Write Parallel('a'"),
        (lambda: Fuse("a", None), "None is neither the name of an adapter nor", "Write Fuse('a'"),
        (
            lambda: rows_of(
                Stack(
                    BatchSplit("a", "b", batch_sizes=[1, 2]),
                    BatchSplit("c", "d", batch_sizes=2),
                )
            ),
            "[3, 4] rows",
            "Let all of them",
        ),
        (
            lambda: rows_of(
                BatchSplit("a", BatchSplit("b", "c", batch_sizes=1), batch_sizes=[1, 3])
            ),
            "gets 3 rows and divides 2",
            "Write batch_sizes with 2",
        ),
        (lambda: from_json({"type": "Heap", "children": []}), "Heap", "'Stack'"),
        (
            lambda: from_json({"type": "Split", "children": ["a"], "parts": 1}),
            "parts",
            "that Split takes",
        ),
    ],
)
def test_what_is_none_is_refused_with_value_and_cure(make, wrong, hint):
    with pytest.raises(CompositionError) as caught:
        make()
    assert wrong in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    "node",
    [
        *LEGAL.values(),
        Fuse("a", "b", name="both"),
        Average("a", "b", weights=[1, 3]),
        Average("a", "b", weights=[2, -1], normalize_weights=False),
        BatchSplit("a", None, Stack("b", "c"), batch_sizes=[1, 2, 3]),
        Stack("c", Split("a", "b", splits=[1, 2])),
    ],
)
def test_repr_and_json_make_the_same_again(node):
    assert eval(repr(node)) == node
    assert hash(eval(repr(node))) == hash(node)
    assert from_json(json.loads(json.dumps(to_json(node)))) == node


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        (Average("a", "b", weights=[2, 2]), "Average('a', 'b')"),
        (Average("a", "b", weights=[1, 3]), "Average('a', 'b', weights=[0.25, 0.75])"),
        (
            Average("a", "b", weights=[1, 3], normalize_weights=False),
            "Average('a', 'b', weights=[1.0, 3.0], normalize_weights=False)",
        ),
        (
            Average("a", "b", weights=[1, -1], normalize_weights=False),
            "Average('a', 'b', weights=[1.0, -1.0], normalize_weights=False)",
        ),
    ],
)
def test_an_average_shows_no_more_than_it_needs(node, shown):
    assert repr(node) == shown
    assert eval(shown).weights == node.weights
    assert from_json(to_json(node)) == node


def test_compositions_are_compared_as_a_whole():
    assert Split("a", "b", splits=2) != Split("a", "b", splits=[2, 3])
    assert Split("a", "b", splits=2) != BatchSplit("a", "b", batch_sizes=2)
    assert Average("a", "b") == Average("a", "b", weights=[2, 2])
    assert Average("a", "b", weights=[1, 3]).weights == (0.25, 0.75)
    assert Average("a", "b", weights=[1, 3], normalize_weights=False).weights == (1, 3)
    assert Parallel("a", "b") != Parallel("a", "b", "c")
    assert Fuse("a", Stack("b", "c")).name == "a,c"


def test_numbers_of_numpy_are_numbers():
    assert Split("a", "b", splits=np.array([1, 2])) == Split("a", "b", splits=[1, 2])
    assert BatchSplit("a", batch_sizes=np.int64(3)) == BatchSplit("a", batch_sizes=3)
    weighed = Average("a", "b", weights=np.array([0.5, 1.5], dtype=np.float32))
    assert weighed == Average("a", "b", weights=[0.25, 0.75])
    json.dumps(to_json(weighed))


def test_rows_of_a_composition():
    split = BatchSplit("b", "c", batch_sizes=[1, 2])
    assert rows_of(split) == (["b", "c", "c"], 1, True)
    assert rows_of(Parallel("a", Stack("b", "c"))) == (["a", Stack("b", "c")], 2, False)
    stacked = [Stack("a", "b"), *[Stack("a", "c")] * 2]
    assert rows_of(Stack("a", split)) == (stacked, 1, True)
    assert rows_of(Parallel("a", split)) == (["a", "a", "a", "b", "c", "c"], 2, True)
    both = Stack(Parallel("a", "b"), Parallel("c", "d"))
    assert rows_of(both) == ([Stack("a", "c"), Stack("b", "d")], 2, False)


@pytest.mark.parametrize(
    ("setup", "gone", "left"),
    [
        (Stack("a", "b"), "a", Stack("b")),
        (Stack("a", "b"), "ab", None),
        (Stack("a", Parallel("b", "c")), "b", Stack("a", Parallel(None, "c"))),
        (Stack("a", Parallel("b", "c")), "bc", Stack("a")),
        (BatchSplit("a", "b", batch_sizes=[1, 2]), "a", BatchSplit(None, "b", batch_sizes=[1, 2])),
        (Split("a", Stack("b"), splits=1), "b", Split("a", None, splits=1)),
        (Average("a", "b", "c", weights=[1, 1, 2]), "c", Average("a", "b")),
        # of weights that were not normalised each stays what it was
        (Average("a", "b", weights=[1, 1], normalize_weights=False), "b", Average("a")),
        (Average("a", "b", weights=[1, -1], normalize_weights=False), "b", Average("a")),
        (Stack("a", Fuse("b", "c")), "c", Stack("a")),
    ],
)
def test_a_composition_without_names(setup, gone, left):
    assert without(setup, list(gone)) == left
    assert without(left, list(gone)) == left


# --- what they mean at a site ---


def site(setup, x: Tensor = X, present: list[str] | None = None, rows=None) -> Tensor:
    parts, index = ((setup,), None) if rows is None else numbered(rows)
    step = compile_rows(parts, present or list(ADAPTERS), ADAPTERS.__getitem__)
    assert step is not None
    held = None if index is None else RowMap(index)
    return evaluate(step, ADAPTERS, x, Affine(), held)


def test_an_average_is_an_average():
    one, two = at_site("o1"), at_site("o2")
    torch.testing.assert_close(site(Average("o1", "o2")), (one + two) / 2)
    weighted = Average("o1", "o2", weights=[1, 3])
    torch.testing.assert_close(site(weighted), 0.25 * one + 0.75 * two)
    # where one is absent its share is the base layer's
    y = 2 * X + 1
    torch.testing.assert_close(site(weighted, present=["o2"]), 0.25 * y + 0.75 * two)
    added = Average("d1", "d2", weights=[2, -1], normalize_weights=False)
    torch.testing.assert_close(site(added), y + 2 * 0.5 * X - 0.25 * X)


def test_an_average_of_inputs_is_taken_before_the_layer():
    calls = []

    class Counted(Affine):
        def __call__(self, x: Tensor) -> Tensor:
            calls.append(x)
            return 2 * x + 1

    step = compile_site(Average("i1", "i2"), list(ADAPTERS), ADAPTERS.__getitem__)
    found = evaluate(step, ADAPTERS, X, Counted())
    torch.testing.assert_close(found, 2 * ((7 * X + 1) + (11 * X - 3)) / 2 + 1)
    assert len(calls) == 1


def test_a_split_divides_the_sequence():
    x = torch.arange(10.0).reshape(2, 5, 1)
    step = compile_site(Split("o1", Stack("i1", "o2"), splits=[2, 3]), [*ADAPTERS], ADAPTERS.get)
    found = evaluate(step, ADAPTERS, x, Ninths(x))
    first, second = x[:, :2], x[:, 2:]
    torch.testing.assert_close(found[:, :2], 3 * (2 * first + 1) + 1)
    torch.testing.assert_close(found[:, 2:], 5 * (2 * (7 * second + 1) + 1) - 2)
    for wrong in (x[:, :4], x[:, 0]):
        with pytest.raises(CompositionError, match="5 tokens"):
            evaluate(step, ADAPTERS, wrong, Affine())


class Ninths(Affine):
    """Has a residual as long as its input."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def residual(self) -> Tensor:
        return 9 * self.x


@pytest.mark.parametrize("count", [4, 8])
def test_rows_take_their_own_steps(count):
    x = torch.arange(float(count)).unsqueeze(-1)
    names = ["o1", None, Stack("i1", "o2"), "o1"]
    parts, index = numbered(names)
    step = compile_rows(parts, list(ADAPTERS), ADAPTERS.__getitem__)
    rows = RowMap(index).enter(4, together=True)
    found = evaluate(step, ADAPTERS, x, Affine(), rows)
    each = count // 4
    for i, name in enumerate(names):
        part = x[i * each : (i + 1) * each]
        expected = 2 * part + 1
        if name is not None:
            alone = compile_site(name, list(ADAPTERS), ADAPTERS.__getitem__)
            expected = evaluate(alone, ADAPTERS, part, Affine())
        torch.testing.assert_close(found[i * each : (i + 1) * each], expected)


def test_rows_that_cannot_be_told_are_refused():
    parts, index = numbered(["o1", None])
    step = compile_rows(parts, list(ADAPTERS), ADAPTERS.__getitem__)
    with pytest.raises(CompositionError, match="got 4 rows, and the composition has 2"):
        evaluate(step, ADAPTERS, torch.zeros(4, 1), Affine(), RowMap(index))
    entered = RowMap(index).enter(2, together=True)
    with pytest.raises(CompositionError, match="got 3 rows"):
        evaluate(step, ADAPTERS, torch.zeros(3, 1), Affine(), entered)
    with pytest.raises(StateError, match="Call model"):
        evaluate(step, ADAPTERS, torch.zeros(2, 1), Affine(), RowMap(index, repeats=2))


def test_a_step_that_all_rows_take_is_that_step():
    parts = numbered([Stack("o1", "d1"), Stack("o1", "d2"), "o1"])[0]
    assert compile_rows(parts, ["o1"], ADAPTERS.__getitem__) == ("o1",)
    assert compile_rows(parts, ["o2"], ADAPTERS.__getitem__) is None


def test_the_residual_of_a_part_is_its_own():
    x = torch.arange(4.0).reshape(4, 1)

    class Reads(Output):
        def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
            assert torch.equal(base.residual, 9 * x)
            assert torch.equal(base.original(x), base(x))
            assert torch.equal(base(x + 1), 2 * x + 3)
            return base(x) + base.residual

    adapters = {"r1": Reads(0, 0), "r2": Reads(0, 0)}
    parts, index = numbered(["r1", None, "r2", "r1"])
    step = compile_rows(parts, list(adapters), adapters.__getitem__)
    found = evaluate(step, adapters, x, Ninths(x), RowMap(index))
    expected = 2 * x + 1 + 9 * x
    expected[1] = 2 * x[1] + 1
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("made", "option"), [(Split, "splits"), (BatchSplit, "batch_sizes"), (Average, "weights")]
)
@pytest.mark.parametrize("value", [[1], 1, []])
def test_without_children_children_are_what_is_missing(made, option, value):
    with pytest.raises(CompositionError) as caught:
        made(**{option: value})
    kind = made.__name__
    assert str(caught.value).startswith(f"{kind}(): a {kind} takes names or compositions, at least")
    assert f"Write {kind}('a', " in str(caught.value)
