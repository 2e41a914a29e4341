"""Batches whose rows use different adapters: what a call of the model does.

The names are checked, rows are counted, and for `Parallel` the batch is repeated. Then a plan that
assigns a composition to each row is active in the calling thread until the call returns. Adapted
layers read the plan and do not count rows themselves.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from adapterzoo.anatomy import HEAD
from adapterzoo.anatomy.tree import parent
from adapterzoo.caches import is_empty
from adapterzoo.composition import BatchSplit, Composition, merged_act, parse
from adapterzoo.composition.compile import join_sites
from adapterzoo.composition.rows import RowMap, SlotRows, has_rows, numbered
from adapterzoo.errors import (
    BatchError,
    CompositionError,
    ConfigError,
    StateError,
    counted,
    listing,
)
from adapterzoo.heads import head_types
from adapterzoo.names import BASE
from adapterzoo.runtime import Plan
from adapterzoo.trunk import Trunk

from .activation import make_plan
from .heads.named import for_rows, for_setup
from .state import AdaptedModel, config_of, is_plain

RowNames: TypeAlias = "Sequence[str | Composition | None]"
TaskIds: TypeAlias = "Tensor | Sequence[int | str | None]"

# inputs with one entry for each row of the batch
_PER_ROW = (
    "input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features",
    "attention_mask", "decoder_input_ids", "decoder_inputs_embeds",
)  # fmt: skip
# inputs without rows, even if their first dimension is as long as the batch
_NO_ROWS = ("cache_position", "logits_to_keep", "num_items_in_batch")
# families with layers whose input has tokens before rows
_TOKENS_FIRST = ("fsmt", "led", "longformer", "xlnet")
# number of cached plans: a server gets the same sets of adapters again and again
_CACHED_PLANS = 64


def plan_of_call(
    model: AdaptedModel,
    inputs: Mapping[str, Any],
    adapter_names: RowNames | None,
    task_ids: TaskIds | None = None,
    one_head: bool = False,
    generates: bool = False,
    copies: int = 1,
) -> tuple[Plan, int]:
    """Return the plan for one call, and how often to repeat its inputs.

    Args:
        model: that is called.
        inputs: by name.
        adapter_names: the adapter of each row; None: those of the active composition.
        task_ids: the task of each row, where the active composition has a `MultiTask`; otherwise
            they have no effect, and a warning says so.
        one_head: whether the caller chooses one head for all rows.
        generates: whether the output has one sequence of tokens for each row.
        copies: number of copies of each row that the call itself makes, as in beam search.

    Raises:
        BatchError: the rows do not fit the batch.
        CompositionError: a row cannot have its composition.
        StateError: `adapter_names` with a merged adapter or inside an `AdapterSetup`.
        UnknownNameError: an adapter is unknown.
    """
    tasks: tuple[int, ...] = ()
    if task_ids is not None or adapter_names is None:
        tasks = _tasks(model, adapter_names, task_ids)
    if adapter_names is not None:
        plan = _plan_of_names(model, adapter_names, one_head)
    else:
        plan = model._active.plan
        if plan.rows is None:
            return plan, 1
    _refuse_recorded(model, plan, inputs)
    rows = cast("RowMap", plan.rows)
    named = None
    if adapter_names is not None:
        named = f"adapter_names=… names {counted(len(adapter_names), 'row')}"
    if isinstance(plan.rows, SlotRows):
        named = f"use(…) names {counted(len(rows.index), 'row')}"
    found = _rows_of_inputs(inputs)
    if is_plain(model):
        # others may be of any shape, such as the time steps of a diffusion model
        found = dict([*found.items()][:1])
    if len(set(found.values())) > 1:
        raise CompositionError(
            f"{named or f'{plan.setup!r} is active'}: the inputs have different numbers of rows "
            f"({', '.join(f'{name}: {count}' for name, count in found.items())})."
        )
    batch = batch_size(inputs)
    count = batch * rows.repeats
    if rows.tasks is not None and len(tasks) != batch:
        raise CompositionError(
            f"{counted(len(tasks), 'task')} for {counted(batch, 'row')}. Write one task for each "
            "row."
        )
    if not batch:
        raise BatchError(f"{named or f'{plan.setup!r} is active'}: the batch has no rows.")
    if count % len(rows.index) or (rows.exact and count != len(rows.index)):
        if named:
            raise BatchError(
                f"{named}: the batch has {counted(batch, 'row')}. Write one name, or None, for "
                "each row."
            )
        legal = len(rows.index) // rows.repeats
        raise BatchError(
            f"{plan.setup!r} is active: its batch_sizes add up to {legal}, and the batch has "
            f"{counted(batch, 'row')}. Give it {counted(legal, 'row')}, or write other batch_sizes."
        )
    # in calls that name rows, or generate, the output has as many rows
    by_task = rows.tasks is not None and rows.repeats == 1 and not rows.exact
    together = adapter_names is not None or generates or by_task
    # the lengths of sequences that cannot be mistaken for a number of rows
    lengths = None
    if config_of(model).model_type not in _TOKENS_FIRST:
        ids = (inputs.get(name) for name in ("input_ids", "decoder_input_ids"))
        shapes = (t.shape for t in ids if isinstance(t, Tensor) and t.dim() > 1)
        lengths = frozenset(shape[-1] for shape in shapes) - {count, count * copies}
    entered = rows.enter(count, together, lengths, tasks)
    trunk = _trunk(model, plan, inputs, batch) if model._adapter_state.shares_trunk else None
    model._active.call.trunk = trunk
    return dataclasses.replace(plan, rows=entered, trunk=trunk), rows.repeats


def _trunk(model: AdaptedModel, plan: Plan, inputs: Mapping[str, Any], batch: int) -> Trunk | None:
    """Return the trunk of a call; None if no rows are equal.

    Args:
        model: that is called.
        plan: for the call.
        inputs: by name, not yet repeated.
        batch: their rows.

    Raises:
        StateError: compiled code cannot compare them.
    """
    rows, unread = cast("RowMap", plan.rows), set(_NO_ROWS)
    labels = {name for cls in head_types.values() for name in cls.label_names}
    if not getattr(config_of(model), "is_encoder_decoder", False):
        unread |= labels
    elif any(isinstance(inputs.get(name), (Mapping, list, tuple)) for name in labels):
        # the decoder reads those of each head
        return None
    numbers: Sequence[int] = range(batch)
    if rows.repeats == 1:
        numbers = _equal_rows([v for n, v in inputs.items() if n not in unread], batch)
    index = (*numbers,) * rows.repeats
    if len({*index}) == len(index):
        return None
    adapted: set[str] = set()
    for path in (*plan.sites, *plan.captures):
        while path and path not in adapted:
            adapted.add(path)
            path = parent(path)
    return Trunk(index, frozenset(adapted))


def _equal_rows(inputs: Sequence[Any], batch: int) -> list[int]:
    """Return a number for each row of a call's inputs; equal rows have equal ones."""
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    with_rows = [t for t in tensors if t.dim() > 0 and t.shape[0] == batch]
    if torch.compiler.is_compiling():
        raise StateError(
            "share_trunk: compiled code cannot see which rows are equal. Write "
            "set_active_adapters(Parallel('a', 'b')), or model.share_trunk(False)."
        )
    # a gradient would reach one of the equal rows alone
    if any(t.requires_grad for t in with_rows):
        return [*range(batch)]
    columns = [t.reshape(batch, -1).unique(dim=0, return_inverse=True)[1] for t in with_rows]
    if not columns:
        return [*range(batch)]
    first = columns[0]
    together = torch.stack([column.to(first.device) for column in columns], 1)  # [batch, inputs]
    return cast("list[int]", together.unique(dim=0, return_inverse=True)[1].tolist())


