"""Batches whose rows go to different heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo.composition import ActiveHeads, RowMap
from adapterzoo.errors import CompositionError, ConfigError, listing
from adapterzoo.model.batches import repeated

from .outputs import MultiHeadOutput


def head_rows(
    heads: ActiveHeads, rows: RowMap | None, together: bool
) -> tuple[tuple[str, ...], RowMap] | None:
    """Return each head once, and the rows of each; None if every head gets all rows.

    Args:
        heads: one for each part of the batch, one for each copy of it, or any number for all rows.
        rows: of the batch, as the adapters divide it.
        together: whether to join the outputs of a `BatchSplit` of heads.

    Raises:
        CompositionError: `Parallel` has repeated the batch, and the number of heads does not fit.
    """
    names, index = heads.names, heads.rows
    if index is not None:
        copies = 1 if rows is None else rows.copies
        rows = RowMap(index, exact=True, together=together, copies=copies, entered=True)
    elif rows is None or rows.heads not in (None, names):
        return None
    elif rows.copies > 1 and len(names) > 1 and len(names) != rows.parts:
        rows = _copies(names, rows)
    elif rows.parts < 2 or len(names) != rows.parts:
        return None
    # a batch may lack rows of some tasks
    present = sorted(set(rows.index))
    answering = [names[part] for part in present]
    if not rows.together:
        numbers = {part: number for number, part in enumerate(present)}
    else:
        answering = list(dict.fromkeys(answering))
        numbers = {part: answering.index(names[part]) for part in present}
    return tuple(answering), rows.renumbered([numbers.get(p, 0) for p in range(len(names))])


def _copies(names: Sequence[str], rows: RowMap) -> RowMap:
    """Return the rows of heads of which each reads one copy of the batch."""
    if len(names) != rows.copies:
        legal = " or ".join(map(str, sorted({1, rows.copies, rows.parts})))
        raise CompositionError(
            f"Parallel: the heads {listing(names)} are active, and they read {rows.copies} copies "
            f"of the batch. Write active_head = […] with {legal} names."
        )
    batch = len(rows.index) // rows.copies
    return replace(rows, index=tuple(row // batch for row in range(len(rows.index))), _layouts={})


def outputs_of(part: int, rows: RowMap, outputs: ModelOutput) -> ModelOutput:
    """Return the base model's outputs for the rows of one part.

    Args:
        part: its number.
        rows: of the batch.
        outputs: of the base model. A cache cannot be divided: it stays whole if the heads' outputs
            are joined, else it is left out.
    """
    taken: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            taken[name] = rows.take(part, value) if value.dim() else value
        elif isinstance(value, tuple):
            taken[name] = tuple(_taken(part, rows, t) for t in value if isinstance(t, Tensor))
        elif rows.together:
            taken[name] = value
    return type(outputs)(**taken)


def _taken(part: int, rows: RowMap, t: Tensor) -> Tensor:
    # memories may have tokens before rows
    fits = t.dim() and t.shape[0] % len(rows.index) == 0
    return rows.take(part, t) if fits else t


def given_to(
    part: int, name: str, rows: RowMap, given: Mapping[str, Any], batch: int
) -> dict[str, Any]:
    """Return the labels and other arguments of a head for its rows.

    Args:
        part: number of the part.
        name: of the head; an argument may be a dict from names of heads to tensors, each for the
            whole batch or for the head's rows.
        rows: of the batch.
        given: arguments of `forward`.
        batch: rows of the batch before it was repeated.

    Raises:
        ConfigError: an argument has another number of rows.
    """
    found: dict[str, Any] = {}
    mine = sum(index == part for index in rows.index)
    for key, value in given.items():
        own = value.get(name) if isinstance(value, Mapping) else value
        # in a dict, a tensor may have only the head's own rows
        fits = isinstance(value, Mapping) and isinstance(own, Tensor) and own.shape[:1] == (mine,)
        if isinstance(own, Tensor) and own.dim() and not fits:
            whole = repeated(own, rows.copies, batch)
            if whole.shape[0] % len(rows.index):
                raise ConfigError(
                    f"forward({key}=…): the batch has {batch} rows and the head {name!r} "
                    f"reads {mine} of them, but {key} has shape {list(own.shape)}. Write {key} of "
                    f"{batch} rows, or {key}={{{name!r}: …}} with the {mine}."
                )
            own = rows.take(part, whole)
        found[key] = own
    return found


def with_copies(rows: RowMap | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return the labels and other arguments of a head, repeated like the batch.

    Args:
        rows: of the batch; `Parallel` has repeated it.
        given: arguments of `forward`; those that have all rows already do not change.
    """
    if rows is None or rows.copies < 2:
        return given
    batch = len(rows.index) // rows.copies
    return {key: repeated(value, rows.copies, batch, key) for key, value in given.items()}


def joined(
    results: Sequence[ModelOutput],
    parts: Sequence[ModelOutput],
    rows: RowMap,
    outputs: ModelOutput,
) -> ModelOutput | None:
    """Return one output for the whole batch in row order; None if kinds or shapes differ.

    Args:
        results: of each head on its rows.
        parts: of the base model, for the rows of each.
        rows: of the batch.
        outputs: of the base model, for all rows.
    """
    first = results[0]
    keys = [[key for key in each if key != "loss"] for each in results]
    if any(type(each) is not type(first) for each in results) or any(k != keys[0] for k in keys):
        return None
    whole: dict[str, Any] = {}
    for key in keys[0]:
        values = [each[key] for each in results]
        if all(value is part.get(key) for value, part in zip(values, parts, strict=True)):
            whole[key] = outputs[key]
            continue
        listed = [value if isinstance(value, tuple) else (value,) for value in values]
        columns = [*zip(*listed, strict=True)]
        if any(not isinstance(t, Tensor) or not t.dim() for column in columns for t in column):
            return None
        if any(len({(t.shape[1:], t.dtype) for t in column}) > 1 for column in columns):
            return None
        put = tuple(rows.put([*column]) for column in columns)
        whole[key] = put if isinstance(values[0], tuple) else put[0]
    return type(first)(loss=total([each.get("loss") for each in results]), **whole)


def total(losses: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the losses that are there."""
    found = [loss for loss in losses if loss is not None]
    return torch.stack([loss.to(found[0].device) for loss in found]).sum() if found else None


def apart(outputs: list[ModelOutput], rows: RowMap) -> MultiHeadOutput:
    """Return the outputs of the parts separately, with the numbers of their rows."""
    loss = total([cast("Tensor | None", a.get("loss")) for a in outputs])
    numbers = [[row for row, p in enumerate(rows.index) if p == i] for i in range(len(outputs))]
    return MultiHeadOutput(head_outputs=outputs, loss=loss, rows=numbers)
