"""Initial values of LoRA from the weight, or from the layers' inputs.

PiSSA (Meng et al. 2024, arXiv:2404.02948, eq. 2–4) starts with the principal part of the weight,
s · B₀ A₀ ≈ U Σ Vᵀ of rank r; OLoRA (Büyükakyüz 2024, arXiv:2406.01775) with the first r columns
and rows of W = Q R. The adapter subtracts s · B₀ A₀, see `lora.Start`.

LoftQ (Li et al. 2023, arXiv:2310.08659, eq. 6–8, T = 1): s · B A is the principal part of W − Q,
where Q is the layer's quantized weight and W the original one. Nothing is subtracted: the update
compensates an error. Differs from PEFT: it divides by s, so any scaling works.

EVA (Paischer et al. 2024, arXiv:2410.07170): A starts as the principal components of the layer's
inputs, B as zero. The components are updated with each batch by an SVD of
[Σ Vᵀ; X − mean; shift of the mean] (Ross et al. 2008), as in PEFT. Of all layers' components,
those that explain the largest shares of the variance are kept, as many as the config has ranks in
total; a layer has at most rho · r of them, and one without any is left out.

CorDA (Yang et al. 2024, arXiv:2406.05223): with the covariance C of the inputs, W C = U Σ Vᵀ; A and
B start as the first components ("ipm", for a task) or the last ones ("kpm", to keep knowledge) of
U Σ Vᵀ C⁻¹ = W.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import FLAG, Check, Choice, Range
from adapterzoo.contracts import InputPlan, InputStatistics, WeightPlan, compute_dtype
from adapterzoo.errors import ConfigError
from adapterzoo.methods._targets import fields_at

from .factors import DRAWN, Factors, LowRankConfig

_NITER = re.compile(r"pissa_niter_([1-9]\d{0,2})")
_ITERATIONS, _EXACT = 4, 256
_DAMPING, _INVERTED = 0.01, 0.05

OPTIONS: Mapping[str, Mapping[str, tuple[Any, Check]]] = {
    "eva": {
        "rho": (2.0, Range(1.0, 1000.0)),
        "tau": (0.99, Range(0.0, 1.0)),
        "use_label_mask": (True, FLAG),
        "whiten": (False, FLAG),
        "adjust_scaling_factors": (True, FLAG),
    },
    "corda": {"corda_method": ("ipm", Choice("ipm", "kpm"))},
    "loftq": {},
}
"""The options of initial values from `init_data`: defaults and valid values, named as in PEFT."""


class Starts(Choice):
    """The names of all initial values."""

    def __init__(self) -> None:
        """Store the names."""
        super().__init__(*DRAWN, "pissa", "olora", *OPTIONS)
        self.legal += ", or 'pissa_niter_4' with any number of iterations"

    def fits(self, value: object) -> bool:
        """Return whether the value is valid."""
        return super().fits(value) or (isinstance(value, str) and bool(_NITER.fullmatch(value)))


def replaces_weight(name: str) -> bool:
    """Return whether initial values replace a part of the base weight."""
    return name in ("olora", "corda") or name.startswith("pissa")


def starts_from_weight(name: str) -> bool:
    """Return whether s · B A starts as a part of the weight, or of its error."""
    return replaces_weight(name) or name == "loftq"


def factors(name: str, w: Tensor, rank: int, s: float, source: torch.Generator | None) -> Factors:
    """Return A₀ and B₀ of initial values that replace a part of the weight.

    Args:
        name: name of the initial values.
        w: the weight `[*experts, d_out, d_in]`, float32 or float64.
        rank: r, at most the smaller width.
        s: the scaling.
        source: source of random numbers, for `pissa_niter_<number>`.
    """
    if name == "olora":
        q, r = torch.linalg.qr(w)
        return r[..., :rank, :].contiguous(), q[..., :rank].contiguous()
    if match := _NITER.fullmatch(name):
        return _balanced(*svd_lowrank(w, rank, int(match[1]), source), s)
    return principal(w, rank, s)


def principal(w: Tensor, rank: int, s: float) -> Factors:
    """Return A and B of the principal part of a matrix; the arguments are those of `factors`."""
    u, values, vh = torch.linalg.svd(w, full_matrices=False)
    return _balanced(u[..., :rank], values[..., :rank], vh[..., :rank, :].mT, s)


def _balanced(u: Tensor, values: Tensor, v: Tensor, s: float) -> Factors:
    """Return A and B of equal norms, with s · B A = U Σ Vᵀ."""
    roots = (values / s).sqrt().unsqueeze(-2)  # [*experts, 1, r]
    return (v * roots).mT.contiguous(), (u * roots).contiguous()


def svd_lowrank(
    w: Tensor, rank: int, iterations: int, source: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, Σ, V of that rank by subspace iteration (Halko et al. 2009, arXiv:0909.4061)."""
    noise = torch.randn(*w.shape[:-2], w.shape[-1], rank, generator=source, device="cpu").to(w)
    q = torch.linalg.qr(w @ noise)[0]  # [*experts, d_out, r]
    for _ in range(iterations):
        q = torch.linalg.qr(w.mT @ q)[0]
        q = torch.linalg.qr(w @ q)[0]
    u, values, vh = torch.linalg.svd(q.mT @ w, full_matrices=False)
    return q @ u, values, vh.mT


