"""Where a sequence of tokens is among the token ids of a call, such as the invocation of aLoRA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import StateError, listing
from .masks import has_values

# the start of the sequence in a row that does not have it
_NEVER = 1 << 62
# the id of padding, and of tokens that adapters add
NO_TOKEN = -1


def found_in_all(starts: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """Return where a sequence begins in each row, if it does so in all.

    Args:
        starts: `[rows, 1]`.
        sequence: of tokens.

    Raises:
        StateError: a row does not have it.
    """
    absent = (starts == _NEVER).flatten()  # [rows]
    if not has_values(absent) or absent.any():
        where = listing(absent.nonzero().flatten().tolist()) if has_values(absent) else "any"
        raise StateError(
            f"alora_invocation_tokens={list(sequence)}: rows {where} of this call do not have "
            f"them, and tokens in past_key_values are unknown. Write model.generate(…), or pass "
            f"whole sequences without past_key_values."
        )
    return starts


def last_start(ids: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """Return where a sequence of tokens begins for the last time in each row, `[rows, 1]`.

    Args:
        ids: `[rows, tokens]`.
        sequence: at least one token.
    """
    count = ids.shape[1] - len(sequence) + 1
    if count <= 0:
        return ids.new_full((ids.shape[0], 1), _NEVER, dtype=torch.long)
    # token by token: a tensor of them would be copied to the device in each call
    matches = ids[:, :count] == sequence[0]  # [rows, count]
    for place, token in enumerate(sequence[1:], 1):
        matches = matches & (ids[:, place : place + count] == token)
    steps = torch.arange(count, device=ids.device)
    last = torch.where(matches, steps, NO_TOKEN).amax(1, keepdim=True)  # [rows, 1]
    return torch.where(last < 0, _NEVER, last)


def grid(value: object) -> Tensor | None:
    """Return a value that is a tensor `[rows, tokens]`; None for any other."""
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


def without_padding(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the ids `[rows, tokens]` with `NO_TOKEN` where a mask of their shape is 0."""
    if mask is None or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask.to(ids.device) == 0, NO_TOKEN)


def padded(ids: Tensor, count: int) -> Tensor:
    """Return the ids `[rows, tokens]` after a number of unknown tokens."""
    return pad(ids, (count, 0), value=NO_TOKEN)


def no_ids(sequence: tuple[int, ...]) -> str:
    """Return the message for a call without token ids.

    Args:
        sequence: of tokens that is looked for; empty: unknown.
    """
    shown = f"alora_invocation_tokens={list(sequence)}" if sequence else "alora_invocation_tokens"
    return (
        f"{shown}: the model got inputs_embeds, in which tokens cannot be found, and an active "
        f"adapter acts only after these. Pass input_ids, or activate another adapter."
    )
