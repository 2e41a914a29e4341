"""The inverse of the function that the step of an entry computes."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from adapterzoo.contracts import Adapter, BaseLayer, InvertibleAdapter
from adapterzoo.errors import CompositionError

from ._rows import RowMap
from ._steps import Fused, RowSteps, Step, share


def inverse_of(
    step: Step | None,
    adapters: Mapping[str, Adapter],
    y: Tensor,
    base: BaseLayer,
    rows: RowMap | None = None,
) -> Tensor:
    """Return the inverse of a step; the inverse of the last adapter is applied first.

    Adapters without an inverse are skipped.

    Args:
        step: of the entry; None if no adapter acts there.
        adapters: at the entry, by name.
        y: `[rows, tokens, d_model]`.
        base: provides the modules that the adapters share.
        rows: of the batch, if the step divides it.

    Raises:
        CompositionError: the step has no inverse.
    """
    if step is None:
        return y
    if isinstance(step, tuple):
        for name in reversed(step):
            adapter = adapters[name]
            y = adapter.inverse(y, base) if isinstance(adapter, InvertibleAdapter) else y
        return y
    if isinstance(step, Fused):
        raise CompositionError(
            "a fusion of invertible functions has no inverse, which a language modeling head needs "
            "before its last layer. Write add_adapter_fusion(…, AdapterFusionConfig("
            "entry='first')), or use another head."
        )
    if not isinstance(step, RowSteps) or rows is None:
        raise CompositionError(
            f"{step!r} has no inverse. Activate invertible adapters in a Stack, or for "
            f"different rows of a batch."
        )
    layout = rows.layout(y.shape[0])
    ordered = layout.arranged(y)
    found: list[Tensor] = []
    for part, start, size in layout.runs:
        take = functools.partial(share, start=start, size=size, of=len(layout.index))
        found.append(inverse_of(step.steps[part], adapters, take(ordered), base))
    return layout.restored(torch.cat(found))  # [rows, tokens, d_model]
