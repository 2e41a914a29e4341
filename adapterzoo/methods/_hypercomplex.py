"""The fields of Compacter's matrices, and the interface through which bottlenecks use them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal

import torch
from torch import nn

from adapterzoo.config_base import config_class
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Choice, Positive, Range, field
from adapterzoo.registry import Registry

from ._products import Product


@config_class
class HypercomplexFields(AdapterConfig):
    """The fields of Compacter's matrices, H = Σᵢ Rᵢ ⊗ Wᵢ; all others need `phm_layer=True`.

    Attributes:
        phm_layer: whether the two matrices of a bottleneck are such sums.
        phm_dim: n, the number of products; it divides d_model and the bottleneck's width.
        factorized_phm_W: Wᵢ is a product of two matrices of rank `phm_rank`.
        shared_W_phm: all layers have the same Wᵢ.
        shared_phm_rule: all layers have the same Rᵢ.
        factorized_phm_rule: Rᵢ is a product of two vectors.
        phm_c_init: how Rᵢ is drawn: "normal" or "uniform".
        phm_init_range: the deviation of "normal" for shared Rᵢ, and for Wᵢ.
        learn_phm: whether Rᵢ is trained.
        hypercomplex_nonlinearity: how Wᵢ is drawn: "glorot-uniform", "glorot-normal" or "normal".
        phm_rank: the rank of Wᵢ.
        phm_bias: whether biases are added.
    """

    phm_layer: bool = False
    phm_dim: int = field(4, Range(1, MAX_WIDTH))
    factorized_phm_W: bool = True  # noqa: N815
    shared_W_phm: bool = False  # noqa: N815
    shared_phm_rule: bool = True
    factorized_phm_rule: bool = False
    phm_c_init: str = field("normal", Choice("normal", "uniform"))
    phm_init_range: float = field(0.0001, Positive())
    learn_phm: bool = True
    hypercomplex_nonlinearity: str = field(
        "glorot-uniform", Choice("glorot-uniform", "glorot-normal", "normal")
    )
    phm_rank: int = field(1, Range(1, MAX_WIDTH))
    phm_bias: bool = True

    @property
    def shares_matrices(self) -> bool:
        """Whether layers share Rᵢ or Wᵢ."""
        return self.phm_layer and (self.shared_phm_rule or self.shared_W_phm)

    def _check_hypercomplex(self) -> None:
        """Check fields that depend on one another.

        Raises:
            ConfigError: a field has no effect, or Compacter is not installed.
        """
        if self.phm_layer and "phm" not in projections:
            raise ConfigError(
                f"{type(self).__name__}(phm_layer=True): the method is not installed. Write "
                f"phm_layer=False."
            )
        if self.phm_rank != 1 and not self.factorized_phm_W:
            raise ConfigError(
                f"{type(self).__name__}(phm_rank={self.phm_rank}, factorized_phm_W=False): the "
                f"rank is that of a factorized W. Write factorized_phm_W=True, or phm_rank=1."
            )


class Projection(nn.Module, ABC):
    """Base of the modules that replace a bottleneck's matrices."""

    @abstractmethod
    def __init__(
        self,
        config: HypercomplexFields,
        part: Literal["down", "up"],
        d_in: int,
        d_out: int,
        *,
        zero: bool,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Make the parameters of a layer.

        Args:
            config: of the adapter.
            part: the down or the up projection.
            d_in: input width.
            d_out: output width.
            zero: whether it starts as zero.
            source: of random numbers.
            device: of the parameters.
            dtype: of the parameters.
        """
        super().__init__()

    @classmethod
    @abstractmethod
    def shared(
        cls,
        config: HypercomplexFields,
        widths: Collection[tuple[int, int]],
        *,
        zero: bool,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> nn.Module:
        """Return the module that all layers share.

        Args:
            config: of the adapter.
            widths: all pairs of d_model and bottleneck width of the layers.
            zero: whether up projections start as zero.
            source: of random numbers.
            device: of the parameters.
            dtype: of the parameters.

        Raises:
            ConfigError: layers of several widths cannot share.
        """

    @property
    @abstractmethod
    def batch_key(self) -> tuple[object, ...]:
        """Values that projections must have in common to be applied in one call to a batch."""

    @abstractmethod
    def product(self, shared: nn.Module | None, device: torch.device) -> Product:
        """Return the function as matrices on a device.

        Args:
            shared: from `shared`; None if layers share nothing.
            device: of the input.
        """


projections: Registry[type[Projection]] = Registry("projection")
"""The class that `phm_layer` selects, as "phm"."""
