"""Layers as passed to adapters: one call of a layer, some of its features, its weight.

Only this module knows the layout of weights: GPT-2's Conv1D and embeddings store theirs as `[d_in,
d_out]`, fused experts keep one tensor for all, and quantized ones are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from adapterzoo.anatomy import OutputSlice, experts
from adapterzoo.anatomy.patterns import EXPERTS
from adapterzoo.call import LayerStackCall, StackCall
from adapterzoo.composition import Around
from adapterzoo.contracts import Adapter, BaseLayer
from adapterzoo.errors import StateError
from adapterzoo.runtime import CallContext

from .quantized import packing_of


class LayerCall(BaseLayer):
    """One call of a layer, as passed to its adapters.

    Attributes:
        shown: the weight to show; None: the layer's own.
        shown_bias: the bias likewise.
        kept: the untouched values of parameters that hold merged ones.
    """

    # made at each layer in each call: what few calls set is a default of the class
    shown: Tensor | None = None
    shown_bias: Tensor | None = None
    kept: Mapping[str, Tensor] = MappingProxyType({})
    _rest: tuple[Any, ...] | list[Any] | None = None
    # the last input and its output: a later adapter may need the same one
    _x: Tensor | None = None
    _y: Any = None

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        residual: Tensor | None = None,
        context: CallContext | None = None,
    ) -> None:
        self._module = module
        self._forward = forward
        self._args = args
        self._kwargs = kwargs
        self._residual = residual
        self._context = context

    def __call__(self, x: Tensor) -> Tensor:
        """Return the untouched layer's output; keep its other return values for `pack`."""
        if self._x is not x:
            out = self._with_keywords(x) if self._kwargs else self._forward(x, *self._args[1:])
            # blocks may return (hidden, attention weights, …)
            if isinstance(out, (tuple, list)):
                self._rest = out[1:]
                out = out[0]
            self._x, self._y = x, out
        return self._y  # type: ignore[no-any-return]

    original = __call__

    def _with_keywords(self, x: Tensor) -> Any:
        if self._args:
            return self._forward(x, *self._args[1:], **self._kwargs)
        return self._forward(**{**self._kwargs, next(iter(self._kwargs)): x})

    def pack(self, y: Tensor) -> Any:
        """Return the output in the form that the layer returned."""
        if self._rest is None:
            return y
        return [y, *self._rest] if isinstance(self._rest, list) else (y, *self._rest)

    @property
    def weight(self) -> Tensor:
        """The untouched weight."""
        if self.shown is None:
            # a packed weight is read once per call, for all parts of the layer and all adapters
            self.shown = matrix(self._module)
        return self.shown

    @property
    def bias(self) -> Tensor | None:
        """The untouched bias."""
        if self.shown_bias is not None:
            return self.shown_bias
        layer = self._module
        # a parametrization takes the parameter away
        if "bias" not in layer._parameters and is_parametrized(layer, "bias"):
            return layer.bias  # type: ignore[return-value]
        return own(layer, "bias")

    @property
    def is_original(self) -> bool:
        """True: the layer alone."""
        return True

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The untouched parameters by name."""
        own = self._module._parameters
        return {name: self.kept.get(name, p) for name, p in own.items() if p is not None}

    @property
    def scale(self) -> float | Tensor:
        """The factor of the output."""
        return getattr(self._module, "embed_scale", 1.0)

    @property
    def padding_idx(self) -> int | None:
        """The token without gradient."""
        return getattr(self._module, "padding_idx", None)

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer.

        Raises:
            StateError: the module that reads it has not run.
        """
        if self._residual is None:
            raise StateError(
                f"{type(self._module).__name__}: the adapter at this layer needs the input of "
                f"another module of the block, which was not run before it. Run the whole block."
            )
        return self._residual

    @property
    def call(self) -> StackCall:
        """The call of the encoder or decoder.

        Raises:
            StateError: none is running.
        """
        positions: tuple[str, ...] = vars(type(self._module)).get("_positions", ())
        named = dict(zip(positions, self._args, strict=False))
        return LayerStackCall(self._in_model().stack, {**named, **self._kwargs})

    @property
    def is_in_call(self) -> bool:
        """Whether a call is running."""
        # compiled: torch 2.11 does not trace `bool` of a list
        return self._context is not None and len(self._context.stacks) > 0

    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that the adapter's layers share.

        Raises:
            StateError: the adapter shares nothing, or is not in a model.
        """
        key = adapter.shared_key
        if key is None:
            raise StateError(
                f"{type(adapter).__name__}: its config shares no module between layers. "
                f"Return one from shared(placements, device, dtype) of the config."
            )
        own = None if adapter.is_replica else key.module
        return self._in_model().shared(key) if own is None else own

    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model, of this replica."""
        return self._in_model().part(path)

    def _in_model(self) -> CallContext:
        if self._context is None:
            raise StateError(
                f"{type(self._module).__name__}: the layer is not in a model, so its adapter "
                f"has neither a running call nor a shared module. Add the adapter to a model."
            )
        return self._context


