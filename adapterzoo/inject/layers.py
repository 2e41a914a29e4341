"""Layers as adapters see them: a call of a layer, some of its features, its weight.

Only this module knows the layout of weights: GPT-2's Conv1D and embeddings store `[d_in, d_out]`,
fused experts share one tensor, and quantized weights are packed. Fused layers, unions and experts
have several adapters under one name.

Quantization libraries are optional and imported only for their own weights: the class of a
weight shows that its library is installed.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv3d, pad
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from adapterzoo.anatomy import OutputSlice
from adapterzoo.anatomy.blocks import experts_transposed, is_packed_linear, linear_shape, stored
from adapterzoo.anatomy.patterns import EXPERTS
from adapterzoo.averaging import Combination
from adapterzoo.call import StackCall
from adapterzoo.composition.compile import LayerView, Nested
from adapterzoo.contracts import (
    Adapter,
    BaseLayer,
    CopyAdapter,
    SharedKey,
    WeightAdapter,
    row_options,
)
from adapterzoo.errors import CompositionError, StateError
from adapterzoo.runtime import CallContext
from adapterzoo.tensor_parallel import write

if TYPE_CHECKING:
    from adapterzoo.kernels.grouped import RowGroups


class LayerCall(BaseLayer):
    """One call of a layer, as passed to its adapters.

    Attributes:
        shown: the weight to show; None: the layer's own.
        shown_bias: the same for the bias.
        kept: the untouched values of merged parameters.
    """

    # the layer alone
    is_original = True
    # created at each layer in each call: rarely set values are defaults of the class
    shown: Tensor | None = None
    shown_bias: Tensor | None = None
    kept: Mapping[str, Tensor] = MappingProxyType({})
    _rest: tuple[Any, ...] | list[Any] | None = None
    # the last input and its output: the next adapter may need the same output
    _x: Tensor | None = None
    _y: Any = None
    # the shape of an output whose first dimension holds the tokens of all rows
    _flat: torch.Size | None = None

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
        """Return the untouched layer's output with the dimensions of `x`.

        `pack` restores its own shape, and adds the layer's other return values.
        """
        if self._x is not x:
            if not self._kwargs:
                out = self._forward(x, *self._args[1:])
            elif self._args:
                out = self._forward(x, *self._args[1:], **self._kwargs)
            else:
                out = self._forward(**{**self._kwargs, next(iter(self._kwargs)): x})
            # blocks may return (hidden, attention weights, …)
            if isinstance(out, (tuple, list)):
                self._rest = out[1:]
                out = out[0]
            # Llama 4's experts return [rows · tokens, d] for [rows, tokens, d]; a module with its
            # own parameter may return something other than a tensor
            if x.dim() == 3 and getattr(out, "ndim", 0) == 2 and len(out) == x.shape[:2].numel():
                self._flat = out.shape
                out = out.view(*x.shape[:-1], -1)
            self._x, self._y = x, out
        return self._y  # type: ignore[no-any-return]

    original = __call__

    def pack(self, y: Tensor) -> Any:
        """Return the output in the form that the layer returned."""
        if self._flat is not None:
            y = y.reshape(self._flat)
        if self._rest is None:
            return y
        return [y, *self._rest] if isinstance(self._rest, list) else (y, *self._rest)

    @property
    def weight(self) -> Tensor:
        """The untouched weight."""
        if self.shown is None:
            # a packed weight is unpacked once per call, for all parts and all adapters
            self.shown = matrix(self._module)
        return self.shown

    def convolve(self, x: Tensor, w: Tensor, groups: int | None = None) -> Tensor:
        """Return another convolution of the input, without a bias."""
        layer: Any = self._module
        run = {1: conv1d, 2: conv2d, 3: conv3d}[len(layer.kernel_size)]
        padding = layer.padding
        if layer.padding_mode != "zeros":
            x = pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
            padding = 0
        own = w.view(len(w), -1, *layer.kernel_size)  # [d, channels, *kernel]
        groups = layer.groups if groups is None else groups
        y: Tensor = run(x, own, None, layer.stride, padding, layer.dilation, groups)
        return y

    def mix(self, t: Tensor, w: Tensor) -> Tensor:
        """Return a product with the channels at each position of a convolution's output."""
        layer: Any = self._module
        places = t.shape[t.dim() - len(layer.kernel_size) :]
        grouped = t.flatten(-len(places)).unflatten(-2, (layer.groups, -1))
        mixed = w.unflatten(0, (layer.groups, -1)) @ grouped
        joined: Tensor = mixed.flatten(-3, -2).unflatten(-1, places)
        return joined

    def by_channel(self, values: Tensor) -> Tensor:
        """Return values for the output channels of a convolution, `[d]` → `[d, 1, …]`."""
        return values.view(-1, *(1 for _ in cast("Any", self._module).kernel_size))

    @property
    def bias(self) -> Tensor | None:
        """The untouched bias."""
        if self.shown_bias is not None:
            return self.shown_bias
        layer = self._module
        # a parametrization removes the parameter
        if "bias" not in layer._parameters and is_parametrized(layer, "bias"):
            return layer.bias  # type: ignore[return-value]
        return own(layer, "bias")

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
        """The id of the token without a gradient."""
        return getattr(self._module, "padding_idx", None)

    @property
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer.

        Raises:
            StateError: the module that reads it has not run.
        """
        if self._residual is None:
            raise StateError(
                f"the adapter at this {type(self._module).__name__} needs the input of another "
                f"module of the block, which has not run. Run the whole block."
            )
        return self._residual

    @property
    def call(self) -> StackCall:
        """The call of the encoder or decoder.

        Raises:
            StateError: no call is running.
        """
        positions: tuple[str, ...] = vars(type(self._module)).get("_positions", ())
        named = dict(zip(positions, self._args, strict=False))
        return StackCall(cast("CallContext", self._context).stack, {**named, **self._kwargs})

    @property
    def is_in_call(self) -> bool:
        """Whether a call is running."""
        # compiled: torch 2.11 does not trace `bool` of a list
        return self._context is not None and len(self._context.stacks) > 0

    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that the adapter's layers share."""
        key = cast("SharedKey", adapter.shared_key)
        own = None if adapter.is_replica else key.module
        return cast("CallContext", self._context).shared(key) if own is None else own

    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model, or of this replica."""
        return cast("CallContext", self._context).part(path)


class SlicedLayer(LayerView):
    """Some output features of a fused layer, or all of a layer, as a separate layer."""

    __slots__ = ("_features", "_taken", "_x", "_y")

    def __init__(
        self,
        base: BaseLayer,
        features: OutputSlice | None,
        x: Tensor | None = None,
        y: Tensor | None = None,
    ) -> None:
        """Take a part of a layer.

        Args:
            base: the layer.
            features: features of the part; None: all, which may not be the last dimension.
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
    """Return a layer's own parameter; None if it has none of this name.

    DataParallel's replicas hold tensors as plain attributes instead of parameters.
    """
    return layer._parameters.get(parameter, vars(layer).get(parameter))


