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
    MultiTask,
    Parallel,
    Split,
    Stack,
    from_json,
    parse,
    to_json,
    without,
)
from adapterzoo.composition.compile import SiteStep, compile_site, evaluate
from adapterzoo.composition.rows import RowMap, numbered, parts_of, rows_of
from adapterzoo.contracts import Adapter, BaseLayer, FusibleAdapter
from adapterzoo.errors import CompositionError, StateError


class Affine(BaseLayer):
    """y = 2 x + 1."""

    scale, padding_idx, is_original, is_in_call = 1.0, None, False, False
    call = shared = part = parameters = None

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
    step = compile_site([Stack(*names)], there(present))
    assert step is not None
    return run(step, X, Affine())


def there(names: list[str] | None) -> dict[str, Adapter]:
    """The adapters at a site; None: all."""
    return ADAPTERS if names is None else {name: ADAPTERS[name] for name in names}


def run(site: SiteStep, x: Tensor, base: BaseLayer, rows: RowMap | None = None) -> Tensor:
    return evaluate(site.step, site.adapters, x, base, rows)


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
    assert compile_site([Stack("o1")], there(["o2"])) is None
    assert compile_site([Stack("o1")], {}) is None


def test_the_innermost_of_a_step_is_first():
    step = compile_site([Stack("i1", "o1", "i2", "o2")], ADAPTERS)
    assert [step.names[number] for number in step.step] == ["o1", "o2", "i2", "i1"]


# --- compositions of compositions ---


LEGAL = {
    "Stack": Stack("a", "b"),
    "Fuse": Fuse("a", "b"),
    "Split": Split("a", "b", splits=2),
    "BatchSplit": BatchSplit("a", "b", batch_sizes=2),
    "Parallel": Parallel("a", "b"),
    "Average": Average("a", "b"),
    "MultiTask": MultiTask("a", "b"),
}
# what cannot be in what, at any depth; all else can
APART = {
    "Fuse": {"Fuse", "Split", "BatchSplit", "Parallel", "Average", "MultiTask"},
    "BatchSplit": {"Parallel", "MultiTask"},
    "Parallel": {"Parallel"},
    "MultiTask": {"BatchSplit", "Parallel", "MultiTask"},
}


def made(kind: str, *children: object):
    options = {"Split": {"splits": 2}, "BatchSplit": {"batch_sizes": 4}}
    return KINDS[kind](*children, **options.get(kind, {}))


KINDS = {
    cls.__name__: cls for cls in (Stack, Fuse, Split, BatchSplit, Parallel, Average, MultiTask)
}
PAIRS = [(outer, inner) for outer in KINDS for inner in KINDS]
LEGAL_PAIRS = [(o, i) for o, i in PAIRS if i not in APART.get(o, ()) and (o, i) != ("Stack",) * 2]


@pytest.mark.parametrize(("outer", "inner"), LEGAL_PAIRS)
def test_what_may_be_in_what(outer, inner):
    node = made(outer, "c", LEGAL[inner])
    assert node.children == ("c", LEGAL[inner])
    assert node.flatten() == ("c", "a", "b")
    assert eval(repr(node)) == node
    assert from_json(json.loads(json.dumps(to_json(node)))) == node


@pytest.mark.parametrize("between", [None, "Stack", "Average", "Split"])
@pytest.mark.parametrize(("outer", "inner"), [(o, i) for o in APART for i in sorted(APART[o])])
def test_what_cannot_be_in_what(outer, inner, between):
    inside = LEGAL[inner] if between is None else made(between, "d", LEGAL[inner])
    if outer == "Fuse" and between in ("Average", "Split"):
        inner = between
    with pytest.raises(CompositionError) as caught:
        made(outer, "c", inside)
    message = str(caught.value)
    assert f"a {outer} cannot contain {'an' if inner == 'Average' else 'a'} {inner}: it " in message
    assert eval(message.rpartition("Write ")[2].removesuffix("."))


def test_a_stack_in_a_stack_is_one_stack():
    assert Stack("a", Stack("b", Stack("c"))) == Stack("a", "b", "c")
    with pytest.raises(CompositionError, match="acts once"):
        Stack("a", Stack("b", "a"))


