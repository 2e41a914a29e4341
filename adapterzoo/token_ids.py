"""The token ids of a running call: which of its tokens follow a given sequence of tokens.

Adapters that act only from such an invocation on, as aLoRA does, read it here, once in each call.
`generate` passes on the whole prompt, so that the invocation may be in the prompt's first part,
whose keys and values are in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .caches import cached_tokens
from .errors import StateError, listing
from .masks import has_values

# arguments of a model or layer with the starts and ends of packed sequences
BOUNDS = ("cu_seqlens", "cu_seq_lens_q")
# the start of the sequence in a row that does not have it
_NEVER = 1 << 62
# the id of padding, and of tokens that adapters add
NO_TOKEN = -1


class PromptIds:
    """The prompt of a running `generate`.

    Attributes:
        ids: `[sequences, tokens]`, those in the cache included; None: `generate` got no ids.
        mask: its `attention_mask`, `[sequences, tokens]`; None if there is none.
        starts: sequence of tokens → where it begins in each row of the calls, `[rows, 1]`.
        read: number of tokens of the first call, with those in the cache before; None before it.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Take the prompt.

        Args:
            given: arguments of `generate`, by name.
        """
        self.ids: Tensor | None = grid(given.get("input_ids"))
        self.mask: Tensor | None = grid(given.get("attention_mask"))
        self.starts: dict[tuple[int, ...], Tensor] = {}
        self.read: int | None = None


class CallIds:
    """The token ids of one call of a stack of blocks.

    Attributes:
        ids: `[rows, tokens]`; None if the stack got embeddings.
    """

    def __init__(
        self,
        ids: Tensor | None,
        given: Mapping[str, Any],
        cached: int,
        prompt: PromptIds | None,
    ) -> None:
        """Record the call.

        Args:
            ids: of the call, `[rows, tokens]`.
            given: its arguments, by name.
            cached: number of tokens in the cache before the call.
            prompt: of the running `generate`, None outside.
        """
        self.ids = ids
        self._given = given
        self._cached = cached
        self._prompt = prompt
        self._found: dict[tuple[int, ...], Tensor] = {}

    def after(self, sequence: tuple[int, ...], rows: int, tokens: int) -> Tensor:
        """Return which tokens are at or after the last occurrence of a sequence.

        Computed once in each call. In `generate` only the prompt is searched.

        Args:
            sequence: the sequence of tokens.
            rows: of a call without ids.
            tokens: the same.

        Returns:
            `[rows, tokens]` bool, false in rows without the sequence.

        Raises:
            StateError: the ids are unknown, or do not tell.
        """
        if sequence not in self._found:
            if self.ids is not None:
                rows, tokens = self.ids.shape
            if self._prompt is None:
                first, starts = self._cached, self._starts(sequence)
            else:
                first = self._first(self._prompt, tokens)
                if sequence not in self._prompt.starts:
                    whole = self._whole(self._prompt, rows, tokens)
                    self._prompt.starts[sequence] = last_start(whole, sequence)
                starts = self._prompt.starts[sequence]
            steps = torch.arange(tokens, device=starts.device) + first  # [tokens]
            self._found[sequence] = steps >= starts  # [rows, tokens]
        return self._found[sequence]

    def _starts(self, sequence: tuple[int, ...]) -> Tensor:
        """Return where the sequence begins in each row of a call outside of `generate`."""
        if self.ids is None:
            raise StateError(_no_ids(sequence))
        self._refuse_packed()
        starts = last_start(_without_padding(self.ids, self._mask(self.ids)), sequence)
        if not self._cached and cached_tokens(self._given) is not None:
            return starts
        # the first tokens of the sequence, which may have the invocation, are unknown
        absent = (starts == _NEVER).flatten()  # [rows]
        if not has_values(absent) or absent.any():
            where = listing(absent.nonzero().flatten().tolist()) if has_values(absent) else "any"
            raise StateError(
                f"alora_invocation_tokens={list(sequence)}: the tokens of this call do not have "
                f"them in rows {where}, and those in past_key_values are unknown. Write "
                f"model.generate(…), or pass whole sequences without past_key_values."
            )
        return starts + self._cached

    def _first(self, prompt: PromptIds, tokens: int) -> int:
        """Return the place in its sequence of the first token of a call in `generate`."""
        if prompt.read is None:
            prompt.read = self._cached + tokens
        if self._cached or tokens >= prompt.read:
            # without a cache, each call has the tokens of all calls before
            return self._cached
        if cached_tokens(self._given) is not None:
            raise StateError(
                f"generate(): the model was called on {tokens} tokens outside of the sequence that "
                f"is generated, and alora_invocation_tokens are looked for only in the prompt. "
                f"Leave out guidance_scale and other options that need such calls."
            )
        # a state that does not count its tokens
        return prompt.read

    def _whole(self, prompt: PromptIds, rows: int, tokens: int) -> Tensor:
        """Return the ids of the prompt, `[rows, tokens]`, `NO_TOKEN` at padding."""
        given, own = prompt.ids, self.ids
        if own is not None and (given is None or own.shape[1] > given.shape[1]):
            # with the tokens that adapters add
            return _without_padding(own, self._mask(own))
        if given is None or rows % given.shape[0]:
            raise StateError(_no_ids(()))
        if own is None and given.shape[1] != self._cached + tokens:
            raise StateError(
                f"generate(input_ids=…, inputs_embeds=…): the ids are {list(given.shape)}, but the "
                f"model read {self._cached + tokens} tokens in each row, and an active adapter "
                f"needs their ids for alora_invocation_tokens. Pass input_ids alone."
            )
        whole = _without_padding(given, prompt.mask)
        # each prompt has its beams, or returned sequences, one after the other
        whole = whole.repeat_interleave(rows // given.shape[0], 0)  # [rows, tokens]
        # `generate` makes a mask where none is given
        return _without_padding(whole, self._mask(whole))

    def _mask(self, ids: Tensor) -> Tensor | None:
        """Return the mask of the call's tokens, `[rows, tokens]`; None if it has none."""
        mask = grid(self._given.get("attention_mask"))
        return None if mask is None else mask[:, -ids.shape[1] :]

    def _refuse_packed(self) -> None:
        """Check that a row is one sequence.

        Raises:
            StateError: it is several.
        """
        packed = any(self._given.get(name) is not None for name in BOUNDS)
        positions = grid(self._given.get("position_ids"))
        if self._given.get("attention_mask") is None and positions is not None:
            # as transformers reads them
            packed = packed or (has_values(positions) and bool((positions.diff() != 1).any()))
        if packed:
            raise StateError(
                "a row of this call holds several sequences (position_ids or cu_seq_lens_q), and "
                "alora_invocation_tokens are looked for once in each row. Pass one sequence in "
                "each row, with an attention_mask."
            )


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


def _without_padding(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the ids `[rows, tokens]` with `NO_TOKEN` where a mask of their shape is 0."""
    if mask is None or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask.to(ids.device) == 0, NO_TOKEN)


def _no_ids(sequence: tuple[int, ...]) -> str:
    shown = f"alora_invocation_tokens={list(sequence)}" if sequence else "alora_invocation_tokens"
    return (
        f"{shown}: the model got inputs_embeds, in which tokens cannot be found, and an active "
        f"adapter acts only after these. Pass input_ids, or activate another adapter."
    )