def stores_transposed(layer: nn.Module, parameter: str = "weight") -> bool:
    """Return whether a weight is `[d_in, d_out]`: embeddings, Conv1D, some experts."""
    if parameter != "weight":
        found = {name: own(layer, name) for name in EXPERTS}
        shapes = {n: tuple(t.shape) for n, t in found.items() if t is not None and t.dim() == 3}
        return experts_transposed(layer, shapes)
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
    elif parameter == "weight" and is_quantized(layer):
        weight = _unpacked(layer)
    # float8 experts have their scales in other parameters
    is_packed = parameter != "weight" and weight is not None and weight.element_size() == 1
    if weight is None or is_packed or weight.dim() < 2 or not weight.is_floating_point():
        raise StateError(
            f"{type(layer).__name__}: its {parameter!r} is not a floating-point matrix, as "
            f"the adapter needs. Write exclude_modules=[…] with the layer's name."
        )
    return as_matrix(layer, parameter, weight)


def as_matrix(layer: nn.Module, parameter: str, value: Tensor) -> Tensor:
    """Return a parameter that a layer stores as `[*experts, d_out, d_in]`; a bias unchanged."""
    if parameter == "weight" and isinstance(layer, _ConvNd):
        return value.flatten(1)
    return value.mT if stores_transposed(layer, parameter) else value


def take_slice(t: Tensor, features: OutputSlice | None, dim: int) -> Tensor:
    """Return some features along a dimension, in the order of a separate layer; None: all."""
    if features is None:
        return t
    if features.groups == 1:
        return t.narrow(dim, features.start, features.stop - features.start)
    dim %= t.dim()
    grouped = t.unflatten(dim, (features.groups, features.width))  # [.., groups, width, ..]
    taken: Tensor = grouped.narrow(dim + 1, features.start, features.stop - features.start)
    return taken.flatten(dim, dim + 1)  # [.., groups · size, ..]


