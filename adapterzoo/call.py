"""The running call of an encoder or decoder.

A layer's input shows neither padding nor the prompt. The module that holds the blocks gets the mask
and the cache; they are kept here while it runs.

States are `[rows, tokens, d]`. A grid `[rows, height, width, d]` counts as one sequence for each
row, line by line; states `[tokens, d]` are concatenated sequences, which `cu_seqlens`, an argument
of the layer, separates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from .caches import cached_tokens
from .errors import StateError, listing
from .masks import attended, bounds_given, bounds_in, has_values, members, packed, unreadable

Places: TypeAlias = "Callable[[object, Tensor], Tensor | None]"
"""Returns the places `[rows, length]` of the tokens that an adapter adds."""

# the start of the sequence in a row that does not have it
NEVER = 1 << 62
# the id of padding, and of tokens that adapters add
NO_TOKEN = -1
_NO_IDS = (
    "the model got inputs_embeds, in which alora_invocation_tokens cannot be found. Pass "
    "input_ids, or activate another adapter."
)


@dataclass(frozen=True, slots=True)
class PackedPrompts:
    """What is known of the prompts of requests whose tokens are packed into one sequence.

    Attributes:
        lengths: number of tokens of each request in the running call, in order.
        starts: sequence of tokens → where it begins for the last time in the prompt of each
            request; beyond all tokens where it does not.
    """

    lengths: tuple[int, ...]
    starts: Mapping[tuple[int, ...], tuple[int, ...]]

    def after(self, sequence: tuple[int, ...], positions: Tensor) -> Tensor:
        """Return which tokens are at or after the last occurrence of a sequence in their prompt.

        Args:
            sequence: of tokens.
            positions: of each token in its request, `[1, tokens]`; those behind all requests are
                padding.

        Returns:
            `[1, tokens]` bool.
        """
        count = positions.shape[-1]
        lengths = (*self.lengths, count - sum(self.lengths))
        starts = torch.tensor((*self.starts[sequence], NEVER), device=positions.device)
        repeats = torch.tensor(lengths, device=positions.device)
        return positions >= starts.repeat_interleave(repeats, output_size=count)


@dataclass(eq=False)
class Generation:
    """What is known of one prompt of a running `generate`; the calls for it share the record.

    Attributes:
        stacks: paths of the stacks that read the prompt and the tokens after it.
        partial: the argument of `generate` that divides the prompt among several calls; else empty.
        guesses: arguments of `generate` that add candidate tokens, which may be rejected later.
        tokens: how many the prompt has, as `generate` counts them; None before it has counted.
        ids: of the prompt, `[sequences, tokens]`, those in the cache included; None: unknown.
        ids_mask: their mask, `[sequences, tokens]`; None if there is none.
        new: how many tokens follow the prompt in the running call; None outside of one.
        mask: the mask `[rows, tokens]` of all tokens up to the end of the running call; None: all
            are real, or unknown.
        tensors: the tensors of `StackCall.remembered`.
        first: path of a stack → tokens of its first call, in a model that does not count them.
        starts: sequence of tokens → where it begins in each row of the calls, `[rows, 1]`.
        length: number of tokens, with those that adapters add, once it has been searched.
        coming: arguments of the prompt that `generate` prepares, by name.
        packed: the prompts of packed requests; None if each row has one prompt.
    """

    stacks: Collection[str] = ("",)
    coming: Mapping[str, Any] = field(default_factory=dict)
    partial: str = ""
    guesses: tuple[str, ...] = ()
    tokens: int | None = None
    new: int | None = None
    mask: Tensor | None = None
    tensors: dict[object, Tensor] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    starts: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    length: int = 0
    packed: PackedPrompts | None = None

    def __post_init__(self) -> None:
        """Keep what the prompt is, before the first call."""
        self._given_partial = self.partial
        self.ids: Tensor | None = grid(self.coming.get("input_ids"))
        self.ids_mask: Tensor | None = grid(self.coming.get("attention_mask"))

    def of_prompt(self, tokens: int) -> Generation:
        """Return a new record, for the prompt that `generate` prepares; it may have several.

        Args:
            tokens: how many the prompt has.
        """
        return Generation(self.stacks, self.coming, self._given_partial, self.guesses, tokens)

    def step(self, tokens: int, mask: Tensor | None) -> None:
        """Start a call.

        Args:
            tokens: the number from the first of the prompt to the last of the call, as `generate`
                counts them.
            mask: see the class.
        """
        if self.tokens is not None:
            self.new, self.mask = max(tokens - self.tokens, 0), grid(mask)
            if tokens < self.tokens:
                self.partial = "prefill_chunk_size"


class RecordedCall:
    """The arguments of a stack of blocks: a mask, a cache, or neither.

    Attributes:
        path: of the stack below the base model.
        mask: its `attention_mask`.
        encoder_mask: its `encoder_attention_mask`.
        generation: the running `generate`; None if there is none, or if the stack reads something
            other than its prompt, as an encoder does.
        cached: number of tokens in the cache before the call.
        places: returns the places of added tokens; None if the call has no room.
        is_checked: whether each row has been checked for a real token.
        ids: of its tokens, `[rows, tokens]`; None if they are unknown.
    """

    def __init__(
        self,
        path: str,
        given: Mapping[str, Any],
        generation: Generation | None,
        places: Places | None = None,
        ids: Tensor | None = None,
        outer: RecordedCall | None = None,
    ) -> None:
        """Record the arguments.

        Args:
            path: of the stack below the base model.
            given: arguments of its forward, by name.
            generation: the running `generate`, None if there is none.
            places: see `StackCall.added`; None if the call has no room for more tokens.
            ids: see the class.
            outer: the call of the model around the stack, None if there is none.
        """
        self.places = places
        self.path = path
        self.mask = given.get("attention_mask")
        self.encoder_mask = given.get("encoder_attention_mask")
        # read now, because the first layer of the stack adds the tokens of this call
        self.cached = cached_tokens(given) or 0
        self.is_checked = False
        reads_prompt = generation is not None and path in generation.stacks
        self.generation = generation if reads_prompt else None
        self._new = None if generation is None else generation.new
        self._given, self._outer = given, outer
        # the arguments of the outermost model around the stack, by name
        self.outermost: Mapping[str, Any] = given if outer is None else outer.outermost
        self._bounds: Tensor | None = None
        self._knows_bounds = False
        self.ids = ids
        self._after: dict[tuple[int, ...], Tensor] = {}

    def later(self, tokens: int) -> int:
        """Return how many tokens follow the prompt; those of the call are the last of them.

        Args:
            tokens: of the call.

        Raises:
            StateError: the call is not one of the sequence that is generated, or does not show
                where the prompt ends.
        """
        generation = self.generation
        if generation is None:
            return tokens if self.cached else 0
        if generation.tokens is not None:
            self.check_sequence()
            return self._new or 0
        # a model with a `generate` of its own
        if asked := [*generation.guesses, *filter(None, [generation.partial])]:
            raise StateError(
                f"generate({listing(asked)}=…): this model does not show where the prompt ends, "
                f"and an active adapter reads it. Leave {listing(asked)} out."
            )
        if self.cached:
            return tokens
        return max(tokens - generation.first.setdefault(self.path, tokens), 0)

    def check_sequence(self) -> None:
        """Check that the call is one of the sequence that `generate` generates.

        Raises:
            StateError: it is not.
        """
        generation = self.generation
        if generation is not None and generation.tokens is not None and self._new is None:
            raise StateError(
                "generate(): the model was called on tokens outside of the sequence, and an active "
                "adapter reads its prompt. Leave out guidance_scale and such options."
            )

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
        if sequence not in self._after:
            if self.ids is not None:
                rows, tokens = self.ids.shape
            generation, first = self.generation, self.cached
            if generation is not None and generation.packed is not None:
                positions = self.outermost["position_ids"]
                self._after[sequence] = generation.packed.after(sequence, positions)
                return self._after[sequence]
            if generation is None:
                starts = self._starts(sequence)
            else:
                later = self.later(tokens)
                if sequence not in generation.starts:
                    found = self._prompt_starts(generation, sequence, rows, tokens)
                    generation.starts[sequence] = found
                starts = generation.starts[sequence]
                if not first and not generation.partial:
                    # a state may not count its tokens
                    first = generation.length + later - tokens
            steps = torch.arange(tokens, device=starts.device) + first  # [tokens]
            self._after[sequence] = steps >= starts  # [rows, tokens]
        return self._after[sequence]

    def _starts(self, sequence: tuple[int, ...]) -> Tensor:
        """Return where the sequence begins in each row of a call outside of `generate`."""
        if self.ids is None:
            raise StateError(_NO_IDS)
        if self.bounds is not None:
            raise StateError(packed("alora_invocation_tokens are looked for"))
        mask = grid(self.mask)
        if mask is not None:
            mask = mask[:, -self.ids.shape[1] :]  # [rows, tokens]
        starts = last_start(without_padding(self.ids, mask), sequence)
        if not self.cached and cached_tokens(self._given) is not None:
            return starts
        # the first tokens of the sequence, which may have the invocation, are unknown
        return found_in_all(starts, sequence) + int(self.cached)

    def _prompt_starts(
        self, generation: Generation, sequence: tuple[int, ...], rows: int, tokens: int
    ) -> Tensor:
        """Return where the sequence begins in each row of the prompt of `generate`."""
        given, own = generation.ids, self.ids
        # of the prompt, up to the end of the call
        read = self.cached + tokens - self.later(tokens)
        if own is not None and (given is None or read > given.shape[1]) and not self.cached:
            # with the tokens that adapters add
            whole = own[:, :read]
        elif given is None or rows % given.shape[0]:
            raise StateError(_NO_IDS)
        elif own is None and given.shape[1] != read:
            raise StateError(
                f"generate(input_ids=…, inputs_embeds=…): the ids are {list(given.shape)}, but the "
                f"model read {read} tokens in each row. Pass input_ids alone."
            )
        else:
            # each prompt has its beams, or returned sequences, one after the other
            whole = without_padding(given, generation.ids_mask)
            whole = whole.repeat_interleave(rows // len(given), 0)
        # tokens that only the cache has
        missing = max(read - whole.shape[1], 0)
        whole = pad(whole, (missing, 0), value=NO_TOKEN)  # [rows, tokens of the prompt]
        for mask in (self.mask, generation.mask):
            # `generate` makes a mask where none is given
            if (of_all := grid(mask)) is not None:
                whole = without_padding(whole, of_all[:, : whole.shape[1]])
        generation.length = whole.shape[1]
        starts = last_start(whole, sequence)
        return found_in_all(starts, sequence) if missing else starts

    @property
    def bounds(self) -> Tensor | None:
        """Where packed sequences begin and end, `[sequences + 1]`; None if a row is one sequence.

        Raises:
            StateError: the values of `position_ids` would tell, and cannot be read.
        """
        if self._outer is not None:
            return self._outer.bounds
        # read once, and only if an adapter asks
        if not self._knows_bounds and self.generation is None:
            self._bounds, self._knows_bounds = bounds_in(self._given), True
        return self._bounds

    @property
    def is_masked(self) -> bool:
        """Whether the stack, or a model around it, got a mask of any name."""
        masks = (value for name, value in self._given.items() if "mask" in name)
        is_given = any(mask is not None for mask in masks)
        return is_given or (self._outer is not None and self._outer.is_masked)

    @property
    def size(self) -> int:
        """The number of tokens of all rows that the model around the stack gets; 0 if unknown."""
        ids, embeds = (self.outermost.get(name) for name in ("input_ids", "inputs_embeds"))
        if ids is not None:
            return int(ids.numel())
        return 0 if embeds is None else embeds.shape[:-1].numel()


class StackCall:
    """Facts about the running call of a stack of blocks.

    Outside of `generate` all tokens of a call belong to the *prompt*, unless the cache held tokens
    before. In `generate` the prompt is what `generate` was given: neither the new tokens nor the
    candidates of assisted decoding belong to it.
    """

    def __init__(self, stack: RecordedCall, own: Mapping[str, Any] | None = None) -> None:
        """Keep the call of a stack as one of its layers sees it.

        Args:
            stack: the call.
            own: arguments of the layer's forward, by name.
        """
        self._stack, self._own = stack, own or {}

    def real(self, x: Tensor) -> Tensor | None:
        """Return which tokens are real, `[rows, tokens]` bool; None if all are.

        Args:
            x: the input of a layer of the stack, `[rows, tokens, …]`.

        Raises:
            StateError: the mask does not determine it, or a row has no real token.
        """
        rows, tokens = self._sizes(x)
        stack = self._stack
        mask, own = stack.mask, self._own.get("attention_mask")
        whole = self._whole_mask(rows, stack.cached + tokens)
        if whole is not None:
            real = whole[:, stack.cached :]  # [rows, tokens]
        elif not stack.is_masked:
            # the layer's own mask hides later tokens alone, with True for hidden ones in MPT
            return None
        else:
            masks = (*members(own), *members(mask))
            read = (attended(m, rows, tokens, stack.cached) for m in masks)
            found = next((seen for seen in read if seen is not None), None)
            if found is None:
                # a layer without a mask attends to all tokens
                if mask is None or ("attention_mask" in self._own and own is None):
                    return None
                raise StateError(unreadable(mask, rows, tokens))
            real = found
        real = real.to(x.device)
        # once in each call
        if not stack.is_checked and has_values(real):
            stack.is_checked = True
            if empty := (~real.any(1)).nonzero().flatten().tolist():
                raise StateError(
                    f"attention_mask={list(real.shape)} is 0 at every token of rows "
                    f"{listing(empty)}, and an active adapter counts tokens. Leave these rows out."
                )
        return real

    def _whole_mask(self, rows: int, tokens: int) -> Tensor | None:
        """Return which tokens are real, `[rows, tokens]`, those in the cache included, or None."""
        stack = self._stack
        masks = (stack.mask, None if stack.generation is None else stack.generation.mask)
        fitting = (m for m in masks if isinstance(m, Tensor) and m.shape == (rows, tokens))
        return next((m != 0 for m in fitting), None)

    def added(self, key: object, x: Tensor) -> Tensor | None:
        """Return the places `[rows, length]` of the tokens that an adapter adds.

        Args:
            key: `Adapter.shared_key` of the adapter.
            x: the input of the layer that they join.

        Returns:
            None if the call has no room for them, at a token after the prompt or if a model calls
            the layer on something other than its tokens.
        """
        places = self._stack.places
        return None if places is None else places(key, x)

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
        lead = x.shape[:-1] if x.is_floating_point() else x.shape
        found = self._stack.after(tokens, lead[0], math.prod(lead[1:]))  # [rows, tokens]
        if lead != found.shape and lead != (found.numel(),):
            raise StateError(
                f"a layer got {list(x.shape)} in a call of {list(found.shape)} tokens, so it "
                f"cannot find alora_invocation_tokens. Write target_modules=[…] without this layer."
            )
        return found.to(x.device).view(lead)

    def has_prompt(self, x: Tensor) -> bool:
        """Return whether any token of the call belongs to the prompt.

        Args:
            x: as for `real`.
        """
        return self._prompt_tokens(x) > 0

    def prompt(self, x: Tensor) -> Tensor:
        """Return which tokens are real tokens of the prompt, `[rows, tokens]` bool.

        Args:
            x: as for `real`.

        Raises:
            StateError: as for `real`, or the call has only a part of the prompt.
        """
        prompt = self._prompt_here(x)
        self._check_whole()
        if self._stack.cached and self.has_prompt(x):
            self._refuse_part("the cache")
        return prompt

    def _prompt_here(self, x: Tensor) -> Tensor:
        """Return which tokens of the call are real tokens of the prompt, `[rows, tokens]`."""
        rows, tokens = self._sizes(x)
        inside = torch.arange(tokens, device=x.device) < self._prompt_tokens(x)  # [tokens]
        real = self.real(x)
        return inside.expand(rows, tokens) if real is None else real & inside

    def of_encoder(self) -> StackCall:
        """Return the call for layers that read the encoder's output.

        In a decoder these make the keys and values of cross-attention.
        """
        given = {"attention_mask": self._stack.encoder_mask}
        return StackCall(RecordedCall(self._stack.path, given, None))

    def of_queries(self) -> StackCall:
        """Return the call for a layer that reads the decoder's states beside the encoder's.

        The mask among its own arguments is the encoder's.
        """
        return StackCall(self._stack)

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
            StateError: as for `real`, or the call does not show the end of the prompt.
        """
        stack = self._stack
        bounds = self._bounds(x)
        if bounds is not None:
            starts = bounds[:-1].unsqueeze(1)  # [sequences, 1]
            places, exists = _places(bounds.diff(), first, last)
            return torch.where(exists, starts + places - 1, math.prod(x.shape[:-1]))
        if last:
            self._check_whole()
        rows, tokens = self._sizes(x)
        seen = stack.cached + self._prompt_tokens(x)
        if not stack.cached:
            prompt = self._prompt_here(x)
        elif (whole := self._whole_mask(rows, stack.cached + tokens)) is not None:
            prompt = whole[:, :seen].to(x.device)
        elif stack.mask is None:
            prompt = torch.ones(rows, seen, dtype=torch.bool, device=x.device)
        else:
            raise StateError(unreadable(stack.mask, rows, stack.cached + tokens))
        return _ends(prompt, stack.cached, tokens, first, last)

    def _check_whole(self) -> None:
        """Check that a call of `generate` has the whole prompt."""
        generation = self._stack.generation
        if generation is not None and generation.partial:
            self._refuse_part(f"{generation.partial}=…")

    def _refuse_part(self, why: str) -> None:
        raise StateError(
            f"generate(): with {why} the model gets the prompt in parts, and an active adapter "
            f"needs all of it, for a mean or its last tokens. Leave it out."
        )

    def _bounds(self, x: Tensor) -> Tensor | None:
        """Return the bounds of packed sequences, `[sequences + 1]`; None if none are packed."""
        if (own := bounds_given(self._own)) is not None:
            return own
        stack = self._stack
        shape = x.shape[:-1] if x.is_floating_point() else x.shape
        return stack.bounds if math.prod(shape) == stack.size else None

    def _sizes(self, x: Tensor) -> tuple[int, int]:
        """Return the rows and tokens of an input."""
        shape = x.shape[:-1] if x.is_floating_point() else x.shape
        bounds = self._bounds(x)
        if bounds is not None and bounds is self._stack.bounds:
            raise StateError(packed("an active adapter reads a sequence, as gates do,"))
        if len(shape) < 2 or bounds is not None:
            raise StateError(
                f"a layer got {list(x.shape)}, concatenated sequences, and an active adapter needs "
                f"[rows, tokens, d_model]. Leave out gates and positions, or the layer."
            )
        return shape[0], math.prod(shape[1:])

    def _prompt_tokens(self, x: Tensor) -> int:
        """Return how many of the call's tokens belong to the prompt: the first ones."""
        tokens = math.prod(x.shape[1:-1] if x.is_floating_point() else x.shape[1:])
        return max(tokens - self._stack.later(tokens), 0)

    def remembered(self, owner: object, compute: Callable[[], Tensor]) -> Tensor:
        """Return a tensor that depends only on the prompt; the same in each step of `generate`.

        Args:
            owner: the tensor's owner; it is computed once per owner and `generate`.
            compute: computes the tensor in a call that includes the prompt.
        """
        if self._stack.generation is None:
            return compute()
        self._stack.check_sequence()
        kept = self._stack.generation.tensors
        if owner not in kept:
            kept[owner] = compute()
        return kept[owner]

    def of_part(self, x: Tensor, take: Callable[[Tensor], Tensor], key: object) -> StackCall:
        """Return the call restricted to some of its rows or tokens.

        Args:
            x: the input of the layer, with all rows and tokens.
            take: returns the part of a tensor `[rows, tokens, …]`.
            key: identifies the part within the call.
        """
        return _PartOfCall(self, x, take, key)


