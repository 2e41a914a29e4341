"""Tokens that adapters add to the sequences of a call, and the position numbers that they change.

The module called first, the whole model or an encoder in it, gets longer sequences: each added
token has a placeholder, with an entry in the mask, positions, types and labels. The adapter inserts
its values at the place of `joins`: at the token table, or at the output of the embedding module,
which is called with the model's own tokens, so their positions, types and norms do not change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.anatomy.tree import below
from adapterzoo.caches import CACHES, cached_tokens
from adapterzoo.call import NO_TOKEN, Generation, RecordedCall, grid
from adapterzoo.composition.compile import evaluate
from adapterzoo.composition.prompts import Joined, Prompts
from adapterzoo.composition.rows import RowMap
from adapterzoo.contracts import PromptAdapter
from adapterzoo.errors import CompositionError, StateError
from adapterzoo.masks import bounds_in, packed
from adapterzoo.runtime import ActiveState, CallContext, Frame

from .adapted import Adapted, acting, adapters_of, shared_of
from .layers import LayerCall

_IGNORED = -100
# arguments of position tables: the number of cached tokens
_COUNTS = "cache_length", "past_key_values_length"
_NO_TOKENS = (*CACHES, "encoder_outputs", "input_ids", "inputs_embeds", "attention_mask")

# prefixes of arguments that belong to other inputs, which may be as long as the tokens
_OF_OTHERS = "decoder_", "pixel_"


def join(
    prompts: Prompts,
    rows: RowMap | None,
    path: str,
    given: Mapping[str, Any],
    generation: Generation | None,
) -> tuple[Joined | None, dict[str, Any]]:
    """Make room for added tokens in the arguments of a call.

    Args:
        prompts: the tokens that the plan adds.
        rows: the part of the composition for each row; None if all rows take all of it.
        path: path of the called module, which has the stack; that of the base model for the whole
            model.
        given: arguments of the call, by name.
        generation: the running `generate`, None outside of it.

    Returns:
        The longer sequences, or None if the call does not take the tokens; and the arguments.

    Raises:
        CompositionError: rows get different numbers of tokens, which the model cannot handle.
        StateError: the mask does not show which tokens are real, or there are too many tokens.
    """
    tokens = prompts.tokens
    encoded = given.get("encoder_outputs")
    if tokens.is_encoder and encoded is not None:
        return _after_encoder(prompts, rows, given, encoded[0])
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    t = embeds if ids is None else ids
    if t is None and tokens.table is None:
        first = next(v for v in given.values() if isinstance(v, Tensor))
        joined = Joined(prompts, _index(rows, first.shape[0]))
        _check_even(joined, "have no mask")
        return joined, dict(given)
    if not isinstance(t, Tensor) or t.dim() != (2 if t is ids else 3):
        # an inner model gets the tokens as rows
        return None, {}
    if generation is None and bounds_in(given) is not None:
        raise StateError(packed(f"{_names(prompts)} adds its tokens"))
    generates = generation is not None
    cached = 0
    if not tokens.is_encoder:
        found = cached_tokens(given)
        cached = found or 0
        # without a cache, each step of `generate` has all earlier tokens
        new = generation.new if generation is not None and not cached else None
        if found is None or (new and t.shape[1] <= new):
            raise StateError(
                "an adapter adds tokens at the start of a sequence, but this model does not count "
                "the earlier tokens in its cache. Write use_cache=False."
            )
    joined = Joined(prompts, _index(rows, t.shape[0]), adds=not cached)
    mask = _mask(given)
    own = t.shape[1] + max(cached - joined.count, 0)
    first_filler = generates and not tokens.is_encoder
    if mask is not None and mask.shape[1] != own:
        raise StateError(
            f"attention_mask={list(mask.shape)}: pass a mask [batch, {own}] of the model's own "
            f"tokens, without the {joined.count} that {_names(prompts)} adds."
        )
    if cached and cached < joined.count:
        raise StateError(
            f"past_key_values was made without the {joined.count} tokens that {_names(prompts)} "
            f"adds. Start with an empty cache."
        )
    joined.lay_out(t.shape[0], own, mask, t.device, first_filler)
    if not tokens.is_encoder and not joined.is_even:
        # padding in some rows must not change the positions of their tokens
        if not generates and not joined.adds:
            _check_even(joined, "continue a cache whose rows are padded at the end. Use generate")
        if generates and tokens.positions is not None and given.get("position_ids") is None:
            _check_even(joined, "come without position_ids")
    changed = dict(given)
    if (wide := joined.mask()) is not None:
        changed["attention_mask"] = wide
    positions = given.get("position_ids")
    shifted = prompts.joins == "inputs" or not tokens.embeds_positions
    if positions is not None and (shifted or not cached):
        if cached:
            changed["position_ids"] = joined.later_positions(positions)
        else:
            changed["position_ids"] = joined.positions(positions, shifted=shifted)
    if cached:
        return joined, changed
    if ids is not None:
        changed["input_ids"] = joined.extended(ids, prompts.filler)
    if embeds is not None:
        changed["inputs_embeds"] = joined.extended(embeds, 0.0)
    for name, value in given.items():
        if name not in (*_NO_TOKENS, "position_ids") and not name.startswith(_OF_OTHERS):
            changed[name] = _extended(joined, name, value, t.shape[:2])
    return joined, changed


def _index(rows: RowMap | None, count: int) -> tuple[int, ...] | None:
    return None if rows is None else rows.layout(count).index


def _names(prompts: Prompts) -> str:
    names = dict.fromkeys(added.key.name for part in prompts.parts for added in part)
    return ", ".join(map(repr, names))


def _mask(given: Mapping[str, Any]) -> Tensor | None:
    mask = given.get("attention_mask")
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2):
        return mask
    raise StateError(
        "an active adapter adds tokens to each row: pass attention_mask [batch, tokens] of 0 and "
        "1; in generate, leave cache_implementation out."
    )


def _check_even(joined: Joined, why: str) -> None:
    if len({joined.prompts.length(part) for part in range(len(joined.prompts.parts))}) > 1:
        raise CompositionError(
            f"the prompts of {_names(joined.prompts)} have different lengths, and the inputs of "
            f"this model {why}. Call it with the rows of one prompt at a time."
        )


def _extended(joined: Joined, name: str, value: Any, shape: torch.Size) -> Any:
    """Return an argument with entries for added tokens, if it has one for each token."""
    # outputs of transformers are dicts too
    if type(value) is dict:
        return {key: _extended(joined, name, v, shape) for key, v in value.items()}
    if not isinstance(value, Tensor) or value.is_floating_point():
        return value
    if name in joined.prompts.places and value.shape[:1] == shape[:1]:
        return joined.places_of(value)
    is_label = "label" in name
    if is_label and joined.prompts.tokens.is_encoder:
        # labels of the decoder
        return value
    return (
        joined.extended(value, _IGNORED if is_label else 0) if value.shape[:2] == shape else value
    )


def _after_encoder(
    prompts: Prompts, rows: RowMap | None, given: Mapping[str, Any], hidden: Tensor
) -> tuple[Joined | None, dict[str, Any]]:
    """Return the arguments of a decoder with the mask of the encoder's output extended."""
    mask = _mask(given)
    joined = Joined(prompts, _index(rows, hidden.shape[0]), adds=False)
    tokens = hidden.shape[1] - joined.count
    if tokens < 0 or (mask is not None and mask.shape[1] != tokens):
        return None, {}
    joined.lay_out(hidden.shape[0], tokens, mask, hidden.device)
    return joined, {**given, "attention_mask": joined.mask()}