@contextmanager
def trunk_started(model: AdaptedModel, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Start the trunk of a call, if it has one, for a forward pass.

    Later passes of `generate`, and those that go on from a cache, have rows that differ.

    Args:
        model: that runs.
        inputs: of the pass, by name.
    """
    active = model._active
    plan, generation = active.plan, active.call.generation
    if plan.trunk is None:
        yield
        return
    is_first = (generation is None or generation.new == 0) and is_empty(inputs)
    with active.overridden(dataclasses.replace(plan, trunk=plan.trunk.started(is_first))):
        yield


def _refuse_recorded(model: AdaptedModel, plan: Plan, inputs: Mapping[str, Any]) -> None:
    """Refuse to record the output of a router that runs once for each kind of rows.

    Raises:
        CompositionError: it would be recorded in pieces.
    """
    blocks = [path for path in plan.divisions if plan.mixtures[path] == path]
    if not blocks:
        return
    config = config_of(model)
    records = any(
        getattr(each, "output_router_logits", False)
        for each in (config, getattr(config, "text_config", None))
    )
    if inputs.get("output_router_logits", records):
        raise CompositionError(
            f"{plan.setup!r}: the experts at {blocks[0]!r} run with their router once for each "
            "adapter, so that its outputs would be recorded in pieces. Write "
            "output_router_logits=False, or activate one adapter."
        )


def _tasks(
    model: AdaptedModel, adapter_names: RowNames | None, task_ids: TaskIds | None
) -> tuple[int, ...]:
    """Return the number of each row's task; empty where no tasks are active.

    Raises:
        CompositionError: `task_ids` is missing, or has what is not a task.
    """
    plan = model._active.plan
    tasks = None if plan.rows is None else plan.rows.tasks
    if task_ids is None:
        if tasks is not None:
            raise CompositionError(
                f"{plan.setup!r} needs the task of each row. Write task_ids=[0, 1, …]."
            )
        return ()
    if adapter_names is not None:
        raise CompositionError("adapter_names=… and task_ids=… are both given. Write one of them.")
    if tasks is None:
        warnings.warn(
            f"task_ids=… has no effect: {plan.setup!r} is active, which has no MultiTask. Write "
            f"set_active_adapters(MultiTask('a', 'b')).",
            stacklevel=2,
        )
        return ()
    count = len(tasks.parts)
    found = []
    for task in task_ids.tolist() if isinstance(task_ids, Tensor) else task_ids:
        is_number = isinstance(task, Integral) and not isinstance(task, bool)
        number = int(cast("int", task)) if is_number else tasks.number(task)
        if number is None or not 0 <= number < count:
            names = listing(n for n in tasks.names[0] if n is not None)
            raise CompositionError(
                f"task_ids=…: there is no task {task!r}. Write 0 to {count - 1}, or {names}."
            )
        found.append(number)
    return tuple(found)


def _plan_of_names(model: AdaptedModel, adapter_names: RowNames, one_head: bool) -> Plan:
    state = model._adapter_state
    listed = isinstance(adapter_names, Sequence) and not isinstance(adapter_names, str)
    if not listed or not adapter_names:
        raise CompositionError(
            f"adapter_names={adapter_names!r} is not a list with a name or None for each row. "
            "Write adapter_names=['a', None, 'b']."
        )
    _refuse_names(model, "adapter_names=…")
    given = [parse(name) if isinstance(name, (list, tuple)) else name for name in adapter_names]
    for name in given:
        if name is not None and not isinstance(name, (str, Composition)):
            state.find(name)
    parts, index = numbered([None if name == BASE else name for name in given])
    for part in parts:
        if isinstance(part, Composition) and has_rows(part):
            raise CompositionError(f"{part!r} divides the batch. Write a name, or Stack('a', 'b').")
    plan = _cached_plan(model, parts, BatchSplit(*parts, batch_sizes=1))
    heads, by_part = for_rows(model, parts, one_head)
    return dataclasses.replace(plan, heads=heads, rows=RowMap(index, exact=True, heads=by_part))


def join_plans(plans: Sequence[Plan]) -> Plan:
    """Return the plan of a batch whose rows take different plans, without the rows.

    The adapters are those of the plans, even if the model no longer has them by name.

    Args:
        plans: at least two, one for each part of the rows; each for all of its rows, with the
            adapters of its sites.

    Raises:
        CompositionError: they cannot act in one call.
    """
    first, *others = plans
    if other := next((plan for plan in others if plan.heads != first.heads), None):
        raise CompositionError(
            f"rows of one batch have the heads {first.heads.given!r} and {other.heads.given!r}. "
            "Activate one for all, or run them one after the other."
        )
    captures: dict[str, tuple[str, ...]] = {}
    for plan in plans:
        for source, readers in plan.captures.items():
            captures[source] = tuple(dict.fromkeys((*captures.get(source, ()), *readers)))
    paths = dict.fromkeys(path for plan in plans for path in plan.sites)
    exits = [plan.exit for plan in plans if plan.exit is not None]
    joined = Plan(
        BatchSplit(*(plan.setup for plan in plans), batch_sizes=1),
        first.heads,
        {
            path: join_sites([plan.sites.get(path) for plan in plans], path.startswith(HEAD))
            for path in paths
        },
        captures,
        stacks=frozenset().union(*(plan.stacks for plan in plans)),
        exit=exits[0] if exits else None,
        mixtures={path: m for plan in plans for path, m in plan.mixtures.items()},
    )
    return joined.divided(len(plans))


def plan_of_name(model: AdaptedModel, name: object) -> Plan:
    """Return the plan in which one adapter acts on all rows, with the head of its name.

    Args:
        model: with adapters.
        name: of an adapter, or a composition; None for the base model.

    Raises:
        StateError: an adapter is merged, or an `AdapterSetup` is active here.
        UnknownNameError: an adapter is unknown.
    """
    _refuse_names(model, "adapter_name=…")
    if name is not None and not isinstance(name, (str, list, tuple, Composition)):
        model._adapter_state.find(name)
    setup = parse(None if name == BASE else name)
    plan = _cached_plan(model, ("alone", setup), setup)
    return dataclasses.replace(plan, heads=for_setup(model, setup, None, model._active.heads))


def _refuse_names(model: AdaptedModel, what: str) -> None:
    """Refuse names of adapters where they cannot take the place of what is active.

    Raises:
        StateError: they cannot.
    """
    state, active = model._adapter_state, model._active
    if active.local_plan is not None:
        raise StateError(
            f"{what}: an AdapterSetup holds {active.plan.setup!r}. Leave the block first."
        )
    if state.merged:
        raise StateError(f"{merged_act(state.merged)} on every row. Write reset_adapter() first.")


def _cached_plan(model: AdaptedModel, key: object, setup: Composition | None) -> Plan:
    """Return the plan of a composition, without heads; that of an earlier call if it is cached."""
    plans = model._adapter_state.plans
    plan = plans.get(key)
    if plan is None:
        plan = make_plan(model, setup, []) if setup is not None and setup.flatten() else Plan()
        # in compiled code, each change of the cache would recompile
        if not torch.compiler.is_compiling():
            while len(plans) >= _CACHED_PLANS:
                plans.pop(next(iter(plans)), None)
            plans[key] = plan
    return plan


def repeated(value: Any, times: int, batch: int, name: str = "") -> Any:
    """Return the inputs for `times` copies of the batch, one after the other.

    Args:
        value: a tensor, or a container of tensors.
        times: how many copies.
        batch: rows of the batch; inputs with another number of rows do not change.
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
        names: of positional inputs, in order.
        args: inputs given by position.
        kwargs: inputs given by name.

    Raises:
        ConfigError: there are more inputs than positions, or one is given twice.
    """
    if len(args) > len(names):
        raise ConfigError(
            f"forward(): {len(args)} inputs by position; {listing(names, limit=30)} have one."
        )
    inputs = dict(zip(names, args, strict=False))
    if twice := sorted(inputs.keys() & kwargs.keys()):
        raise ConfigError(f"forward(): {listing(twice)} by position and by name. Write it once.")
    return {**inputs, **kwargs}


def with_batch(names: Sequence[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs of a model; tokens without a batch become a batch of one row.

    Args:
        names: of the base model's inputs, which may have a value for each token.
        inputs: all inputs by name.
    """
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 1:
        return inputs
    given = {n: inputs[n] for n in names if n in inputs and n not in _NO_ROWS}
    tokens = {n: t for n, t in given.items() if isinstance(t, Tensor) and t.shape == ids.shape}
    return {**inputs, **{n: t[None] for n, t in tokens.items()}}  # [1, tokens]


def batch_size(inputs: Mapping[str, Any]) -> int:
    """Return the number of rows of a model's inputs; 1 if it is unknown."""
    return next(iter(_rows_of_inputs(inputs).values()), 1)


def _rows_of_inputs(inputs: Mapping[str, Any]) -> dict[str, int]:
    encoded = inputs.get("encoder_outputs")
    if encoded is not None:
        inputs = {**inputs, "inputs_embeds": encoded[0]}
    named = {n: inputs[n] for n in _PER_ROW if isinstance(inputs.get(n), Tensor)}
    if not named:
        named = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and n not in _NO_ROWS}
    return {name: value.shape[0] for name, value in named.items() if value.dim() > 0}
