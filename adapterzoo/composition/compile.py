"""What a site evaluates in a forward, compiled from a composition.

A composition is pruned to the adapters that are present at the site. A chain of adapters, by far
the usual step, is a tuple of names. The other steps are small trees of chains; those that divide
the batch are only at the root. The layer that an adapter sees holds the adapters before it, or a
part of the batch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from adapterzoo.call import StackCall
from adapterzoo.contracts import (
    Adapter,
    AttentionAdapter,
    BaseLayer,
    FusibleAdapter,
    InvertibleAdapter,
    LanguageFreeAdapter,
    Prefix,
    can_batch,
)
from adapterzoo.errors import CompositionError
from adapterzoo.names import FUSION

from .nodes import Average, Child, Fuse, Node, Split
from .rows import Layout, RowMap


class Around(BaseLayer):
    """Base of the views: forwards to the layer inside everything that a view does not change."""

    __slots__ = ("_inner",)

    def __init__(self, inner: BaseLayer) -> None:
        """Wrap a layer.

        Args:
            inner: the layer, with the adapters before.
        """
        self._inner = inner

    def original(self, x: Tensor) -> Tensor:
        """Return the untouched output."""
        return self._inner.original(x)

    @property
    def weight(self) -> Tensor:
        """The untouched weight."""
        return self._inner.weight

    @property
    def bias(self) -> Tensor | None:
        """The untouched bias."""
        return self._inner.bias

    @property
    def scale(self) -> float | Tensor:
        """The factor of the output."""
        return self._inner.scale

    @property
    def padding_idx(self) -> int | None:
        """The token without gradient."""
        return self._inner.padding_idx

    @property
    def is_original(self) -> bool:
        """Whether no earlier adapter acts."""
        return self._inner.is_original

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The untouched parameters."""
        return self._inner.parameters

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer."""
        return self._inner.residual

    @property
    def call(self) -> StackCall:
        """The call of the encoder or decoder."""
        return self._inner.call

    @property
    def is_in_call(self) -> bool:
        """Whether a call is running."""
        return self._inner.is_in_call

    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that the adapter's layers share."""
        return self._inner.shared(adapter)

    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model."""
        return self._inner.part(path)


class Nested(Around):
    """A layer together with an adapter, as the base of the next adapter."""

    __slots__ = ("_adapter",)

    def __init__(self, adapter: Callable[[Tensor, BaseLayer], Tensor], inner: BaseLayer) -> None:
        """Put the adapter around the layer.

        Args:
            adapter: an adapter, or another function of an input and its base.
            inner: the layer, with the adapters before.
        """
        self._adapter = adapter
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output with the adapters."""
        adapted: Tensor = self._adapter(x, self._inner)
        return adapted

    @property
    def is_original(self) -> bool:
        """False: the adapter acts."""
        return False


class Whole:
    """One call of a layer; its outputs are computed once for all parts of the input."""

    __slots__ = ("_original", "_output", "_residual", "base", "order", "x")

    def __init__(self, base: BaseLayer, x: Tensor, order: Callable[[Tensor], Tensor]) -> None:
        """Record the call; nothing is computed yet.

        Args:
            base: the layer, with the adapters before.
            x: its input.
            order: sorts the rows of an input or output, so that each part is contiguous.
        """
        self.base = base
        self.x = x
        self.order = order
        self._output: Tensor | None = None
        self._original: Tensor | None = None
        self._residual: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """The layer's output, sorted."""
        if self._output is None:
            self._output = self.order(self.base(self.x))
        return self._output

    @property
    def original(self) -> Tensor:
        """The untouched layer's output, sorted; `output` itself if no earlier adapter acts."""
        if self._original is None:
            output, original = self.base(self.x), self.base.original(self.x)
            if self._output is None:
                self._output = self.order(output)
            self._original = self._output if original is output else self.order(original)
        return self._original

    @property
    def residual(self) -> Tensor:
        """The residual stream, sorted."""
        if self._residual is None:
            self._residual = self.order(self.base.residual)
        return self._residual


class PartOf(Around):
    """The layer's call restricted to some rows of the batch, or some tokens of its sequences."""

    __slots__ = ("_key", "_output", "_take", "_whole", "x")

    def __init__(
        self, whole: Whole, x: Tensor, take: Callable[[Tensor], Tensor], key: object
    ) -> None:
        """Take a part.

        Args:
            whole: the call of the layer.
            x: the part of its input.
            take: returns the part of a tensor that is sorted like `whole`.
            key: identifies the part within the call.
        """
        super().__init__(whole.base)
        self._whole = whole
        self._take = take
        self._key = key
        self.x = x
        # taken once, so that outputs which are one object of the layer are one of the part
        self._output: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output for the part."""
        if x is not self.x:
            return self._inner(x)
        if self._output is None:
            self._output = self._take(self._whole.output)
        return self._output

    def original(self, x: Tensor) -> Tensor:
        """Return the untouched output for the part."""
        if x is not self.x:
            return self._inner.original(x)
        # read before `output`, which it may set
        original = self._whole.original
        return self(x) if original is self._whole.output else self._take(original)

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer, of the part."""
        return self._take(self._whole.residual)

    @property
    def call(self) -> StackCall:
        """The call of the encoder or decoder, as the part sees it."""
        whole = self._whole
        return whole.base.call.of_part(whole.x, lambda t: self._take(whole.order(t)), self._key)


