"""Keys and values before those of attention: what the step of an attention site evaluates to."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapterzoo.contracts import Adapter, AttentionAdapter, BaseLayer, Prefix
from adapterzoo.errors import CompositionError

from ._rows import RowMap
from ._steps import RowSteps, Step, share
from ._views import PartOf, Whole

_ALONE = "Activate them in a Stack, or for different rows of a batch."


def prefix_of(
    step: Step,
    adapters: Mapping[str, Adapter],
    x: Tensor,
    base: BaseLayer,
    rows: RowMap | None = None,
) -> Prefix:
    """Return the prefix of an attention under its step: adapters of a stack one after the other.

    Args:
        step: of the site.
        adapters: at the site, by name.
        x: the input of the attention, on the side of its queries, `[rows, tokens, d_model]`.
        base: the attention.
        rows: of the batch, where the step divides it.

    Raises:
        CompositionError: the step divides the sequence, averages or fuses.
    """
    if isinstance(step, tuple):
        return _chained([_own(adapters[name])(x, base) for name in step])
    if not isinstance(step, RowSteps) or rows is None:
        raise CompositionError(
            f"{step!r}: keys and values of prefixes cannot be joined so. {_ALONE}"
        )
    layout = rows.layout_of(x)
    whole = Whole(base, x, lambda t: rows.layout(t.shape[0]).arranged(t))
    ordered = layout.arranged(x)
    parts: list[Prefix | None] = []
    sizes: list[int] = []
    for part, start, size in layout.runs:
        take = functools.partial(share, start=start, size=size, of=len(layout.index))
        own = take(ordered)
        parts.append(_of_part(step.steps[part], adapters, own, PartOf(whole, own, take, part)))
        sizes.append(own.shape[0])
    keys, values, mask = _side_by_side(parts, sizes)
    first = next(part for part in parts if part is not None)
    restored = [layout.restored(t) for t in (keys, values, mask)]
    in_window = any(part.in_window for part in parts if part is not None)
    return Prefix(restored[0], restored[1], restored[2], first.distances, in_window)


def _own(adapter: Adapter) -> AttentionAdapter:
    if not isinstance(adapter, AttentionAdapter):
        raise CompositionError(
            f"a {type(adapter).__name__} adapter cannot act at an attention, where others prepend "
            f"keys and values. {_ALONE}"
        )
    return adapter


def _of_part(
    step: Step | None, adapters: Mapping[str, Adapter], x: Tensor, base: BaseLayer
) -> Prefix | None:
    return None if step is None else prefix_of(step, adapters, x, base)


def _chained(prefixes: Sequence[Prefix]) -> Prefix:
    if len(prefixes) == 1:
        return prefixes[0]
    if len({prefix.distances for prefix in prefixes}) > 1:
        raise CompositionError(
            "Stack: one of the prefixes was trained with shifted distances between tokens and "
            "another without, so that no attention computes both. Activate them one by one."
        )
    count = max(prefix.keys.shape[0] for prefix in prefixes)
    keys = [p.keys.expand(count, -1, -1, -1) for p in prefixes]
    values = [p.values.expand(count, -1, -1, -1) for p in prefixes]
    in_window = any(prefix.in_window for prefix in prefixes)
    return Prefix(torch.cat(keys, 2), torch.cat(values, 2), None, prefixes[0].distances, in_window)


def _side_by_side(
    parts: Sequence[Prefix | None], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values `[rows, heads, longest, width]`, and which of them are no filler."""
    one = next(part for part in parts if part is not None)
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
            # in front: where a relative bias counts positions, those behind it stay
            found.append(pad(t, (0, 0, missing, 0)))  # [size, heads, longest, width]
        mask = one.keys.new_ones(size, length, dtype=torch.bool)
        masks.append(pad(mask, (missing, 0)))  # [size, longest]
    return torch.cat(keys), torch.cat(values), torch.cat(masks)
