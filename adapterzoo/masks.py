"""Facts in masks and positions about the tokens of a call: padding, and packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .errors import StateError

# a mask adds less to the score of a hidden token: -10,000 in old models, else almost infinite
_HIDDEN = -5_000.0


def members(mask: Any) -> tuple[Any, ...]:
    """Return the masks for layers of different kinds, or the only one."""
    masks = tuple(mask.values()) if isinstance(mask, Mapping) else (mask,)
    return tuple(m for m in masks if m is not None)


def attended(mask: Any, rows: int, tokens: int, cached: int) -> Tensor | None:
    """Return the tokens some query attends to, `[rows, tokens]` bool; None if unknown.

    Args:
        mask: `[rows, keys]`, or `[rows or 1, …, keys]`: bool, or added to scores.
        rows: number of rows of the batch.
        tokens: number of tokens of the call.
        cached: number of tokens of earlier calls.
    """
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3, 4):
        return None
    if mask.shape[0] not in (1, rows) or (mask.dim() > 2 and mask.shape[-2] not in (1, tokens)):
        return None
    keys = mask.shape[-1]
    if keys < tokens or (mask.dim() == 2 and keys != cached + tokens):
        return None
    seen = _seen(mask)
    start = min(cached, keys - tokens)
    if mask.dim() > 2:
        seen = seen[..., start : start + tokens].flatten(1, -2).any(1)  # [rows or 1, tokens]
    return seen.expand(rows, -1)[:, -tokens:]  # [rows, tokens]


def first_attended(mask: Tensor) -> Tensor:
    """Return the first key that each query attends to, `[rows or 1, queries or 1]`; 0 if none.

    Args:
        mask: `[rows or 1, heads or 1, queries or 1, keys]`: bool, or added to scores.
    """
    return _seen(mask).any(1).int().argmax(-1)


def _seen(mask: Tensor) -> Tensor:
    return mask > _HIDDEN if mask.is_floating_point() else mask != 0


def unreadable(mask: Any, rows: int, tokens: int) -> str:
    """Return the message for a mask that does not show which tokens are real."""
    shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
    return (
        f"attention_mask={shown}: an active adapter needs to know which of the "
        f"{[rows, tokens]} tokens are real. Pass a mask [batch, tokens] of 0 and 1."
    )


def bounds_given(given: Mapping[str, Any]) -> Tensor | None:
    """Return where packed sequences begin and end, `[sequences + 1]`, if an argument says so.

    Args:
        given: arguments of a model or layer, by name.
    """
    names = ("cu_seqlens", "cu_seq_lens_q")
    bounds = next((b for name in names if (b := given.get(name)) is not None), None)
    return None if bounds is None else cast("Tensor", bounds.long())


def bounds_in(given: Mapping[str, Any]) -> Tensor | None:
    """Return where the packed sequences of a call begin and end in its concatenated rows.

    As transformers reads them: a position that does not continue the previous one by one starts a
    sequence, unless there is a mask.

    Args:
        given: arguments of the call, by name.

    Returns:
        `[sequences + 1]`; None if each row is one sequence.

    Raises:
        StateError: the positions cannot be read.
    """
    if (bounds := bounds_given(given)) is not None:
        return bounds
    positions, ids = given.get("position_ids"), given.get("input_ids")
    if given.get("attention_mask") is not None or not isinstance(positions, Tensor):
        return None
    if positions.dim() != 2 or not positions.numel():
        return None
    t = given.get("inputs_embeds") if ids is None else ids
    if isinstance(t, Tensor):
        positions = positions.expand(t.shape[0], -1)  # [rows, tokens]
    if not has_values(positions):
        raise StateError(
            f"position_ids={list(positions.shape)} may pack several sequences into a row, which "
            f"compiled code cannot see. Pass an attention_mask [rows, tokens]."
        )
    starts = positions.diff(prepend=positions[:, :1]) != 1  # [rows, tokens]
    if int(starts.sum()) == positions.shape[0]:
        return None
    places = starts.flatten().nonzero().flatten()
    return torch.nn.functional.pad(places, (0, 1), value=starts.numel())  # [sequences + 1]


def packed(why: str) -> str:
    """Return the message for a row of several sequences.

    Args:
        why: what an adapter does once per row.
    """
    return (
        f"a row of this call holds several sequences (position_ids or cu_seq_lens_q), and {why} "
        f"once in each row. Pass one sequence in each row, with an attention_mask."
    )


def has_values(t: Tensor) -> bool:
    """Return whether a tensor's values can be read: not during tracing or capture."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or type(t) is not Tensor:
        return False
    if t.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(t):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())
