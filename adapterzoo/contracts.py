"""The two contracts of the library: adapters and heads.

An adapter is a function around a layer, which it gets as a `BaseLayer`; a head is a function of
hidden states. Both are plain modules that do not depend on models, names, files, devices or each
other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn

from adapterzoo.averaging import Combination, weighted_sum
from adapterzoo.call import StackCall
from adapterzoo.errors import StateError

if TYPE_CHECKING:
    from adapterzoo.kernels.grouped import RowGroups
    from adapterzoo.tensor_parallel import LayerSplit

# kind of device → whether it has float64; torch has no question for it, so that others are tried
_HAVE_FLOAT64 = {"cpu": True, "cuda": True, "meta": True, "mps": False}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, solves and merges: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without it, as Apple's.

    Args:
        device: that computes.
    """
    kind = device.type
    if kind not in _HAVE_FLOAT64:
        try:
            torch.ones(1, dtype=torch.float64, device=device).add(1)
            _HAVE_FLOAT64[kind] = True
        except (RuntimeError, TypeError):
            _HAVE_FLOAT64[kind] = False
    return torch.float64 if _HAVE_FLOAT64[kind] else torch.float32


def upcast(t: Tensor, like: Tensor) -> Tensor:
    """Return the values on another tensor's device, in the dtype for computing there."""
    wide = t.dtype is torch.float64
    return t.detach().to(like.device, widest(like.device) if wide else compute_dtype(t.dtype))


class Contained(nn.Module):
    """A module that a layer, or the base model, keeps under the name of an adapter or fusion.

    Attributes:
        container: name of the submodule that holds it, `<layer>.<container>.<name>`: a part of the
            names of its parameters, as in AdapterHub's `adapters`.
        prefix: precedes its name in compositions, where adapters and fusions meet.
    """

    container: str = "adapters"
    prefix: ClassVar[str] = ""


class SharedModules(nn.ModuleDict, Contained):
    """Modules that the layers of an adapter share, by name."""

    container = "shared_parameters"


@dataclass(slots=True, unsafe_hash=True)
class SharedKey:
    """What the layers of an adapter share; one object for all of them.

    Attributes:
        name: of the adapter.
        number: of the config in a union; None outside of unions.
        module: the one that the layers share; None before the adapter is in a model.
    """

    name: str = ""
    number: int | None = None
    module: nn.Module | None = field(default=None, compare=False, repr=False)


class Ejectable(nn.Module, ABC):
    """A shared module with values that a network computes while they are trained."""

    @abstractmethod
    def eject(self) -> Mapping[str, Any]:
        """Replace the network by the values that it computes, in place.

        Returns:
            The fields of the config that change; empty if there is no network.
        """


class LayerData:
    """What the initial values of an adapter take from `init_data` for one layer."""


class OriginalWeight(LayerData):
    """The weight of a quantized layer before its quantization.

    Attributes:
        read: reads it `[d_out, d_in]`, in the dtype that it is stored in.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        """Take the function that reads it."""
        self.read = read


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The layers whose original weights the initial values of a config need.

    Attributes:
        shapes: path of each adapted layer → `(d_out, d_in)`; one that is not quantized needs none.
    """

    shapes: Mapping[str, tuple[int, int]]


