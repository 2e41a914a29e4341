"""Linear functions of bottlenecks: one matrix, or a product of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo.kernels.grouped import Groups, grouped_expand, grouped_shrink, stacked
from adapterzoo.methods._layers import features


class Product(NamedTuple):
    """x Mᵀ + b with M a product of matrices, some of which are repeated along a block diagonal.

    Attributes:
        matrices: `[out, in]` each; the first is applied first.
        blocks: how many equal parts of the features each is applied to; 1: to all features.
        bias: `[d_out]`, or None.
    """

    matrices: tuple[Tensor, ...]
    blocks: tuple[int, ...]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` `[*batch, d_in]`, in the dtype of the matrices → `[*batch, d_out]`."""
        if len(self.matrices) == 1:
            return linear(x, self.matrices[0], self.bias)
        for matrix, blocks in zip(self.matrices, self.blocks, strict=True):
            if blocks == 1:
                x = linear(x, matrix)
            else:
                x = linear(x.unflatten(-1, (blocks, -1)), matrix).flatten(-2)  # [*batch, out]
        return x if self.bias is None else x + self.bias


def by_rows(products: Sequence[Product], groups: Groups, x: Tensor) -> Tensor:
    """Return each row by the product of its adapter.

    Args:
        products: of equal shapes.
        groups: which of them each row takes.
        x: `[rows, *tokens, d_in]`.

    Returns:
        `[rows, *tokens, d_out]`, in the dtype of the matrices.
    """
    dim = x.dim()
    for i, blocks in enumerate(products[0].blocks):
        stack = torch.stack([product.matrices[i] for product in products])  # [n, out, in]
        if blocks == 1:
            x = grouped_shrink(x, stack, groups)
        else:
            parts = x.unflatten(-1, (blocks, -1))  # [rows, *tokens, blocks, in]
            x = grouped_shrink(parts, stack, groups).flatten(-2)  # [rows, *tokens, blocks · out]
    biases = [product.bias for product in products if product.bias is not None]
    return x + features(biases, groups, dim).to(x.dtype) if biases else x


def dense_by_rows(
    downs: Sequence[Product],
    ups: Sequence[Product],
    act: Callable[[Tensor], Tensor],
    groups: Groups,
    x: Tensor,
) -> Tensor:
    """Return W_up φ(W_down x + b_down) + b_up of each row's adapter, with one matrix for each W.

    Args:
        downs: W_down and b_down of each adapter; their widths may differ.
        ups: W_up and b_up.
        act: φ.
        groups: which adapter each row takes.
        x: `[rows, *tokens, d_model]`; the result is of the same shape.
    """
    dim, ones = x.dim(), [1.0] * len(downs)
    stack = stacked([down.matrices[0] for down in downs], [up.matrices[0] for up in ups], ones)
    inner = grouped_shrink(x, stack.a, groups)  # [rows, *tokens, width]
    down_bias, up_bias = (
        features([cast("Tensor", one.bias) for one in each], groups, dim).to(inner.dtype)
        for each in (downs, ups)
    )
    bias = up_bias.expand(x.shape)  # [rows, *tokens, d_model]
    return grouped_expand(bias, act(inner + down_bias), stack.b, ones, groups)
