"""The prefix of an attention site: keys and values from the adapters of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapterzoo.contracts import Adapter, AttentionAdapter, BaseLayer, Prefix
from adapterzoo.errors import CompositionError

from ._rows import RowMap
from ._steps import RowSteps, Step, parts_of_call

_ALONE = "Activate them in a Stack, or for different rows of a batch."


def prefix_of(
    step: Step,
    adapters: Mapping[str, Adapter],
    x: Tensor,
    base: BaseLayer,
    rows: RowMap | None = None,
) -> Prefix:
    """Return the prefix of an attention site under its step; those of a stack are concatenated.

    Args:
        step: of the site.
        adapters: at the site, by name.
        x: the input of the queries, `[rows, tokens, d_model]`.
        base: the attention.
        rows: of the batch, where the step divides it.

    Raises:
        CompositionError: the step divides the sequence, averages or fuses.
    """
    if isinstance(step, tuple):
        return _chained([_own(adapters[name])(x, base) for name in step])
    if not isinstance(step, RowSteps) or rows is None:
        raise CompositionError(
            f"{step!r}: keys and values of prefixes cannot be joined this way. {_ALONE}"
        )
    layout = rows.layout_of(x)
    parts: list[Prefix | None] = []
    sizes: list[int] = []
    for part, view in parts_of_call(layout, rows, x, base):
        own = step.steps[part]
        parts.append(None if own is None else prefix_of(own, adapters, view.x, view))
        sizes.append(view.x.shape[0])
    found = [part for part in parts if part is not None]
    keys, values, mask = (layout.restored(t) for t in _padded(parts, sizes, found[0]))
    in_window = any(part.in_window for part in found)
    return Prefix(keys, values, mask, found[0].distances, in_window)


def _own(adapter: Adapter) -> AttentionAdapter:
    if not isinstance(adapter, AttentionAdapter):
        raise CompositionError(
            f"a {type(adapter).__name__} adapter cannot act at an attention, where others prepend "
            f"keys and values. {_ALONE}"
        )
    return adapter


def _chained(prefixes: Sequence[Prefix]) -> Prefix:
    """Return one prefix, `[rows or 1, kv_heads, length, width]`, whose length is the sum."""
    if len(prefixes) == 1:
        return prefixes[0]
    if len({prefix.distances for prefix in prefixes}) > 1:
        raise CompositionError(
            "Stack: one of the prefixes was trained with shifted distances between tokens and "
            "another without, and an attention cannot compute both. Activate them one by one."
        )
    count = max(prefix.keys.shape[0] for prefix in prefixes)
    keys = torch.cat([p.keys.expand(count, -1, -1, -1) for p in prefixes], 2)
    values = torch.cat([p.values.expand(count, -1, -1, -1) for p in prefixes], 2)
    in_window = any(prefix.in_window for prefix in prefixes)
    return Prefix(keys, values, None, prefixes[0].distances, in_window)


def _padded(
    parts: Sequence[Prefix | None], sizes: Sequence[int], one: Prefix
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values `[rows, kv_heads, longest, width]` and a mask, false for padding."""
    longest = max(part.keys.shape[2] for part in parts if part is not None)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    masks: list[Tensor] = []
    for part, size in zip(parts, sizes, strict=True):
        length = 0 if part is None else part.keys.shape[2]
        missing = longest - length
        for found, like, own in (
            (keys, one.keys, None if part is None else part.keys),
            (values, one.values, None if part is None else part.values),
        ):
            empty = like.new_zeros(1, like.shape[1], 0, like.shape[3])
            t = (empty if own is None else own).expand(size, -1, -1, -1)
            # pad at the start, so that the positions which a relative bias counts do not change
            found.append(pad(t, (0, 0, missing, 0)))  # [size, kv_heads, longest, width]
        mask = one.keys.new_ones(size, length, dtype=torch.bool)
        masks.append(pad(mask, (missing, 0)))  # [size, longest]
    return torch.cat(keys), torch.cat(values), torch.cat(masks)
