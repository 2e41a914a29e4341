"""Batches whose rows take different adapters: what happens where the model is called.

The names are checked, the batch is counted and, for `Parallel`, repeated; then a plan that assigns
a composition to each row is active in the calling thread until the call returns. The adapted layers
ask that plan and count nothing themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo.composition import BatchSplit, Composition, RowMap, has_rows, numbered, parse
from adapterzoo.errors import BatchError, CompositionError, ConfigError, StateError, listing
from adapterzoo.runtime import Plan

from .activation import make_plan
from .state import AdaptedModel

RowNames: TypeAlias = "Sequence[str | Composition | None]"

BASE = "__base__"
"""PEFT's name for a row without an adapter; None means the same."""

# possible inputs of models with one entry for each row of the batch
_PER_ROW = (
    "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features",
    "attention_mask", "decoder_input_ids", "decoder_inputs_embeds",
)  # fmt: skip
# inputs without rows, even if their first dimension is as long as the batch
_NO_ROWS = ("cache_position", "logits_to_keep", "num_items_in_batch")
# families with layers whose input has tokens before rows
_TOKENS_FIRST = ("fsmt", "led", "longformer", "xlnet")
# how many mixed plans are kept: a server sees the same sets of adapters again and again
_KEPT_PLANS = 64


def starts(model: AdaptedModel, adapter_names: RowNames | None) -> bool:
    """Return whether a call has rows to tell apart, and is the outermost one that does it."""
    rows = model._active.plan.rows
    return adapter_names is not None or not (rows is None or rows.entered)


def plan_of_call(
    model: AdaptedModel,
    inputs: Mapping[str, Any],
    adapter_names: RowNames | None,
    one_head: bool = False,
    generates: bool = False,
    copies: int = 1,
) -> tuple[Plan, int]:
    """Return the plan for one call, and how often its inputs must be repeated.

    Args:
        model: that is called.
        inputs: as they were given.
        adapter_names: the adapter of each row; None: those of the active composition.
        one_head: whether the caller chooses one head for all rows.
        generates: whether the output has one sequence of tokens for each row.
        copies: of each row that the call itself makes, as beam search does.

    Raises:
        CompositionError: the rows do not fit the batch.
        StateError: an adapter is merged, or an `AdapterSetup` is in force.
        UnknownNameError: there is no adapter of a name.
    """
    if adapter_names is not None:
        plan = _plan_of_names(model, adapter_names, one_head)
        what = f"adapter_names=… names {len(adapter_names)} rows"
    else:
        plan = model._active.plan
        what = f"{plan.setup!r} is active"
    rows = cast("RowMap", plan.rows)
    batch = _batch_of(inputs, what)
    count = batch * rows.repeats
    if not count or count % len(rows.index) or (rows.exact and count != len(rows.index)):
        legal = len(rows.index) // rows.repeats
        raise BatchError(
            f"{what}: the batch has {batch} rows, legal are {legal}. "
            f"Write {'one name, or None, for each row' if adapter_names else 'other sizes'}."
        )
    # the output of a call that names rows, or generates, has as many rows
    together = adapter_names is not None or generates
    entered = rows.enter(count, together, _lengths(model, inputs, count, copies))
    return dataclasses.replace(plan, rows=entered), rows.repeats


def _lengths(
    model: AdaptedModel, inputs: Mapping[str, Any], count: int, copies: int
) -> frozenset[int] | None:
    """Return the lengths of sequences that no layer can have as its number of rows."""
    if model.config.model_type in _TOKENS_FIRST:
        return None
    ids = (inputs.get(name) for name in ("input_ids", "decoder_input_ids"))
    found = {t.shape[-1] for t in ids if isinstance(t, Tensor) and t.dim() > 1}
    # a batch as long as its sequences is taken for one in the usual order
    return frozenset(found - {count, count * copies})