class Components(InputStatistics):
    """The principal components of a layer's inputs.

    Attributes:
        components: `[count, d_in]`, None before the first batch.
        values: their singular values.
        shares: share of the variance that each explains.
        converged: for each component, whether the last batch left it unchanged.
    """

    def __init__(self, count: int, tau: float) -> None:
        """Start without data.

        Args:
            count: number of components.
            tau: cosine above which a component counts as unchanged.
        """
        self.count, self.tau = count, tau
        self.components: Tensor | None = None
        self.values: Tensor
        self.converged = torch.zeros(count, dtype=torch.bool)
        self._mean = torch.zeros(())
        self._seen, self._variance = 0, 0.0

    def update(self, x: Tensor) -> None:
        """Update the components; a batch with fewer tokens than components is skipped."""
        n = len(x)
        if n < self.count:
            return
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
        # always choose the same one of a component and its opposite
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
            ConfigError: a component has no variance to divide by.
        """
        components = cast("Tensor", self.components)
        found, values = components[:rank], self.values[:rank]
        if not whiten:
            return found
        # a value up to this may be 0, except for the SVD's rounding
        least = values[0] * torch.finfo(values.dtype).eps * found.shape[-1]
        if (varying := int((values > least).sum())) < rank:
            raise ConfigError(
                f"init_options={{'whiten': True}}: only {varying} of {rank} components vary. Write "
                f"more batches, r={max(varying, 1)}, or 'whiten': False."
            )
        return found / values.sqrt().unsqueeze(-1)


def _spectrum(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return at least this many singular values, and Vᵀ; exact where that is cheap."""
    if min(x.shape) <= _EXACT:
        _, values, vh = torch.linalg.svd(x, full_matrices=False)
        return values, vh
    source = torch.Generator().manual_seed(0)
    _, values, v = svd_lowrank(x, min(rank, *x.shape), _ITERATIONS, source)
    return values, v.mT


