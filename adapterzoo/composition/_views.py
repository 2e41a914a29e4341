"""How an adapter sees its layer in a composition: with others around it, or a part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from adapterzoo.call import StackCall
from adapterzoo.contracts import Adapter, BaseLayer, SharedInputAdapter


class Around(BaseLayer):
    """Base of the views: what they do not change is that of the layer inside."""

    __slots__ = ("_inner",)

    def __init__(self, inner: BaseLayer) -> None:
        """Look at a layer.

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

    def from_input(self, adapter: SharedInputAdapter, x: Tensor) -> Any:
        """Return what the adapter needs of x."""
        return self._inner.from_input(adapter, x)


class Nested(Around):
    """A layer with an adapter, or several, around it, as the base of the next one."""

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


class Whole:
    """One input of a layer, and what the layer makes of it, computed once for all its parts."""

    __slots__ = ("_output", "_plain", "_residual", "base", "order", "x")

    def __init__(self, base: BaseLayer, x: Tensor, order: Callable[[Tensor], Tensor]) -> None:
        """Look at a call.

        Args:
            base: the layer, with the adapters before.
            x: its input.
            order: brings rows of an input or output in the order in which parts are taken.
        """
        self.base = base
        self.x = x
        self.order = order
        self._output: Tensor | None = None
        self._plain: Tensor | None = None
        self._residual: Tensor | None = None

    @property
    def output(self) -> Tensor:
        """The layer's output, ordered."""
        if self._output is None:
            self._output = self.order(self.base(self.x))
        return self._output

    @property
    def plain(self) -> Tensor:
        """The untouched layer's output, ordered; the same object as `output` where it is so."""
        if self._plain is None:
            output, plain = self.base(self.x), self.base.original(self.x)
            if self._output is None:
                self._output = self.order(output)
            self._plain = self._output if plain is output else self.order(plain)
        return self._plain

    @property
    def residual(self) -> Tensor:
        """The residual stream, ordered."""
        if self._residual is None:
            self._residual = self.order(self.base.residual)
        return self._residual


class PartOf(Around):
    """Some rows of a batch, or some tokens of its sequences, as all that the layer is given."""

    __slots__ = ("_key", "_output", "_take", "_whole", "x")

    def __init__(
        self, whole: Whole, x: Tensor, take: Callable[[Tensor], Tensor], key: object
    ) -> None:
        """Take a part.

        Args:
            whole: the call of the layer.
            x: the part of its input.
            take: gives the part of what is ordered as `whole` is.
            key: tells the part from the others of the call.
        """
        super().__init__(whole.base)
        self._whole = whole
        self._take = take
        self._key = key
        self.x = x
        # taken once: what is the same object of the layer is so of its part
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
        whole = self._whole
        # the whole plain output comes first: it may be the output itself
        plain = whole.plain
        return self(x) if plain is whole.output else self._take(plain)

    def from_input(self, adapter: SharedInputAdapter, x: Tensor) -> Any:
        """Return the adapter's projection of the part, which other layers do not share."""
        return type(adapter).from_input((adapter,), x)[0]

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
    """A layer that gives back what it is given, to see to what an adapter changes its input."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the input itself."""
        return x