def _ends(prompt: Tensor, cached: int, tokens: int, first: int, last: int) -> Tensor:
    """Return the ends of prompts in a call; see `StackCall.prompt_ends`.

    Args:
        prompt: which tokens are real ones of the prompt, `[rows, seen]`, from its first on.
        cached: how many of them are not in the call, but in the cache.
        tokens: of each row in the call.
        first: number of tokens at the start of a prompt.
        last: number at its end.
    """
    rows = prompt.shape[0]
    places, exists = _places(prompt.sum(1), first, last)
    # the n-th real token is where the count of real ones reaches n
    at = torch.searchsorted(prompt.cumsum(1), places) - cached  # [rows, first + last]
    exists = exists & (at >= 0)
    at = at + tokens * torch.arange(rows, device=prompt.device).unsqueeze(1)
    return torch.where(exists, at, rows * tokens)


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


def found_in_all(starts: Tensor, sequence: tuple[int, ...]) -> Tensor:
    """Return where a sequence begins in each row, if it does so in all.

    Args:
        starts: `[rows, 1]`.
        sequence: of tokens.

    Raises:
        StateError: a row does not have it.
    """
    absent = (starts == NEVER).flatten()  # [rows]
    if not has_values(absent) or absent.any():
        where = listing(absent.nonzero().flatten().tolist()) if has_values(absent) else "any"
        raise StateError(
            f"alora_invocation_tokens={list(sequence)}: rows {where} of this call do not have "
            f"them. Write model.generate(…), or pass whole sequences without past_key_values."
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
        return ids.new_full((ids.shape[0], 1), NEVER, dtype=torch.long)
    # token by token: a tensor of them would be copied to the device in each call
    matches = ids[:, :count] == sequence[0]  # [rows, count]
    for place, token in enumerate(sequence[1:], 1):
        matches = matches & (ids[:, place : place + count] == token)
    steps = torch.arange(count, device=ids.device)
    last = torch.where(matches, steps, NO_TOKEN).amax(1, keepdim=True)  # [rows, 1]
    return torch.where(last < 0, NEVER, last)


def grid(value: object) -> Tensor | None:
    """Return a value that is a tensor `[rows, tokens]`; None for any other."""
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


def without_padding(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Return the ids `[rows, tokens]` with `NO_TOKEN` where a mask of their shape is 0."""
    if mask is None or mask.shape != ids.shape:
        return ids
    return ids.masked_fill(mask.to(ids.device) == 0, NO_TOKEN)


class _PartOfCall(StackCall):
    """Some rows or tokens of a call."""

    def __init__(
        self, whole: StackCall, x: Tensor, take: Callable[[Tensor], Tensor], key: object
    ) -> None:
        super().__init__(whole._stack)
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

    def prompt_ends(self, x: Tensor, first: int, last: int) -> Tensor:
        """Return the ends of the prompts of the part."""
        prompt = self.prompt(x)
        return _ends(prompt, 0, prompt.shape[1], first, last)

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

    def of_queries(self) -> StackCall:
        """Return the part of the call without the layer's own arguments."""
        return self._whole.of_queries().of_part(self._x, self._take, self._key)
