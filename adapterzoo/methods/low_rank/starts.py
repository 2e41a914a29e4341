"""Initial values of LoRA, and the part of the base weight that some of them replace.

PiSSA (Meng et al. 2024, arXiv:2404.02948, eq. 2–4) starts with the principal part of the weight,
s · B₀ A₀ ≈ U Σ Vᵀ of rank r; OLoRA (Büyükakyüz 2024, arXiv:2406.01775) with the first r columns
and rows of W = Q R. PEFT subtracts s · B₀ A₀ from the base weight. Here the base stays as it is
and the adapter subtracts it: y = W x + s · (B A − B₀ A₀) x, which equals a LoRA of rank 2r with
A' = [A; A₀] and B' = [B, −B₀].

Orthogonal: the rows of A and the columns of B lie in two orthogonal halves of a random basis of
the ranks, so that B A = 0 although neither is zero. Gaussian: A has deviation 1 / r. Both as in
PEFT.

LoftQ (Li et al. 2023, arXiv:2310.08659, eq. 6–8, T = 1): s · B A is the principal part of W − Q,
where Q is the quantized weight that the layer has and W the original one. Nothing is subtracted:
the update makes up for an error. Differs from PEFT: it divides by s, so that any scaling does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from adapterzoo.errors import ConfigError
from adapterzoo.fields import Choice

from ._init import constant, kaiming, normal

Factors: TypeAlias = tuple[Tensor, Tensor]
"""A `[*experts, r, d_in]` and B `[*experts, d_out, r]`."""

_NITER = re.compile(r"pissa_niter_([1-9]\d{0,2})")


DRAWN = "lora", "bert", "gaussian", "orthogonal"
"""The names of initial values that do not depend on the weight."""


FROM_INPUTS = "eva", "corda"
"""Those that need inputs of the layers."""


FROM_ORIGINAL = "loftq"
"""Those that need the weight before its quantization."""


class Starts(Choice):
    """The names of all initial values."""

    def __init__(self) -> None:
        """Take the names."""
        super().__init__(*DRAWN, "pissa", "olora", *FROM_INPUTS, FROM_ORIGINAL)
        self.legal += ", or 'pissa_niter_4' with any number of iterations"

    def fits(self, value: object) -> bool:
        """Return whether the value is legal."""
        return super().fits(value) or (isinstance(value, str) and bool(_NITER.fullmatch(value)))


def replaces_weight(name: str) -> bool:
    """Return whether initial values replace a part of the base weight."""
    return name in ("olora", "corda") or name.startswith("pissa")


def starts_from_weight(name: str) -> bool:
    """Return whether s · B A starts as a part of the weight, or of its error."""
    return replaces_weight(name) or name == FROM_ORIGINAL


def drawing(
    name: str, rank: int, source: torch.Generator | None
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return the initializers of A and B that do not depend on the weight.

    Args:
        name: of the initial values; for those that depend on the weight, the values of "lora".
        rank: r.
        source: of random numbers.

    Raises:
        ConfigError: the rank must be even.
    """
    if name == "bert":
        return normal(0.02, source), normal(0.02, source)
    if name == "gaussian":
        return normal(1 / rank, source), constant(0.0)
    if name != "orthogonal":
        return kaiming(source), constant(0.0)
    if rank % 2:
        raise ConfigError(
            f"init_weights='orthogonal' with rank {rank}: A and B get one half of the ranks each, "
            f"so the rank must be even. Write r={rank + 1}."
        )
    basis = torch.linalg.qr(torch.randn(rank, rank, generator=source, device="cpu"))[0]  # [r, r]
    halves = basis[0::2], basis[1::2]  # [r / 2, r] each

    def fill_a(t: Tensor) -> Tensor:
        drawn = torch.randn(*t.shape[:-2], t.shape[-1], rank // 2, generator=source, device="cpu")
        return t.copy_((drawn @ halves[0]).mT / 10)  # [*experts, r, d_in]

    def fill_b(t: Tensor) -> Tensor:
        drawn = torch.randn(*t.shape[:-1], rank // 2, generator=source, device="cpu")
        return t.copy_(drawn @ halves[1] / 10)  # [*experts, d_out, r]

    return fill_a, fill_b


def check_weight(name: str, w: Tensor) -> None:
    """Check that initial values can be computed from a weight.

    Args:
        name: of the initial values.
        w: the weight.

    Raises:
        ConfigError: it has values that are NaN or infinite.
    """
    if not bool(w.isfinite().all()):
        raise ConfigError(
            f"init_weights={name!r} is computed from the weight, and that has values that are not "
            f"finite. Load the base model again, in float32, or write init_weights='lora'."
        )


def factors(name: str, w: Tensor, rank: int, s: float, source: torch.Generator | None) -> Factors:
    """Return A₀ and B₀ of initial values that replace a part of the weight.

    Args:
        name: of the initial values.
        w: the weight `[*experts, d_out, d_in]`, float32 or float64.
        rank: r, at most the smaller width.
        s: the scaling.
        source: of random numbers, for `pissa_niter_<number>`.

    Raises:
        ConfigError: the weight is not finite.
    """
    check_weight(name, w)
    if name == "olora":
        q, r = torch.linalg.qr(w)
        return r[..., :rank, :].contiguous(), q[..., :rank].contiguous()
    if match := _NITER.fullmatch(name):
        return _balanced(*svd_lowrank(w, rank, int(match[1]), source), s)
    return principal(w, rank, s)


def principal(w: Tensor, rank: int, s: float) -> Factors:
    """Return A and B of the principal part of a matrix; arguments as of `factors`."""
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