def test_any_depth_is_legal():
    deep = Stack("a", Average("b", BatchSplit("c", Split("d", Fuse("e", "f"), splits=1),
                                              batch_sizes=[1, 2])))  # fmt: skip
    assert deep.last() == "f"
    assert deep.flatten() == tuple("abcdef")


@pytest.mark.parametrize(
    ("make", "wrong", "hint"),
    [
        (lambda: Stack(), "Stack()", "Write Stack('a', 'b')"),
        (lambda: Stack("a", 3), "Stack('a', 3)", "Write Stack('a', 'b')"),
        (lambda: Stack("a", None), "Stack('a', None)", "Write Stack('a', 'b')"),
        (lambda: Stack(["a", "b"]), "Stack(['a', 'b']", "Write Stack('a', 'b')"),
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
        (lambda: Average("a", "b", weights=[1, -1]), "sum to 0 and", "Write normalize_weights"),
        (lambda: Average("a", "b", weights=["1", 2]), "'1'", "Write weights=[0.5, 0.5]"),
        (lambda: Split("a", "b", splits=None), "splits=None", "Write splits=[2, 2]"),
        (lambda: Split("a", "b", splits=2.5), "splits=2.5", "Write splits=[2, 2]"),
        (lambda: Average("a", weights=0.5), "weights=0.5", "Write weights=[1.0]"),
        (lambda: Average("a", weights=object), "<class 'object'>", "Write weights=[1.0]"),
        (lambda: Average("a", weights=[float("nan")]), "[nan]", "Write weights=[1.0]"),
        (lambda: Average("a", None), "Average('a', None)", "Write Average('a'"),
        (lambda: Parallel(), "Parallel()", "Write Parallel('a'"),
        (lambda: Fuse("a", None), "Fuse('a', None)", "Write Fuse('a'"),
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
            "gets 3 rows but divides 2",
            "Write batch_sizes with 2",
        ),
        (lambda: from_json({"type": "Heap", "children": []}), "Heap", "'Stack'"),
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
        (
            Average("a", "b", weights=[1, 3]),
            "Average('a', 'b', weights=[0.25, 0.75], normalize_weights=False)",
        ),
        (
            Average("a", "b", weights=[1, -1], normalize_weights=False),
            "Average('a', 'b', weights=[1.0, -1.0], normalize_weights=False)",
        ),
    ],
)
def test_an_average_shows_its_weights(node, shown):
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
        # weights that cancel out have no sum to divide by
        (
            Average("a", "b", "c", weights=[2, 1, -1]),
            "a",
            Average("b", "c", weights=[0.5, -0.5], normalize_weights=False),
        ),
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
    step = compile_site(parts, there(present))
    assert step is not None
    held = None if index is None else RowMap(index)
    return run(step, x, Affine(), held)


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

    step = compile_site([Average("i1", "i2")], ADAPTERS)
    found = run(step, X, Counted())
    torch.testing.assert_close(found, 2 * ((7 * X + 1) + (11 * X - 3)) / 2 + 1)
    assert len(calls) == 1


def test_a_split_divides_the_sequence():
    x = torch.arange(10.0).reshape(2, 5, 1)
    step = compile_site([Split("o1", Stack("i1", "o2"), splits=[2, 3])], ADAPTERS)
    found = run(step, x, Ninths(x))
    first, second = x[:, :2], x[:, 2:]
    torch.testing.assert_close(found[:, :2], 3 * (2 * first + 1) + 1)
    torch.testing.assert_close(found[:, 2:], 5 * (2 * (7 * second + 1) + 1) - 2)
    for wrong, says in ((x[:, :4], "have 4 tokens"), (x[:, 0], "has no tokens")):
        with pytest.raises(CompositionError, match=says):
            run(step, wrong, Affine())


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
    step = compile_site(parts, ADAPTERS)
    rows = RowMap(index).enter(4, together=True)
    found = run(step, x, Affine(), rows)
    each = count // 4
    for i, name in enumerate(names):
        part = x[i * each : (i + 1) * each]
        expected = 2 * part + 1
        if name is not None:
            alone = compile_site([name], ADAPTERS)
            expected = run(alone, part, Affine())
        torch.testing.assert_close(found[i * each : (i + 1) * each], expected)


