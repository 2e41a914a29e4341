"""Compositions: what is one, what it means at a site, and what is refused with which cure."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from adapterzoo.composition import Stack, compile_site, evaluate, parse
from adapterzoo.contracts import Adapter, Base
from adapterzoo.errors import AdapterZooError, CompositionError


class Affine(Base):
    """y = 2 x + 1."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * x + 1

    plain = __call__

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

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return self.factor * base(x) + self.summand


class Input(Output):
    """Multiplies what the layer gets, and adds."""

    acts_on: ClassVar[str] = "input"

    def forward(self, x: Tensor, base: Base) -> Tensor:
        return base(self.factor * x + self.summand)


class Delta(Output):
    """Adds a multiple of the input, and asks the untouched layer for nothing but its weight."""

    def forward(self, x: Tensor, base: Base) -> Tensor:
        assert torch.equal(base.weight, torch.tensor([[2.0]]))
        assert torch.equal(base.plain(x), 2 * x + 1)
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
def test_what_a_user_may_pass(setup: object, expected: Stack | None) -> None:
    assert parse(setup) == expected


@pytest.mark.parametrize(
    ("make", "wrong", "cure"),
    [
        (lambda: Stack(), "Stack()", "Write Stack('a', 'b')"),
        (lambda: Stack("a", 3), "Stack('a', 3)", "Write Stack('a', 'b')"),
        (lambda: Stack("a", None), "Stack('a', None)", "Write Stack('a', 'b')"),
        (lambda: Stack(["a", "b"]), "Stack(['a', 'b'],)", "Write Stack('a', 'b')"),
        (lambda: Stack(Stack("a")), "Stack(Stack('a'),)", "Write Stack('a', 'b')"),
        (lambda: Stack("a", "b", "a"), "'a', 'b', 'a'", "Write Stack('a', 'b')."),
        (lambda: parse(["b", "b"]), "'b', 'b'", "Write Stack('b')."),
        (lambda: parse(["a", 1]), "'a', 1", "Write Stack('a', 'b')"),
        (lambda: parse(3), "active adapters 3", "got a int. Write 'a' or Stack('a', 'b')"),
        (lambda: parse({"a": 1}), "{'a': 1}", "got a dict. Write 'a' or Stack('a', 'b')"),
        (lambda: parse({"a"}), "{'a'}", "got a set. Write 'a' or Stack('a', 'b')"),
    ],
)
def test_what_is_none_is_refused_with_value_and_cure(make, wrong: str, cure: str) -> None:
    with pytest.raises(CompositionError) as caught:
        make()
    message = str(caught.value)
    assert wrong.replace(",)", "") in message.replace(",)", "")
    assert cure in message
    assert isinstance(caught.value, AdapterZooError)
    assert isinstance(caught.value, ValueError)


def test_a_stack_is_its_names_in_order() -> None:
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


def test_a_stack_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Stack("a").children = ("b",)  # type: ignore[misc]


# --- what it means ---


def test_one_adapter_is_a_function_around_the_layer() -> None:
    assert torch.equal(at_site("o1"), 3 * (2 * X + 1) + 1)
    assert torch.equal(at_site("i1"), 2 * (7 * X + 1) + 1)


def test_the_first_adapter_of_a_stack_acts_first() -> None:
    y = 2 * X + 1
    assert torch.equal(at_site("o1", "o2"), 5 * (3 * y + 1) - 2)
    assert torch.equal(at_site("o2", "o1"), 3 * (5 * y - 2) + 1)
    # on the input too: what comes out of the first goes into the second
    assert torch.equal(at_site("i1", "i2"), 2 * (11 * (7 * X + 1) - 3) + 1)
    assert torch.equal(at_site("i2", "i1"), 2 * (7 * (11 * X - 3) + 1) + 1)


@pytest.mark.parametrize("names", [("i1", "o1"), ("o1", "i1")])
def test_input_and_output_do_not_depend_on_their_order(names: tuple[str, ...]) -> None:
    assert torch.equal(at_site(*names), 3 * (2 * (7 * X + 1) + 1) + 1)


def test_four_at_once() -> None:
    inner = 2 * (11 * (7 * X + 1) - 3) + 1
    assert torch.equal(at_site("i1", "o1", "i2", "o2"), 5 * (3 * inner + 1) - 2)


def test_deltas_add_in_any_order() -> None:
    expected = 2 * X + 1 + 0.5 * X + 0.25 * X
    torch.testing.assert_close(at_site("d1", "d2"), expected)
    torch.testing.assert_close(at_site("d2", "d1"), expected)


def test_a_site_keeps_what_is_present_there() -> None:
    assert torch.equal(at_site("o1", "o2", present=["o2"]), at_site("o2"))
    assert torch.equal(at_site("i1", "i2", present=["i2", "o1"]), at_site("i2"))
    assert compile_site(Stack("o1"), ["o2"], ADAPTERS.__getitem__) is None
    assert compile_site(Stack("o1"), [], ADAPTERS.__getitem__) is None


def test_the_innermost_of_a_step_is_first() -> None:
    step = compile_site(Stack("i1", "o1", "i2", "o2"), list(ADAPTERS), ADAPTERS.__getitem__)
    assert step == ("o1", "o2", "i2", "i1")
