"""The steps that sites evaluate in a forward, compiled from a composition.

A composition is pruned to the adapters that are present at the site, which get numbers. The usual
step is a chain, a tuple of these numbers; averages, fusions and splits of the sequence in it are
trees of chains. A step that divides the batch has a chain for each kind of rows. The layer that an
adapter gets includes the earlier adapters, and may be restricted to a part of the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
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
from adapterzoo.kernels.grouped import RowGroups, stacked

from . import Average, Child, Fuse, Node, Split, fusion_key
from .rows import PackedRows, RowLayout, RowMap, SlotRows


def _inner_property(name: str) -> Any:
    """Return a property that reads the same property of the inner layer."""

    def read(view: LayerView) -> Any:
        return getattr(view._inner, name)

    return property(read)


class LayerView(BaseLayer):
    """Base of the views, which forward to the inner layer whatever they do not change."""

    __slots__ = ("_inner",)

    def __init__(self, inner: BaseLayer) -> None:
        """Wrap a layer, with the earlier adapters."""
        self._inner = inner

    weight = _inner_property("weight")
    bias = _inner_property("bias")
    scale = _inner_property("scale")
    padding_idx = _inner_property("padding_idx")
    is_original = _inner_property("is_original")
    parameters = _inner_property("parameters")
    residual = _inner_property("residual")
    call = _inner_property("call")
    is_in_call = _inner_property("is_in_call")
    original = _inner_property("original")
    shared = _inner_property("shared")
    part = _inner_property("part")
    convolve = _inner_property("convolve")
    mix = _inner_property("mix")
    by_channel = _inner_property("by_channel")
    split = _inner_property("split")


class Nested(LayerView):
    """A layer together with an adapter, as the base of the next adapter."""

    __slots__ = ("_adapter",)
    is_original = False

    def __init__(self, adapter: Callable[[Tensor, BaseLayer], Tensor], inner: BaseLayer) -> None:
        """Wrap the layer in the adapter.

        Args:
            adapter: an adapter, or another function of an input and its base.
            inner: the layer, with the earlier adapters.
        """
        self._adapter = adapter
        self._inner = inner

    def __call__(self, x: Tensor) -> Tensor:
        """Return the output with the adapters."""
        return self._adapter(x, self._inner)


@dataclass(slots=True)
class SharedOutputs:
    """One call of a layer; its output is computed once for all parts of the input.

    Attributes:
        base: the layer, with the earlier adapters.
        x: its input.
        order: a function that sorts rows so that each part is contiguous.
    """

    base: BaseLayer
    x: Tensor
    order: Callable[[Tensor], Tensor]
    _unsorted: Tensor | None = None
    _output: Tensor | None = None
    _original: Tensor | None = None
    _residual: Tensor | None = None

    @property
    def residual(self) -> Tensor:
        """The residual stream, sorted."""
        if self._residual is None:
            self._residual = self.order(self.base.residual)
        return self._residual

    @property
    def output(self) -> Tensor:
        """The layer's output, sorted."""
        if self._output is None:
            self._unsorted = self.base(self.x)
            self._output = self.order(self._unsorted)
        return self._output

    @property
    def original(self) -> Tensor:
        """The untouched layer's output, sorted; `output` itself if no earlier adapter acts."""
        if self._original is None:
            output, original = self.output, self.base.original(self.x)
            self._original = output if original is self._unsorted else self.order(original)
        return self._original


class PartialLayer(LayerView):
    """The layer's call restricted to some rows of the batch, or some tokens of its sequences."""

    __slots__ = ("_key", "_output", "_take", "_whole", "x")

    def __init__(
        self, whole: SharedOutputs, x: Tensor, take: Callable[[Tensor], Tensor], key: object
    ) -> None:
        """Take a part of a call.

        Args:
            whole: the layer's call.
            x: this part of its input.
            take: a function that returns this part of a tensor sorted like `whole`.
            key: a value that identifies the part within the call.
        """
        super().__init__(whole.base)
        self._whole = whole
        self._take = take
        self._key = key
        self.x = x
        # taken once, so that outputs that are the same object in the layer are so in the part
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
        # read before `output`, which may set it
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


