"""The tensors R and W of Compacter, whole or as two factors, with their initial values."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import ConfigError

from ._hypercomplex import HypercomplexFields
from ._init import constant, drawn, normal, uniform


class Drawing:
    """Draws R and W, and registers them in modules."""

    def __init__(
        self,
        config: HypercomplexFields,
        source: torch.Generator | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.config, self.source, self.device, self.dtype = config, source, device, dtype

    def rule(self, module: nn.Module, std: float, bound: float) -> None:
        """Draw R from a normal or uniform distribution; it is a buffer if it is not trained."""
        n, is_normal = self.config.phm_dim, self.config.phm_c_init == "normal"
        fill = normal(std, self.source) if is_normal else uniform(bound, self.source)
        factorized = self.config.factorized_phm_rule
        shapes = ((n, n, 1), (n, 1, n)) if factorized else ((n, n, n),)
        for name, shape in zip(names("phm_rule", factorized), shapes, strict=True):
            made = drawn(shape, fill, self.device, self.dtype)
            if self.config.learn_phm:
                module.register_parameter(name, made)
            else:
                module.register_buffer(name, made.detach())

    def w(
        self, module: nn.Module, called: tuple[str, ...], d_in: int, d_out: int, zero: bool
    ) -> None:
        """Draw W; if W starts as zero, its last factor does."""
        n, rank = self.config.phm_dim, self.config.phm_rank
        rows, columns = d_in // n, d_out // n
        shapes = ((n, rows, rank), (n, rank, columns)) if len(called) > 1 else ((n, rows, columns),)
        for name, shape in zip(called, shapes, strict=True):
            fill = constant(0.0) if zero and name == called[-1] else self._fill(shape)
            module.register_parameter(name, drawn(shape, fill, self.device, self.dtype))

    def _fill(self, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        # Glorot & Bengio 2010, eq. 16, of each of the n matrices
        std = (2.0 / (shape[1] + shape[2])) ** 0.5
        return {
            "glorot-uniform": uniform(3.0**0.5 * std, self.source),
            "glorot-normal": normal(std, self.source),
            "normal": normal(self.config.phm_init_range, self.source),
        }[self.config.hypercomplex_nonlinearity]


def names(name: str, factorized: bool) -> tuple[str, ...]:
    """Return the names of a tensor's factors, or its own."""
    return (f"{name}_left", f"{name}_right") if factorized else (name,)


def held(module: nn.Module | None, called: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Return tensors of a module by name."""
    return tuple(cast("Tensor", getattr(module, name)) for name in called)


def whole(factors: tuple[Tensor, ...]) -> Tensor:
    """Return the product of two factors, or the only one."""
    return factors[0] if len(factors) == 1 else torch.matmul(*factors)


def check_widths(config: HypercomplexFields, d_in: int, d_out: int) -> None:
    """Check that a matrix consists of phm_dim × phm_dim parts.

    Raises:
        ConfigError: it does not.
    """
    n = config.phm_dim
    for width in (d_in, d_out):
        if width % n:
            d_model = max(d_in, d_out)
            legal = [k for k in range(1, d_model + 1) if not (d_in % k or d_out % k)]
            raise ConfigError(
                f"{type(config).__name__}(phm_dim={n}, reduction_factor="
                f"{config['reduction_factor']!r}): {n} does not divide {width}; the bottleneck has "
                f"{d_in} and {d_out} features. Write phm_dim={legal[-1]}, or another "
                f"reduction_factor."
            )