class Probe(Around):
    """A layer that returns its input, which shows how an adapter changes that input."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input itself."""
        return x


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


@dataclass(frozen=True, slots=True)
class BoundStep:
    """What a site evaluates; equal to another one if its step has the same names.

    Attributes:
        step: the step; it names adapters by keys of `adapters`.
        adapters: number → adapter; None if the step has the names of adapters at the layer.
        named: the step with the names of adapters.
        only: the adapter, if the site evaluates nothing else and neither captures nor shares
            inputs; None for other sites.
    """

    step: Step = field(compare=False, repr=False)
    adapters: Mapping[str, Any] | None = field(compare=False, repr=False)
    named: Step
    only: Adapter | None = field(default=None, compare=False, repr=False)

    def by_name(self) -> BoundStep:
        """Return the site for a copy of the layer, which has its own adapters."""
        return self if self.adapters is None else BoundStep(self.named, None, self.named)


def by_name(step: Step) -> BoundStep:
    """Return a site whose adapters are looked up at the layer in each call."""
    return BoundStep(step, None, step)


def bound(
    step: Step, adapters: Mapping[str, Adapter | Callable[..., Any]], alone: bool = False
) -> BoundStep:
    """Return a site that holds its adapters.

    Args:
        step: with the names of adapters.
        adapters: those at the site, by name; if one is missing, they are looked up in each call.
        alone: whether the plan has only the step for the site, no captured or shared inputs.
    """
    if isinstance(step, tuple) and len(set(step)) == len(step):
        numbers = _numbers(len(step))
        held = dict(zip(numbers, map(adapters.__getitem__, step), strict=True))
        only = cast("Adapter", held[numbers[0]]) if alone and len(step) == 1 else None
        return BoundStep(numbers, held, step, only)
    found: dict[str, str] = {}
    numbered = _renamed(step, lambda name: found.setdefault(name, str(len(found))))
    if not found.keys() <= adapters.keys():
        return by_name(step)
    return BoundStep(numbered, {number: adapters[name] for name, number in found.items()}, step)


@functools.cache
def _numbers(count: int) -> Chain:
    return tuple(map(str, range(count)))


def _renamed(step: Any, rename: Callable[[str], str]) -> Any:
    """Return a step, or a part of one, with other names."""
    if step is None:
        return None
    if isinstance(step, str):
        return rename(step)
    if isinstance(step, tuple):
        return tuple(_renamed(part, rename) for part in step)
    return step.renamed(lambda part: _renamed(part, rename))


AdapterOf = Callable[[str], Adapter]


def compile_site(
    setup: Child,
    present: Collection[str],
    adapter_of: AdapterOf,
    unfused: Collection[str] = (),
) -> Step | None:
    """Return the step of a site; None if no adapter of the composition is present there.

    Args:
        setup: what is active; all rows of a batch take it.
        present: the names that have an adapter at the site.
        adapter_of: the adapter of a name at the site.
        unfused: the fusions without layers at the site, where the first of their adapters acts.
    """
    if not isinstance(setup, Node):
        return (setup,) if setup is not None and setup in present else None
    steps = [compile_site(child, present, adapter_of, unfused) for child in setup.children]
    if all(step is None for step in steps):
        return None
    _refuse_other_base(setup, present, adapter_of)
    acting = [step for step in steps if step is not None and not _is_base(step, adapter_of)]
    if not acting:
        # adapters of a base model without its language adapters, which do nothing else here
        return next(step for step in steps if step is not None)
    if isinstance(setup, Fuse) and setup.name in unfused:
        return steps[0]
    if isinstance(setup, (Average, Fuse, Split)):
        _refuse_unmixable(setup, present, adapter_of)
    if isinstance(setup, Fuse):
        return _fused(setup, steps, adapter_of)
    if isinstance(setup, Split):
        return Tokens(tuple(steps), setup.splits, _acts_on_all(steps, adapter_of))
    if isinstance(setup, Average):
        return Mean(tuple(steps), setup.weights, _acts_on_all(steps, adapter_of))
    parts: list[str | Tree] = []
    for step in acting:
        parts += step if isinstance(step, tuple) else [step]
    # the first adapter of a stack acts first: of those that change the input, the outermost
    outer = [part for part in parts if _acts_on(part, adapter_of) == "input"]
    inner = [part for part in parts if _acts_on(part, adapter_of) != "input"]
    nested = (*inner, *reversed(outer))
    names = tuple(part for part in nested if isinstance(part, str))
    return names if len(names) == len(nested) else Nest(nested, "output" if inner else "input")