def put_slice(t: Tensor, part: Tensor, features: OutputSlice | None, dim: int) -> Tensor:
    """Return `t` with the part at the place that `take_slice` reads; None: the part alone."""
    if features is None:
        return part
    dim %= t.dim()
    size = features.stop - features.start
    grouped = t.unflatten(dim, (features.groups, features.width))  # [.., groups, width, ..]
    before = grouped.narrow(dim + 1, 0, features.start)
    after = grouped.narrow(dim + 1, features.stop, features.width - features.stop)
    middle = part.unflatten(dim, (features.groups, size))  # [.., groups, size, ..]
    whole = torch.cat([before, middle, after], dim + 1)  # [.., groups, width, ..]
    return whole.flatten(dim, dim + 1)  # [.., groups · width, ..]


class FusedAdapters(WeightAdapter):
    """Several adapters of one name at one layer: for the parts of a fused layer or of a union.

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

    def _parts(self, base: BaseLayer) -> Iterator[tuple[str, OutputSlice | None, Any, BaseLayer]]:
        """Yield the label, slice and adapter of each child, and the layer as the child sees it."""
        for label, features in self.slices.items():
            view = base if features is None else SlicedLayer(base, features)
            yield label, features, self._modules[label], view

    def init_from_layer(self, base: BaseLayer) -> None:
        """Initialize each child from its slice of the layer."""
        for _, _, adapter, view in self._parts(base):
            adapter.init_from_layer(view)

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
                "the adapters have different parts at one layer. Add them with the same targets, "
                "or write set_active_adapters(Stack('a', 'b'))."
            )
        for label, _, own, view in self._parts(base):
            own.combine([each._modules[label] for each in adapters], weights, strategy, view)

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the fused layer's output. `x` `[*batch, d_in]` → `[*batch, d_out]`."""
        return self._first(len(self.slices), x, base)

    def _first(self, count: int, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output with the first adapters only."""
        y = untouched = base(x)
        labels = list(self.slices)
        for i, label in enumerate(labels[:count]):
            features = self.slices[label]
            # an adapter that changes its input calls its base again, with the earlier adapters
            met = any(_overlap(features, self.slices[other]) for other in labels[:i])
            before = Nested(functools.partial(self._first, i), base) if met else base
            adapter = cast("Adapter", self._modules[label])
            so_far = y if met else untouched
            view = SlicedLayer(before, features, x, so_far)
            part = adapter(x, view)
            y = put_slice(y, part, features, -1)
        return y

    @property
    def row_options(self) -> Hashable | None:
        """The disjoint parts and their options; None if a part acts alone."""
        own = list(self.slices.values())
        if any(_overlap(one, other) for i, one in enumerate(own) for other in own[:i]):
            return None
        parts = [cast("Adapter", self._modules[label]) for label in self.slices]
        options = [row_options(part) for part in parts]
        # a child that changes the input would call the whole layer for its slice
        if None in options or any(part.acts_on != "output" for part in parts):
            return None
        return tuple(self.slices.items()), tuple(options)

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return the parts' tensors, with the part's label before each name."""
        return {
            f"{label}.{name}": value
            for label, _, part, view in self._parts(base)
            for name, value in part.row_tensors(view, dtype).items()
        }

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Return the fused layer's output, each row of the batch with its own adapters."""
        y = untouched = base(x)
        for label, features in self.slices.items():
            view = SlicedLayer(base, features, x, untouched)
            inside = f"{label}."
            own = {n.removeprefix(inside): s for n, s in stacks.items() if n.startswith(inside)}
            part = cast("Adapter", self._modules[label]).forward_rows(own, groups, x, view)
            y = put_slice(y, part, features, -1)
        return y

    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight of all features, `[*experts, d_out, d_in]`."""
        for _, features, part, view in self._parts(base):
            own = mergeable(part).merged_weight(take_slice(w, features, -2), view)
            w = put_slice(w, own, features, -2)
        return w

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return the factors of all features: the children's side by side, if all have factors."""
        found: list[tuple[Tensor, Tensor]] = []
        for _, features, part, view in self._parts(base):
            factors = mergeable(part).low_rank_factors(take_slice(w, features, -2), view)
            if factors is None:
                return None
            a, b = factors
            nothing = b.new_zeros(*b.shape[:-2], w.shape[-2], b.shape[-1])
            found.append((a, put_slice(nothing, b, features, -2)))
        # the ranks side by side
        return torch.cat([a for a, _ in found], -2), torch.cat([b for _, b in found], -1)

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias of all features, `[d_out]`."""
        for _, features, part, view in self._parts(base):
            own = mergeable(part).merged_bias(take_slice(b, features, 0), view)
            b = put_slice(b, own, features, 0)
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


def is_additive(adapter: nn.Module | None) -> bool:
    """Return whether merging the adapter equals keeping it active together with others."""
    if isinstance(adapter, ExpertAdapters):
        return all(map(is_additive, adapter._modules.values()))
    return isinstance(adapter, WeightAdapter) and adapter.is_additive


def mergeable(adapter: nn.Module | None) -> WeightAdapter:
    """Return the adapter, if it equals a changed weight.

    Raises:
        StateError: the adapter is not a change of the weight.
    """
    if isinstance(adapter, WeightAdapter):
        return adapter
    raise StateError(
        f"a {type(adapter).__name__} adapter is not a change of a weight and cannot be merged. "
        f"Keep it active instead."
    )


def changed(
    adapter: nn.Module | None, parameter: str, value: Tensor, base: BaseLayer, layer: nn.Module
) -> Tensor:
    """Return a parameter of a layer with an adapter's change, as the layer stores it.

    Args:
        adapter: the layer's adapter.
        parameter: name of the parameter.
        value: so far; float32 or float64, as the layer stores it; zeros for a missing bias.
        base: the layer; `base.parameters` are the untouched ones.
        layer: the module.

    Raises:
        StateError: the adapter is not a change of a weight.
    """
    if isinstance(adapter, CopyAdapter):
        return adapter.parameter(parameter, value, base)
    if isinstance(adapter, ExpertAdapters):
        if parameter not in adapter._modules:
            return value
        adapter = adapter._modules[parameter]
    elif parameter == "bias":
        return mergeable(adapter).merged_bias(value, base)
    w = mergeable(adapter).merged_weight(as_matrix(layer, parameter, value), base)
    return w.mT if stores_transposed(layer, parameter) else w.reshape(value.shape)


def _common_container(adapters: Sequence[Adapter]) -> str:
    """Return the container of the adapters; the general one if they have several."""
    containers = {adapter.container for adapter in adapters}
    return containers.pop() if len(containers) == 1 else Adapter.container


def _overlap(one: OutputSlice | None, other: OutputSlice | None) -> bool:
    if one is None or other is None:
        return True
    alike = (one.groups, one.width) == (other.groups, other.width)
    return not alike or (one.start < other.stop and other.start < one.stop)


class Packing:
    """How to read one kind of packed weight; by default torchao's, which behave like plain tensors.

    These functions do not cache their results.
    """

    def is_packed(self, weight: Any) -> bool:
        """Return whether the weight is already quantized; some classes first hold plain numbers."""
        return True

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight in floating point, in the shape that the layer stores.

        Args:
            layer: the owner of the weight, which may keep the scales.
            weight: the packed weight.
        """
        return cast("Tensor", weight.dequantize())

    def count(self, weight: Any) -> int:
        """Return the number of values of the unpacked weight."""
        return cast("Tensor", weight).numel()

    def unpack(self, layer: nn.Module, weight: Any) -> None:
        """Make gradients pass through the layer, even after inference."""


class FourBit(Packing):
    """bitsandbytes' `Params4bit`: two numbers per byte, `[d_out · d_in / 2, 1]`, and block scales.

    On a CPU with bfloat16 instructions, the first forward without gradients reorders the weight
    permanently: `dequantize_4bit` misreads that order, and gradients do not pass.
    """

    def is_packed(self, weight: Any) -> bool:
        """Return whether scales exist; packed bytes can also have the dtype bfloat16."""
        return weight.quant_state is not None

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight `[d_out, d_in]`, in the dtype that it had before quantization."""
        from bitsandbytes import functional

        data, state = _in_first_order(weight)
        return functional.dequantize_4bit(data, state)

    def count(self, weight: Any) -> int:
        """Return d_out · d_in."""
        return math.prod(weight.quant_state.shape)

    def unpack(self, layer: nn.Module, weight: Any) -> None:
        """Restore the weight's original order, permanently."""
        weight.data, weight.quant_state = _in_first_order(weight)
        if "support_avx512bf16_for_cpu" in vars(layer):
            cast("Any", layer).support_avx512bf16_for_cpu = False


class EightBit(Packing):
    """bitsandbytes' `Int8Params`: `[d_out, d_in]` in int8, with one scale per row."""

    def is_packed(self, weight: Any) -> bool:
        """Return whether the numbers are integers."""
        return not cast("Tensor", weight).is_floating_point()

    def read(self, layer: nn.Module, weight: Any) -> Tensor:
        """Return the weight `[d_out, d_in]`, in float32."""
        from bitsandbytes import functional

        # the first forward moves the scales from the weight to the layer
        scales = cast("Any", layer).state.SCB if weight.SCB is None else weight.SCB  # [d_out]
        return cast("Tensor", functional.int8_vectorwise_dequant(weight.data, scales))


# by package and class of a weight, or a base of its class
PACKINGS: Mapping[str, Packing] = {
    "bitsandbytes.Int8Params": EightBit(),
    "bitsandbytes.Params4bit": FourBit(),
    "optimum.QTensor": Packing(),
    "torchao.TorchAOBaseTensor": Packing(),
}


def packing_of(weight: Tensor | None) -> Packing | None:
    """Return the reader for a packed weight; None if it is not packed.

    Args:
        weight: weight of a layer, None if it has none.
    """
    # torch.compile sees only the other classes
    if weight is None or type(weight) in (Tensor, nn.Parameter):
        return None
    for cls in type(weight).__mro__:
        found = PACKINGS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
        if found is not None:
            return found if found.is_packed(weight) else None
    return None


def is_quantized(layer: nn.Module) -> bool:
    """Return whether a layer multiplies by something other than its stored weight.

    Args:
        layer: any module.
    """
    if any(packing_of(p) is not None for p in layer._parameters.values()):
        return True
    if not isinstance(layer, nn.Linear):
        return is_packed_linear(layer)
    weight = layer._parameters.get("weight")
    # a cast of float8 to another dtype around a layer does not change its forward
    is_whole = weight is None or weight.element_size() > 1 or _plain(layer).forward is _MULTIPLY
    if not (is_whole and (weight is None or weight.is_floating_point())):
        return True
    # AutoBitLinear rounds its weight in each call
    rounds = getattr(layer, "online_quant", False)
    # Linear4bit, whose weight is a DTensor of packed numbers once it is sharded
    rounds = rounds or getattr(layer, "quant_state", None) is not None
    return rounds or any("scale" in name for name in (*layer._parameters, *layer._buffers))


_MULTIPLY = nn.Linear.forward


def _plain(layer: nn.Module) -> Any:
    """Return the layer's class without adapters."""
    return getattr(layer, "_plain", type(layer))


def _unpacked(layer: nn.Module) -> Tensor:
    """Return the weight `[d_out, d_in]` of a layer that keeps it in its own way.

    Raises:
        StateError: the layer does more to its inputs than multiply them.
    """
    cls = _plain(layer)
    if f"{cls.__module__.partition('.')[0]}.{cls.__name__}" == "hqq.HQQLinear":
        return cast("Tensor", cls.dequantize(layer))
    if not has_run(layer):
        raise StateError(
            f"{cls.__name__}: compressed-tensors unpacks its weight in the model's first call, but "
            "the adapter needs it earlier. Write model(**inputs) first."
        )
    w, only_multiplies = _products(layer)
    if not only_multiplies:
        raise StateError(
            f"{cls.__name__}: it rounds its inputs by a fixed scale or changes them otherwise, so "
            "its weight cannot be read. Write LoRAConfig(), which does not read it."
        )
    return w.mT


def _products(layer: nn.Module) -> tuple[Tensor, bool]:
    """Return the layer's products with the identity `[d_in, d_out]`, and whether they are Wᵀ.

    They are if the layer only multiplies. Rounding each input by its largest value does not change
    a row of the identity; other rounding, and norms, change 0.7 times a row.
    """
    d_in, _, _ = cast("tuple[int, int, bool]", linear_shape(layer))
    floats = (t for t in stored(layer) if t.is_floating_point() and t.element_size() > 1)
    # scales may be wider than the dtype in which the layer computes
    narrow = min(floats, key=Tensor.element_size, default=torch.empty(0))
    eye = torch.eye(d_in, dtype=narrow.dtype, device=stored(layer)[0].device)
    run = functools.partial(_plain(layer).forward, layer)
    with torch.no_grad():
        bias = run(torch.zeros_like(eye[:1]))  # [1, d_out]
        w, probe = run(eye) - bias, (run(0.7 * eye[:1]) - bias) / 0.7  # [d_in, d_out], [1, d_out]
    return w, _is_near(probe[0], w[0], w.abs().amax() + bias.abs().amax())


def has_run(layer: nn.Module) -> bool:
    """Return whether a quantized layer can run alone: compressed-tensors unpacks whole models.

    Args:
        layer: a quantized layer.
    """
    return not isinstance(layer, nn.Linear) or "weight_packed" not in layer._parameters


def passes_gradients(layer: nn.Module) -> bool:
    """Return whether a quantized layer passes the gradient of its product to its input.

    Args:
        layer: a layer whose class keeps its weight in its own way.
    """
    w, only_multiplies = _products(layer)
    with torch.enable_grad():
        x = torch.full_like(w[:, 0], 0.7).requires_grad_()  # [d_in]
        y = _plain(layer).forward(layer, x[None])
        if not y.requires_grad:
            return False
        (found,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    if found is None or not only_multiplies:
        return found is not None and bool(found.any())
    return _is_near(found, w.sum(1), w.abs().sum(1).amax())


def _is_near(found: Tensor, expected: Tensor, size: Tensor) -> bool:
    """Return whether values are equal, except for rounding of terms of a given size."""
    bound = 8 * torch.finfo(expected.dtype).eps * size
    return bool(((found - expected).abs() <= bound).all())


def was_transposed(layer: nn.Module) -> bool:
    """Return whether a layer stored its weight `[d_in, d_out]` before it was quantized.

    Args:
        layer: quantized; from GPT-2's Conv1D, a linear layer that knows its former class.
    """
    return getattr(getattr(layer, "source_cls", None), "__name__", "") == "Conv1D"


def unpacked_size(weight: Tensor) -> int:
    """Return the number of values of a weight when unpacked.

    Args:
        weight: any tensor.
    """
    packing = packing_of(weight)
    return weight.numel() if packing is None else packing.count(weight)


def uncounted(layer: nn.Module) -> int:
    """Return the number of values of a quantized layer that its parameters do not count.

    Args:
        layer: any module; 0 if its packed weight knows its size, or it has none.
    """
    if not is_quantized(layer) or any(map(packing_of, layer._parameters.values())):
        return 0
    d_in, d_out, _ = cast("tuple[int, int, bool]", linear_shape(layer))
    has_bias = getattr(layer, "bias", None) is not None
    stored = sum(p.numel() for p in layer._parameters.values() if p is not None)
    return (d_in + has_bias) * d_out - stored


def unpack_all(model: nn.Module) -> None:
    """Make gradients pass through all quantized layers of a model.

    Args:
        model: the model; the values of its weights do not change.
    """
    for layer in model.modules():
        for weight in layer._parameters.values():
            if (packing := packing_of(weight)) is not None:
                packing.unpack(layer, weight)


def _in_first_order(weight: Any) -> tuple[Tensor, Any]:
    """Return (bytes, state) of a `Params4bit` in its original order, without changing it."""
    data, state = weight.data, weight.quant_state
    if not getattr(state, "packing_format_for_cpu", False):
        return data, state
    from bitsandbytes import functional

    # the code below writes to the state
    state = copy.copy(state)
    # do not quantize the scales again: that would lose precision
    state.original_nested = False
    reordered, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
    if state.absmax.dim() == 2:
        # bitsandbytes 0.50 leaves the scales in the other order, [d_in / block, d_out]
        state.absmax = state.absmax.T.reshape(-1).float()  # [d_in / block · d_out]
    return reordered, state


def write_finite(target: Tensor, value: Tensor, what: str) -> None:
    """Write a merged value if it is finite in the dtype of the target.

    Args:
        target: a parameter or buffer.
        value: a tensor of its shape.
        what: its name in the message.

    Raises:
        StateError: the value is not finite.
    """
    merged = value.to(target.dtype)
    if not _is_finite(merged):
        why = "overflows" if _is_finite(value) else "is not finite"
        raise StateError(
            f"{what} {why} in {target.dtype}; nothing has changed. Look for NaN in the adapter, or "
            "write model.float() first."
        )
    write(target, merged)


def _is_finite(t: Tensor) -> bool:
    # one pass without a boolean tensor: aminmax returns NaN if any value is NaN
    return not t.numel() or bool(torch.stack(t.aminmax()).isfinite().all())