def entered(
    module: nn.Module, path: str, joined: Joined, context: CallContext, given: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments with tokens added to embeddings that the caller passed.

    Args:
        module: the module that is called.
        path: its path.
        joined: the longer sequences.
        context: the model's context.
        given: arguments of the call, by name.
    """
    prompts, table = joined.prompts, joined.prompts.tokens.table
    at_stack = path == prompts.tokens.stack and joined.adds and not joined.is_called
    if prompts.joins != "inputs" or table is None or not at_stack:
        return given
    layer = module.get_submodule(table.removeprefix(f"{path}.") if path else table)
    adapters = adapters_of(layer)
    base = LayerCall(layer, lambda x: x, context=context)
    embeds = given["inputs_embeds"]
    for key in dict.fromkeys(added.key for part in prompts.parts for added in part):
        parts = (m for m in adapters[key.name].modules() if isinstance(m, PromptAdapter))
        adapter = next(m for m in parts if m.shared_key == key)
        embeds = joined.entered(embeds, key, adapter.prompt(base))
    return {**given, "inputs_embeds": embeds}


class AdaptedEmbeddings(Adapted):
    """Mixed into the class of an embedding module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the model's own tokens, and add the tokens of adapters."""
        active, plan, site = self._planned()
        joined = active.call.joined
        if joined is None or site is None or joined.prompts.joins != "embeddings":
            return super().forward(*args, **kwargs)
        if not joined.adds:
            return super(Adapted, self).forward(*args, **kwargs)
        # the caller tells layers apart by the first argument: use one that exists
        kwargs = dict(sorted(kwargs.items(), key=lambda item: not isinstance(item[1], Tensor)))
        plain = functools.partial(_own, super(Adapted, self).forward, joined)
        base = LayerCall(self, plain, args, kwargs, None, active.call)
        x = args[0] if args else next(iter(kwargs.values()))
        return base.pack(evaluate(*acting(self, site), x, base, plan.rows))


def _own(plain: Callable[..., Any], joined: Joined, *args: Any, **kwargs: Any) -> Any:
    """Return the module's output for the model's own tokens, with room for the added ones."""

    def cut(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == joined.length
        return joined.own(value) if wide else value

    if joined.is_laid_out:
        out = plain(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
    else:
        out = plain(*args, **kwargs)
    y = out[0] if isinstance(out, tuple) else out
    known = joined.length - joined.count if joined.is_laid_out else None
    if not isinstance(y, Tensor) or y.dim() != 3 or known not in (None, y.shape[1]):
        raise StateError(
            f"the embedding module returned {list(getattr(y, 'shape', ()))}, but tokens join "
            f"[rows, {known or 'tokens'}, d]. Write joins='inputs', or use another method."
        )
    if known is None:
        joined.lay_out(y.shape[0], y.shape[1], None, y.device)
    wide = joined.extended(y, 0.0)
    return (wide, *out[1:]) if isinstance(out, tuple) else wide


NUMBERS = "position_ids"
"""The argument for the number of cached tokens."""


class AdaptedPositions(Adapted):
    """Mixed into the class of a module whose position numbers adapters change."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the position numbers of the active adapters."""
        active, plan, site = self._planned()
        plain = super(Adapted, self).forward
        if site is None:
            return plain(*args, **kwargs)
        given = {**dict(zip(self._positions, args, strict=False)), **kwargs}
        # a table gives embeddings, to which other adapters may add; a rotation gives none
        is_table = isinstance(self, nn.Embedding)
        if is_table and NUMBERS in self._positions:
            is_table = False
            if given.get(NUMBERS) is None:
                given = {**given, NUMBERS: self._counted(given)}
        name = NUMBERS if NUMBERS in given else next(iter(given))
        numbers = given[name]
        if plan.rows is not None and numbers.shape[0] == 1:
            numbers = numbers.expand(len(plan.rows.index), -1)  # [rows, tokens]
        read = plain if is_table else lambda numbers: numbers
        base = LayerCall(self, read, context=active.call)
        found = evaluate(*acting(self, site), numbers, base, plan.rows)
        return found if is_table else plain(**{**given, name: found})

    def _counted(self, given: Mapping[str, Any]) -> Tensor:
        """Return the numbers `[tokens]` that a table would count from the cache's length.

        Raises:
            CompositionError: rows of the batch have different adapters, hence different numbers.
        """
        _, plan, _ = self._planned()
        if plan.rows is not None:
            raise CompositionError(
                f"a {type(self).__name__} counts one position for all rows. Pass position_ids."
            )
        first = next(iter(given.values()))
        start = next((given[name] for name in _COUNTS if name in given), 0)
        return torch.arange(start, start + first.shape[1], device=first.device)


def counted(given: Mapping[str, Any], around: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's arguments with positions that start at the first real token of each row.

    Rotations depend only on distances, so padding at the start changes nothing between tokens, but
    a prefix keeps its position. Numbers from the caller are kept.

    Args:
        given: arguments of the model that numbers the tokens of its stack, by name.
        around: those of the outermost model, which may have numbered them already.
    """
    t = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
    if t is None or around.get(NUMBERS) is not None:
        return given
    tokens, before = t.shape[1], cached_tokens(given) or 0
    masks = (given.get("attention_mask"), around.get("attention_mask"))
    mask = next((m for m in masks if isinstance(m, Tensor) and m.dim() == 2), None)
    numbers = given.get(NUMBERS)
    if numbers is None:
        numbers = torch.arange(before, before + tokens, device=t.device)[None]  # [1, tokens]
    # three numbers per token are counted by the mask
    if mask is None or mask.shape[1] != before + tokens or numbers.dim() != 2:
        return given
    first = (mask != 0).int().argmax(1, keepdim=True)  # [rows, 1]
    start = numbers[:, :1]
    if before:
        shift = torch.minimum(first, start - before + first)
    else:
        shift = numbers.expand(len(first), -1).gather(1, first) - start
    numbers = (numbers - shift.clamp(min=0)).clamp(min=0)  # [rows, tokens]
    return {**given, NUMBERS: numbers}


class AdaptedStack(Adapted):
    """Mixed into the class of an encoder or decoder whose calls adapters read."""

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return a forward with the original signature, which `generate` inspects."""

        @functools.wraps(plain.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return AdaptedStack.forward(self, *args, **kwargs)

        return {"forward": forward}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; its arguments are recorded while it runs."""
        link = self._link
        if link.path not in link.active.plan.stacks:
            return super().forward(*args, **kwargs)
        call = recorded_call(self, self._positions, link.active, link.path, args, kwargs)
        with call as (values, named):
            return super().forward(*values, **named)


@contextmanager
def recorded_call(
    module: nn.Module,
    positions: tuple[str, ...],
    active: ActiveState,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    with_head: bool = False,
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Record the arguments of an encoder or decoder for its adapters while it runs.

    The outermost of several such calls makes room for the tokens that adapters add.

    Args:
        module: the module that is called.
        positions: names of the arguments of its forward that can be given by position.
        active: the model's `Active`.
        path: path of the module below the base model.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.
        with_head: whether the module is a model around the one at the path.

    Yields:
        The arguments to call it with.

    Raises:
        StateError: the call cannot hold the tokens that adapters add.
    """
    context, plan = active.call, active.plan
    given = {**dict(zip(positions, args, strict=False)), **kwargs}
    prompts, joined = plan.prompts, context.joined
    is_first = prompts is not None and joined is None and below(prompts.tokens.stack, path)
    if not context.stacks:
        context.has_joined = False
    if is_first and prompts is not None:
        joined, changed = join(prompts, plan.rows, path, given, context.generation)
        if joined is not None:
            args, kwargs, given, context.has_joined = (), changed, changed, True
    shared = None if path else functools.partial(shared_of, module)
    adding = joined if joined is not None and joined.adds else None
    places = None
    if adding is not None and below(adding.prompts.tokens.stack, path):
        places = adding.at
    ids = grid(given.get("input_ids"))
    outer = context.stacks[-1].call if context.stacks else None
    if outer is not None and outer.ids is not None:
        # a decoder has other ones than its encoder
        ids = outer.ids if ids is None or ids.shape == outer.ids.shape else ids
    elif outer is None and ids is not None and adding is not None and adding.is_laid_out:
        ids = adding.extended(adding.own(ids), NO_TOKEN)
    call = RecordedCall(path, given, context.generation, places, ids, outer)
    context.stacks.append(Frame(call, shared, module, joined))
    try:
        if joined is not None and not with_head and given.get("inputs_embeds") is not None:
            given = entered(module, path, joined, context, given)
            args, kwargs = (), given
        if path in plan.counted and not with_head and NUMBERS in positions:
            args, kwargs = (), counted(given, call.outermost)
        yield args, kwargs
        is_missed = is_first and outer is None and not context.has_joined
        # a call without arguments, around a block called on its own, has no sequences
        if prompts is not None and is_missed and given:
            raise StateError(
                f"{_names(prompts)} adds tokens, and no module of this call gets them. "
                "Pass input_ids [batch, tokens], or activate an adapter of another method."
            )
        adds = is_first and joined is not None and joined.adds and joined.count > 0
        if joined is not None and adds and not joined.is_called:
            at = joined.prompts.tokens.table or joined.prompts.tokens.embeddings
            raise StateError(
                f"{_names(joined.prompts)} adds tokens, but the model has embedded its own without "
                f"calling {at!r}. Activate an adapter of another method."
            )
    finally:
        context.stacks.pop()
        if call.generation is not None:
            call.generation.new = None