def test_rows_that_cannot_be_told_are_refused():
    parts, index = numbered(["o1", None])
    step = compile_site(parts, ADAPTERS)
    with pytest.raises(CompositionError, match="got 4 rows, but the composition has 2"):
        run(step, torch.zeros(4, 1), Affine(), RowMap(index))
    entered = RowMap(index).enter(2, together=True)
    with pytest.raises(CompositionError, match="got 3 rows"):
        run(step, torch.zeros(3, 1), Affine(), entered)
    with pytest.raises(StateError, match="Call model"):
        run(step, torch.zeros(2, 1), Affine(), RowMap(index, repeats=2))


def test_a_step_that_all_rows_take_is_that_step():
    parts = numbered([Stack("o1", "d1"), Stack("o1", "d2"), "o1"])[0]
    assert compile_site(parts, there(["o1"])) == SiteStep((0,), ("o1",))
    assert compile_site(parts, there(["o2"])) is None


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
    step = compile_site(parts, adapters)
    found = run(step, x, Ninths(x), RowMap(index))
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
    assert str(caught.value).startswith(f"{kind}(): children are names of adapters and")
    assert f"Write {kind}('a', " in str(caught.value)


# --- nestings, by hand ---


class Bottleneck(FusibleAdapter):
    """Adds a multiple of the layer's output, or what stands in its place."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def update(self, x: Tensor, base: BaseLayer) -> Tensor:
        return self.factor * x

    def forward(self, x: Tensor, base: BaseLayer, instead=None) -> Tensor:
        y = base(x)
        return y + (self.update(y, base) if instead is None else instead(y))


def mixing(z: Tensor, outputs: list[Tensor]) -> tuple[Tensor]:
    """A fusion with the weights 1/4 and 3/4."""
    return (0.25 * outputs[0] + 0.75 * outputs[1] + 0 * z,)


NESTED = ADAPTERS | {"b1": Bottleneck(2.0), "b2": Bottleneck(-6.0), "fusion:b1,b2": mixing}
FUSED = 1 + 0.25 * 2 - 0.75 * 6


def nested(setup: object, x: Tensor) -> Tensor:
    step = compile_site([setup], NESTED)
    return run(step, x, Ninths(x))


def test_what_holds_a_fusion_holds_what_the_fusion_gives():
    x = torch.arange(1.0, 11.0).reshape(2, 5, 1)
    y, fuse = 2 * x + 1, Fuse("b1", "b2")
    torch.testing.assert_close(nested(fuse, x), FUSED * y)
    split = nested(Split("o1", fuse, splits=[2, 3]), x)
    torch.testing.assert_close(split, torch.cat([3 * y[:, :2] + 1, FUSED * y[:, 2:]], 1))
    average = nested(Average("b1", fuse, weights=[1, 3]), x)
    torch.testing.assert_close(average, (0.25 * 3 + 0.75 * FUSED) * y)


def test_averages_and_splits_may_be_in_each_other_at_any_depth():
    x = torch.arange(1.0, 13.0).reshape(2, 6, 1)
    y = 2 * x + 1
    inner = Average("b1", "b2")
    torch.testing.assert_close(
        nested(Average("o1", inner, weights=[1, 3]), x), 0.25 * (3 * y + 1) + 0.75 * -1.0 * y
    )
    deep = Split(
        "o1", Split(inner, Stack("b1", Split("b2", None, splits=1)), splits=2), splits=[2, 4]
    )
    expected = torch.cat([3 * y[:, :2] + 1, -1.0 * y[:, 2:4], -5 * 3 * y[:, 4:5], 3 * y[:, 5:]], 1)
    torch.testing.assert_close(nested(deep, x), expected)


# --- rows of nestings: the composition of each row, written out ---


ROWS = {
    "parallel of fusion": (Parallel("a", "b", Fuse("a", "b")), ["a", "b", Fuse("a", "b")]),
    "parallel of split": (Parallel("a", Split("b", None, splits=1)),
                          ["a", Split("b", None, splits=1)]),
    "split of parallel": (Split("a", Parallel("b", "c"), splits=1),
                          [Split("a", "b", splits=1), Split("a", "c", splits=1)]),
    "average of parallel": (Average("a", Parallel("b", "c"), weights=[1, 3]),
                            [Average("a", "b", weights=[1, 3]), Average("a", "c", weights=[1, 3])]),
    "average of parallel of none": (Average("a", Parallel("b", None), weights=[1, 3]),
                                    [Average("a", "b", weights=[1, 3]),
                                     Average("a", weights=[0.25], normalize_weights=False)]),
    "batch split of fusion": (BatchSplit(Fuse("a", "b"), "c", batch_sizes=[1, 2]),
                              [Fuse("a", "b"), "c", "c"]),
    "two parallels": (Stack(Parallel("a", "b"), Parallel("c", "d")),
                      [Stack("a", "c"), Stack("b", "d")]),
    "deep": (Stack("e", Average("a", Split("b", Parallel("c", "d"), splits=1), weights=[1, 3])),
             [Stack("e", Average("a", Split("b", x, splits=1), weights=[1, 3])) for x in "cd"]),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS)
def test_the_rows_of_a_nesting(case):
    setup, expected = ROWS[case]
    parts, rows = parts_of(setup)
    assert [parts[part] for part in rows.index] == expected


TASKS = {
    "alone": (MultiTask("a", "b"), [["a"], ["b"]]),
    "with none": (MultiTask("a", None), [["a"], [None]]),
    "of a stack": (MultiTask(Stack("c", "a"), "b"), [[Stack("c", "a")], ["b"]]),
    "of a fusion": (MultiTask(Fuse("a", "b"), "c"), [[Fuse("a", "b")], ["c"]]),
    "of a split": (MultiTask(Split("a", "b", splits=1), "c"), [[Split("a", "b", splits=1)], ["c"]]),
    "in a stack": (Stack("c", MultiTask("a", "b")), [[Stack("c", "a")], [Stack("c", "b")]]),
    "two": (Stack(MultiTask("c", "d"), MultiTask("a", "b")),
            [[Stack("c", "a")], [Stack("d", "b")]]),
    "in an average": (Average("c", MultiTask("a", "b")),
                      [[Average("c", "a")], [Average("c", "b")]]),
    "in a split": (Split("c", MultiTask("a", "b"), splits=1),
                   [[Split("c", "a", splits=1)], [Split("c", "b", splits=1)]]),
    "in a parallel": (Parallel("c", MultiTask("a", "b")), [["c", "a"], ["c", "b"]]),
    "beside a batch split": (Stack(BatchSplit("c", None, batch_sizes=1), MultiTask("a", "b")),
                             [[Stack("c", "a"), Stack("a")], [Stack("c", "b"), Stack("b")]]),
}  # fmt: skip


@pytest.mark.parametrize("case", TASKS)
def test_the_rows_of_each_task(case):
    setup, expected = TASKS[case]
    parts, rows = parts_of(setup)
    assert [[parts[part] for part in own] for own in rows.tasks.parts] == expected


def test_the_rows_of_a_batch_by_its_tasks():
    parts, rows = parts_of(Parallel("c", MultiTask("a", "b")))
    found = rows.enter(6, together=False, task_ids=(1, 0, 1))
    assert [parts[part] for part in found.index] == ["c", "c", "c", "b", "a", "b"]
    assert found.copies == 2
    # tasks that the batch lacks are still tasks
    _, rows = parts_of(MultiTask("a", "b", "c"))
    assert rows.enter(2, together=True, task_ids=(1, 1)).parts == 3
    with pytest.raises(StateError, match=r"MultiTask.*task_ids"):
        rows.layout(3)


@pytest.mark.parametrize(
    ("setup", "says"),
    [
        (Stack(MultiTask("a", "b"), MultiTask("c", "d", "e")), "as many children"),
        (Stack(MultiTask("a", "b"), MultiTask(Stack("c", "b"), "a")), "as many children"),
    ],
)
def test_one_task_id_must_do_for_all(setup, says):
    with pytest.raises(CompositionError, match=says):
        parts_of(setup)