class PackedLayer(LayerView):
    """A layer with packed requests `[1, tokens, …]`, for adapters whose rows are tokens.

    Attributes:
        x: its input, `[tokens, 1, …]`.
    """

    __slots__ = ("_output", "_packed", "x")

    def __init__(self, inner: BaseLayer, packed: Tensor) -> None:
        """Make tokens the rows of the input.

        Args:
            inner: the layer.
            packed: its input, `[1, tokens, …]`.
        """
        super().__init__(inner)
        self._packed = packed
        self.x = packed.transpose(0, 1)
        # the last output and its transpose: the same object in the layer is the same in the view
        self._output: tuple[Tensor, Tensor] | None = None

    def _turned(self, y: Tensor) -> Tensor:
        if self._output is None or self._output[0] is not y:
            self._output = y, y.transpose(0, 1)
        return self._output[1]

    def _inputs(self, x: Tensor) -> Tensor:
        return self._packed if x is self.x else x.transpose(0, 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output, `[tokens, 1, …]`."""
        return self._turned(self._inner(self._inputs(x)))

    def original(self, x: Tensor) -> Tensor:
        """Return the untouched layer's output, `[tokens, 1, …]`."""
        return self._turned(self._inner.original(self._inputs(x)))

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer, `[tokens, 1, d_model]`."""
        return self._inner.residual.transpose(0, 1)

    @property
    def call(self) -> StackCall:
        """The call of the encoder or decoder, with tokens as rows."""
        return self._inner.call.of_part(self._packed, lambda t: t.transpose(0, 1), "packed")


class IdentityBase(LayerView):
    """A layer that returns its input; it shows how an adapter changes the input."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input itself."""
        return x


_CALLED_ALONE = (
    "rows of a batch: a layer was called alone, so its rows are unknown. "
    "Call the model itself, or activate one adapter for all rows."
)

Tree: TypeAlias = "Tokens | Mean | Fused"

Chain: TypeAlias = tuple["int | Tree", ...]
"""Numbers of adapters, and trees of them, in the order in which they nest, innermost first."""

Step: TypeAlias = "Chain | RowSteps | Slots | Copies"

Adapters: TypeAlias = Sequence[Any]
"""The adapters and fusion layers of a site, by number."""

Rows: TypeAlias = RowMap | None
"""The rows of the batch, if the step divides it."""


def evaluate(
    step: Step, adapters: Adapters, x: Tensor, base: BaseLayer, rows: Rows = None
) -> Tensor:
    """Return the output of a site under its step. `x` `[*batch, d_in]` → `[*batch, d_out]`.

    Args:
        step: the site's step.
        adapters: the adapters at the site.
        x: the input.
        base: the layer.
        rows: the batch's rows, if the step divides it.
    """
    if not isinstance(step, tuple):
        return step.run(adapters, x, base, rows)
    adapter: Any = None
    for part in step:
        base = base if adapter is None else Nested(adapter, base)
        adapter = adapters[part] if isinstance(part, int) else functools.partial(part.run, adapters)
    return adapter(x, base)  # type: ignore[no-any-return]


def fold(step: Step, w: Tensor, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Return the weight under a step, for a module that computes with its parameters.

    Args:
        step: the site's step.
        w: the weight.
        change: a function that applies one adapter, given its number and the weight so far.

    Raises:
        CompositionError: the step divides the batch or the sequence, which a weight cannot express.
    """
    for part in step if isinstance(step, tuple) else (step,):
        if isinstance(part, int):
            w = change(part, w)
        elif isinstance(part, Mean):
            changed = [None if each is None else fold(each, w, change) for each in part.steps]
            w = part.averaged(w, changed)
        else:
            raise CompositionError(
                "a module that computes with its parameters cannot divide its input. "
                "Activate one adapter for all rows and tokens."
            )
    return w


@dataclass(frozen=True)
class Tokens:
    """A step for each part of the sequence."""

    steps: tuple[Chain | None, ...]
    sizes: tuple[int, ...]
    acts_on: str

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the concatenated outputs. `x` is `[batch, tokens, d_in]` or `[batch, tokens]`.

        Raises:
            CompositionError: the input has no tokens, or their number is not that of all parts.
        """
        split = f"Split(…, splits={list(self.sizes)})"
        if x.dim() < (3 if x.is_floating_point() else 2):
            raise CompositionError(
                f"{split}: a layer got {list(x.shape)}, which has no tokens. Add the adapters with "
                "exclude_modules=[…] for such layers, or activate one adapter."
            )
        if x.shape[1] != sum(self.sizes):
            raise CompositionError(
                f"{split}: the sequences have {x.shape[1]} tokens, and the splits add up to "
                f"{sum(self.sizes)}. Give the model sequences of {sum(self.sizes)} tokens, or "
                "write other splits."
            )
        whole = SharedOutputs(base, x, lambda t: t)
        found: list[Tensor] = []
        start = 0
        for step, size in zip(self.steps, self.sizes, strict=True):
            take = functools.partial(torch.narrow, dim=1, start=start, length=size)
            found.append(_on_part(step, adapters, PartialLayer(whole, take(x), take, start)))
            start += size
        return torch.cat(found, 1)  # [batch, tokens, d_out]

    def renumbered(self, numbers: Sequence[int]) -> Tokens:
        """Return the same step with other adapter numbers."""
        return replace(self, steps=tuple(_renumbered(step, numbers) for step in self.steps))


@dataclass(frozen=True)
class Mean:
    """The base output plus the weighted sum of the steps' changes.

    If all steps change the layer's input, the inputs are averaged, so a norm after them
    normalizes the average.
    """

    steps: tuple[Chain | None, ...]
    weights: tuple[float, ...]
    acts_on: str

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the average of the outputs, or the output of the average input."""
        on_input = self.acts_on == "input"
        own = IdentityBase(base) if on_input else base
        y = own(x)
        changed = [None if s is None else evaluate(s, adapters, x, own) for s in self.steps]
        average = self.averaged(y, changed)
        return base(average) if on_input else average

    def averaged(self, y: Tensor, changed: Sequence[Tensor | None]) -> Tensor:
        """Return y + Σ w (changed − y)."""
        total = y
        for weight, z in zip(self.weights, changed, strict=True):
            if z is not None:
                total = total.add(z - y, alpha=weight)
        return total

    def renumbered(self, numbers: Sequence[int]) -> Mean:
        """Return the same step with other adapter numbers."""
        return replace(self, steps=tuple(_renumbered(step, numbers) for step in self.steps))


@dataclass(frozen=True)
class Fused:
    """A fusion of the outputs of chains, which replaces the update of the last adapter.

    Attributes:
        chains: chains of the children.
        last_adapters: the last adapter in each chain; the fusion attends to its update.
        fusion: the fusion layer.
    """

    chains: tuple[Chain, ...]
    last_adapters: tuple[int, ...]
    fusion: int
    acts_on: str

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the last adapter's output with the fusion in place of its update."""

        def update(z: Tensor) -> Tensor:
            outputs = [
                self._output_of(chain, last, adapters, x, base, z)
                for chain, last in zip(self.chains, self.last_adapters, strict=True)
            ]
            return cast("Tensor", adapters[self.fusion](z, outputs)[0])

        return cast("Tensor", adapters[self.last_adapters[-1]](x, base, update))

    def renumbered(self, numbers: Sequence[int]) -> Fused:
        """Return the same step with other adapter and fusion numbers."""
        return replace(
            self,
            chains=tuple(cast("Chain", _renumbered(chain, numbers)) for chain in self.chains),
            last_adapters=tuple(numbers[last] for last in self.last_adapters),
            fusion=numbers[self.fusion],
        )

    @staticmethod
    def _output_of(
        chain: Chain, last: int, adapters: Adapters, x: Tensor, base: BaseLayer, z: Tensor
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
            return cast("Tensor", adapter(x, base, record))

        evaluate(chain, [recording if a is adapter else a for a in adapters], x, base)
        return recorded[-1]


def _renumbered(step: Chain | None, numbers: Sequence[int]) -> Chain | None:
    """Return a step with other adapter numbers, given by number."""
    if step is None:
        return None
    return tuple(p.renumbered(numbers) if not isinstance(p, int) else numbers[p] for p in step)


@dataclass(frozen=True)
class BatchedAdapters:
    """One adapter of the same class for each part of the batch, in one call.

    Attributes:
        distinct: the distinct adapters.
        of_parts: the index in `distinct` of each part's adapter; None without one.
    """

    distinct: tuple[int, ...]
    of_parts: tuple[int | None, ...]

    def run(self, adapters: Adapters, layout: RowLayout, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output of all rows."""
        distinct, of_parts = self.distinct, self.of_parts
        if not torch.is_grad_enabled() and len(layout.runs) < len(of_parts):
            # adapters without rows are not read; in training they get a gradient of zero
            own = {of_parts[part] for part, _, _ in layout.runs}
            there = [number for number in range(len(distinct)) if number in own]
            places = {number: place for place, number in enumerate(there)}
            distinct = tuple(distinct[number] for number in there)
            of_parts = tuple(None if n is None else places.get(n) for n in of_parts)
            if not distinct:
                return base(x)
        found = [adapters[number] for number in distinct]
        if len(found) == 1 and all(of_parts[part] == 0 for part, _, _ in layout.runs):
            return found[0](x, base)  # type: ignore[no-any-return]
        return on_rows(found, layout.groups(of_parts), x, base)


def on_rows(adapters: Sequence[Any], groups: RowGroups, x: Tensor, base: BaseLayer) -> Tensor:
    """Apply several adapters at one layer, each to its rows of a batch.

    Args:
        adapters: adapters that `can_batch` has accepted.
        groups: the adapter of each row, if any.
        x: `[rows, *tokens, d_in]`, or token ids.
        base: the layer, with the earlier adapters.
    """
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    each = [adapter.row_tensors(base, dtype) for adapter in adapters]
    stacks: dict[str, Any] = {}
    for name, first in each[0].items():
        values = [own[name] for own in each]
        stacks[name] = stacked(values) if isinstance(first, Tensor) else values
    return adapters[0].forward_rows(stacks, groups, x, base)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RowSteps:
    """A step for each part of the batch's rows.

    Attributes:
        steps: a step for each part of the rows; None for the base layer.
        layers: the steps as layers that each apply their adapters in one call, innermost first;
            None if that is impossible.
        at_outputs: whether the layer is an output layer, which may get only some of the tokens.
    """

    steps: tuple[Chain | None, ...]
    layers: tuple[BatchedAdapters, ...] | None
    at_outputs: bool = False

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: Rows = None) -> Tensor:
        """Return the output of all rows; `x` is `[rows, …]`.

        Raises:
            CompositionError: the layer was called alone.
        """
        if rows is None:
            raise CompositionError(_CALLED_ALONE)
        if self.at_outputs and isinstance(rows, PackedRows):
            rows = rows.at_outputs()
        if is_packed(x, rows):
            packed = PackedLayer(base, x)
            return self._on_rows(adapters, packed.x, packed, rows).transpose(0, 1)
        return self._on_rows(adapters, x, base, rows)

    def _on_rows(self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: RowMap) -> Tensor:
        layout = rows.layout_of(x)
        if self.layers is not None:
            for layer in self.layers[:-1]:
                base = Nested(functools.partial(layer.run, adapters, layout), base)
            return self.layers[-1].run(adapters, layout, x, base)
        views = parts_of_call(layout, rows, x, base)
        outputs = [_on_part(self.steps[part], adapters, view) for part, view in views]
        if len(outputs) < len(self.steps) and torch.is_grad_enabled():
            outputs.append(no_rows(adapters, outputs[0], base))
        return layout.restored(torch.cat(outputs))  # [rows, …]


@dataclass(frozen=True)
class Slots:
    """An adapter from the slots of a shelf for each row, or none.

    The site's adapters are functions of the row groups, an input and its base.

    Attributes:
        shelves: the shelf number of each adapter, innermost first.
        at_outputs: see `RowSteps`.
    """

    shelves: tuple[int, ...]
    at_outputs: bool = False

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: Rows = None) -> Tensor:
        """Return the output of all rows; `x` is `[rows, …]`.

        Raises:
            BatchError: the number of rows does not fit.
            CompositionError: the layer was called alone.
        """
        if not isinstance(rows, SlotRows):
            raise CompositionError(_CALLED_ALONE)
        if self.at_outputs and rows.outputs is not None:
            rows = rows.outputs
        packed = is_packed(x, rows)
        if packed:
            base = PackedLayer(base, x)
            x = base.x
        for shelf, adapter in zip(self.shelves, adapters, strict=True):
            base = Nested(functools.partial(adapter, rows.groups(shelf, x.shape[0])), base)
        y = base(x)
        return y.transpose(0, 1) if packed else y


def is_packed(x: Tensor, rows: RowMap) -> bool:
    """Return whether a layer's input is one sequence of packed requests, not a row for each token.

    Args:
        x: features, or token ids.
        rows: the batch's rows.
    """
    if not (isinstance(rows, PackedRows) or (isinstance(rows, SlotRows) and rows.is_packed)):
        return False
    return x.shape[0] == 1 and x.dim() > (2 if x.is_floating_point() else 1)


def no_rows(adapters: Adapters, like: Tensor, base: BaseLayer) -> Tensor:
    """Return a tensor `[0, …]` whose gradient reaches all parameters that train at a site.

    Joined to the rows of a batch, it gives an adapter without rows a gradient of zeros, which
    DistributedDataParallel would wait for.
    """
    modules = [module for adapter in adapters for module in adapter.modules()]
    sharing = [m for m in modules if isinstance(m, Adapter) and m.shared_key is not None]
    parameters = [p for module in modules for p in module.parameters(recurse=False)]
    parameters += [p for module in sharing for p in base.shared(module).parameters()]
    found = [p.flatten()[:0].to(like) for p in parameters if p.requires_grad]
    return torch.cat([like.new_empty(0), *found]).view(0, *like.shape[1:])


def parts_of_call(
    layout: RowLayout, rows: RowMap, x: Tensor, base: BaseLayer
) -> list[tuple[int, PartialLayer]]:
    """Return each part of the batch: its number, and the layer as the part sees it.

    Args:
        layout: layout of the layer's input.
        rows: the batch's rows.
        x: the input, `[rows, …]`.
        base: the layer.
    """
    # the residual may be in sequences when x is in tokens
    whole = SharedOutputs(base, x, lambda t: rows.layout(t.shape[0]).arranged(t))
    ordered = layout.arranged(x)
    views = []
    for part, start, size in layout.runs:
        take = functools.partial(share, start=start, size=size, of=layout.size)
        views.append((part, PartialLayer(whole, take(ordered), take, part)))
    return views


def _on_part(step: Chain | None, adapters: Adapters, view: PartialLayer) -> Tensor:
    return view(view.x) if step is None else evaluate(step, adapters, view.x, view)


def share(t: Tensor, *, start: int, size: int, of: int) -> Tensor:
    """Return the rows of a part from a sorted tensor with a fixed number of rows per row of x.

    Args:
        t: `[rows, …]`, or a multiple of the rows.
        start: the part's first row.
        size: the part's number of rows.
        of: number of rows of the batch.
    """
    count = t.shape[0]
    return t.narrow(0, start * count // of, size * count // of)  # [size · count / of, …]


@dataclass(frozen=True)
class Copies:
    """The copy of a layer that runs for each part of the batch.

    Attributes:
        owners: the number of the copy for each part; None for the layer itself.
    """

    owners: tuple[int | None, ...]

    def call(
        self,
        copies: Adapters,
        layer: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rows: RowMap | None,
    ) -> Any:
        """Return the layer's output, computed by the copies.

        Args:
            copies: the copies, by number.
            layer: the layer's own forward.
            args: the layer's positional arguments.
            kwargs: the layer's keyword arguments.
            rows: the batch's rows; None if all rows take the same copy.

        Raises:
            CompositionError: the rows that the layer got cannot be identified.
        """
        found = [layer if owner is None else copies[owner] for owner in self.owners]
        if len(set(self.owners)) == 1:
            return found[0](*args, **kwargs)
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
        if rows is None or first is None:
            raise CompositionError(_CALLED_ALONE)
        if isinstance(rows, PackedRows):
            rows = rows.at_outputs()
        packed = is_packed(first, rows)
        layout = rows.layout(first.shape[1]) if packed else rows.layout_of(first)

        def turned(value: Any) -> Any:
            is_mine = isinstance(value, Tensor) and value.shape[:2] == first.shape[:2]
            return value.transpose(0, 1) if packed and is_mine else value

        args, kwargs = [*map(turned, args)], {name: turned(v) for name, v in kwargs.items()}
        parts = []
        for part, start, size in layout.runs:

            def own(value: Any, start: int = start, size: int = size) -> Any:
                is_mine = isinstance(value, Tensor) and value.dim() > 0
                if not is_mine or value.shape[0] != layout.size:
                    return value
                return layout.arranged(value).narrow(0, start, size)

            named = {key: own(value) for key, value in kwargs.items()}
            parts.append(found[part](*map(own, args), **named))
        return _joined(parts, layout, packed)

    def run(self, adapters: Adapters, x: Tensor, base: BaseLayer, rows: Rows = None) -> Tensor:
        """Return the output for a layer with one argument; see `call`."""
        return cast("Tensor", self.call(adapters, base, (x,), {}, rows))


def _joined(parts: Sequence[Any], layout: RowLayout, packed: bool) -> Any:
    """Return the output of all rows from those of the parts, each a tensor or a tuple of them."""
    if isinstance(parts[0], tuple):
        return tuple(_joined(each, layout, packed) for each in zip(*parts, strict=True))
    whole = layout.restored(torch.cat(list(parts)))  # [rows, …]
    return whole.transpose(0, 1) if packed else whole


def inverse_of(
    step: Step | None, adapters: Adapters, y: Tensor, base: BaseLayer, rows: Rows = None
) -> Tensor:
    """Return the inverse of a step; the inverse of the last adapter is applied first.

    Adapters without an inverse are skipped.

    Args:
        step: step of the entry; None if no adapter acts there.
        adapters: the adapters at the entry.
        y: `[rows, tokens, d_model]`.
        base: the layer that provides modules shared by the adapters.
        rows: the batch's rows, if the step divides it.

    Raises:
        CompositionError: the step has no inverse.
    """
    if step is None:
        return y
    if isinstance(step, tuple) and all(isinstance(part, int) for part in step):
        for number in reversed(step):
            adapter = adapters[cast("int", number)]
            y = adapter.inverse(y, base) if isinstance(adapter, InvertibleAdapter) else y
        return y
    if not isinstance(step, RowSteps) or rows is None:
        raise CompositionError(
            f"{step!r} has no inverse, which a language modeling head needs. Activate a Stack of "
            f"invertible adapters, or add a fusion with AdapterFusionConfig(entry='first')."
        )
    if isinstance(rows, PackedRows):
        rows = rows.at_outputs()
    packed = is_packed(y, rows)
    y = y.transpose(0, 1) if packed else y
    layout = rows.layout(y.shape[0])
    views = parts_of_call(layout, rows, y, base)
    found = [inverse_of(step.steps[part], adapters, view.x, base) for part, view in views]
    z = layout.restored(torch.cat(found))  # [rows, tokens, d_model]
    return z.transpose(0, 1) if packed else z


def prefix_of(
    step: Step, adapters: Adapters, x: Tensor, base: BaseLayer, rows: Rows = None
) -> Prefix:
    """Return an attention site's prefix under its step; the prefixes of a stack are joined.

    Args:
        step: the site's step.
        adapters: the adapters at the site.
        x: the input of the queries, `[rows, tokens, d_model]`.
        base: the attention.
        rows: the batch's rows, where the step divides it.

    Raises:
        CompositionError: the step divides the sequence, averages or fuses, or contains an adapter
            that is not a prefix.
    """
    if isinstance(step, tuple):
        found = [adapters[part] for part in step if isinstance(part, int)]
        if len(found) == len(step) and all(isinstance(a, AttentionAdapter) for a in found):
            return _chained([adapter(x, base) for adapter in found])
    if not isinstance(step, RowSteps) or rows is None:
        raise CompositionError(
            "an attention can only join keys and values of prefixes, one after another. "
            "Activate them in a Stack, or for different rows of a batch."
        )
    layout = rows.layout_of(x)
    parts: list[Prefix | None] = []
    sizes: list[int] = []
    for part, view in parts_of_call(layout, rows, x, base):
        own = step.steps[part]
        parts.append(None if own is None else prefix_of(own, adapters, view.x, view))
        sizes.append(view.x.shape[0])
    there = [part for part in parts if part is not None]
    if not there:
        # this batch has no rows for the prefixes
        own = next(own for own in step.steps if own is not None)
        there = [prefix_of(own, adapters, x, base)]
    keys, values, mask = _padded(parts, sizes, there[0])
    if len(parts) < len(step.steps) and torch.is_grad_enabled():
        keys = torch.cat([keys, no_rows(adapters, keys, base)])
    keys, values, mask = (layout.restored(t) for t in (keys, values, mask))
    in_window = any(part.in_window for part in parts if part is not None)
    return Prefix(keys, values, mask, there[0].distances, in_window)


def _chained(prefixes: Sequence[Prefix]) -> Prefix:
    """Return one prefix, `[rows or 1, kv_heads, length, width]`, whose length is the sum."""
    if len(prefixes) == 1:
        return prefixes[0]
    if len({prefix.distances for prefix in prefixes}) > 1:
        raise CompositionError(
            "Stack: only some of the prefixes were trained with shifted distances between tokens, "
            "and an attention cannot compute both. Activate them one by one."
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
    longest = max((part.keys.shape[2] for part in parts if part is not None), default=0)
    empty = Prefix(one.keys.detach()[:1, :, :0], one.values.detach()[:1, :, :0])
    keys: list[Tensor] = []
    values: list[Tensor] = []
    masks: list[Tensor] = []
    for part, size in zip(parts, sizes, strict=True):
        own = part or empty
        missing = longest - own.keys.shape[2]
        # pad at the start, so that the positions counted by a relative bias do not change
        keys.append(pad(own.keys.expand(size, -1, -1, -1), (0, 0, missing, 0)))
        values.append(pad(own.values.expand(size, -1, -1, -1), (0, 0, missing, 0)))
        mask = one.keys.new_ones(size, longest - missing, dtype=torch.bool)
        masks.append(pad(mask, (missing, 0)))  # [size, longest]
    return torch.cat(keys), torch.cat(values), torch.cat(masks)


@dataclass(frozen=True, slots=True)
class SiteStep:
    """A site's evaluation: a step over numbered adapters.

    `torch.compile` specializes a forward on the names that it reads: compiled code reads only the
    numbers, and runs for all compositions of the same structure.

    Attributes:
        step: the step over the adapters' numbers.
        names: names of the adapters, by number.
        adapters: adapters by number; None if they are looked up at the layer in each call, as for a
            copy of the layer, which has its own.
        only: the adapter, if it is all that the site evaluates; else None.
    """

    step: Step
    names: tuple[str, ...]
    adapters: tuple[Any, ...] | None = field(default=None, compare=False, repr=False)
    only: Adapter | None = field(default=None, compare=False, repr=False)

    def by_name(self) -> SiteStep:
        """Return the site for a copy of the layer."""
        return SiteStep(self.step, self.names)

    def of_part(self, part: int) -> SiteStep | None:
        """Return the site for the rows of one part; None if nothing acts there."""
        step: Step | None = self.step
        if isinstance(step, RowSteps):
            step = step.steps[part]
        elif isinstance(step, Copies) and len(set(step.owners)) > 1:
            owner = step.owners[part]
            step = None if owner is None else Copies((owner,))
        return None if step is None else replace(self, step=step, only=None)


def step_of_copies(owners: Sequence[str | None]) -> SiteStep:
    """Return the step of a static head's layer, from the owner of each part's copy."""
    names = tuple(dict.fromkeys(owner for owner in owners if owner is not None))
    numbers = tuple(None if owner is None else names.index(owner) for owner in owners)
    return SiteStep(Copies(numbers), names)


def compile_site(
    parts: Sequence[Child], present: Mapping[str, Any], unfused: Collection[str] = ()
) -> SiteStep | None:
    """Return the step of a site; None if no adapter of the composition is present there.

    Args:
        parts: the distinct compositions of the rows.
        present: the adapters and fusion layers at the site, by name.
        unfused: the fusions without layers at the site; the first of their adapters acts instead.
    """
    site = _Site(present, unfused)
    step = _of_parts([site.compiled(part) for part in parts], site._adapter)
    if step is None:
        return None
    held = tuple(present.get(name) for name in site.names)
    if None in held:
        return SiteStep(step, tuple(site.names))
    return SiteStep(step, tuple(site.names), held, held[0] if step == (0,) else None)


def join_sites(sites: Sequence[SiteStep | None], at_outputs: bool = False) -> SiteStep:
    """Return the step of a site for rows with different plans.

    Args:
        sites: the step in each plan, with its adapters; None where no adapter acts; not all None.
        at_outputs: see `RowSteps`.

    Raises:
        CompositionError: one plan runs a copy of a layer that another plan adapts.
    """
    numbers: dict[int, int] = {}
    names, adapters = list[str](), list[Any]()
    steps: list[Step | None] = []
    for site in sites:
        if site is None:
            steps.append(None)
            continue
        own: list[int] = []
        for name, adapter in zip(site.names, site.adapters or (), strict=True):
            own.append(numbers.setdefault(id(adapter), len(adapters)))
            if own[-1] == len(adapters):
                names.append(name)
                adapters.append(adapter)
        if isinstance(site.step, tuple):
            steps.append(_renumbered(site.step, own))
        elif isinstance(site.step, Copies):
            (owner,) = set(site.step.owners)
            steps.append(Copies((None if owner is None else own[owner],)))
        else:
            raise CompositionError("a plan whose rows differ cannot be joined with others")
    held = tuple(adapters)
    copies = [step for step in steps if isinstance(step, Copies)]
    if copies:
        if any(isinstance(step, tuple) for step in steps):
            raise CompositionError(
                "an adapter has its own copy of an output layer that the adapter of another "
                "request changes. Run them one after the other."
            )
        owners = (step.owners[0] if isinstance(step, Copies) else None for step in steps)
        return SiteStep(Copies(tuple(owners)), tuple(names), held)
    step = _of_parts(cast("list[Chain | None]", steps), held.__getitem__, at_outputs)
    alone = all(site is not None and site.only is not None for site in sites)
    only = held[0] if step == (0,) and alone else None
    return SiteStep(cast("Step", step), tuple(names), held, only)


def _of_parts(
    steps: Sequence[Chain | None], adapter: Callable[[int], Any], at_outputs: bool = False
) -> Chain | RowSteps | None:
    """Return the step of a site from that of each part of the rows.

    Args:
        steps: a chain for each part; None for the base layer.
        adapter: a function that returns an adapter by its number.
        at_outputs: see `RowSteps`.
    """
    if all(step == steps[0] for step in steps):
        return steps[0]
    return RowSteps(tuple(steps), _layers(steps, adapter), at_outputs)


def _layers(
    steps: Sequence[Chain | None], adapter: Callable[[int], Any]
) -> tuple[BatchedAdapters, ...] | None:
    """Return different rows' chains as layers, each of which applies its adapters in one call.

    Args:
        steps: a chain for each part of the rows.
        adapter: a function that returns an adapter by its number.
    """
    chains = [[part for part in step or () if isinstance(part, int)] for step in steps]
    if any(len(chain) < len(step or ()) for chain, step in zip(chains, steps, strict=True)):
        return None
    layers: list[BatchedAdapters] = []
    for level in range(max(map(len, chains))):
        at_level = [chain[level] if level < len(chain) else None for chain in chains]
        distinct = tuple(dict.fromkeys(number for number in at_level if number is not None))
        uniform = len(distinct) == 1 and None not in at_level
        if not uniform and not can_batch([adapter(number) for number in distinct]):
            return None
        of_parts = tuple(None if n is None else distinct.index(n) for n in at_level)
        layers.append(BatchedAdapters(distinct, of_parts))
    return tuple(layers)


class _Site:
    """Compiles compositions for one site, and numbers the adapters that they use."""

    def __init__(self, present: Mapping[str, Any], unfused: Collection[str]) -> None:
        self._present, self._unfused = present, unfused
        self.names: list[str] = []

    def _number(self, name: str) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def _adapter(self, number: int) -> Any:
        return self._present[self.names[number]]

    def compiled(self, setup: Child) -> Chain | None:
        """Return the step of a composition, pruned to the adapters that are present."""
        if not isinstance(setup, Node):
            return (self._number(setup),) if setup is not None and setup in self._present else None
        steps = [self.compiled(child) for child in setup.children]
        if all(step is None for step in steps):
            return None
        self._refuse_other_base(setup)
        acting = [step for step in steps if step is not None and not self._is_base(step)]
        if not acting:
            # adapters of a base model without its language adapters do nothing else here
            return next(step for step in steps if step is not None)
        if isinstance(setup, Fuse) and setup.name in self._unfused:
            return steps[0]
        if isinstance(setup, (Average, Fuse, Split)):
            self._refuse_unmixable(setup)
        if isinstance(setup, Fuse):
            return (self._fused(setup, steps),)
        if isinstance(setup, Split):
            return (Tokens(tuple(steps), setup.splits, self._acts_on_all(steps)),)
        if isinstance(setup, Average):
            return (Mean(tuple(steps), setup.weights, self._acts_on_all(steps)),)
        parts = [part for step in acting for part in step]
        # the first adapter of a stack acts first; if adapters change the input, it is the outermost
        outer = [part for part in parts if self._acts_on(part) == "input"]
        inner = [part for part in parts if self._acts_on(part) != "input"]
        return (*inner, *reversed(outer))

    def _is_base(self, step: Chain) -> bool:
        only = step[0] if len(step) == 1 else None
        adapter = self._adapter(only) if isinstance(only, int) else None
        return isinstance(adapter, LanguageFreeAdapter) and adapter.is_base

    def _refuse_other_base(self, setup: Node) -> None:
        names = setup.flatten()
        found = {name: self._present.get(name) for name in names}
        free = {n: a for n, a in found.items() if isinstance(a, LanguageFreeAdapter)}
        other = next((n for n in names if n not in free), None)
        if free and other is not None:
            first, adapter = next(iter(free.items()))
            raise CompositionError(
                f"{setup!r}: {first!r} is for a model without its language adapters, {other!r} is "
                f"not. Write BatchSplit({first!r}, {other!r}, …), or add it with {adapter.joining}."
            )

    def _refuse_unmixable(self, setup: Node) -> None:
        for name in setup.flatten():
            adapter = self._present.get(name)
            fusible = isinstance(setup, Fuse) and isinstance(adapter, FusibleAdapter)
            what = "" if adapter is None or fusible else adapter.stacks_only
            if what:
                raise CompositionError(
                    f"{setup!r}: {name!r} has {what}, which cannot be averaged, fused or split. "
                    f"Write Stack({name!r}, …), or BatchSplit({name!r}, …) for rows of a batch."
                )

    def _fused(self, setup: Fuse, steps: Sequence[Chain | None]) -> Fused:
        chains: list[Chain] = []
        last_adapters: list[int] = []
        for child, step in zip(setup.children, steps, strict=True):
            last = child.last() if isinstance(child, Node) else child
            if step is None or last not in [self.names[cast("int", part)] for part in step]:
                raise CompositionError(
                    f"{setup!r}: {child!r} lacks an adapter at a site where others have one. "
                    f"Fuse adapters with the same sites."
                )
            chains.append(step)
            last_adapters.append(self._number(str(last)))
        fusion = self._number(fusion_key(setup.name))
        acts_on = self._acts_on(last_adapters[-1])
        return Fused(tuple(chains), tuple(last_adapters), fusion, acts_on)

    def _acts_on(self, part: int | Tree) -> str:
        return str((self._adapter(part) if isinstance(part, int) else part).acts_on)

    def _acts_on_all(self, steps: Sequence[Chain | None]) -> str:
        parts = [part for step in steps for part in step or ()]
        return "input" if all(self._acts_on(part) == "input" for part in parts) else "output"
