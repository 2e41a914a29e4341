"""Several adapters under one name at one layer: for fused layers, unions and experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, cast

from torch import Tensor, nn

from adapterzoo.anatomy import OutputSlice
from adapterzoo.averaging import Combination
from adapterzoo.composition import Nested
from adapterzoo.contracts import Adapter, BaseLayer, WeightAdapter, can_batch
from adapterzoo.errors import CompositionError, StateError
from adapterzoo.runtime import SharedInput

from .views import SlicedLayer, put_slice, take_slice

if TYPE_CHECKING:
    from adapterzoo.kernels.grouped import Groups


class FusedAdapters(WeightAdapter):
    """Several adapters of one name at one layer: for the parts of a fused layer, or of a union.

    Each child adapts its rows of the output, all rows where it has none; earlier ones act first.
    """

    def __init__(self, parts: list[tuple[str, OutputSlice | None, Adapter]]) -> None:
        """Join the adapters.

        Args:
            parts: label (the role of the rows, unique), rows, adapter.
        """
        super().__init__()
        self.rows = {label: rows for label, rows, _ in parts}
        for label, _, adapter in parts:
            self.add_module(label, adapter)
        self.is_additive = all(is_additive(adapter) for _, _, adapter in parts)

    def init_from_layer(self, base: BaseLayer) -> None:
        """Show each child its rows of the layer."""
        for label, rows in self.rows.items():
            adapter = cast("Adapter", self._modules[label])
            adapter.init_from_layer(base if rows is None else SlicedLayer(base, rows))

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Each child takes what those of its rows become."""
        if any(adapter.rows != self.rows for adapter in adapters):
            raise CompositionError(
                f"the adapters have other parts at one layer: "
                f"{', '.join(str(list(adapter.rows)) for adapter in adapters)}. Add them with the "
                f"same targets, or write set_active_adapters(Stack('a', 'b'))."
            )
        for label, children in _by_label(adapters).items():
            rows, own = self.rows[label], cast("Adapter", self._modules[label])
            shown = base if rows is None else SlicedLayer(base, rows)
            own.combine(children, weights, strategy, shown)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """The fused layer's output. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        family = SharedInput([cast("Adapter", adapter) for adapter in self._modules.values()])
        return self._first(len(self.rows), x, base, family)

    def _first(self, count: int, x: Tensor, base: BaseLayer, family: SharedInput) -> Tensor:
        """The output with the first adapters only."""
        y = untouched = base(x)
        labels = list(self.rows)
        for i, label in enumerate(labels[:count]):
            rows = self.rows[label]
            # one that changes its input calls its base anew: those before it shall act there too
            met = any(_overlap(rows, self.rows[other]) for other in labels[:i])
            before = Nested(functools.partial(self._first, i, family=family), base) if met else base
            adapter = cast("Adapter", self._modules[label])
            so_far = y if met else untouched
            part = adapter(x, SlicedLayer(before, rows or _all_rows(y), x, so_far, family))
            y = part if rows is None else put_slice(y, part, rows, -1)
        return y

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Whether all have the same parts, none over another, and those of each can mix."""
        rows = adapters[0].rows
        if any(a.rows != rows for a in adapters):
            return False
        own = list(rows.values())
        if any(_overlap(one, other) for i, one in enumerate(own) for other in own[:i]):
            return False
        # a child that changes its input would call the whole layer for its rows
        return all(
            children[0].acts_on == "output" and can_batch(children)
            for children in _by_label(adapters).values()
        )

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """The fused layer's output, each row of the batch with its own adapters."""
        y = untouched = base(x)
        for label, children in _by_label(adapters).items():
            rows = adapters[0].rows[label] or _all_rows(y)
            kind = type(children[0])
            part = kind.forward_batched(children, groups, x, SlicedLayer(base, rows, x, untouched))
            y = put_slice(y, part, rows, -1)
        return y

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """The merged weight of all rows, `[d_out, d_in]`, with experts in front."""
        for label, rows in self.rows.items():
            adapter = mergeable(self._modules[label])
            whole = rows or _all_rows(w, -2)
            part = adapter.weight(take_slice(w, whole, -2), SlicedLayer(base, whole))
            w = put_slice(w, part, whole, -2)
        return w

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """The merged bias of all rows, `[d_out]`."""
        for label, rows in self.rows.items():
            adapter = mergeable(self._modules[label])
            whole = rows or _all_rows(b)
            part = adapter.bias(take_slice(b, whole, 0), SlicedLayer(base, whole))
            b = put_slice(b, part, whole, 0)
        return b


class ExpertAdapters(Adapter):
    """The adapters of one name at a module that computes with its parameters: fused experts.

    There is no layer to add an output to: while the adapters are active, the parameters that the
    module reads are the changed ones.
    """

    def __init__(self, parts: dict[str, FusedAdapters]) -> None:
        """Join the adapters.

        Args:
            parts: name of a parameter to its adapters.
        """
        super().__init__()
        for parameter, adapters in parts.items():
            self.add_module(parameter, adapters)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """The module's output, computed with the weights that `changed` gives it."""
        return base(x)

    def changed(self, parameter: str, w: Tensor, base: BaseLayer) -> Tensor:
        """A weight `[*experts, d_out, d_in]` with the adapters' change."""
        adapters = self._modules.get(parameter)
        return adapters.weight(w, base) if isinstance(adapters, FusedAdapters) else w


def is_additive(adapter: nn.Module | None) -> bool:
    """Whether merging the adapter and letting it act beside others is the same."""
    if isinstance(adapter, ExpertAdapters):
        return all(map(is_additive, adapter._modules.values()))
    return isinstance(adapter, WeightAdapter) and adapter.is_additive


def mergeable(adapter: nn.Module | None) -> WeightAdapter:
    """The adapter, when it equals a changed weight.

    Raises:
        StateError: it is a function that no weight can express.
    """
    if isinstance(adapter, WeightAdapter):
        return adapter
    raise StateError(
        f"a {type(adapter).__name__} adapter is not a change of a weight and cannot be merged. "
        f"Keep it active instead; adapters that can be merged derive from WeightAdapter."
    )


def _by_label(parts: Sequence[FusedAdapters]) -> dict[str, list[Adapter]]:
    """The children of several adapters that sit at the same rows."""
    return {
        label: [cast("Adapter", each._modules[label]) for each in parts] for label in parts[0].rows
    }


def _overlap(one: OutputSlice | None, other: OutputSlice | None) -> bool:
    if one is None or other is None:
        return True
    alike = (one.groups, one.width) == (other.groups, other.width)
    return not alike or (one.start < other.stop and other.start < one.stop)


def _all_rows(t: Tensor, dim: int = -1) -> OutputSlice:
    size = t.shape[dim]
    return OutputSlice(1, size, 0, size)
