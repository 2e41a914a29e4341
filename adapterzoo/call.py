"""The call of an encoder or decoder, as the adapters inside it see it.

A layer sees neither padding nor the prompt. The module that holds the blocks is given the mask and
the cache; what it was given is kept here while it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import StateError

Places: TypeAlias = "Callable[[tuple[str, int | None] | None, Tensor], Tensor | None]"
"""Gives the places `[rows, length]` of the tokens that an adapter adds."""


class StackCall(ABC):
    """Facts about the running call of a stack of blocks.

    The tokens of a call belong to the *prompt* unless the cache held tokens before the call, or
    `generate` has appended them.
    """

    @abstractmethod
    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens are real, `[rows, tokens]` bool; None where all are.

        Args:
            x: the input of a layer of the stack, `[rows, tokens, …]`.

        Raises:
            StateError: the mask does not tell.
        """

    @abstractmethod
    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens are real tokens of the prompt, `[rows, tokens]` bool.

        Args:
            x: as for `real`.

        Raises:
            StateError: the mask does not tell.
        """

    @abstractmethod
    def has_prompt(self, x: Tensor) -> bool:
        """Return whether any token of the call belongs to the prompt.

        Args:
            x: as for `real`.
        """

    @abstractmethod
    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return what follows from the prompt alone, in each step of `generate` the same tensor.

        Args:
            owner: whose tensor it is; it is computed once for each while `generate` runs.
            compute: makes the tensor from the tokens of a call that has the prompt.
        """

    def added(self, key: tuple[str, int | None] | None, x: Tensor) -> Tensor | None:
        """Return the places `[rows, length]` of the tokens that an adapter adds.

        Args:
            key: `Adapter.shared_key` of the adapter.
            x: the input of the layer that they join.

        Returns:
            None where the call has no room for them: at a token that follows the prompt, and
            where a model calls the layer for something else than its tokens.
        """
        return None

    def of_part(self, x: Tensor, take: Callable[[Tensor], Tensor], key: object) -> StackCall:
        """Return the call as some rows or tokens of it see it.

        Args:
            x: the input of the layer, with all rows and tokens.
            take: gives the part of a tensor `[rows, tokens, …]`.
            key: tells the part from the others of the call.
        """
        return _PartOfCall(self, x, take, key)


class Generation:
    """What one call of `generate` must remember between its steps.

    Attributes:
        prompts: path of a stack to the number of tokens of its first call.
        tensors: what `StackCall.remembered` keeps.
    """

    def __init__(self) -> None:
        """Start before the first step."""
        self.prompts: dict[str, int] = {}
        self.tensors: dict[object, Tensor] = {}


class RecordedCall(StackCall):
    """The call of a module that was given a mask, a cache, or neither."""

    def __init__(
        self,
        path: str,
        given: Mapping[str, Any],
        generation: Generation | None,
        places: Places | None = None,
    ) -> None:
        """Record the arguments.

        Args:
            path: of the stack below the base model.
            given: arguments of its forward, by name.
            generation: the running `generate`, None outside.
            places: see `StackCall.added`; None where the call has no room for more tokens.
        """
        self._places = places
        self._path = path
        self._mask = given.get("attention_mask")
        self._generation = generation
        cache = given.get("past_key_values")
        # asked now: the first layer of the stack adds the tokens of this call
        self.cached = 0 if cache is None else int(cache.get_seq_length())

    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens are real; see `StackCall.real`."""
        mask, (rows, tokens) = self._mask, x.shape[:2]
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != rows:
            shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise StateError(
                f"attention_mask={shown}: an active adapter needs to know which of the "
                f"{list(x.shape[:2])} tokens are real. Pass a mask [batch, tokens] of 0 and 1."
            )
        if mask.shape[1] < tokens:
            raise StateError(
                f"attention_mask={list(mask.shape)}: the layer got {tokens} tokens. Pass a mask "
                f"[batch, tokens] with a column for each."
            )
        return mask[:, -tokens:].to(x.device) != 0  # [rows, tokens]

    def added(self, key: tuple[str, int | None] | None, x: Tensor) -> Tensor | None:
        """Return the places of an adapter's tokens; see `StackCall.added`."""
        return None if self._places is None else self._places(key, x)

    def has_prompt(self, x: Tensor) -> bool:
        """Return whether the call has tokens of the prompt; see `StackCall.has_prompt`."""
        return self._prompt_length(x) > self.cached

    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens are real tokens of the prompt; see `StackCall.prompt`."""
        rows, tokens = x.shape[:2]
        count = max(self._prompt_length(x) - self.cached, 0)
        inside = torch.arange(tokens, device=x.device) < count  # [tokens]
        real = self.real(x)
        return inside.expand(rows, tokens) if real is None else real & inside

    def _prompt_length(self, x: Tensor) -> int:
        """Tokens of the prompt, with those in the cache."""
        if self._generation is None:
            return 0 if self.cached else x.shape[1]
        return self._generation.prompts.setdefault(self._path, self.cached + x.shape[1])

    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the prompt; see `StackCall.remembered`."""
        if self._generation is None:
            return compute()
        kept = self._generation.tensors
        if owner not in kept:
            kept[owner] = compute()
        return kept[owner]


class _PartOfCall(StackCall):
    """Some rows or tokens of a call."""

    def __init__(
        self, whole: StackCall, x: Tensor, take: Callable[[Tensor], Tensor], key: object
    ) -> None:
        self._whole = whole
        self._x = x
        self._take = take
        self._key = key

    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens of the part are real."""
        real = self._whole.real(self._x)
        return None if real is None else self._take(real)

    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens of the part are real tokens of the prompt."""
        return self._take(self._whole.prompt(self._x))

    def has_prompt(self, x: Tensor) -> bool:
        """Return whether the call has tokens of the prompt."""
        return self._whole.has_prompt(self._x)

    def added(self, key: tuple[str, int | None] | None, x: Tensor) -> Tensor | None:
        """Return the places of an adapter's tokens in this part."""
        at = self._whole.added(key, self._x)
        return None if at is None else self._take(at)

    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the prompt, of this part."""
        return self._whole.remembered((owner, self._key), compute)