class InputStatistics(LayerData, ABC):
    """What initial values take from the inputs of a layer, batch by batch."""

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Add the inputs `[tokens, d_in]` of one batch, without padding."""


class InputPlan(ABC):
    """The inputs that the initial values of a config need.

    Attributes:
        watched: path of a layer → what collects its inputs.
        skips_unlabeled: whether tokens with the label −100 are left out.
    """

    watched: Mapping[str, InputStatistics]
    skips_unlabeled: bool = False

    @abstractmethod
    def lacking(self, passed: bool) -> frozenset[str]:
        """Return the paths that need another batch; `passed`: all data have been read once."""

    @abstractmethod
    def check(self) -> None:
        """Check after the first pass that the data can be enough.

        Raises:
            ConfigError: no number of passes can be enough.
        """

    def changes(self) -> Mapping[str, Any]:
        """Return the fields of the config that the inputs decide, with their values."""
        return {}


class BaseLayer(ABC):
    """The layer as passed to an adapter: callable, with `weight` and `bias`.

    In a `Stack`, calling it includes the earlier adapters; `original` and `weight` belong to the
    untouched layer.

    Attributes:
        split: how tensor parallelism splits the layer, of which the input, the output, the weight
            and the tensors of adapters are this process's parts then; None for a whole layer.
    """

    __slots__ = ()
    split: LayerSplit | None = None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output with the earlier adapters.

        Args:
            x: `[*batch, d_in]`.

        Returns:
            `[*batch, d_out]`.
        """

    def convolve(self, x: Tensor, w: Tensor, groups: int | None = None) -> Tensor:
        """Return another convolution of the input, without a bias.

        Args:
            x: the input of the convolution, `[*rows, channels, *space]`.
            w: `[d, d_in]`, the inputs of one position as in `weight`.
            groups: parts of the channels that do not mix; None: as in the layer.

        Returns:
            `[*rows, d, *places]`.

        Raises:
            StateError: the layer is not a convolution.
        """
        raise StateError("the layer is not a convolution")

    def mix(self, t: Tensor, w: Tensor) -> Tensor:
        """Return a product with the channels at each place of a convolution's output.

        Args:
            t: `[*rows, channels, *places]`, the channels of one group after the other.
            w: `[d_out, channels / groups]`.

        Returns:
            `[*rows, d_out, *places]`.

        Raises:
            StateError: the layer is not a convolution.
        """
        raise StateError("the layer is not a convolution")

    def by_channel(self, values: Tensor) -> Tensor:
        """Return values of the channels of a convolution's output, `[d]` → `[d, 1, …]`.

        Raises:
            StateError: the layer is not a convolution.
        """
        raise StateError("the layer is not a convolution")

    @abstractmethod
    def original(self, x: Tensor) -> Tensor:
        """Return the untouched layer's output.

        After a call of the layer with the same `x` it is not computed again; if no earlier adapter
        acts, it is the result of that call.

        Args:
            x: `[*batch, d_in]`.

        Returns:
            `[*batch, d_out]`.
        """

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """The untouched weight `[d_out, d_in]`, however the layer stores it.

        Raises:
            StateError: the layer has no such weight.
        """

    @property
    @abstractmethod
    def bias(self) -> Tensor | None:
        """The untouched bias `[d_out]`; None if the layer has none."""

    @property
    @abstractmethod
    def scale(self) -> float | Tensor:
        """The factor of the layer's output, 1 except in the embeddings of some families."""

    @property
    @abstractmethod
    def call(self) -> StackCall:
        """The running call of the encoder or decoder that holds the layer.

        Only adapters with `reads_call` may use it.

        Raises:
            StateError: the layer was called outside of its model.
        """

    @property
    @abstractmethod
    def is_in_call(self) -> bool:
        """Whether a call of an encoder or decoder is running, so that there is a `call`."""

    @abstractmethod
    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that `AdapterConfig.shared` made for all layers of the adapter.

        Args:
            adapter: the adapter that calls this.

        Raises:
            StateError: the adapter shares nothing, or its layer is not in a model.
        """

    @abstractmethod
    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model, of this replica.

        Only adapters with `reads_call` may use it.

        Args:
            path: below the base model.

        Raises:
            StateError: no call is running.
        """

    @property
    @abstractmethod
    def padding_idx(self) -> int | None:
        """The token of an embedding whose row gets no gradient; None if every row gets one."""

    @property
    @abstractmethod
    def is_original(self) -> bool:
        """Whether no earlier adapter acts."""

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, Tensor]:
        """The untouched parameters of the whole layer by name, as it stores them."""

    @property
    @abstractmethod
    def residual(self) -> Tensor:
        """The residual stream before the sub-layer, for a site with a `source`.

        Shape `[*batch, d_model]`.
        """


