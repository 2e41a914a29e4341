"""The contract of an adapter: a function around a layer, which it gets as a `BaseLayer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn

from adapterzoo.averaging import Combination, weighted_sum
from adapterzoo.call import StackCall
from adapterzoo.errors import StateError

from ._dtypes import upcast
from .contained import Contained, SharedKey
from .init_data import LayerData

if TYPE_CHECKING:
    from adapterzoo.kernels.grouped import Groups


class BaseLayer(ABC):
    """The layer as passed to an adapter: callable, with `weight` and `bias`.

    In a `Stack`, calling it includes the earlier adapters; `original` and `weight` belong to the
    untouched layer.
    """

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's output with the earlier adapters.

        Args:
            x: `[*batch, d_in]`.

        Returns:
            `[*batch, d_out]`.
        """

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
    def call(self) -> StackCall:
        """The running call of the encoder or decoder that holds the layer.

        Only adapters with `reads_call` may use it.

        Raises:
            StateError: the layer was called outside of its model.
        """
        raise StateError("this layer is not in a model, so no call of a model is running.")

    @property
    def is_in_call(self) -> bool:
        """Whether a call of an encoder or decoder is running, so that there is a `call`."""
        return False

    def shared(self, adapter: Adapter) -> nn.Module:
        """Return the module that `AdapterConfig.shared` made for all layers of the adapter.

        Args:
            adapter: the adapter that calls this.

        Raises:
            StateError: the adapter shares nothing, or its layer is not in a model.
        """
        raise StateError("this layer is not in a model, so its adapter shares nothing.")

    def part(self, path: str) -> Any:
        """Return a module or parameter of the running model, of this replica.

        Only adapters with `reads_call` may use it.

        Args:
            path: below the base model.

        Raises:
            StateError: no call is running.
        """
        raise StateError(f"this layer is not in a model, so there is no {path!r}.")

    @property
    def padding_idx(self) -> int | None:
        """The token of an embedding whose row gets no gradient; None if every row gets one."""
        return None

    @property
    def is_original(self) -> bool:
        """Whether no earlier adapter acts."""
        return False

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The untouched parameters of the whole layer by name, as it stores them.

        Raises:
            StateError: the layer does not show them.
        """
        raise StateError("this layer does not show its parameters.")

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
        reads_prompt: whether it depends on the prompt of each sequence: its ids, ends or mean.
        shared_key: leads `base.shared` to the module that its layers share; None if they share
            nothing.
        is_replica: whether it is one of DataParallel, which reads another copy of that module.
        acts_on: `"output"` for a function of the layer's output or a delta added to it,
            `"input"` for one that changes the layer's input. It determines how a `Stack` nests: the
            first adapter of a stack always acts first.
        stacks_only: why it cannot be in averages, fusions and splits; empty if it can.
        stands_alone: whether one name can have no other adapter at its layer.
        learns_faster: names of the parameters that LoRA+ trains at the higher learning rate.
        at_embedding: whether the layer is an embedding, for which LoRA+ has a rate of its own.
    """

    acts_on: ClassVar[str] = "output"
    stacks_only: ClassVar[str] = ""
    learns_faster: ClassVar[frozenset[str]] = frozenset()
    at_embedding: bool = False
    stands_alone: ClassVar[bool] = False
    reads_call: bool = False
    reads_prompt: bool = False
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
        if strategy.target != "parameters":
            raise strategy.refusal(f"a {type(self).__name__} adapter has none")
        self.combine_linearly(self._tensors(), adapters, weights, strategy, base)

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
        own, others = self._tensors(), [adapter._tensors() for adapter in adapters]
        for name in names:
            target = own[name]
            theirs = [upcast(tensors[name], target) for tensors in others]
            value = weighted_sum(theirs, weights)
            if name in identity:
                value = value + (1 - sum(weights)) * upcast(identity[name], target)
            strategy.fill(target, value, name)

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.named_parameters()) | dict(self.named_buffers())

    @abstractmethod
    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the adapted output of `x`, `[*batch, d_in]` → `[*batch, d_out]`, same dtype."""

    @classmethod
    def supports_batching(cls, adapters: Sequence[Self]) -> bool:
        """Return whether `forward_batched` supports these; if not, each is called on its rows."""
        return False

    @classmethod
    def forward_batched(
        cls, adapters: Sequence[Self], groups: Groups, x: Tensor, base: BaseLayer
    ) -> Tensor:
        """Apply several adapters of the class at one layer, each to its rows of a batch.

        Args:
            adapters: of one layer, in the numbering of `groups`.
            groups: which of them applies to each row, if any.
            x: `[rows, *tokens, d_in]`.
            base: the layer, with the earlier adapters.

        Returns:
            `[rows, *tokens, d_out]`, each row equal to the output of its adapter on that row.

        Raises:
            StateError: the class does not implement it.
        """
        raise StateError(
            f"{cls.__name__}.forward_batched: {cls.__name__}.supports_batching is True for these, "
            f"but the method is missing. Write @classmethod def forward_batched(cls, adapters, "
            f"groups, x, base), or remove supports_batching."
        )
