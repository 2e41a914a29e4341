"""Operands that are hostile to kernels, and the comparison with float64."""

import mmap

import torch

from adapterzoo.kernels.low_rank import low_rank_reference

LAYOUTS = ("columns", "strided", "rows of a wider tensor", "expanded", "a batch of sequences")


def drawn(*shape, dtype):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def edged(rows, width, dtype):
    """A matrix with NaN all around: what is read beyond its edges spoils the result."""
    whole = torch.full((rows + 300, width + 300), float("nan"), dtype=dtype)
    inner = whole[150 : 150 + rows, 150 : 150 + width]
    return inner.copy_(drawn(rows, width, dtype=dtype))


def near(name, got, truth, tolerance, dtype):
    """Whole tensors, to a part of the largest element; NaN anywhere fails."""
    if got.dtype is not dtype or got.shape != truth.shape:
        raise ValueError(f"{name}: {got.dtype} {list(got.shape)}, not {dtype} {list(truth.shape)}")
    if truth.numel():
        size = max(truth.abs().max().item(), 1e-30)
        error = (got.double() - truth).abs().max().item() / size
        if not error <= tolerance:
            raise ValueError(f"{name}: wrong by {error:.1e}")


def arranged(layout, rows, width, dtype=torch.float32):
    """`[rows, width]`, or for a batch of sequences `[2, rows, width]`, in one of LAYOUTS."""
    whole = drawn(2 * rows, 2 * width, dtype=dtype)
    return {
        "columns": drawn(width, rows, dtype=dtype).T,
        "strided": whole[::2, ::2],
        "rows of a wider tensor": whole[:rows, width:],
        "expanded": drawn(1, 1, dtype=dtype).expand(rows, width),
        "a batch of sequences": drawn(width, rows, 2, dtype=dtype).permute(2, 1, 0),
    }[layout]


def both_gradients(out, values):
    """Those of the squares of `out`, and those of the squares of these."""
    first = torch.autograd.grad(
        out.square().sum(), values, create_graph=True, materialize_grads=True
    )
    total = sum(g.square().sum() for g in first)
    return *first, *torch.autograd.grad(total, values, materialize_grads=True)


def far(rows, width):
    """Rows 2²⁸ elements apart: row · stride passes 2³¹; only what is touched takes memory."""
    apart = 1 << 28
    memory = mmap.mmap(-1, 2 * apart * rows, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    whole = torch.frombuffer(memory, dtype=torch.float16)
    return whole.as_strided((rows, width), (apart, 1)).copy_(drawn(rows, width, dtype=whole.dtype))


def grouped_low_rank_reference(y, x, a, b, scaling, groups):
    """`low_rank_reference` of each row with its adapter, in the dtype of `y`."""
    rows = [
        y[row] if i == -1 else low_rank_reference(y[row], x[row], a[i], b[i], scaling[i])
        for row, i in enumerate(groups.index)
    ]
    return torch.stack(rows) if rows else y.clone()
