"""What initial values take from the inputs of a layer: principal components, or a covariance.

EVA (Paischer et al. 2024, arXiv:2410.07170): A starts as the principal components of the layer's
inputs, B as zero; layers whose components explain more of the variance get higher ranks. The
components are updated with each batch by an SVD of [Σ Vᵀ; X − mean; shift of the mean] (Ross et
al. 2008), as in PEFT.

CorDA (Yang et al. 2024, arXiv:2406.05223): with the covariance C of the inputs, W C = U Σ Vᵀ; A and
B start as the first components ("ipm", for a task) or the last ones ("kpm", to keep knowledge) of
U Σ Vᵀ C⁻¹ = W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adapterzoo.contracts import InputStatistics, compute_dtype
from adapterzoo.errors import ConfigError

from ._starts import Factors, check_weight, svd_lowrank

_ITERATIONS, _EXACT = 4, 256
_DAMPING, _INVERTED = 0.01, 0.05


def refuse_not_finite(x: Tensor) -> None:
    """Check the inputs of a layer.

    Raises:
        ConfigError: one is infinite or NaN.
    """
    if not bool(x.isfinite().all()):
        raise ConfigError(
            "with init_data the inputs of a layer are not finite. Write other batches, or load the "
            "model in float32."
        )


class Components(InputStatistics):
    """The principal components of a layer's inputs.

    Attributes:
        components: `[count, d_in]`, None before the first batch.
        values: their singular values.
        shares: of the variance that each explains.
        converged: for each component, whether the last batch left it as it was.
    """

    def __init__(self, count: int, tau: float) -> None:
        """Watch nothing yet.

        Args:
            count: of components.
            tau: cosine from which a component counts as unchanged.
        """
        self.count, self.tau = count, tau
        self.components: Tensor | None = None
        self.values = self.shares = torch.zeros(count)
        self.converged = torch.zeros(count, dtype=torch.bool)
        self._mean = torch.zeros(())
        self._seen, self._variance = 0, 0.0

    def update(self, x: Tensor) -> None:
        """Update the components; a batch with fewer tokens than components is left out."""
        n = len(x)
        if n < self.count:
            return
        refuse_not_finite(x)
        x = x.to(compute_dtype(x.dtype))
        mean, total = x.mean(0), self._seen + n
        centered = x - mean
        shift = (self._seen * n / total) ** 0.5 * (self._mean.to(mean) - mean)  # [d_in]
        self._variance += float(
            centered.square().sum() + (shift.square().sum() if self._seen else 0)
        )
        before = self.components
        if before is not None:
            known = self.values.unsqueeze(-1) * before
            centered = torch.cat([known, centered, shift.unsqueeze(0)])
        values, vh = _spectrum(centered, 2 * self.count)
        largest = vh.abs().argmax(-1, keepdim=True)
        # of a component and its opposite, always the same one
        vh = vh * vh.gather(-1, largest).sign()
        self.components, self.values = vh[: self.count].contiguous(), values[: self.count]
        self.shares = (self.values.square() / self._variance).nan_to_num()
        self._mean = (self._mean.to(mean) * self._seen + mean * n) / total
        self._seen = total
        if before is not None:
            cosines = torch.nn.functional.cosine_similarity(self.components, before, dim=-1)
            self.converged = cosines >= self.tau

    def first(self, rank: int, whiten: bool) -> Tensor:
        """Return the first components as A `[rank, d_in]`, each divided by √σ with `whiten`.

        Raises:
            ConfigError: there are no components, or one has no variance to divide by.
        """
        if self.components is None:
            raise ConfigError(
                f"init_weights='eva': no batch had {self.count} tokens, as many as components are "
                f"needed. Write larger batches in init_data."
            )
        found, values = self.components[:rank], self.values[:rank]
        if not whiten:
            return found
        # a value up to this may be 0, but for the rounding of the SVD
        least = values[0] * torch.finfo(values.dtype).eps * found.shape[-1]
        if (varying := int((values > least).sum())) < rank:
            raise ConfigError(
                f"init_options={{'whiten': True}}: only {varying} of {rank} principal components "
                f"of the inputs vary, and each is divided by its deviation. Write more batches in "
                f"init_data, r={max(varying, 1)}, or 'whiten': False."
            )
        return found / values.sqrt().unsqueeze(-1)


def _spectrum(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return singular values and Vᵀ, at least that many; exact where that is cheap."""
    if min(x.shape) <= _EXACT:
        _, values, vh = torch.linalg.svd(x, full_matrices=False)
        return values, vh
    source = torch.Generator().manual_seed(0)
    _, values, v = svd_lowrank(x, min(rank, *x.shape), _ITERATIONS, source)
    return values, v.mT


class Covariance(InputStatistics):
    """The covariance of a layer's inputs, each batch divided by its largest value."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self.matrix: Tensor | None = None
        self.batches = 0

    def update(self, x: Tensor) -> None:
        """Add a batch."""
        if not len(x):
            return
        refuse_not_finite(x)
        x = x.to(compute_dtype(x.dtype))
        x = x / x.max().abs()
        own = x.mT @ x  # [d_in, d_in]
        self.matrix = own if self.matrix is None else self.matrix + own
        self.batches += 1

    def factors(self, w: Tensor, rank: int, s: float, keeps_knowledge: bool) -> Factors:
        """Return A₀ and B₀.

        Args:
            w: the weight `[d_out, d_in]`, float32 or float64.
            rank: r, at most the smaller width.
            s: the scaling.
            keeps_knowledge: whether they are of the last components.

        Raises:
            ConfigError: there was no batch, or its values or the weight are not finite.
        """
        check_weight("corda", w)
        if self.matrix is None or not bool(self.matrix.isfinite().all()):
            raise ConfigError(
                "init_weights='corda': the inputs of a layer are missing or not finite. Write "
                "other batches in init_data."
            )
        c = (self.matrix / self.batches).to(w)
        eye, damping = torch.eye(len(c), dtype=c.dtype, device=c.device), _DAMPING
        while True:
            damped = c + eye * (damping * c.diagonal().mean())
            inverse = torch.linalg.inv(damped)
            if torch.dist(damped @ inverse, eye) < _INVERTED:
                break
            damping *= 2
        u, values, vh = torch.linalg.svd(w @ damped, full_matrices=False)
        v = (vh @ inverse).mT  # [d_in, width]
        part = slice(-rank, None) if keeps_knowledge else slice(rank)
        roots = (values[part] / s).sqrt()
        return (v[:, part] * roots).mT.contiguous(), (u[:, part] * roots).contiguous()