class Covariance(InputStatistics):
    """The covariance of a layer's inputs, each batch divided by its largest value."""

    def __init__(self) -> None:
        """Start without data."""
        self.matrix: Tensor | None = None
        self.batches = 0

    def update(self, x: Tensor) -> None:
        """Add a batch."""
        if not len(x):
            return
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
            keeps_knowledge: whether they are the last components.

        Raises:
            ConfigError: there was no batch, or its values are not finite.
        """
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
        return _balanced(u[:, part], values[part], v[:, part], s)


def sites_of(config: LowRankConfig, anatomy: Anatomy) -> list[Site]:
    """Return the layers whose inputs or original weights are needed.

    Raises:
        ConfigError: a layer is not a whole linear layer.
    """
    sites = [placement.site for placement in config.placements(anatomy)]
    for site in sites:
        if site.output_slice is not None or site.is_only_read or site.kind == "embedding":
            raise ConfigError(
                f"init_weights={config.init_weights!r} at {site.name!r}: it is for whole linear "
                f"layers. Write target_modules=[…] with names of such, or init_weights='lora'."
            )
    return sites


class EvaPlan(InputPlan):
    """The principal components of all layers, until the kept ones have converged."""

    def __init__(self, config: LowRankConfig, options: Mapping[str, Any], anatomy: Anatomy) -> None:
        """Start with all layers."""
        self._config, self._adjusts = config, options["adjust_scaling_factors"]
        self._sites = sites = sites_of(config, anatomy)
        self._ranks = {site.path: config.rank_at(site.path) for site in sites}
        # a layer has no more components than inputs
        self._most = {
            site.path: min(round(self._ranks[site.path] * options["rho"]), site.d_in)
            for site in sites
        }
        self._components = {path: Components(n, options["tau"]) for path, n in self._most.items()}
        self.watched = self._components
        self.skips_unlabeled = options["use_label_mask"]

    def lacking(self, passed: bool) -> frozenset[str]:
        """Return the layers whose kept components have not converged."""
        kept = self.ranks()
        return frozenset(
            path for path, own in self._components.items() if not own.converged[: kept[path]].all()
        )

    def ranks(self) -> dict[str, int]:
        """Return the rank of each layer; the largest possible until each has components."""
        if any(own.components is None for own in self._components.values()):
            return self._most
        paths = [path for path, n in self._most.items() for _ in range(n)]
        shares = torch.cat([own.shares.cpu() for own in self._components.values()])
        first = shares.argsort(descending=True)[: sum(self._ranks.values())].tolist()
        counts = Counter(paths[i] for i in first)
        return {path: counts[path] for path in self._most}

    def check(self) -> None:
        """Check that each layer has had a batch with enough tokens.

        Raises:
            ConfigError: a layer has not.
        """
        for path, own in self._components.items():
            if own.components is None:
                raise ConfigError(
                    f"init_weights='eva' at {path!r}: no batch has {own.count} tokens there, one "
                    f"for each component. Write larger batches in init_data."
                )

    def changes(self) -> dict[str, Any]:
        """Return the layers with a rank, their ranks, and the scalings adjusted to them."""
        config, ranks = self._config, self.ranks()
        if ranks == self._ranks:
            return {}
        alphas = {
            path: config.alpha_at(path) * (rank / self._ranks[path] if self._adjusts else 1)
            for path, rank in ranks.items()
        }
        kept = [path for path, rank in ranks.items() if rank]
        return {
            **fields_at(site for site in self._sites if ranks[site.path]),
            "rank_pattern": {re.escape(p): ranks[p] for p in kept if ranks[p] != config.r},
            "alpha_pattern": {re.escape(p): alphas[p] for p in kept if alphas[p] != config.alpha},
        }


class CordaPlan(InputPlan):
    """The covariances of all layers, from one pass through the data."""

    def __init__(
        self, config: LowRankConfig, _options: Mapping[str, Any], anatomy: Anatomy
    ) -> None:
        """Start with all layers."""
        self.watched = {site.path: Covariance() for site in sites_of(config, anatomy)}

    def lacking(self, passed: bool) -> frozenset[str]:
        """Return all layers in the first pass, and none after it."""
        return frozenset() if passed else frozenset(self.watched)

    def check(self) -> None:
        """Accept any data: one pass is enough."""


PLANS: Mapping[str, Any] = {
    "eva": EvaPlan,
    "corda": CordaPlan,
    "loftq": lambda config, _options, anatomy: WeightPlan(
        {site.path: (site.d_out, site.d_in) for site in sites_of(config, anatomy)}
    ),
}
"""Initial values → the data that they need."""
