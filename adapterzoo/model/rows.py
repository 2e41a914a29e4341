"""Rows of a batch: what the model does before a forward in which rows take different adapters.

All of it happens where the model is called: the names are checked, the batch is counted and, for
`Parallel`, repeated; then a plan that says which row takes what holds for the calling thread until
the call returns. The adapted layers ask that plan and count nothing themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo.composition import BatchSplit, Composition, RowMap, has_rows, numbered, parse
from adapterzoo.errors import CompositionError, ConfigError, StateError, listing
from adapterzoo.runtime import Plan

from .adapters import AdaptersMixin

RowNames: TypeAlias = "Sequence[str | Composition | None]"

BASE = "__base__"
"""What PEFT writes for a row without adapter; None says the same."""

# inputs with one entry for each row of the batch, whichever of them a model takes
_PER_ROW = (
    "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features",
    "attention_mask", "decoder_input_ids", "decoder_inputs_embeds",
)  # fmt: skip
# what has no rows, even where its first dimension is as long as the batch
_NO_ROWS = ("cache_position", "logits_to_keep", "num_items_in_batch")
# families with layers that get tokens before rows
_TOKENS_FIRST = ("fsmt", "led", "longformer", "xlnet")
# mixed plans that are kept: a server meets the same sets of adapters again and again
_KEPT_PLANS = 64


class RowsMixin(AdaptersMixin):
    """What `forward` and `generate` do with `adapter_names`, `BatchSplit` and `Parallel`."""

    def _rows_start(self, adapter_names: RowNames | None) -> bool:
        """Whether a call has rows to tell apart, and is the one that must do it."""
        rows = self._active.plan.rows
        return adapter_names is not None or not (rows is None or rows.entered)

    def _rows_plan(
        self,
        inputs: Mapping[str, Any],
        adapter_names: RowNames | None,
        call: str,
        one_head: bool = False,
        copies: int = 1,
    ) -> tuple[Plan, int]:
        """The plan for one call, and how often its inputs must be repeated.

        Args:
            inputs: of the model, as they were given.
            adapter_names: the adapter of each row; None: as the active composition says.
            call: "forward" or "generate", for messages.
            one_head: whether the caller says which head answers all rows.
            copies: of each row that the call makes by itself, as beam search does.

        Raises:
            CompositionError: the rows do not fit the batch.
            StateError: an adapter is merged, or an `AdapterSetup` says already what acts.
            UnknownNameError: there is no adapter of a name.
        """
        if adapter_names is not None:
            plan = self._plan_of_names(adapter_names, call, one_head)
            what = f"{call}(adapter_names=…) names {len(adapter_names)} rows"
        else:
            plan = self._active.plan
            what = f"{call}() with {plan.setup!r} active"
        rows = cast("RowMap", plan.rows)
        # whoever names rows, and whoever generates, gets an answer of as many rows
        together = adapter_names is not None or call == "generate"
        batch = _batch_of(inputs, what)
        count = batch * rows.repeats
        if not count or count % len(rows.index) or (rows.exact and count != len(rows.index)):
            legal = len(rows.index) // rows.repeats
            raise CompositionError(
                f"{what}: the batch has {batch} rows, legal are {legal}. "
                f"Write {'one name, or None, for each row' if adapter_names else 'other sizes'}."
            )
        entered = rows.enter(count, together, self._lengths(inputs, count, copies))
        return dataclasses.replace(plan, rows=entered), rows.repeats

    def _lengths(self, inputs: Mapping[str, Any], count: int, copies: int) -> frozenset[int] | None:
        """Lengths of the inputs' sequences that no layer can have as its number of rows."""
        if cast("Any", self).config.model_type in _TOKENS_FIRST:
            return None
        ids = (inputs.get(name) for name in ("input_ids", "decoder_input_ids"))
        found = {t.shape[-1] for t in ids if isinstance(t, Tensor) and t.dim() > 1}
        # a batch as long as its sequences is taken for one in the usual order
        return frozenset(found - {count, count * copies})

    def _overridden(self, plan: Plan) -> AbstractContextManager[None]:
        return self._active.overridden(plan)

    def _plan_of_names(self, adapter_names: RowNames, call: str, one_head: bool) -> Plan:
        listed = isinstance(adapter_names, Sequence) and not isinstance(adapter_names, str)
        if not listed or not adapter_names:
            raise CompositionError(
                f"{call}(adapter_names={adapter_names!r}): it is a list with one name, or None for "
                f"the base model, for each row. Write adapter_names=['a', None, 'b']."
            )
        if self._active.held is not None:
            raise StateError(
                f"{call}(adapter_names=…): an AdapterSetup of this thread says already what acts, "
                f"{self._active.plan.setup!r}. Leave the 'with AdapterSetup(…)' block first."
            )
        if self._adapter_state.merged:
            raise StateError(
                f"{call}(adapter_names=…): {listing(self._adapter_state.merged)} is merged into "
                f"the base weights and would act on every row. Write reset_adapter() first."
            )
        given = [parse(name) if isinstance(name, (list, tuple)) else name for name in adapter_names]
        for name in given:
            if name is not None and not isinstance(name, (str, Composition)):
                self._find(name, f"{call}(adapter_names=…)")
        parts, index = numbered([None if name == BASE else name for name in given])
        default = self._active.default.plan
        plan = self._adapter_state.plans.get(parts)
        if plan is None:
            plan = self._compile_parts(parts, call)
        # what a compiler traces is part of its graph, and would trace anew what has changed
        if parts not in self._adapter_state.plans and not torch.compiler.is_compiling():
            while len(self._adapter_state.plans) >= _KEPT_PLANS:
                del self._adapter_state.plans[next(iter(self._adapter_state.plans))]
            self._adapter_state.plans[parts] = plan
        own = self._own_heads(parts)
        if None in own and any(own) and len(default.heads) != 1 and not one_head:
            raise StateError(
                f"{call}(adapter_names=…): {parts[own.index(None)]!r} has no head of its name, and "
                f"the active heads are {listing(default.heads)}, not one that answers such rows. "
                f"Write model.active_head = {next(filter(None, own))!r}, or head=… for all rows."
            )
        heads = self._heads_of_parts(parts, default.heads)
        by_part = heads if any(own) else ()
        return dataclasses.replace(plan, heads=heads, rows=RowMap(index, exact=True, heads=by_part))

    def _compile_parts(self, parts: tuple[Any, ...], call: str) -> Plan:
        for part in parts:
            if isinstance(part, Composition):
                if has_rows(part):
                    raise CompositionError(
                        f"{call}(adapter_names=…): {part!r} divides the batch, and it is given to "
                        f"one row. Write a name, or Stack('a', 'b')."
                    )
                for name in part.flatten():
                    self._find(name, f"{call}(adapter_names=…)")
                _check_row(part, call)
            elif part is not None:
                self._find(part, f"{call}(adapter_names=…)")
        setup = BatchSplit(*parts, batch_sizes=1)
        if not setup.flatten():
            return Plan()
        return self.make_plan(setup, [])


def _check_row(part: Composition, call: str) -> None:
    try:
        BatchSplit(part, batch_sizes=1)
    except CompositionError as error:
        # it speaks of a BatchSplit that nobody wrote
        raise CompositionError(
            f"{call}(adapter_names=…): {part!r} cannot be given to one row. Names can, and Stack, "
            f"Split and Average of names. Write a name, or Stack('a', 'b')."
        ) from error


def repeated(value: Any, times: int, batch: int, name: str = "") -> Any:
    """The inputs for `times` copies of the batch, one after the other.

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
    """The inputs of a model, all of them by name.

    Args:
        names: of those that have a position, in order.
        args: what was given by position.
        kwargs: what was given by name.

    Raises:
        ConfigError: more inputs by position than have one, or one by position and by name.
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
    """The number of rows of a model's inputs; 1 where nothing tells."""
    rows = _rows_of_inputs(inputs)
    return next(iter(rows.values()), 1)


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
            f"{what}: it cannot be told which rows are meant, the inputs have different numbers of "
            f"them ({shown}). Give inputs of equally many rows, or activate one adapter."
        )
    return batch_size(inputs)
