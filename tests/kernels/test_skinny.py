"""Products of few columns: values of float64 in all forms and layouts, and their gradients."""

import pytest
import torch
from measured import Operations, near
from rounded import rounding

from adapterzoo.kernels._skinny import _FEW_COLUMNS, _MANY_COLUMNS, outer, project

RANKS = (1, 3, _FEW_COLUMNS - 1, _FEW_COLUMNS, _MANY_COLUMNS - 1, _MANY_COLUMNS)
LAYOUTS = {
    "rows": lambda v: v,
    "columns": lambda v: v.T.contiguous().T,
    # as a part of a joined product
    "part": lambda v: torch.cat([v, v], 1)[:, v.shape[1] :],
}


def drawn(rank, rows=37, width=53):
    torch.manual_seed(rank)
    return [torch.randn(n, m, dtype=torch.float64) for n, m in ((rows, width), (rank, width))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rank", RANKS)
def test_values_are_those_of_float64(rank, layout):
    x, a = drawn(rank)
    t = x @ a.T
    for own in LAYOUTS.values():
        found = project(own(x).float(), LAYOUTS[layout](a).float())
        # the inputs are rounded, too
        near(found, t, rounding(x.shape[1], torch.float32), x.abs() @ a.abs().T)
        of_rows = outer(own(x).float(), LAYOUTS[layout](t).float())
        near(of_rows, x.T @ t, rounding(len(x), torch.float32), x.abs().T @ t.abs())


def test_a_term_that_is_left_out_is_seen():
    x, a = drawn(3)
    short = project(x[:, 1:].float(), a[:, 1:].float())
    with pytest.raises(AssertionError):
        near(short, x @ a.T, rounding(x.shape[1], torch.float32), x.abs() @ a.abs().T)


@pytest.mark.parametrize("rank", [3, _FEW_COLUMNS])
def test_gradients_and_their_gradients(rank):
    x, a = (v.requires_grad_() for v in drawn(rank, 5, 4))
    t = torch.randn(5, rank, dtype=torch.float64, requires_grad=True)
    for run, given in ((project, (x, a)), (outer, (x, t))):
        assert torch.autograd.gradcheck(run, given, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("rank", RANKS)
def test_nothing_large_is_copied(rank):
    x, a = (v.float() for v in drawn(rank, 300, 200))
    transposed = a.T.contiguous().T
    with Operations() as seen:
        t = project(x, transposed)
        found = outer(x, t)
    assert found.is_contiguous()
    assert seen.names.count("mm") == 2
    assert seen.largest <= max(rank * 300, rank * 200)


def test_no_rows():
    x, a = (v[:0] if v.shape[0] == 37 else v for v in drawn(3))
    assert project(x, a).shape == (0, 3)
    assert torch.equal(outer(x, x.new_empty(0, 3)), x.new_zeros(53, 3))
