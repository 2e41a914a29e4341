"""Parts of adapters: gates, linear functions, and the values of each row of a mixed batch.

The gate is UniPELT's (Mao et al. 2022, arXiv:2110.07577, §3.2): how strongly an adapter acts on a
sequence, g = σ(W x + b), one number for a sequence; two in prefix tuning if keys and values have
separate gates. In the paper's convention g is the mean over the real tokens of the prompt, so that
padding, a cache and new tokens change nothing. In the convention of adapters it is the mean over
all tokens of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from torch.nn.utils.rnn import pad_sequence

from adapterzoo.anatomy import Site
from adapterzoo.call import StackCall
from adapterzoo.contracts import BaseLayer, compute_dtype
from adapterzoo.errors import StateError
from adapterzoo.kernels.grouped import Groups, grouped_expand, grouped_shrink, stacked

from ._init import constant, drawn, normal

UNSAYABLE = (
    "a gate of adapters reads all tokens of a call, padding included, and this one the real tokens "
    "of the prompt; only use_gating=True, convention='adapterhub' can be written"
)
"""Why AdapterHub's format cannot express a gate in the paper's convention."""


class Gate(nn.Module):
    """g = mean over the tokens of σ(W x + b).

    Attributes:
        weight: `[count, d_in]`.
        bias: `[count]`.
        reads_call: whether it needs to know which tokens are real.
        reads_sequence: whether it is a mean over tokens.
        is_cross: whether its site is in cross-attention.
        reads_encoder: whether its input is the encoder's output, as at the keys of cross-attention.
        decided: an identity that each result passes through, for `OutputRecorder`.
    """

    def __init__(
        self,
        site: Site,
        convention: str,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
        count: int = 1,
    ) -> None:
        """Make the parameters: W normal with deviation 0.02, b zero.

        Args:
            site: determines the width and the tokens to read.
            convention: "adapterhub" for that of adapters; others are the paper's.
            source: of random numbers.
            device: of the parameters.
            dtype: of the parameters.
            count: how many numbers a sequence gets.
        """
        super().__init__()
        self.weight = drawn((count, site.d_in), normal(0.02, source), device, dtype)
        self.bias = drawn((count,), constant(0.0), device, dtype)
        # an expert's tokens form no sequence, so each has its own gate
        self.reads_sequence = not site.is_routed
        self.reads_call = convention != "adapterhub" and self.reads_sequence
        self.is_cross = site.cross
        self.reads_encoder = site.cross and site.role in ("key", "value")
        self.decided = nn.Identity()

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the gate `[batch, 1, …, count]`, with x's dimensions `[batch, *tokens, d_in]`."""
        score = partial(linear, x.to(self.weight.dtype), self.weight, self.bias)
        mean: Tensor = self.decided(self.mean(score, x, base, self))
        return mean

    def mean(
        self, score: Callable[[], Tensor], x: Tensor, base: BaseLayer, owner: object
    ) -> Tensor:
        """Return the mean of σ over the tokens, `[batch, 1, …, count]`.

        Args:
            score: returns W x + b `[batch, *tokens, count]`.
            x: `[batch, *tokens, d_in]`.
            base: the layer.
            owner: identifies the mean in later steps of `generate`.
        """
        if not self.reads_call or x.dim() != 3:
            opened = torch.sigmoid(score())
            if x.dim() < 3:
                return opened  # [*batch, count]
            # [batch, 1, …, count]
            return opened.mean(tuple(range(1, x.dim() - 1)), keepdim=True)
        call = base.call
        if self.is_cross:
            call = call.of_encoder() if self.reads_encoder else call.of_queries()
        return call.remembered(owner, lambda: prompt_mean(torch.sigmoid(score()), x, call))


def prompt_mean(values: Tensor, x: Tensor, call: StackCall) -> Tensor:
    """Return the mean over the real tokens of the prompt, `[batch, 1, width]`.

    Args:
        values: `[batch, tokens, width]`.
        x: the input of the layer, `[batch, tokens, d_in]`.
        call: of the stack.

    Raises:
        StateError: the prompt was in an earlier call, outside of `generate`.
    """
    if x.shape[1] and not call.has_prompt(x):
        raise StateError(
            "use_gating=True: a gate is the mean over the prompt, which is in past_key_values "
            "here. Write model.generate(…), or pass the whole sequence without past_key_values."
        )
    real = call.prompt(x).unsqueeze(-1).to(values.dtype)  # [batch, tokens, 1]
    return (values * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)


# --- values for each row of a mixed batch: its adapter's, or those without an adapter ---


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


# --- linear functions: one matrix, or a product of several ---


class MatrixProduct(NamedTuple):
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


def by_rows(products: Sequence[MatrixProduct], groups: Groups, x: Tensor) -> Tensor:
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
    downs: Sequence[MatrixProduct],
    ups: Sequence[MatrixProduct],
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


class Affine(nn.Module):
    """x Wᵀ + b; not an `nn.Linear`, so that code that walks a model's layers skips it."""

    bias: nn.Parameter

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        # None only in fusions
        self.register_parameter("bias", bias)

    @property
    def in_features(self) -> int:
        """Features of the input."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Features of the output."""
        return self.weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """`x` `[*batch, d_in]` → `[*batch, d_out]`."""
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Return the widths."""
        return f"d_in={self.in_features}, d_out={self.out_features}"
