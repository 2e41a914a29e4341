"""Steps: what a site evaluates in a forward, compiled from a composition.

A chain of adapters, by far the usual step, is a tuple of names. The other steps are small trees
of chains; those that divide the batch are only at the root.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo.contracts import Adapter, BaseLayer, FusibleAdapter
from adapterzoo.errors import CompositionError

from ._rows import Layout, RowMap
from ._views import Nested, PartOf, Probe, Whole

Chain: TypeAlias = tuple[str, ...]
"""Names of adapters in the order in which they nest, innermost first."""

Step: TypeAlias = "Chain | Tree"

Adapters: TypeAlias = Mapping[str, Adapter]


def evaluate(
    step: Step, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
) -> Tensor:
    """Return the output of a site under its step. `x` `[*batch, d_in]` → `[*batch, d_out]`.

    Args:
        step: of the site.
        adapters: at the site, by name.
        x: the input.
        base: the layer.
        rows: of the batch, if the step divides it.
    """
    if not isinstance(step, tuple):
        return step.run(adapters, x, base, rows)
    for name in step[:-1]:
        base = Nested(adapters[name], base)
    adapted: Tensor = adapters[step[-1]](x, base)
    return adapted


def fold(step: Step | str, w: Tensor, change: Callable[[str, Tensor], Tensor]) -> Tensor:
    """Return the weight under a step, for a module that computes with its parameters.

    Args:
        step: of the site.
        w: the weight.
        change: returns the weight with one adapter, from its name and the weight so far.

    Raises:
        CompositionError: the step divides the batch or the sequence, which a weight cannot express.
    """
    if isinstance(step, str):
        return change(step, w)
    if isinstance(step, (tuple, Nest)):
        for part in step if isinstance(step, tuple) else step.parts:
            w = fold(part, w, change)
        return w
    if isinstance(step, Mean):
        return step.averaged(w, [None if s is None else fold(s, w, change) for s in step.steps])
    raise CompositionError(
        f"a module that computes with its parameters cannot divide its input, as {step!r} would. "
        f"Activate one adapter for all rows and tokens."
    )


class _Named:
    """What has names of adapters in some of its fields.

    Attributes:
        named: these fields.
    """

    named: ClassVar[tuple[str, ...]]

    def renamed(self, rename: Callable[[Any], Any]) -> Self:
        """Return the same with other names.

        Args:
            rename: returns a field with other names.
        """
        changes = {name: rename(getattr(self, name)) for name in self.named}
        return cast("Self", replace(cast("Any", self), **changes))


class Tree(_Named, ABC):
    """Base of the steps that are not a chain.

    Attributes:
        acts_on: see `Adapter`.
    """

    acts_on: Literal["output", "input"]

    @abstractmethod
    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the output of the site; for the arguments see `evaluate`."""


@dataclass(frozen=True)
class Nest(Tree):
    """A chain with trees in it, innermost first."""

    named = ("parts",)

    parts: tuple[str | Tree, ...]
    acts_on: Literal["output", "input"] = "output"

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Nest the parts."""
        for part in self.parts[:-1]:
            base = Nested(_bound(part, adapters), base)
        return _bound(self.parts[-1], adapters)(x, base)


def _bound(part: str | Tree, adapters: Adapters) -> Callable[[Tensor, BaseLayer], Tensor]:
    return adapters[part] if isinstance(part, str) else functools.partial(part.run, adapters)


@dataclass(frozen=True)
class Tokens(Tree):
    """Each step on its part of the sequence."""

    named = ("steps",)

    steps: tuple[Step | None, ...]
    sizes: tuple[int, ...]
    acts_on: Literal["output", "input"] = "output"

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the concatenated outputs. `x` `[batch, tokens, d_in]`, or `[batch, tokens]`."""
        if x.dim() < (3 if x.is_floating_point() else 2) or x.shape[1] != sum(self.sizes):
            raise CompositionError(
                f"Split(…, splits={list(self.sizes)}): an adapted layer got an input "
                f"{list(x.shape)}, and the parts have {sum(self.sizes)} tokens. Give the model "
                f"sequences of {sum(self.sizes)} tokens, or write other splits."
            )
        whole = Whole(base, x, lambda t: t)
        found: list[Tensor] = []
        start = 0
        for step, size in zip(self.steps, self.sizes, strict=True):
            take = functools.partial(torch.narrow, dim=1, start=start, length=size)
            found.append(_on_part(step, adapters, PartOf(whole, take(x), take, start)))
            start += size
        return torch.cat(found, 1)  # [batch, tokens, d_out]