def _plan_of_names(model: AdaptedModel, adapter_names: RowNames, one_head: bool) -> Plan:
    state, active = model._adapter_state, model._active
    listed = isinstance(adapter_names, Sequence) and not isinstance(adapter_names, str)
    if not listed or not adapter_names:
        raise CompositionError(
            f"adapter_names={adapter_names!r}: it is a list with one name, or None for the base "
            f"model, for each row. Write adapter_names=['a', None, 'b']."
        )
    if active.held is not None:
        raise StateError(
            f"adapter_names=…: an AdapterSetup of this thread is already active, "
            f"{active.plan.setup!r}. Leave the 'with AdapterSetup(…)' block first."
        )
    if state.merged:
        raise StateError(
            f"adapter_names=…: {listing(state.merged)} is merged into the base weights and would "
            f"act on every row. Write reset_adapter() first."
        )
    given = [parse(name) if isinstance(name, (list, tuple)) else name for name in adapter_names]
    for name in given:
        if name is not None and not isinstance(name, (str, Composition)):
            state.find(name)
    parts, index = numbered([None if name == BASE else name for name in given])
    plan = state.plans.get(parts) or _compiled(model, parts)
    # a compiler would trace anew after each change of the cache
    if parts not in state.plans and not torch.compiler.is_compiling():
        while len(state.plans) >= _KEPT_PLANS:
            del state.plans[next(iter(state.plans))]
        state.plans[parts] = plan
    heads, by_part = model._head_strategy.for_rows(parts, one_head)
    return dataclasses.replace(plan, heads=heads, rows=RowMap(index, exact=True, heads=by_part))


def _compiled(model: AdaptedModel, parts: tuple[Any, ...]) -> Plan:
    for part in parts:
        if isinstance(part, Composition):
            if has_rows(part):
                raise CompositionError(
                    f"adapter_names=…: {part!r} divides the batch, and it is given to one row. "
                    f"Write a name, or Stack('a', 'b')."
                )
            _check_row(part)
    setup = BatchSplit(*parts, batch_sizes=1)
    return make_plan(model, setup, []) if setup.flatten() else Plan()


def _check_row(part: Composition) -> None:
    try:
        BatchSplit(part, batch_sizes=1)
    except CompositionError as error:
        # that message names a BatchSplit that the user did not write
        raise CompositionError(
            f"adapter_names=…: {part!r} cannot be given to one row. Names can, and Stack, Split "
            f"and Average of names. Write a name, or Stack('a', 'b')."
        ) from error


def repeated(value: Any, times: int, batch: int, name: str = "") -> Any:
    """Return the inputs for `times` copies of the batch, one after the other.

    Args:
        value: a tensor, or a container of tensors.
        times: how many copies.
        batch: rows of the batch; what has another number of rows stays as it is.
        name: of the input.
    """
    if isinstance(value, Tensor):
        if name in _NO_ROWS or value.dim() == 0 or value.shape[0] != batch:
            return value
        return value.repeat(times, *(1 for _ in value.shape[1:]))  # [times · batch, …]
    if isinstance(value, Mapping):
        made = {key: repeated(v, times, batch, key) for key, v in value.items()}
        return made if type(value) is dict else type(value)(**made)
    if isinstance(value, (tuple, list)):
        return type(value)(repeated(v, times, batch) for v in value)
    return value


def named_inputs(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the inputs of a model, all of them by name.

    Args:
        names: of those that have a position, in order.
        args: what was given by position.
        kwargs: what was given by name.

    Raises:
        ConfigError: there are more inputs than positions, or one is given twice.
    """
    if len(args) > len(names):
        raise ConfigError(
            f"forward(): {len(args)} inputs are given by position and {len(names)} have one: "
            f"{listing(names, limit=30)}. Write the others by name."
        )
    inputs = dict(zip(names, args, strict=False))
    if twice := sorted(inputs.keys() & kwargs.keys()):
        raise ConfigError(f"forward(): {listing(twice)} by position and by name. Write it once.")
    return {**inputs, **kwargs}


def batch_size(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a model's inputs; 1 where nothing tells."""
    return next(iter(_rows_of_inputs(inputs).values()), 1)


def _rows_of_inputs(inputs: Mapping[str, Any]) -> dict[str, int]:
    encoded = inputs.get("encoder_outputs")
    if encoded is not None:
        inputs = {**inputs, "inputs_embeds": encoded[0]}
    named = {n: inputs[n] for n in _PER_ROW if isinstance(inputs.get(n), Tensor)}
    if not named:
        named = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and n not in _NO_ROWS}
    return {name: value.shape[0] for name, value in named.items() if value.dim() > 0}


def _batch_of(inputs: Mapping[str, Any], what: str) -> int:
    rows = _rows_of_inputs(inputs)
    if len(set(rows.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in rows.items())
        raise CompositionError(
            f"{what}: the inputs have different numbers of rows "
            f"({shown}). Pass inputs with the same number of rows, or activate one adapter."
        )
    return batch_size(inputs)
