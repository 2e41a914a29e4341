"""Arithmetic for combining adapters into one: on tensors, independent of methods.

A strategy chooses the tensors (parameters, low-rank factors or changes of a weight), prunes each
and joins them; `split` factorizes a change again.

Sum: task arithmetic, Ilharco et al. 2022, arXiv:2212.04089, §2.
Keeping the largest: TIES, Yadav et al. 2023, arXiv:2306.01708, §3.1 "trim"; elected signs: §3.2
"elect" and §3.3 "disjoint merge".
Keeping at random: DARE, Yu et al. 2023, arXiv:2311.03099, eq. 2 and 3.
Low rank: Eckart & Young 1936: no matrix of rank r is nearer to a matrix with the singular values σ
than the one with the r largest of them; the distance is √Σ σᵢ² over the others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapterzoo.errors import CompositionError, ConfigError


def weighted(
    names: Sequence[str] | Mapping[str, float],
    weights: Sequence[float] | None,
    normalize: bool,
    example: Sequence[str] = ("a", "b"),
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Return names and their weights.

    Args:
        names: at least one; or a dict from names to weights.
        weights: one for each name; None: those of the dict, or equal weights of sum 1.
        normalize: whether to divide them by their sum.
        example: names for the message.

    Raises:
        ConfigError: there are no names, a weight is missing or not finite, or their sum is zero
            or infinite.
    """
    # the weights of a composition would be ignored
    if isinstance(names, str) or not isinstance(names, (Sequence, Mapping)) or not names:
        raise ConfigError(f"{names!r} is not a list of one or more names. Write {list(example)!r}.")
    if isinstance(names, Mapping):
        if weights is not None:
            raise ConfigError(
                f"weights={weights!r}: the values of a dict are its weights. Leave weights out."
            )
        weights = list(names.values())
    if weights is None:
        return tuple(names), (1.0 / len(names),) * len(names)
    # a set has no order
    unordered = isinstance(weights, (str, Set, Mapping)) or not isinstance(weights, Iterable)
    found = () if unordered else tuple(weights)
    if len(found) != len(names) or not all(map(_is_finite, found)):
        raise ConfigError(
            f"weights={weights!r} is not a list of {len(names)} finite numbers. "
            f"Write weights={[1.0] * len(names)!r}."
        )
    total = float(sum(found)) if normalize else 1.0
    if total == 0 or math.isinf(total):
        raise ConfigError(
            f"weights={list(found)!r}: they sum to {total:g} and cannot be normalized. "
            f"Write normalize_weights=False."
        )
    return tuple(names), tuple(float(weight) / total for weight in found)


def _is_finite(weight: object) -> bool:
    return isinstance(weight, Real) and not isinstance(weight, bool) and math.isfinite(weight)