class SlicedLayer(Around):
    """Some output features of a fused layer, as a separate layer."""

    __slots__ = ("_features", "_taken", "_x", "_y")

    def __init__(
        self,
        base: BaseLayer,
        features: OutputSlice,
        x: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        """Take a part of a layer.

        Args:
            base: the layer.
            features: of the part.
            x: an input whose output is known.
            y: the layer's output for `x`.
        """
        self._inner = base
        self._features = features
        self._x = x
        self._y = y
        # the last output and its part: the same output object gives the same part object
        self._taken: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return these features of the layer's output."""
        return self._take(self._y if x is self._x and self._y is not None else self._inner(x))

    def original(self, x: Tensor) -> Tensor:
        """Return the untouched layer's output for these features."""
        return self._take(self._inner.original(x))

    def _take(self, y: Tensor) -> Tensor:
        if self._taken is None or self._taken[0] is not y:
            self._taken = y, take_slice(y, self._features, -1)
        return self._taken[1]

    @property
    def weight(self) -> Tensor:
        """The untouched weight."""
        return take_slice(self._inner.weight, self._features, -2)

    @property
    def bias(self) -> Tensor | None:
        """The untouched bias."""
        bias = self._inner.bias
        return None if bias is None else take_slice(bias, self._features, 0)


def own(layer: nn.Module, parameter: str) -> Tensor | None:
    """Return a layer's own parameter, None if it has none of this name.

    DataParallel's replicas hold tensors as plain attributes instead of parameters.
    """
    return layer._parameters.get(parameter, vars(layer).get(parameter))


def stores_transposed(layer: nn.Module, parameter: str = "weight") -> bool:
    """Return whether a weight is `[d_in, d_out]`: embeddings, Conv1D, some experts."""
    if parameter != "weight":
        found = {name: own(layer, name) for name in EXPERTS}
        shapes = {n: tuple(t.shape) for n, t in found.items() if t is not None and t.dim() == 3}
        return experts.stores_transposed(layer, shapes)
    if isinstance(layer, nn.Linear):
        return False
    names = {cls.__name__ for cls in type(layer).__mro__}
    return isinstance(layer, nn.Embedding) or "Conv1D" in names


def matrix(layer: nn.Module, parameter: str = "weight") -> Tensor:
    """Return a weight as `[*experts, d_out, d_in]`; a view unless it is quantized.

    Raises:
        StateError: the layer has no floating-point matrix of this name.
    """
    weight = own(layer, parameter)
    if weight is not None and (packing := packing_of(weight)) is not None:
        weight = packing.read(layer, weight)
    if weight is None or weight.dim() < 2 or not weight.is_floating_point():
        held = "missing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        raise StateError(
            f"{type(layer).__name__}: its {parameter!r} is not a floating-point matrix ({held}), "
            f"so it can be adapted by a function of its input or output only. Write "
            f"exclude_modules=[…] with its name."
        )
    return weight.mT if stores_transposed(layer, parameter) else weight


def take_slice(t: Tensor, features: OutputSlice, dim: int) -> Tensor:
    """Return some features along a dimension, in the order of a separate layer."""
    if features.groups == 1:
        return t.narrow(dim, features.start, features.stop - features.start)
    dim %= t.dim()
    grouped = t.unflatten(dim, (features.groups, features.width))  # [.., groups, width, ..]
    taken: Tensor = grouped.narrow(dim + 1, features.start, features.stop - features.start)
    return taken.flatten(dim, dim + 1)  # [.., groups · size, ..]


def put_slice(t: Tensor, part: Tensor, features: OutputSlice, dim: int) -> Tensor:
    """Return `t` with the part in the place that `take_slice` reads."""
    dim %= t.dim()
    size = features.stop - features.start
    grouped = t.unflatten(dim, (features.groups, features.width))  # [.., groups, width, ..]
    before = grouped.narrow(dim + 1, 0, features.start)
    after = grouped.narrow(dim + 1, features.stop, features.width - features.stop)
    middle = part.unflatten(dim, (features.groups, size))  # [.., groups, size, ..]
    whole = torch.cat([before, middle, after], dim + 1)  # [.., groups, width, ..]
    return whole.flatten(dim, dim + 1)  # [.., groups · width, ..]
