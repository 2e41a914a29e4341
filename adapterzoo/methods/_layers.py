"""Small layers that adapters of several families have, and values for each row of a mixed batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence

from adapterzoo.anatomy import Site
from adapterzoo.call import StackCall
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import StateError
from adapterzoo.kernels.grouped import Groups, grouped_shrink

from ._init import constant, drawn, normal

UNSAYABLE = (
    "a gate of adapters reads all tokens of a call, padding included, and this one the real tokens "
    "of the prompt; only use_gating=True, convention='adapterhub' can be written"
)
"""Why AdapterHub's format cannot express a gate in the paper's convention."""


class Gate(nn.Module):
    """The gate of UniPELT, g = mean over the tokens of σ(W x + b): how strongly an adapter acts.

    Mao et al. 2022, arXiv:2110.07577, §3.2: one number for a sequence; two in prefix tuning if keys
    and values have separate gates. In the paper's convention g is the mean over the real tokens of
    the prompt, so that padding, a cache and new tokens change nothing. In the convention of
    adapters it is the mean over all tokens of the call.

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
