"""Few rows without gradients on a GPU: plain operations, because the host's calls take the time."""

import sys
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from adapterzoo.kernels import ops
from adapterzoo.kernels.compose import compose
from adapterzoo.kernels.dora import row_norm
from adapterzoo.kernels.low_rank import low_rank, shrink

WIDTH, RANK = 256, 8


class Called(TorchDispatchMode):
    """Names of the operations, except views; an operator of ours hides those inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        own = name.startswith("adapterzoo")
        short = name.partition("::")[2].partition(".")[0]
        skipped = ("t", "view", "_unsafe_view", "detach", "alias", "device")
        if own or not (func.is_view or short in skipped):
            self.names.append(name.partition(".")[0].removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def called(run):
    with torch.no_grad(), Called() as found:
        run()
    return found.names


@pytest.fixture
def gpu():
    """Tensors of a GPU without values."""
    with FakeTensorMode():
        yield


def operands(rows, dtype=torch.float16):
    def made(*shape, of=dtype):
        return torch.empty(*shape, dtype=of, device="cuda")

    x, y = made(rows, 1, WIDTH), made(rows, 1, WIDTH)
    return x, y, made(RANK, WIDTH), made(WIDTH, RANK), made(WIDTH, of=torch.float32)


ROWS = 4


@pytest.mark.usefixtures("gpu")
def test_the_kernels_take_any_number_of_rows():
    x, y, a, b, gain = operands(ROWS)
    names = called(lambda: low_rank(y, x, a, b, 0.5))
    assert names == ["adapterzoo::low_rank_shrink", "adapterzoo::low_rank_expand"]
    assert called(lambda: compose(y, gain, None)) == ["adapterzoo::compose"]
    w = torch.empty(4096, 4096, device="cuda", dtype=torch.float16)
    a, b = (torch.empty(shape, device="cuda", dtype=w.dtype) for shape in ((8, 4096), (4096, 8)))
    assert called(lambda: row_norm(w, a, b, 0.5)) == ["adapterzoo::row_norm"]


@pytest.mark.usefixtures("gpu")
def test_dropout_draws_the_same_with_and_without_gradients():
    """A reentrant checkpoint runs first without gradients, then with them."""
    x, y, a, b, _ = operands(ROWS)
    # Triton keeps a seed, torch operations would draw a mask; a GPU that is not there draws nothing
    seed = torch.empty(1, dtype=torch.int64, device="cuda")
    with (
        mock.patch.object(ops, "takes_triton", return_value=True),
        mock.patch("adapterzoo.kernels.low_rank.dropout_seed", return_value=seed),
        mock.patch("adapterzoo.kernels.low_rank.dropout_bits", side_effect=AssertionError),
    ):
        names = called(lambda: shrink(x, a, 0.1, True))
        assert names == ["adapterzoo::low_rank_shrink"]
        assert "adapterzoo::low_rank_shrink" in called(lambda: low_rank(y, x, a, b, 0.5, 0.1, True))


def python_calls(run):
    """How many functions of Python a call enters."""
    count = 0

    def seen(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_the_plain_way_enters_fewer_functions():
    """On this CPU: what the mode `triton` would register, without its kernels."""
    x, y = torch.randn(ROWS, 1, WIDTH), torch.randn(ROWS, 1, WIDTH)
    a, b = torch.randn(RANK, WIDTH), torch.randn(WIDTH, RANK)
    with torch.no_grad():
        plain = python_calls(lambda: low_rank(y, x, a, b, 0.5))
        with (
            mock.patch.object(ops, "asks_triton", return_value=True),
            mock.patch.object(ops, "_mode", "triton"),
            mock.patch.object(ops, "takes_triton", return_value=False),
        ):
            registered = python_calls(lambda: low_rank(y, x, a, b, 0.5))
    assert plain < registered
