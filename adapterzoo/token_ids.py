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
from torch.nn.functional import pad

from .caches import cached_tokens
from .errors import StateError, listing
from .masks import has_values, packed

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
        length: number of tokens, with those that adapters add, once it has been searched.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Take the prompt.

        Args:
            given: arguments of `generate`, by name.
        """
        self.ids: Tensor | None = grid(given.get("input_ids"))
        self.mask: Tensor | None = grid(given.get("attention_mask"))
        self.starts: dict[tuple[int, ...], Tensor] = {}
        self.length = 0


class CallIds:
    """The token ids of one call of a stack of blocks.

    Attributes:
        ids: `[rows, tokens]`; None if the stack got embeddings.
    """

    def __init__(self, ids: Tensor | None, given: Mapping[str, Any]) -> None:
        """Record the call.

        Args:
            ids: of the call, `[rows, tokens]`.
            given: its arguments, by name.
        """
        self.ids = ids
        self._given = given
        self._found: dict[tuple[int, ...], Tensor] = {}

    def after(self, sequence: tuple[int, ...], rows: int, tokens: int, call: Any) -> Tensor:
        """Return which tokens are at or after the last occurrence of a sequence.

        Computed once in each call. In `generate` only the prompt is searched.

        Args:
            sequence: the sequence of tokens.
            rows: of a call without ids.
            tokens: the same.
            call: the `RecordedCall` that has these ids.

        Returns:
            `[rows, tokens]` bool, false in rows without the sequence.

        Raises:
            StateError: the ids are unknown, or do not tell.
        """
        if sequence not in self._found:
            if self.ids is not None:
                rows, tokens = self.ids.shape
            if call.generation is None:
                first, starts = call.cached, self._starts(sequence, call)
            else:
                later, prompt = call.later(tokens), call.generation.ids
                if sequence not in prompt.starts:
                    prompt.starts[sequence] = self._prompt_starts(sequence, rows, tokens, call)
                starts = prompt.starts[sequence]
                first = call.cached
                if not first and not call.generation.partial:
                    # a state may not count its tokens
                    first = prompt.length + later - tokens
            steps = torch.arange(tokens, device=starts.device) + first  # [tokens]
            self._found[sequence] = steps >= starts  # [rows, tokens]
        return self._found[sequence]

    def _starts(self, sequence: tuple[int, ...], call: Any) -> Tensor:
        """Return where the sequence begins in each row of a call outside of `generate`."""
        if self.ids is None:
            raise StateError(_no_ids(sequence))
        if call.bounds is not None:
            raise StateError(packed("alora_invocation_tokens are looked for"))
        mask = grid(self._given.get("attention_mask"))
        if mask is not None:
            mask = mask[:, -self.ids.shape[1] :]  # [rows, tokens]
        starts = last_start(_without_padding(self.ids, mask), sequence)
        if not call.cached and cached_tokens(self._given) is not None:
            return starts
        # the first tokens of the sequence, which may have the invocation, are unknown
        return _found(starts, sequence) + call.cached

    def _prompt_starts(
        self, sequence: tuple[int, ...], rows: int, tokens: int, call: Any
    ) -> Tensor:
        """Return where the sequence begins in each row of the prompt of `generate`."""
        generation = call.generation
        prompt: PromptIds = generation.ids
        given, own = prompt.ids, self.ids
        # of the prompt, up to the end of the call
        read = call.cached + tokens - call.later(tokens)
        masks = [self._given.get("attention_mask"), generation.mask]
        if own is not None and (given is None or read > given.shape[1]) and not call.cached:
            # with the tokens that adapters add
            whole = own[:, :read]
        elif given is None or rows % given.shape[0]:
            raise StateError(_no_ids(()))
        elif own is None and given.shape[1] != read:
            raise StateError(
                f"generate(input_ids=…, inputs_embeds=…): the ids are {list(given.shape)}, but the "
                f"model read {read} tokens in each row, and an active adapter "
                f"needs their ids for alora_invocation_tokens. Pass input_ids alone."
            )
        else:
            # each prompt has its beams, or returned sequences, one after the other
            whole = _without_padding(given, prompt.mask).repeat_interleave(rows // len(given), 0)
        # tokens that only the cache has
        missing = max(read - whole.shape[1], 0)
        whole = pad(whole, (missing, 0), value=NO_TOKEN)  # [rows, tokens of the prompt]
        for mask in masks:
            # `generate` makes a mask where none is given
            if (of_all := grid(mask)) is not None:
                whole = _without_padding(whole, of_all[:, : whole.shape[1]])
        prompt.length = whole.shape[1]
        starts = last_start(whole, sequence)
        return _found(starts, sequence) if missing else starts


def _found(starts: Tensor, sequence: tuple[int, ...]) -> Tensor:
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
            f"alora_invocation_tokens={list(sequence)}: the tokens of this call do not have "
            f"them in rows {where}, and those in past_key_values are unknown. Write "
            f"model.generate(…), or pass whole sequences without past_key_values."
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