@dataclass(frozen=True)
class Mean(Tree):
    """The base plus the weighted sum of the changes that the steps make.

    If all steps change the layer's input, the inputs are averaged, so that a norm after them
    normalizes the average.
    """

    named = ("steps",)

    steps: tuple[Step | None, ...]
    weights: tuple[float, ...]
    acts_on: Literal["output", "input"]

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the average of the outputs, or the output of the average input."""
        if self.acts_on == "input":
            probe = Probe(base)
            return base(self.averaged(x, [self._at(s, adapters, x, probe) for s in self.steps]))
        y = base(x)
        return self.averaged(y, [self._at(s, adapters, x, base) for s in self.steps])

    @staticmethod
    def _at(step: Step | None, adapters: Adapters, x: Tensor, base: BaseLayer) -> Tensor | None:
        return None if step is None else evaluate(step, adapters, x, base)

    def averaged(self, y: Tensor, changed: Sequence[Tensor | None]) -> Tensor:
        """Return y + Σ w (changed − y)."""
        total = y
        for weight, z in zip(self.weights, changed, strict=True):
            if z is not None:
                total = total.add(z - y, alpha=weight)
        return total


@dataclass(frozen=True)
class Fused(Tree):
    """A fusion over the outputs of chains; it replaces the update of the last adapter.

    Attributes:
        chains: of the children.
        last_adapters: the name that acts last in each chain; the fusion attends to its update.
        key: the site's key of the fusion layer.
    """

    named = ("chains", "last_adapters", "key")

    chains: tuple[Chain, ...]
    last_adapters: tuple[str, ...]
    key: str
    acts_on: Literal["output", "input"]

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the last adapter's output with the fusion in place of its update."""

        def update(z: Tensor) -> Tensor:
            outputs = [
                self._output_of(chain, name, adapters, x, base, z)
                for chain, name in zip(self.chains, self.last_adapters, strict=True)
            ]
            return cast("Tensor", adapters[self.key](z, outputs)[0])

        fused: Tensor = adapters[self.last_adapters[-1]](x, base, update)
        return fused

    @staticmethod
    def _output_of(
        chain: Chain, last: str, adapters: Adapters, x: Tensor, base: BaseLayer, z: Tensor
    ) -> Tensor:
        """Return the last adapter's update, given the output of the rest of its chain."""
        adapter = cast("FusibleAdapter", adapters[last])
        if len(chain) == 1:
            return adapter.update(z, base)
        recorded: list[Tensor] = []

        def record(z: Tensor) -> Tensor:
            recorded.append(adapter.update(z, base))
            return recorded[-1]

        def recording(x: Tensor, base: BaseLayer) -> Tensor:
            adapted: Tensor = adapter(x, base, record)
            return adapted

        evaluate(chain, {**adapters, last: cast("Adapter", recording)}, x, base)
        return recorded[-1]


@dataclass(frozen=True)
class BatchedAdapters(_Named):
    """One adapter for each part of the batch, of one class, in one call.

    Attributes:
        names: the distinct adapters.
        numbers: the number of each part's adapter; None if it has none.
    """

    named = ("names",)

    names: tuple[str, ...]
    numbers: tuple[int | None, ...]

    def run(self, adapters: Adapters, layout: Layout, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of all rows."""
        found = [adapters[name] for name in self.names]
        if len(found) == 1 and None not in self.numbers:
            alone: Tensor = found[0](x, base)
            return alone
        return type(found[0]).forward_batched(found, layout.groups(self.numbers), x, base)


@dataclass(frozen=True)
class RowSteps(Tree):
    """Each step on its rows of the batch.

    Attributes:
        steps: one for each part of the rows; None for the base layer.
        layers: the same as layers that each apply their adapters in one call, innermost first;
            None if that is impossible.
    """

    named = ("steps", "layers")

    acts_on: ClassVar[Literal["output", "input"]] = "output"  # type: ignore[misc]

    steps: tuple[Step | None, ...]
    layers: tuple[BatchedAdapters, ...] | None

    def run(
        self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap | None = None
    ) -> Tensor:
        """Return the output of all rows. `x` `[rows, …]`."""
        if rows is None:
            raise CompositionError(
                "rows of a batch: a layer was called alone, so it is unknown which rows it got. "
                "Call the model itself."
            )
        layout = rows.layout_of(x)
        if self.layers is not None:
            for layer in self.layers[:-1]:
                base = Nested(functools.partial(layer.run, adapters, layout), base)
            return self.layers[-1].run(adapters, layout, x, base)
        views = parts_of_call(layout, rows, x, base)
        outputs = [_on_part(self.steps[part], adapters, view) for part, view in views]
        return layout.restored(torch.cat(outputs))  # [rows, …]


def parts_of_call(
    layout: Layout, rows: RowMap, x: Tensor, base: BaseLayer
) -> list[tuple[int, PartOf]]:
    """Return the number of each part of the batch, with the layer as the part sees it.

    Args:
        layout: of the layer's input.
        rows: of the batch.
        x: the input, `[rows, …]`.
        base: the layer.
    """
    # the residual may come in sequences where x comes in tokens
    whole = Whole(base, x, lambda t: rows.layout(t.shape[0]).arranged(t))
    ordered = layout.arranged(x)
    views = []
    for part, start, size in layout.runs:
        take = functools.partial(share, start=start, size=size, of=len(layout.index))
        views.append((part, PartOf(whole, take(ordered), take, part)))
    return views


def _on_part(step: Step | None, adapters: Adapters, view: PartOf) -> Tensor:
    return view(view.x) if step is None else evaluate(step, adapters, view.x, view)


def share(t: Tensor, *, start: int, size: int, of: int) -> Tensor:
    """Return the rows of a part from a sorted tensor with equally many rows for each row of x.

    Args:
        t: `[rows, …]`, or a multiple of the rows.
        start: first row of the part.
        size: its rows.
        of: rows of the batch.
    """
    count = t.shape[0]
    return t.narrow(0, start * count // of, size * count // of)  # [size · count / of, …]
