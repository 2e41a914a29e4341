"""The layer as an adapter sees it: with earlier adapters, or for a part of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from adapterzoo.call import StackCall
from adapterzoo.contracts import Adapter, BaseLayer


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
