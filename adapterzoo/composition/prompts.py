"""Tokens that adapters add to the sequences of a call: their number and place in each row.

Each row gets the tokens of its adapters before or after its first real token. Rows with fewer
added tokens than others get filler, which is masked like padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from adapterzoo.anatomy.sites import TokenInput
from adapterzoo.contracts import Joins, PromptAdapter, SharedKey

from . import Child, Stack


class Added(NamedTuple):
    """The tokens of one adapter.

    Attributes:
        key: `shared_key` of the adapter.
        length: number of tokens.
        after_first: whether they follow the first real token; if not, they precede it.
    """

    key: SharedKey
    length: int
    after_first: bool


@dataclass(frozen=True, slots=True)
class Prompts:
    """The tokens that a plan adds.

    Attributes:
        parts: for each part of the composition, the tokens that its rows get, in order.
        joins: where they join.
        tokens: where the model takes its tokens.
        filler: the placeholder: a token without special meaning to the model.
        places: arguments of the whole model that are indices of tokens, such as "start_positions".
    """

    parts: tuple[tuple[Added, ...], ...]
    joins: Joins
    tokens: TokenInput
    filler: int
    places: tuple[str, ...] = ()

    def length(self, part: int, after_first: bool | None = None) -> int:
        """Return the number of tokens that each row of a part gets.

        Args:
            part: number of the part.
            after_first: only those after (True) or before (False) the first real token; None: all.
        """
        kinds = (False, True) if after_first is None else (after_first,)
        return sum(added.length for added in self.parts[part] if added.after_first in kinds)


def prompts_of(
    parts: Sequence[Child], adapters: Mapping[str, Sequence[PromptAdapter]]
) -> tuple[tuple[Added, ...], ...]:
    """Return the tokens that each part of a composition adds, in the order of its stack.

    Args:
        parts: compositions that do not divide rows.
        adapters: adapters that add tokens, by name.
    """

    def added(part: Child) -> Iterator[Added]:
        for name in () if part is None else Stack(part).flatten():
            for adapter in adapters.get(name, ()):
                key = adapter.shared_key or SharedKey(name)
                yield Added(key, adapter.length, adapter.after_first)

    return tuple(tuple(added(part)) for part in parts)


class Joined:
    """The sequences of one call with the tokens that adapters add.

    Attributes:
        prompts: the tokens that the plan adds.
        adds: whether this call, rather than an earlier one, gets the tokens.
        count: the largest number of tokens that a row gets.
        length: number of tokens of a row, including those that are added and those in the cache.
        is_laid_out: whether the places of the tokens are known.
    """

    def __init__(self, prompts: Prompts, index: Sequence[int] | None, adds: bool = True) -> None:
        """Describe the call; `lay_out` follows once the tokens are known.

        Args:
            prompts: the tokens that the plan adds.
            index: the part of each row; None if there is one part.
            adds: whether this call, rather than an earlier one, gets the tokens.
        """
        self.prompts, self.adds = prompts, adds
        self.count = max(map(prompts.length, set(index or (0,))))
        self.is_laid_out = False
        self._index = index
        # the input of the layer that the tokens join; it identifies the layer's call
        self._x: Tensor | None = None

    def lay_out(
        self,
        rows: int,
        tokens: int,
        mask: Tensor | None,
        device: torch.device,
        filler_first: bool = False,
    ) -> None:
        """Find the place of each token.

        Args:
            rows: the batch's rows.
            tokens: number of tokens of a row, including those in the cache.
            mask: `[rows, tokens]`, 0 at padding; None: all are real.
            device: device of the input.
            filler_first: whether filler comes first, so that the last token stays the last.
        """
        prompts, parts = self.prompts, range(len(self.prompts.parts))
        self.length = tokens + self.count
        self._device, self._mask = device, mask
        self._before = self._of_rows([prompts.length(part, False) for part in parts])
        after = self._of_rows([prompts.length(part, True) for part in parts])
        self._missing = self._of_rows([self.count - prompts.length(part) for part in parts])
        skipped = self._missing if filler_first else 0
        # row by row, so that padding on the left changes nothing
        first = 0 if mask is None else (mask != 0).int().argmax(1, keepdim=True)  # [rows, 1]
        steps = torch.arange(tokens, device=device).expand(rows, -1)  # [rows, tokens]
        self._shift = self._before * (steps >= first) + after * (steps > first)
        self._places = steps + self._shift + skipped
        self._start, self._first, self._filler_first = first + skipped, first, filler_first
        self.is_laid_out = True

    def _of_rows(self, values: Sequence[int]) -> Any:
        """Return the value of each row's part: `[rows, 1]`, or one number if all are equal."""
        own = [values[part] for part in self._index or (0,)]
        if len(set(own)) == 1:
            return own[0]
        return torch.tensor(own, device=self._device).unsqueeze(1)

    @property
    def is_called(self) -> bool:
        """Whether the layer that the tokens join has been called."""
        return self._x is not None

    @property
    def is_even(self) -> bool:
        """Whether all rows get the same number of tokens."""
        return isinstance(self._missing, int)

    def extended(self, t: Tensor, fill: float) -> Tensor:
        """Return a tensor `[rows, tokens, …]` with `fill` at the places of added tokens."""
        count, tokens = t.shape[:2]
        places = self._places.reshape(count, tokens, *(1 for _ in t.shape[2:]))
        places = places.expand(t.shape)  # [rows, tokens, …]
        wide = t.new_full((count, self.length, *t.shape[2:]), fill)
        return wide.scatter(1, places, t)  # [rows, length, …]

    def own(self, t: Tensor) -> Tensor:
        """Return the model's own tokens of a tensor `[rows, length, …]`."""
        count, tokens = self._places.shape
        places = self._places.reshape(count, tokens, *(1 for _ in t.shape[2:]))  # [rows, tokens, …]
        return t.gather(1, places.expand(count, tokens, *t.shape[2:]))  # [rows, tokens, …]

    def mask(self) -> Tensor | None:
        """Return the mask `[rows, length]`: ones at added tokens, zeros at filler."""
        if self.is_even and self._mask is None:
            return None
        given = self._mask
        if given is None:
            given = torch.ones(self._places.shape, dtype=torch.long, device=self._device)
        mask = self.extended(given, 1)
        if self.is_even:
            return mask
        steps = torch.arange(self.length, device=self._device)  # [length]
        missing = self._missing
        filler = steps < missing if self._filler_first else steps >= self.length - missing
        return mask.masked_fill(filler, 0)

    def positions(self, given: Tensor, *, shifted: bool) -> Tensor:
        """Return the positions of all tokens.

        Args:
            given: the model's own mask, `[…, rows or 1, tokens]`.
            shifted: whether added tokens have their own positions; if not, theirs are 0.

        Returns:
            `[…, rows, length]`.
        """
        tokens = self._places.shape[1]
        own = given.expand(*given.shape[:-2], self._places.shape[0], tokens)
        wide = own.new_zeros((*own.shape[:-1], self.length))
        places = self._places.expand(own.shape)
        if not shifted:
            return wide.scatter(-1, places, own)  # […, rows, length]
        first = torch.as_tensor(self._first, device=own.device).expand(own.shape[-2], 1)
        start = own.gather(-1, first.expand(*own.shape[:-1], 1))  # […, rows, 1]
        steps = torch.arange(self.length, device=own.device)
        wide = start + (steps - self._start).clamp(min=0)  # […, rows, length]
        shifted_by: Tensor = own + self._shift
        return wide.scatter(-1, places, shifted_by)  # […, rows, length]

    def later_positions(self, given: Tensor) -> Tensor:
        """Return positions `[…, rows or 1, new]` of later tokens, shifted by the added ones."""
        return cast("Tensor", given + self._shift[:, -given.shape[-1] :])

    def places_of(self, numbers: Tensor) -> Tensor:
        """Return the new indices `[rows, …]` of the model's own tokens from their old ones.

        Indices outside the sequence stay outside.
        """
        tokens = self._places.shape[1]
        flat = numbers.reshape(numbers.shape[0], -1)  # [rows, numbers]
        at = self._places.gather(1, flat.clamp(0, tokens - 1))
        at = torch.where(flat < tokens, at, flat + self.count)
        return torch.where(flat < 0, flat, at).reshape(numbers.shape)  # [rows, …]

    def _known(self, key: object) -> SharedKey | None:
        """Return the plan's own object for a key; None if the plan has no such tokens."""
        keys = [added.key for part in self.prompts.parts for added in part]
        # the same object everywhere, except in a copy of the model
        found = next((each for each in keys if each is key), None)
        return found or next((each for each in keys if each == key), None)

    def at(self, key: object, x: Tensor) -> Tensor | None:
        """Return the places `[rows, length]` of an adapter's tokens.

        The places are meaningless in rows without the adapter.

        Args:
            key: the adapter's key.
            x: the input of the layer that they join.

        Returns:
            None if the layer has already been called with another input.
        """
        rows, is_module = self._places.shape[0], self.prompts.joins == "embeddings"
        # whether the input holds the rows' tokens; not checked at an embedding module
        if self._x is None and (
            is_module or (x.dim() > 1 and x.shape[0] == rows and x.shape[1] >= self.length)
        ):
            self._x = x
        if x is not self._x:
            return None
        offsets = []
        own = self._known(key)
        found: Added | None = None
        for part in self.prompts.parts:
            offset, here = {False: 0, True: 0}, 0
            for added in part:
                if added.key is own:
                    found, here = added, offset[added.after_first]
                offset[added.after_first] += added.length
            offsets.append(here)
        if found is None:
            return None
        behind = self._before + 1 if found.after_first else 0
        steps = torch.arange(found.length, device=self._device)
        at: Tensor = self._start + behind + self._of_rows(offsets) + steps  # [rows or 1, length]
        at = at.clamp(max=self.length - 1)
        return at.expand(rows, found.length)  # [rows, length]

    def entered(self, embeds: Tensor, key: SharedKey, prompt: Tensor) -> Tensor:
        """Return embeddings `[rows, length, d]` with an adapter's tokens in their places."""
        at = self.at(key, embeds if self._x is None else self._x)
        if at is None:
            return embeds
        at = at.unsqueeze(-1).expand(-1, -1, embeds.shape[-1])  # [rows, added, d]
        wide = embeds.scatter(1, at, prompt.to(embeds).expand(at.shape))
        own = self._known(key)
        has = self._of_rows([any(a.key is own for a in part) for part in self.prompts.parts])
        return wide if has is True else torch.where(has.unsqueeze(-1), wide, embeds)
