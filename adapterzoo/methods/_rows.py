"""Values for each row of a mixed batch: its adapter's, or those without an adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch.nn.utils.rnn import pad_sequence

from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.kernels.grouped import Groups, grouped_shrink

from ._gate import Gate


def taken(tensors: Sequence[Tensor], groups: Groups) -> Tensor:
    """Return the tensor of each row's adapter, `[rows, …]`; zeros for rows without an adapter.

    Rows without an adapter, which may hold inf or NaN, send no gradient to any adapter.

    Args:
        tensors: one for each adapter, of one shape; or vectors, padded with zeros to the longest.
        groups: which adapter each row takes.
    """
    alike = len({t.shape for t in tensors}) == 1
    # [n, …]
    stack = torch.stack([*tensors]) if alike else pad_sequence([*tensors], batch_first=True)
    rows = stack.index_select(0, groups.numbers("of_all", stack.device))
    return rows.index_fill_(0, groups.numbers("base", rows.device), 0.0) if groups.base else rows


def features(vectors: Sequence[Tensor], groups: Groups, dim: int) -> Tensor:
    """Return `taken` for vectors, as `[rows, 1, …, width]` with `dim` dimensions."""
    rows = taken(vectors, groups)  # [rows, width]
    return rows.view(len(rows), *(1 for _ in range(dim - 2)), rows.shape[1])  # [rows, 1, …, width]


def restored(out: Tensor, plain: Tensor, groups: Groups) -> Tensor:
    """Return `out` with the rows of `plain` where no adapter acts; both `[rows, …]`."""
    if not groups.base:
        return out
    places = groups.numbers("base", out.device)
    return out.index_copy(0, places, plain.index_select(0, places).to(out.dtype))


def normed(norms: Sequence[nn.LayerNorm], groups: Groups, x: Tensor) -> Tensor:
    """Normalize each row by its adapter's norm. `x` `[rows, *tokens, d_model]`, same shape."""
    one = norms[0]
    wide = x.to(compute_dtype(x.dtype))
    core = layer_norm(wide, one.normalized_shape, eps=one.eps)
    weight = features([norm.weight for norm in norms], groups, x.dim())
    bias = features([norm.bias for norm in norms], groups, x.dim())
    return torch.addcmul(bias.to(core.dtype), core, weight.to(core.dtype)).to(x.dtype)


def gated(gates: Sequence[Gate], groups: Groups, x: Tensor, base: BaseLayer) -> Tensor:
    """Return each row's gate; `x` `[rows, *tokens, d_in]` → `[rows, 1, …, 1]`.

    It is 1/2 for rows without an adapter. Each gate's `decided` gets the results of its rows.
    """

    def score() -> Tensor:
        weights = torch.stack([gate.weight for gate in gates])  # [n, 1, d_in]
        products = grouped_shrink(x, weights, groups)  # [rows, *tokens, 1]
        return products + features([g.bias for g in gates], groups, x.dim()).to(products.dtype)

    whole = gates[0].mean(score, x, base, tuple(gates))
    parts = whole.index_select(0, groups.numbers("order", x.device)).split(groups.lengths)
    for i, part in zip(groups.adapters, parts, strict=True):
        gates[i].decided(part)
    return whole
