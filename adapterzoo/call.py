"""The running call of an encoder or decoder.

A layer's input shows neither padding nor the prompt. The module that holds the blocks gets the mask
and the cache; they are kept here while it runs.

States are `[rows, tokens, d]`. A grid `[rows, height, width, d]` counts as one sequence for each
row, line by line; states `[tokens, d]` are concatenated sequences, which `cu_seqlens`, an argument
of the layer, separates.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .caches import cached_tokens
from .errors import StateError, listing
from .masks import attended, has_values, members, unreadable
from .token_ids import BOUNDS, CallIds, PromptIds

Places: TypeAlias = "Callable[[object, Tensor], Tensor | None]"
"""Returns the places `[rows, length]` of the tokens that an adapter adds."""


class StackCall(ABC):
    """Facts about the running call of a stack of blocks.

    The tokens of a call belong to the *prompt* unless the cache held tokens before the call, or
    `generate` has appended them.
    """

    @abstractmethod
    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens are real, `[rows, tokens]` bool; None if all are.

        Args:
            x: the input of a layer of the stack, `[rows, tokens, …]`.

        Raises:
            StateError: the mask does not determine it, or a row has no real token.
        """

    @abstractmethod
    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens are real tokens of the prompt, `[rows, tokens]` bool.

        Args:
            x: as for `real`.

        Raises:
            StateError: as for `real`.
        """

    def prompt_ends(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return where the first and the last real tokens of each prompt are.

        Args:
            x: as for `real`.
            first: number of tokens at the start of a prompt.
            last: number at its end; a token in both counts as one of these.

        Returns:
            `[sequences, first + last]`, indices into the concatenated tokens of all sequences; the
            number of all tokens where a prompt is too short.

        Raises:
            StateError: as for `real`.
        """
        prompt = self.prompt(x)
        rows, tokens = prompt.shape
        places, exists = _places(prompt.sum(1), first, last)
        # the n-th real token is where the count of real ones reaches n
        at = torch.searchsorted(prompt.cumsum(1), places)  # [rows, first + last]
        at = at + tokens * torch.arange(rows, device=x.device).unsqueeze(1)
        return torch.where(exists, at, rows * tokens)

    @abstractmethod
    def after(self, tokens: tuple[int, ...], x: Tensor) -> Tensor:
        """Return which tokens are at or after the last occurrence of a sequence of tokens.

        In `generate` only the prompt is searched, so that all new tokens are after the sequence.

        Args:
            tokens: the sequence.
            x: the input of a layer of the stack, `[rows, tokens, …]`, or `[rows · tokens, d]`.

        Returns:
            Bool, with the dimensions of x without its features; false in rows without the sequence.

        Raises:
            StateError: the ids of the call are unknown, or do not tell.
        """

    @abstractmethod
    def has_prompt(self, x: Tensor) -> bool:
        """Return whether any token of the call belongs to the prompt.

        Args:
            x: as for `real`.
        """

    @abstractmethod
    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that depends only on the prompt; the same in each step of `generate`.

        Args:
            owner: the tensor's owner; it is computed once per owner and `generate`.
            compute: computes the tensor in a call that includes the prompt.
        """

    def added(self, key: object, x: Tensor) -> Tensor | None:
        """Return the places `[rows, length]` of the tokens that an adapter adds.

        Args:
            key: `Adapter.shared_key` of the adapter.
            x: the input of the layer that they join.

        Returns:
            None if the call has no room for them, at a token after the prompt or if a model calls
            the layer on something other than its tokens.
        """
        return None

    @abstractmethod
    def of_encoder(self) -> StackCall:
        """Return the call for layers that read the encoder's output.

        In a decoder these make the keys and values of cross-attention.
        """

    def of_part(self, x: Tensor, take: Callable[[Tensor], Tensor], key: object) -> StackCall:
        """Return the call restricted to some of its rows or tokens.

        Args:
            x: the input of the layer, with all rows and tokens.
            take: returns the part of a tensor `[rows, tokens, …]`.
            key: identifies the part within the call.
        """
        return _PartOfCall(self, x, take, key)


class Generation:
    """The state of one call of `generate` between its steps.

    Attributes:
        prompts: path of a stack → number of tokens of its first call.
        tensors: the tensors of `StackCall.remembered`.
        first: number of tokens of the call to which adapters have added theirs.
        ids: of the prompt.
    """

    def __init__(self, given: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Start before the first step.

        Args:
            given: arguments of `generate`, by name.
        """
        self.ids = PromptIds(given)
        self.prompts: dict[str, int] = {}
        self.tensors: dict[object, Tensor] = {}
        self.first: int | None = None