def weighted_sum(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σᵢ wᵢ τᵢ, added in the given order.

    Args:
        tensors: at least one, of one shape, dtype and device.
        weights: a weight for each.
    """
    total = weights[0] * tensors[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + weight * tensor
    return total


def elected(
    tensors: Sequence[Tensor], weights: Sequence[float], majority_sign_method: str = "total"
) -> Tensor:
    """Return the elementwise weighted mean over the tensors that have the elected sign γ.

    With A = {i : sign τᵢ = γ} the result is Σ_{i ∈ A} wᵢ τᵢ / max(|A|, 1). As in PEFT, the election
    ignores the weights, a tie elects +, and the sum is divided by |A|, not by the weights.

    Args:
        tensors: at least one, of one shape, dtype and device.
        weights: a weight for each.
        majority_sign_method: "total": γ = sign Σ τᵢ; "frequency": γ = sign Σ sign τᵢ.
    """
    stacked = torch.stack(tuple(tensors))  # [n, *shape]
    signs = stacked.sign()
    votes = stacked if majority_sign_method == "total" else signs
    gamma = torch.where(votes.sum(0) >= 0, 1, -1)  # [*shape]
    agrees = signs == gamma
    one = [1] * (stacked.dim() - 1)
    factors = stacked.new_tensor(list(weights)).view(-1, *one)  # [n, 1, …]
    return (stacked * factors * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def largest(tensor: Tensor, density: float) -> Tensor:
    """Keep the ⌊density · n⌋ of n entries with the largest magnitude; set the others to zero.

    Args:
        tensor: a tensor of any shape; all experts of a stack are pruned together.
        density: share of the entries to keep, above 0 to 1.
    """
    flat = tensor.reshape(-1)  # [n]
    kept = flat.abs().topk(int(density * flat.numel())).indices
    pruned = torch.zeros_like(flat)
    pruned[kept] = flat[kept]
    return pruned.view(tensor.shape)  # [*shape]


def random(tensor: Tensor, density: float, source: torch.Generator | None = None) -> Tensor:
    """Return m ⊙ δ / density with m ~ Bernoulli(density); its mean over m is δ.

    Args:
        tensor: a tensor of any shape.
        density: probability of keeping an entry, above 0 to 1.
        source: on the CPU, so that all devices draw the same; None: torch's default generator.
    """
    shares = torch.full(tensor.shape, density, dtype=tensor.dtype, device="cpu")
    mask = torch.bernoulli(shares, generator=source)
    return tensor * mask.to(tensor.device) / density


def split(
    change: Tensor,
    rank: int,
    clamp: float | None = None,
    full_matrices: bool = False,
    driver: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return A = V_rᵀ and B = U_r Σ_r of the SVD: B A is the nearest matrix of rank r.

    Eckart & Young 1936. If the change has fewer singular values, the rest of A and B is zero.

    Args:
        change: `[*experts, d_out, d_in]`.
        rank: r.
        clamp: a quantile of all entries of A and B; larger magnitudes are cut to it.
        full_matrices: whether to compute unused singular vectors, as PEFT does.
        driver: cuSOLVER's driver, see `torch.linalg.svd`.

    Returns:
        A `[*experts, rank, d_in]` and B `[*experts, d_out, rank]`.
    """
    u, s, v = torch.linalg.svd(change, full_matrices=full_matrices, driver=driver)
    count = min(rank, s.shape[-1])
    b = u[..., :count] * s[..., None, :count]  # [*experts, d_out, count]
    a = v[..., :count, :]  # [*experts, count, d_in]
    if clamp is not None:
        high = _quantile(torch.cat([b.reshape(-1), a.reshape(-1)]), clamp)  # [entries]
        a, b = a.clamp(-high, high), b.clamp(-high, high)
    missing = rank - count
    return pad(a, (0, 0, 0, missing)), pad(b, (0, missing))  # to `rank`


def signed_roots(weights: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return factors for A and B with each weight as product: ±√|w| and √|w|, the sign on A."""
    roots = [math.sqrt(abs(weight)) for weight in weights]
    signed = [math.copysign(root, weight) for root, weight in zip(roots, weights, strict=True)]
    return signed, roots


def _quantile(values: Tensor, q: float) -> Tensor:
    """Compute `torch.quantile` without its limit of 16 million values."""
    ordered = values.sort().values
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], at - low)


class Truncated(NamedTuple):
    """Factors of a change.

    Attributes:
        a: `[*experts, rank, d_in]`.
        b: `[*experts, d_out, rank]`.
        is_exact: whether B A is the change by algebra, without an SVD.
    """

    a: Tensor
    b: Tensor
    is_exact: bool


def truncated(
    change: Tensor,
    factors: tuple[Tensor, Tensor] | None,
    rank: int | None,
    energy: float | None,
    precision: float,
) -> Truncated:
    """Return the factors of a change, exact ones where they exist and are small enough.

    Args:
        change: `[*experts, d_out, d_in]`.
        factors: A and B with B A = change; None: not known.
        rank: the largest rank; None: not limited.
        energy: the share of Σ σ² to keep, above 0 to 1; None: all of it. Experts have one rank.
        precision: relative size of singular values that count as zero.
    """
    limit = min(change.shape[-2:])
    if factors is not None:
        # columns of zeros add nothing
        used = factors[1].flatten(0, -2).ne(0).any(0)  # [rank]
        factors = factors[0][..., used, :], factors[1][..., used]
        count = factors[0].shape[-2]
        if energy is None and count <= min(limit, rank or limit):
            return Truncated(*factors, is_exact=True)
        factors = factors if count < limit else None
    u, s, v = torch.linalg.svd(change, full_matrices=False) if factors is None else _svd(*factors)
    kept = (s > precision * s[..., :1]).sum(-1)  # [*experts]
    if energy is not None:
        # Σ σ² of the values from the i-th on
        tails = s.square().flip(-1).cumsum(-1).flip(-1)  # [*experts, values]
        kept = kept.minimum((tails > (1 - energy) * tails[..., :1]).sum(-1))
    count = min(int(kept.max()), rank or limit)
    return Truncated(v[..., :count, :], u[..., :count] * s[..., None, :count], is_exact=False)


def _svd(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the SVD of B A from that of a matrix `[rank, rank]`."""
    q_in, r_in = torch.linalg.qr(a.mT)
    q_out, r_out = torch.linalg.qr(b)
    u, s, v = torch.linalg.svd(r_out @ r_in.mT)
    return q_out @ u, s, v @ q_in.mT


Target: TypeAlias = Literal["parameters", "only_b", "factors", "ranks", "change"]
"""What to combine: all parameters; the same with a weight's sign only on B; the factors A and B,
each times the root of its weight; the concatenated factors; the change of the layer's weight."""


@dataclass(frozen=True, slots=True)
class Combination:
    """What a strategy combines and how, with its options, for one call or one layer.

    Attributes:
        target: what to combine.
        prunes: how to choose the entries to keep: by "magnitude", at "random", or None for all.
        elects: whether signs are elected, as in TIES.
        needs_rank: whether `svd_rank` is required.
        keeps_alpha: whether the result has the alpha of the first adapter, and B is divided by the
            scaling that follows.
        name: name of the strategy.
        adapters: names of the adapters, for messages.
        density: share of the entries to keep; None: all.
        majority_sign_method: how signs are elected.
        rank: rank of the result; None: the largest of those combined.
        clamp: quantile at which factors are clamped; None: not at all.
        full_matrices: argument of `torch.linalg.svd`.
        driver: argument of `torch.linalg.svd`.
        source: random number generator; None: torch's default.
    """

    target: Target
    prunes: Literal["magnitude", "random"] | None = None
    elects: bool = False
    needs_rank: bool = False
    keeps_alpha: bool = False
    name: str = ""
    adapters: tuple[str, ...] = ("a", "b")
    density: float | None = None
    majority_sign_method: str = "total"
    rank: int | None = None
    clamp: float | None = None
    full_matrices: bool = False
    driver: str | None = None
    source: torch.Generator | None = None

    @property
    def composed(self) -> str:
        """The call that averages the outputs of the adapters."""
        return f"set_active_adapters(Average({', '.join(map(repr, self.adapters))}))"

    @property
    def keeps_scaling(self) -> bool:
        """Whether the factors are combined without the scaling of the adapters, which stays."""
        return self.target in ("parameters", "only_b")

    def mix(self, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Prune each tensor, then join them.

        Args:
            tensors: at least one, of one shape and device, float32 or float64.
            weights: a weight for each.
        """
        if self.prunes is not None and self.density is not None and self.density < 1:
            prune: Callable[[Tensor, float], Tensor] = largest
            if self.prunes == "random":
                prune = functools.partial(random, source=self.source)
            tensors = [prune(tensor, self.density) for tensor in tensors]
        if self.elects:
            return elected(tensors, weights, self.majority_sign_method)
        return weighted_sum(tensors, weights)

    def fill(self, target: Tensor, value: Tensor, what: str) -> None:
        """Copy a result into its parameter.

        Args:
            target: a parameter of a new adapter.
            value: a tensor of the same shape.
            what: the parameter's name.

        Raises:
            CompositionError: the result is not finite in the parameter's dtype.
        """
        cast = value.to(target.dtype)
        if not bool(cast.isfinite().all()):
            raise CompositionError(
                f"the combined {what} is not finite in {target.dtype}; nothing has changed. Look "
                f"for NaN in the adapters, or write smaller weights."
            )
        target.copy_(cast)

    def refuse_differing(
        self,
        configs: Sequence[Mapping[str, Any]],
        but: Iterable[str],
        hint: str | None = None,
    ) -> None:
        """Raise if configs differ.

        Args:
            configs: at least one, as dicts of JSON types.
            but: fields that may differ.
            hint: what to write instead; None: a composition.

        Raises:
            CompositionError: the configs differ in another field.
        """
        hint = hint or f"{self.composed}, which averages the adapters' outputs"
        # the order of layers, matrices and targets has no meaning
        dicts = [
            {k: sorted(map(repr, v)) if isinstance(v, list) else v for k, v in config.items()}
            for config in configs
        ]
        for field in dict.fromkeys(field for values in dicts for field in values):
            found = [values.get(field) for values in dicts]
            if field not in but and any(value != found[0] for value in found):
                given = [config.get(field) for config in configs]
                raise CompositionError(
                    f"{self.name!r} takes one {field}, but these have "
                    f"{' and '.join(map(str, given))}. Write {hint}."
                )

    def refusal(self, why: str) -> CompositionError:
        """Create the error for an adapter that lacks what the strategy combines.

        Args:
            why: the reason, for the message.
        """
        return CompositionError(
            f"{self.name!r} combines low-rank factors, but {why}. Write combine_strategy='linear', "
            f"the average of all parameters, or {self.composed}."
        )


LINEAR_OF_PEFT = "lora_linear_sqrt"
"""The strategy that PEFT calls "linear"."""

STRATEGIES: Mapping[str, Combination] = {
    # as adapters defines them
    "linear": Combination("parameters"),
    "lora_linear_only_negate_b": Combination("only_b"),
    "lora_delta_w_svd": Combination("change", needs_rank=True, keeps_alpha=True),
    # as PEFT defines them
    LINEAR_OF_PEFT: Combination("factors"),
    "cat": Combination("ranks"),
    "svd": Combination("change"),
    "magnitude_prune": Combination("factors", "magnitude"),
    "magnitude_prune_svd": Combination("change", "magnitude"),
    "ties": Combination("factors", "magnitude", elects=True),
    "ties_svd": Combination("change", "magnitude", elects=True),
    "dare_linear": Combination("factors", "random"),
    "dare_linear_svd": Combination("change", "random"),
    "dare_ties": Combination("factors", "random", elects=True),
    "dare_ties_svd": Combination("change", "random", elects=True),
}
