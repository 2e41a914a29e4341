"""Several adapters under one name at one layer: for fused layers, unions and experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import OutputSlice
from adapterzoo.averaging import Combination
from adapterzoo.composition import Nested
from adapterzoo.contracts import Adapter, BaseLayer, CopyAdapter, WeightAdapter, can_batch
from adapterzoo.errors import CompositionError, StateError

from .views import SlicedLayer, put_slice, take_slice

if TYPE_CHECKING:
    from adapterzoo.kernels.grouped import Groups


class FusedAdapters(WeightAdapter):
    """Several adapters of one name at one layer: for the parts of a fused layer, or of a union.

    Each child adapts its slice of the output features, or all of them; earlier ones act first.
    """

    def __init__(self, parts: list[tuple[str, OutputSlice | None, Adapter]]) -> None:
        """Join the adapters.

        Args:
            parts: label (unique, the role of the features), slice (None: all), and adapter.
        """
        super().__init__()
        self.slices = {label: features for label, features, _ in parts}
        for label, _, adapter in parts:
            self.add_module(label, adapter)
        self.is_additive = all(is_additive(adapter) for _, _, adapter in parts)
        self.container = _common_container([adapter for _, _, adapter in parts])

    def init_from_layer(self, base: BaseLayer) -> None:
        """Initialize each child from its slice of the layer."""
        for label, features in self.slices.items():
            adapter = cast("Adapter", self._modules[label])
            adapter.init_from_layer(base if features is None else SlicedLayer(base, features))

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Set each child to a combination of the children with the same label."""
        if any(adapter.slices != self.slices for adapter in adapters):
            raise CompositionError(
                f"the adapters have different parts at one layer: "
                f"{', '.join(str([*adapter.slices]) for adapter in adapters)}. Add them with the "
                f"same targets, or write set_active_adapters(Stack('a', 'b'))."
            )
        for label, children in _by_label(adapters).items():
            features, own = self.slices[label], cast("Adapter", self._modules[label])
            shown = base if features is None else SlicedLayer(base, features)
            own.combine(children, weights, strategy, shown)

    def _adapters(self) -> list[Adapter]:
        return [cast("Adapter", adapter) for adapter in self._modules.values()]

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the fused layer's output. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        return self._first(len(self.slices), x, base)

    def _first(self, count: int, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output with the first adapters only."""
        y = untouched = base(x)
        labels = list(self.slices)
        for i, label in enumerate(labels[:count]):
            features = self.slices[label]
            # an adapter that changes its input calls its base again, with those before it
            met = any(_overlap(features, self.slices[other]) for other in labels[:i])
            before = Nested(functools.partial(self._first, i), base) if met else base
            adapter = cast("Adapter", self._modules[label])
            so_far = y if met else untouched
            view = SlicedLayer(before, features or _all_features(y), x, so_far)
            part = adapter(x, view)
            y = part if features is None else put_slice(y, part, features, -1)
        return y

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether all have the same disjoint parts that can be batched."""
        if any(a.slices != adapters[0].slices for a in adapters):
            return False
        own = list(adapters[0].slices.values())
        if any(_overlap(one, other) for i, one in enumerate(own) for other in own[:i]):
            return False
        # a child that changes the input would call the whole layer for its slice
        return all(
            children[0].acts_on == "output" and can_batch(children)
            for children in _by_label(adapters).values()
        )

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return the fused layer's output, each row of the batch with its own adapters."""
        y = untouched = base(x)
        for label, children in _by_label(adapters).items():
            features = adapters[0].slices[label] or _all_features(y)
            view = SlicedLayer(base, features, x, untouched)
            part = type(children[0]).forward_batched(children, groups, x, view)
            y = put_slice(y, part, features, -1)
        return y

    def weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight of all features, `[*experts, d_out, d_in]`."""
        for label, features in self.slices.items():
            adapter = mergeable(self._modules[label])
            if features is None:
                w = adapter.weight(w, base)
                continue
            part = adapter.weight(take_slice(w, features, -2), SlicedLayer(base, features))
            w = put_slice(w, part, features, -2)
        return w

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return the factors of all features: those of the children side by side, if all have."""
        found: list[tuple[Tensor, Tensor]] = []
        for label, features in self.slices.items():
            adapter, whole = mergeable(self._modules[label]), features or _all_features(w, -2)
            own = adapter.low_rank_factors(take_slice(w, whole, -2), SlicedLayer(base, whole))
            if own is None:
                return None
            a, b = own
            nothing = b.new_zeros(*b.shape[:-2], w.shape[-2], b.shape[-1])
            found.append((a, put_slice(nothing, b, whole, -2)))
        # the ranks side by side
        return torch.cat([a for a, _ in found], -2), torch.cat([b for _, b in found], -1)

    def bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias of all features, `[d_out]`."""
        for label, features in self.slices.items():
            adapter = mergeable(self._modules[label])
            whole = features or _all_features(b)
            part = adapter.bias(take_slice(b, whole, 0), SlicedLayer(base, whole))
            b = put_slice(b, part, whole, 0)
        return b


class ExpertAdapters(Adapter):
    """The adapters of one name at a module that computes with its parameters: fused experts.

    While the adapters are active, the module reads the changed parameters.
    """

    def __init__(self, parts: dict[str, FusedAdapters]) -> None:
        """Join the adapters.

        Args:
            parts: name of a parameter → its adapters.
        """
        super().__init__()
        for parameter, adapters in parts.items():
            self.add_module(parameter, adapters)
        self.container = _common_container([*parts.values()])

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the module's output, computed with the weights from `changed`."""
        return base(x)

    def changed(self, parameter: str, w: Tensor, base: BaseLayer) -> Tensor:
        """Return a weight `[*experts, d_out, d_in]` with the adapters' change."""
        adapters = self._modules.get(parameter)
        return adapters.weight(w, base) if isinstance(adapters, FusedAdapters) else w


def is_additive(adapter: nn.Module | None) -> bool:
    """Return whether merging the adapter equals keeping it active beside others."""
    if isinstance(adapter, ExpertAdapters):
        return all(map(is_additive, adapter._modules.values()))
    return isinstance(adapter, WeightAdapter) and adapter.is_additive


def mergeable(adapter: nn.Module | None) -> WeightAdapter:
    """Return the adapter, if it equals a changed weight.

    Raises:
        StateError: a weight cannot express it.
    """
    if isinstance(adapter, WeightAdapter):
        return adapter
    raise StateError(
        f"a {type(adapter).__name__} adapter is not a change of a weight and cannot be merged. "
        f"Keep it active instead; adapters that can be merged derive from WeightAdapter."
    )


def changed(
    adapter: nn.Module, parameter: str, value: Tensor, base: BaseLayer, transposed: bool
) -> Tensor:
    """Return a parameter of a layer with an adapter's change, as the layer stores it.

    Args:
        adapter: of the layer.
        parameter: its name.
        value: so far, float32 or float64, as the layer stores it; zeros for a missing bias.
        base: the layer; `base.parameters` are its untouched ones.
        transposed: whether the layer stores the parameter as `[*experts, d_in, d_out]`.

    Raises:
        StateError: the adapter is not a change of a weight.
    """
    if isinstance(adapter, CopyAdapter):
        return adapter.parameter(parameter, value, base)
    if parameter == "bias" and not isinstance(adapter, ExpertAdapters):
        return mergeable(adapter).bias(value, base)
    w = value.mT if transposed else value
    if isinstance(adapter, ExpertAdapters):
        w = adapter.changed(parameter, w, base)
    else:
        w = mergeable(adapter).weight(w, base)
    return w.mT if transposed else w


def _common_container(adapters: Sequence[Adapter]) -> str:
    """Return the container of the adapters; that of adapters in general if they have several."""
    containers = {adapter.container for adapter in adapters}
    return containers.pop() if len(containers) == 1 else Adapter.container


def _by_label(parts: Sequence[FusedAdapters]) -> dict[str, list[Adapter]]:
    """Return the children of several adapters by label."""
    labels = parts[0].slices
    return {n: [cast("Adapter", each._modules[n]) for each in parts] for n in labels}


def _overlap(one: OutputSlice | None, other: OutputSlice | None) -> bool:
    if one is None or other is None:
        return True
    alike = (one.groups, one.width) == (other.groups, other.width)
    return not alike or (one.start < other.stop and other.start < one.stop)


def _all_features(t: Tensor, dim: int = -1) -> OutputSlice:
    size = t.shape[dim]
    return OutputSlice(1, size, 0, size)
