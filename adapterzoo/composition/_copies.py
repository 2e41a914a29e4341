"""The step of a layer of a static head: an adapter's copy of the layer runs instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import CompositionError

from ._rows import Layout, RowMap
from ._steps import Adapters, Tree


@dataclass(frozen=True)
class Copies(Tree):
    """The copy of a layer that runs, for each part of the batch.

    Attributes:
        names: the name of the copy for each part; None for the layer itself.
    """

    named = ("names",)

    acts_on: ClassVar[Literal["output", "input"]] = "output"  # type: ignore[misc]

    names: tuple[str | None, ...]

    def call(
        self,
        copies: Mapping[str, Callable[..., Any]],
        layer: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rows: RowMap | None,
    ) -> Any:
        """Return the layer's output, computed by the copies.

        Args:
            copies: by name.
            layer: the layer's own forward.
            args: of the layer.
            kwargs: of the layer.
            rows: of the batch; None if all rows take the same copy.

        Raises:
            CompositionError: the rows that the layer got, or its output, cannot be identified.
        """
        found = [layer if name is None else copies[name] for name in self.names]
        if len(set(self.names)) == 1:
            return found[0](*args, **kwargs)
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if rows is None or first is None:
            raise CompositionError(
                "rows of a batch: a layer of the head was called directly, so it is unknown which "
                "rows it got. Call the model itself, or activate one adapter for all rows."
            )
        layout, count = rows.layout_of(first), first.shape[0]
        parts = []
        for part, start, size in layout.runs:

            def own(value: Any, start: int = start, size: int = size) -> Any:
                if not isinstance(value, Tensor) or not value.dim() or value.shape[0] != count:
                    return value
                return layout.arranged(value).narrow(0, start, size)

            named = {key: own(value) for key, value in kwargs.items()}
            parts.append(found[part](*map(own, args), **named))
        return _joined(parts, layout)

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the output for a layer with one argument; see `call`."""
        output: Tensor = self.call(adapters, base, (x,), {}, rows)
        return output


def _joined(parts: list[Any], layout: Layout) -> Any:
    first = parts[0]
    if isinstance(first, Tensor) and first.dim() and len({p.shape[1:] for p in parts}) == 1:
        return layout.restored(torch.cat(parts))  # [rows, …]
    if isinstance(first, tuple) and len({len(p) for p in parts}) == 1:
        return tuple(_joined(list(each), layout) for each in zip(*parts, strict=True))
    raise CompositionError(
        f"rows of a batch: a layer of the head returned a {type(first).__name__}, which cannot be "
        f"joined row by row. Activate one adapter for all rows."
    )