class Adapter(Contained, ABC):
    """Base of all adapters: `forward(x, base)` is the adapted layer.

    Every tensor of an adapter is a parameter or a buffer, so that moves, copies and files include
    it.

    Attributes:
        reads_call: whether `forward` uses `base.call`.
        reads_prompt: whether it depends on the prompt of each sequence, its ends or its mean, in
            another way than by an `invocation`.
        invocation: tokens from whose last occurrence in the prompt on it acts; None: it acts from
            the first token on.
        shared_key: the key by which `base.shared` finds the module that the adapter's layers share;
            None if they share nothing.
        is_replica: whether it is one of DataParallel, which reads another copy of that module.
        acts_on: `"output"` for a function of the layer's output or a delta added to it,
            `"input"` for one that changes the layer's input. It determines how a `Stack` nests: the
            first adapter of a stack always acts first.
        stacks_only: why it cannot be in averages, fusions and splits; empty if it can.
        stands_alone: whether one name can have no other adapter at its layer.
        learns_faster: names of the parameters that LoRA+ trains at the higher learning rate.
        at_embedding: whether the layer is an embedding, for which LoRA+ has a rate of its own.
        splits: the sides of its layer, "in" and "out", that tensor parallelism may split: `forward`
            needs no more than this process's part of them, with `base.split` for what processes
            have to sum.
        split_dims: name of each tensor that counts features of the layer → the side that each of
            its dimensions counts, "" for another one.
    """

    acts_on: ClassVar[str] = "output"
    stacks_only: ClassVar[str] = ""
    learns_faster: ClassVar[frozenset[str]] = frozenset()
    at_embedding: bool = False
    stands_alone: ClassVar[bool] = False
    splits: frozenset[str] = frozenset()
    split_dims: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    reads_call: bool = False
    reads_prompt: bool = False
    invocation: tuple[int, ...] | None = None
    shared_key: SharedKey | None = None
    is_replica: bool = False

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica.is_replica = True
        return replica

    def init_from_layer(self, base: BaseLayer) -> None:
        """Take initial values from the layer; called once, before a new adapter is added.

        Not called for an adapter that is loaded from a file.

        Args:
            base: the layer; its values are loaded even if they are offloaded.
        """

    def init_from_data(self, data: LayerData, base: BaseLayer) -> None:
        """Take initial values from `init_data`, as the config asks for them.

        Args:
            data: for the layer, collected by the plan of the config.
            base: as in `init_from_layer`.
        """

    def identity_values(self, base: BaseLayer) -> Mapping[str, Tensor]:
        """Return the identity values of parameters whose identity value is not zero.

        A sum of adapters is θ₀ + Σ wᵢ (θᵢ − θ₀) with these θ₀, so that the weights apply to the
        changes that the adapters make, whatever their sum.

        Args:
            base: the layer.
        """
        return {}

    def in_slot(self, slot: Self) -> Mapping[str, Tensor]:
        """Return the tensors by key with which another adapter computes what this one computes.

        Smaller ones than the slot's are padded with zeros at the end of each dimension, as the
        `slot_fields` of the config allow.

        Args:
            slot: an adapter of the same layer.

        Raises:
            ConfigError: there are none.
        """
        return self.state_dict()

    def combine(
        self,
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Set the values to a combination of several adapters.

        Called once, on an uninitialized adapter. The default supports only "linear", and combines
        all parameters.

        Args:
            adapters: at least one of this class, of the same layer.
            weights: one for each.
            strategy: the strategy and its options.
            base: the layer; its values are loaded even if they are offloaded.

        Raises:
            CompositionError: the strategy makes no sense for the method.
        """
        self._refuse(strategy)
        tensors = self.state_dict(keep_vars=True)
        self.combine_linearly(tensors, adapters, weights, strategy, base)

    def _refuse(self, strategy: Combination) -> None:
        """Refuse a strategy that makes no sense for all parameters of the method."""
        if strategy.target != "parameters":
            raise strategy.refusal(f"a {type(self).__name__} adapter has none")

    def combine_linearly(
        self,
        names: Iterable[str],
        adapters: Sequence[Self],
        weights: Sequence[float],
        strategy: Combination,
        base: BaseLayer,
    ) -> None:
        """Fill parameters and buffers with θ₀ + Σ wᵢ (θᵢ − θ₀); see `identity_values`.

        Args:
            names: of the tensors.
            adapters: of the same layer.
            weights: one for each.
            strategy: the strategy and its options.
            base: the layer.
        """
        identity = self.identity_values(base)
        own = self.state_dict(keep_vars=True)
        others = [adapter.state_dict(keep_vars=True) for adapter in adapters]
        for name in names:
            target = own[name]
            values = [upcast(tensors[name], target) for tensors in others]
            value = weighted_sum(values, weights)
            if name in identity:
                value = value + (1 - sum(weights)) * upcast(identity[name], target)
            strategy.fill(target, value, name)

    def extra_repr(self) -> str:
        """Return the shapes of the parameters, and the scaling if there is one."""
        shown = [f"{n}={[*p.shape]}" for n, p in self.named_parameters(recurse=False)]
        scaling = getattr(self, "scaling", None)
        return ", ".join([*shown, f"{scaling=:g}"] if isinstance(scaling, float) else shown)

    @abstractmethod
    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the adapted output of `x`, `[*batch, d_in]` → `[*batch, d_out]`, same dtype."""

    @property
    def row_options(self) -> Hashable | None:
        """What adapters must share to act together in `forward_rows`; None: each acts alone.

        Beside their class: dtypes, dropout, and everything else that `row_tensors` does not hold.
        """
        return None

    def row_tensors(self, base: BaseLayer, dtype: torch.dtype) -> Mapping[str, Tensor | float]:
        """Return all values by name with which `forward_rows` computes what `forward` does.

        Tensors of different adapters may differ in size if zeros at the end of each dimension
        change nothing.

        Args:
            base: the layer, with the earlier adapters.
            dtype: of its features.

        Raises:
            NotImplementedError: the class does not implement it.
        """
        raise NotImplementedError(f"{type(self).__name__}.row_tensors")

    def forward_rows(
        self, stacks: Mapping[str, Any], groups: RowGroups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Apply several adapters at one layer, each to its rows of a batch.

        The adapter itself is any of them, for the options that they share.

        Args:
            stacks: the `row_tensors` of n adapters by name, each `[n, …]`; numbers as n floats, or
                as a tensor `[n]` on the CPU.
            groups: which of them applies to each row, if any.
            x: `[rows, *tokens, d_in]`.
            base: the layer, with the earlier adapters.

        Returns:
            `[rows, *tokens, d_out]`, each row equal to the output of its adapter on that row.

        Raises:
            NotImplementedError: the class does not implement it.
        """
        raise NotImplementedError(f"{type(self).__name__}.forward_rows")


def row_options(adapter: Adapter) -> Hashable | None:
    """Return what adapters must share to act together in `forward_rows`; None: each acts alone.

    A class that overrides `forward` and inherits `forward_rows` does not support it.
    """
    kind = type(adapter)
    names = "forward_rows", "forward"
    owners = [next(c for c in kind.__mro__ if name in vars(c)) for name in names]
    options = adapter.row_options if issubclass(*owners) else None
    return None if options is None else (kind, options)


def can_batch(adapters: Sequence[Adapter]) -> bool:
    """Return whether the adapters can act in one call of `forward_rows`."""
    found = {row_options(adapter) for adapter in adapters}
    return len(found) == 1 and None not in found


class WeightAdapter(Adapter):
    """An adapter that equals a changed weight, so that it can be merged into the layer.

    Attributes:
        is_additive: whether `merged_weight` adds something that does not depend on the layer, so
            that it does not matter which of several such adapters are merged and which are active.
        keeps_weight: whether only the bias changes, so that the layer needs no weight matrix.
        adapts_convolutions: whether it can adapt a convolution too.
    """

    is_additive: bool = False
    keeps_weight: ClassVar[bool] = False
    adapts_convolutions: ClassVar[bool] = False

    def convolved(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the adapted output of a convolution, base(x) + (W' − W) ∗ x + b' − b.

        Args:
            x: `[*rows, channels, *space]`.
            base: the convolution.

        Returns:
            `[*rows, d_out, *places]`.
        """
        w = base.weight.to(compute_dtype(base.weight.dtype))  # [d_out, d_in]
        y, change = base(x), self.trained_weight(w, base) - w
        y = y + base.convolve(x, change.to(x.dtype)).to(y.dtype)
        b = w.new_zeros(len(w)) if base.bias is None else base.bias.to(w.dtype)  # [d_out]
        changed = self.merged_bias(b, base)
        return y if changed is b else y + base.by_channel(changed - b).to(y.dtype)

    def trained_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return `merged_weight`, without the parts that training drops in this call."""
        return self.merged_weight(w, base)

    @abstractmethod
    def merged_weight(self, w: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged weight.

        Args:
            w: the weight so far, `[d_out, d_in]`, float32 or float64; with several adapters
                merged one after the other it includes the earlier ones.
            base: the layer; `base.weight` is its untouched weight.

        Returns:
            `[d_out, d_in]`.
        """

    def low_rank_factors(self, w: Tensor, base: BaseLayer) -> tuple[Tensor, Tensor] | None:
        """Return A and B with `merged_weight(w, base)` = w + B A for any w; None: there are none.

        A conversion to LoRA takes them as they are, scaling included; without them it takes the
        SVD of the change.

        Args:
            w: gives the device and the dtype.
            base: the layer.

        Returns:
            A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]`.
        """
        return None

    def merged_bias(self, b: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged bias, for adapters that change it.

        Args:
            b: the bias so far, `[d_out]`; zeros if the layer has none.
            base: the layer.

        Returns:
            `[d_out]`.
        """
        return b


class FactoredAdapter(WeightAdapter):
    """An adapter that can make any change of a weight whose rank is not above its own."""

    @abstractmethod
    def set_factors(self, a: Tensor, b: Tensor) -> None:
        """Make the change B A.

        Args:
            a: `[*experts, rank, d_in]`, at most the adapter's rank.
            b: `[*experts, d_out, rank]`.
        """


class CopyAdapter(WeightAdapter):
    """An adapter that runs a copy of its layer, with parameters of its own, in the layer's place.

    Attributes:
        layer: the copy. Building the adapter for a layer sets it; `init_from_layer` or a file gives
            it values.
    """

    stands_alone: ClassVar[bool] = True
    layer: nn.Module

    @abstractmethod
    def parameter(self, name: str, value: Tensor, base: BaseLayer) -> Tensor:
        """Return the merged value of a parameter, of which a norm has no matrix.

        Args:
            name: of the parameter.
            value: so far, float32 or float64, as the layer stores it.
            base: the layer; `base.parameters` are its untouched ones.
        """


def replaced(value: Tensor, own: Tensor, plain: Tensor) -> Tensor:
    """Return `own` where nothing has changed `plain` yet; otherwise add its difference to `value`.

    Args:
        value: with the changes of earlier adapters.
        own: the adapter's value.
        plain: the layer's value.
    """
    return torch.where(value == plain, own, value + (own - plain))


class FusibleAdapter(Adapter):
    """An adapter that adds a function of the stream; a fusion can replace that function."""

    @abstractmethod
    def update(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the adapter's update of `x` `[*batch, d_model]`, same shape; fusions attend to it.

        Gates and dropouts are left out.

        Args:
            x: what the adapter's function reads.
            base: the layer.
        """

    @abstractmethod
    def forward(
        self, x: Tensor, base: BaseLayer, instead: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the adapted layer.

        Args:
            x: `[*batch, d_in]`.
            base: the layer.
            instead: a function of the same input to add in place of the adapter's own.

        Returns:
            `[*batch, d_out]`, in the base's dtype.
        """


class Prefix(NamedTuple):
    """Keys and values that precede those of the attention module.

    Attributes:
        keys: `[rows or 1, kv_heads, length, key_width]`; they are not rotated.
        values: `[rows or 1, kv_heads, length, value_width]`.
        mask: `[rows, length]` bool, false for padding; None: every query attends to all.
        distances: how a relative position bias counts distances. "kept": between tokens as without
            a prefix. "shifted": keys count from the first of the prefix and queries from 0.
            None: the attention has no such bias, as in cross-attention.
        in_window: whether a sliding window hides it from tokens far after it.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    distances: Literal["kept", "shifted"] | None = "kept"
    in_window: bool = False


class AttentionAdapter(Adapter):
    """An adapter that prepends keys and values to those of an attention module.

    In a `Stack` the keys and values of the first adapter come first.

    Attributes:
        counts_padding: whether rotary positions count the padding before a row's first token, as a
            model does without `position_ids`.
    """

    stacks_only: ClassVar[str] = "keys and values of a prefix"
    counts_padding: bool = False

    @abstractmethod
    def forward(self, x: Tensor, base: BaseLayer) -> Prefix:  # type: ignore[override]
        """Return the keys and values.

        Args:
            x: the input of the queries, `[rows, tokens, d_model]`.
            base: the attention.
        """


class InvertibleAdapter(Adapter):
    """A function at a model's input whose inverse acts before the logits."""

    stacks_only: ClassVar[str] = "an invertible function"

    @abstractmethod
    def inverse(self, y: Tensor, base: BaseLayer) -> Tensor:
        """Return the inverse of `forward`; `y` `[*batch, d_model]` enters a head's last layer."""


class PositionAdapter(Adapter):
    """An adapter that changes position numbers: `forward` calls `base` with the new ones."""

    acts_on = "input"


class LanguageFreeAdapter(Adapter):
    """An adapter in the place of a block's language adapters, which do not act.

    Its input is the stream that they would read; in a `Stack` the first adapter acts first, and the
    last one returns what the language adapters would have returned.

    Attributes:
        is_base: whether it only leaves them out, so that it does nothing beside another one.
        joining: the configs of adapters that can act with it.
    """

    acts_on = "input"
    stacks_only = "a base model without its language adapters"
    is_base: ClassVar[bool] = False
    joining: ClassVar[str]


Joins: TypeAlias = Literal["inputs", "embeddings"]
"""Where added tokens join: at the output of the embedding table, or of the embedding module."""


class PromptAdapter(Adapter):
    """An adapter that adds tokens to each sequence; its site is where they join it.

    The mask, positions and labels of the call get room for them before anything is computed. In
    a `Stack` the tokens of the first adapter come first.

    Attributes:
        length: how many tokens.
        after_first: whether they follow the first real token; otherwise they precede it.
        joins: where they join.
    """

    stacks_only: ClassVar[str] = "the tokens of a prompt"
    # outermost at the table, so that other adapters there do not act on placeholders
    acts_on = "input"
    reads_call = True
    length: int
    after_first: bool
    joins: Joins

    @abstractmethod
    def prompt(self, base: BaseLayer) -> Tensor:
        """Return the tokens, `[length, d]`."""

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the tokens inserted, `[rows, tokens, d]`."""
        y = base(x)
        # outside of a call, the table is only looked up
        at = base.call.added(self.shared_key, x) if base.is_in_call else None  # [rows, length]
        if at is None:
            return y
        at = at.to(y.device).unsqueeze(-1).expand(-1, -1, y.shape[-1])  # [rows, length, d]
        return y.scatter(1, at, self.prompt(base).to(y).expand(at.shape))


class Head(nn.Module, ABC):
    """Base of all heads: hidden states to logits, and logits with labels to a loss."""

    @abstractmethod
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Return the logits of the task.

        Args:
            hidden: `[batch, tokens, d_model]`, or `[batch, d_model]` if the model has pooled.
            mask: `[batch, tokens]`, true or 1 at real tokens; None when all are.
        """

    @abstractmethod
    def loss(self, logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        """Return the training loss, a scalar; labels of −100 do not count."""