class RecordedCall:
    """The arguments of a stack of blocks: a mask, a cache, or neither.

    Attributes:
        path: of the stack below the base model.
        mask: its `attention_mask`.
        encoder_mask: its `encoder_attention_mask`.
        generation: the running `generate`, None if there is none.
        cached: number of tokens in the cache before the call.
        places: returns the places of added tokens; None if the call has no room.
        is_checked: whether each row has been checked for a real token.
        ids: its token ids.
    """

    def __init__(
        self,
        path: str,
        given: Mapping[str, Any],
        generation: Generation | None,
        places: Places | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Record the arguments.

        Args:
            path: of the stack below the base model.
            given: arguments of its forward, by name.
            generation: the running `generate`, None if there is none.
            places: see `StackCall.added`; None if the call has no room for more tokens.
            ids: of the tokens, `[rows, tokens]`; None if they are unknown.
        """
        self.places = places
        self.path = path
        self.mask = given.get("attention_mask")
        self.encoder_mask = given.get("encoder_attention_mask")
        self.generation = generation
        # read now, because the first layer of the stack adds the tokens of this call
        self.cached = cached_tokens(given) or 0
        self.is_checked = False
        prompt = None if generation is None else generation.ids
        self.ids = CallIds(ids, given, self.cached, prompt)


class LayerStackCall(StackCall):
    """The call of a stack together with the arguments of one layer."""

    def __init__(self, stack: RecordedCall, own: Mapping[str, Any]) -> None:
        """Join a call and a layer's arguments.

        Args:
            stack: the call.
            own: arguments of the layer's forward, by name.
        """
        self._stack = stack
        self._own = own

    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens are real; see `StackCall.real`."""
        rows, tokens = self._sizes(x)
        stack = self._stack
        mask, own = stack.mask, self._own.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == (rows, stack.cached + tokens):
            real = mask[:, stack.cached :] != 0  # [rows, tokens]
        else:
            masks = (*members(own), *members(mask))
            read = (attended(m, rows, tokens, stack.cached) for m in masks)
            found = next((seen for seen in read if seen is not None), None)
            if found is None:
                # without a mask, attention covers all tokens
                if mask is None or ("attention_mask" in self._own and own is None):
                    return None
                raise StateError(unreadable(mask, rows, tokens))
            real = found
        real = real.to(x.device)
        self._check(real)
        return real

    def _check(self, real: Tensor) -> None:
        """Raise if a row has no real token; checks once per call."""
        stack = self._stack
        if stack.is_checked or not has_values(real):
            return
        stack.is_checked = True
        if empty := (~real.any(1)).nonzero().flatten().tolist():
            raise StateError(
                f"attention_mask={list(real.shape)}: it is 0 at every token of rows "
                f"{listing(empty)}, and an active adapter counts the real tokens of each row. "
                f"Leave these rows out, or write 1 at their tokens."
            )

    def added(self, key: object, x: Tensor) -> Tensor | None:
        """Return the places of an adapter's tokens; see `StackCall.added`."""
        places = self._stack.places
        return None if places is None else places(key, x)

    def after(self, tokens: tuple[int, ...], x: Tensor) -> Tensor:
        """Return which tokens follow a sequence of tokens; see `StackCall.after`."""
        lead = x.shape[:-1] if x.is_floating_point() else x.shape
        found = self._stack.ids.after(tokens, lead[0], math.prod(lead[1:]))  # [rows, tokens]
        if lead != found.shape and lead != (found.numel(),):
            raise StateError(
                f"a layer got {list(x.shape)} in a call of {list(found.shape)} tokens, so it is "
                f"unknown which of them follow alora_invocation_tokens={list(tokens)}. Write "
                f"target_modules=[…] without this layer."
            )
        return found.to(x.device).view(lead)

    def has_prompt(self, x: Tensor) -> bool:
        """Return whether the call has tokens of the prompt; see `StackCall.has_prompt`."""
        return self._prompt_length(x) > self._stack.cached

    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens are real tokens of the prompt; see `StackCall.prompt`."""
        rows, tokens = self._sizes(x)
        count = max(self._prompt_length(x) - self._stack.cached, 0)
        inside = torch.arange(tokens, device=x.device) < count  # [tokens]
        real = self.real(x)
        return inside.expand(rows, tokens) if real is None else real & inside

    def of_encoder(self) -> StackCall:
        """Return the call for layers that read the encoder's output."""
        given = {"attention_mask": self._stack.encoder_mask}
        return LayerStackCall(RecordedCall(self._stack.path, given, None), {})

    def prompt_ends(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return the ends of each prompt; see `StackCall.prompt_ends`."""
        bounds = self._bounds()
        if bounds is None:
            return super().prompt_ends(x, first, last)
        starts = bounds[:-1].unsqueeze(1)  # [sequences, 1]
        places, exists = _places(bounds.diff(), first, last)
        return torch.where(exists, starts + places - 1, math.prod(x.shape[:-1]))

    def _bounds(self) -> Tensor | None:
        """Return the bounds of packed sequences, `[sequences + 1]`; None if none are packed."""
        found = next((b for n in BOUNDS if (b := self._own.get(n)) is not None), None)
        return None if found is None else found.long()

    def _sizes(self, x: Tensor) -> tuple[int, int]:
        """Return the rows and tokens of an input."""
        shape = x.shape[:-1] if x.is_floating_point() else x.shape
        if len(shape) < 2 or self._bounds() is not None:
            raise StateError(
                f"a layer got {list(x.shape)}, concatenated sequences, but an active "
                f"adapter needs [rows, tokens, d_model]. Use an adapter without gates or "
                f"positions, or leave the layer out."
            )
        return shape[0], math.prod(shape[1:])

    def _prompt_length(self, x: Tensor) -> int:
        """Return the number of tokens of the prompt, including those in the cache."""
        tokens = math.prod(x.shape[1:-1] if x.is_floating_point() else x.shape[1:])
        stack = self._stack
        if stack.generation is None:
            return 0 if stack.cached else tokens
        return stack.generation.prompts.setdefault(stack.path, stack.cached + tokens)

    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the prompt; see `StackCall.remembered`."""
        if self._stack.generation is None:
            return compute()
        kept = self._stack.generation.tensors
        if owner not in kept:
            kept[owner] = compute()
        return kept[owner]


def _places(counts: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return the first and last of `counts` tokens `[rows]`, from 1, and which of them exist.

    Both `[rows, first + last]`.
    """
    count = counts.unsqueeze(1)  # [rows, 1]
    steps = torch.arange(first + last, device=counts.device)  # [first + last]
    is_first = steps < first
    places = torch.where(is_first, steps, count + steps - first - last) + 1  # [rows, first + last]
    exists = (places > 0) & (places <= torch.where(is_first, count - last, count))
    return places, exists


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

    def after(self, tokens: tuple[int, ...], x: Tensor) -> Tensor:
        """Return which tokens of the part follow a sequence of tokens."""
        return self._take(self._whole.after(tokens, self._x))

    def has_prompt(self, x: Tensor) -> bool:
        """Return whether the call has tokens of the prompt."""
        return self._whole.has_prompt(self._x)

    def added(self, key: object, x: Tensor) -> Tensor | None:
        """Return the places of an adapter's tokens in this part."""
        at = self._whole.added(key, self._x)
        return None if at is None else self._take(at)

    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor of the prompt, of this part."""
        return self._whole.remembered((owner, self._key), compute)

    def of_encoder(self) -> StackCall:
        """Return the part of the call for layers that read the encoder's output."""
        return self._whole.of_encoder().of_part(self._x, self._take, self._key)