def _is_base(step: Step, adapter_of: AdapterOf) -> bool:
    adapter = adapter_of(step[0]) if isinstance(step, tuple) and len(step) == 1 else None
    return isinstance(adapter, LanguageFreeAdapter) and adapter.is_base


def _refuse_other_base(setup: Node, present: Collection[str], adapter_of: AdapterOf) -> None:
    names = setup.flatten()
    free = {
        n: a for n in names if isinstance(a := _at(n, present, adapter_of), LanguageFreeAdapter)
    }
    other = next((n for n in names if n not in free), None)
    if free and other is not None:
        first, adapter = next(iter(free.items()))
        raise CompositionError(
            f"{setup!r}: {first!r} is an adapter of the base model without its language adapters, "
            f"and {other!r} of the one with them. Write BatchSplit({first!r}, {other!r}, …) for "
            f"different rows of a batch, or add {other!r} again for the same base model: with "
            f"{adapter.joining}."
        )


def _at(name: str, present: Collection[str], adapter_of: AdapterOf) -> Adapter | None:
    return adapter_of(name) if name in present else None


def _refuse_unmixable(setup: Node, present: Collection[str], adapter_of: AdapterOf) -> None:
    for name in setup.flatten():
        adapter = _at(name, present, adapter_of)
        fusible = isinstance(setup, Fuse) and isinstance(adapter, FusibleAdapter)
        what = "" if adapter is None or fusible else adapter.stacks_only
        if what:
            raise CompositionError(
                f"{setup!r}: {name!r} has {what}, which cannot be averaged, fused or given to a "
                f"part of the sequence. Write Stack({name!r}, …), or BatchSplit({name!r}, …) for "
                f"different rows of a batch."
            )


def _fused(setup: Fuse, steps: Sequence[Step | None], adapter_of: AdapterOf) -> Fused:
    chains: list[Chain] = []
    last_adapters: list[str] = []
    for child, step in zip(setup.children, steps, strict=True):
        last = child.last() if isinstance(child, Node) else child
        if not isinstance(step, tuple) or last is None or last not in step:
            raise CompositionError(
                f"{setup!r}: {child!r} has no adapter at a site where others of the fusion have "
                f"one. Fuse adapters with the same sites."
            )
        chains.append(step)
        last_adapters.append(last)
    acts_on = adapter_of(last_adapters[-1]).acts_on
    return Fused(
        tuple(chains),
        tuple(last_adapters),
        fusion_key(setup.name),
        "input" if acts_on == "input" else "output",
    )


def fusion_key(name: str) -> str:
    """Return the key under which a site keeps a fusion layer; no adapter can have this name."""
    return FUSION + name


def compile_rows(
    parts: Sequence[Child],
    present: Collection[str],
    adapter_of: AdapterOf,
    unfused: Collection[str] = (),
) -> Step | None:
    """Return the step of a site for a batch whose rows take different compositions.

    Args:
        parts: the compositions, each for all rows that take it.
        present: the names that have an adapter at the site.
        adapter_of: the adapter of a name at the site.
        unfused: as in `compile_site`.
    """
    steps = [compile_site(part, present, adapter_of, unfused) for part in parts]
    return join_rows(steps, adapter_of)


def join_rows(steps: Sequence[Step | None], adapter_of: AdapterOf) -> Step | None:
    """Join a site's steps for different rows to one step."""
    if all(step == steps[0] for step in steps):
        return steps[0]
    return RowSteps(tuple(steps), _layers(steps, adapter_of))


def _layers(
    steps: Sequence[Step | None], adapter_of: AdapterOf
) -> tuple[BatchedAdapters, ...] | None:
    chains = [step or () for step in steps if step is None or isinstance(step, tuple)]
    if len(chains) < len(steps):
        return None
    layers: list[BatchedAdapters] = []
    for level in range(max(map(len, chains))):
        at_level = [chain[level] if level < len(chain) else None for chain in chains]
        names = tuple(dict.fromkeys(name for name in at_level if name is not None))
        adapters = [adapter_of(name) for name in names]
        uniform = len(names) == 1 and None not in at_level
        if not uniform and not can_batch(adapters):
            return None
        numbers = tuple(None if name is None else names.index(name) for name in at_level)
        layers.append(BatchedAdapters(names, numbers))
    return tuple(layers)


def _acts_on(part: str | Tree, adapter_of: AdapterOf) -> str:
    return adapter_of(part).acts_on if isinstance(part, str) else part.acts_on


def _acts_on_all(steps: Sequence[Step | None], adapter_of: AdapterOf) -> Literal["output", "input"]:
    parts = [p for s in steps if s is not None for p in (s if isinstance(s, tuple) else (s,))]
    return "input" if all(_acts_on(p, adapter_of) == "input" for p in parts) else "output"
