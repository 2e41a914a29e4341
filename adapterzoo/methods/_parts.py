"""Parts of adapters: gates and linear functions.

The gate is UniPELT's (Mao et al. 2022, arXiv:2110.07577, §3.2): how strongly an adapter acts on a
sequence, g = σ(W x + b), one number per sequence; two in prefix tuning if keys and values have
separate gates. In the paper's convention g is the mean over the real tokens of the prompt, so
padding, a cache and new tokens change nothing. In the convention of adapters it is the mean over
all tokens of the call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from adapterzoo.anatomy import Site
from adapterzoo.call import StackCall
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import StateError
from adapterzoo.tensor_parallel import LayerSplit

from ._init import constant, drawn, normal

UNSAYABLE = (
    "a gate of adapters reads all tokens of a call, padding included, but this one the real tokens "
    "of the prompt; only use_gating=True, convention='adapterhub' can be written"
)
"""Why AdapterHub's format cannot express a gate in the paper's convention."""


class Gate(nn.Module):
    """g = mean over the tokens of σ(W x + b).

    Attributes:
        weight: `[count, d_in]`.
        bias: `[count]`.
        reads_call: whether it needs the record of real tokens.
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
            convention: "adapterhub" for that of adapters; else the paper's.
            source: source of random numbers.
            device: device for the parameters.
            dtype: dtype of the parameters.
            count: number of gates per sequence.
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

    def forward(self, x: Tensor, base: BaseLayer, split: LayerSplit | None = None) -> Tensor:
        """Return the gate `[batch, 1, …, count]`, with x's dimensions `[batch, *tokens, d_in]`.

        Args:
            x: the input.
            base: the layer.
            split: the layer's split, if `x` is its input and the gate scales its output.
        """
        if not self.reads_call or x.dim() != 3:
            opened = self._opened(x, split)
            # [batch, 1, …, count]; without tokens [*batch, count]
            mean = (
                opened.mean(tuple(range(1, x.dim() - 1)), keepdim=True) if x.dim() > 2 else opened
            )
        else:
            call = base.call
            if self.is_cross:
                call = call.of_encoder() if self.reads_encoder else call.of_queries()
            mean = call.remembered(self, lambda: prompt_mean(self._opened(x, split), x, call))
        decided: Tensor = self.decided(mean)
        return decided

    def _opened(self, x: Tensor, split: LayerSplit | None) -> Tensor:
        """Return σ(W x + b) `[*batch, count]`."""
        x = x.to(self.weight.dtype)
        if split is None:
            return torch.sigmoid(linear(x, self.weight, self.bias))
        return split.spread(torch.sigmoid(split.summed(linear(x, self.weight)) + self.bias))


def prompt_mean(values: Tensor, x: Tensor, call: StackCall) -> Tensor:
    """Return the mean over the real tokens of the prompt, `[batch, 1, width]`.

    Args:
        values: `[batch, tokens, width]`.
        x: the input of the layer, `[batch, tokens, d_in]`.
        call: call of the stack.

    Raises:
        StateError: the prompt was in an earlier call, outside `generate`.
    """
    if x.shape[1] and not call.has_prompt(x):
        raise StateError(
            "use_gating=True: a gate is the mean over the prompt, but that is in past_key_values "
            "here. Write model.generate(…), or pass the whole sequence without past_key_values."
        )
    real = call.prompt(x).unsqueeze(-1).to(values.dtype)  # [batch, tokens, 1]
    return (values * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)


def affine(
    shape: tuple[int, int],
    fill: Callable[[Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Affine:
    """Return x Wᵀ + b with W `[d_out, d_in]` of this shape, filled on the CPU, and b = 0."""
    bias = drawn(shape[:1], constant(0.0), device, dtype)
    return Affine(drawn(shape, fill, device, dtype), bias)


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
