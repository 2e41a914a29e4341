"""What EVA, CorDA and LoftQ need, and the ranks that EVA gives to each layer.

EVA's ranks: of the components of all layers, those that explain the largest shares of the
variance are kept, as many as the config has ranks in all; a layer has at most rho · r of them, and
one without any is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.contracts import InputPlan, WeightPlan
from adapterzoo.errors import ConfigError
from adapterzoo.fields import FLAG, Check, Choice, Range

from ._input_statistics import Components, Covariance
from ._low_rank_config import LowRankConfig
from ._starts import FROM_ORIGINAL

OPTIONS: Mapping[str, Mapping[str, tuple[Any, Check]]] = {
    "eva": {
        "rho": (2.0, Range(1.0, 1000.0)),
        "tau": (0.99, Range(0.0, 1.0)),
        "use_label_mask": (True, FLAG),
        "whiten": (False, FLAG),
        "adjust_scaling_factors": (True, FLAG),
    },
    "corda": {"corda_method": ("ipm", Choice("ipm", "kpm"))},
    FROM_ORIGINAL: {},
}
"""The options of initial values from `init_data`: defaults and legal values, named as in PEFT."""


def sites_of(config: LowRankConfig, anatomy: Anatomy) -> list[Site]:
    """Return the layers whose inputs or original weights are needed.

    Raises:
        ConfigError: one is not a whole linear layer.
    """
    sites = [placement.site for placement in config.placements(anatomy)]
    for site in sites:
        if site.output_slice is not None or site.is_only_read or site.kind == "embedding":
            instead = f"target_modules={[site.path.rpartition('.')[2]]!r}, or leave the layer out"
            if site.is_only_read:
                instead = "init_weights='lora', or leave the parameter out"
            raise ConfigError(
                f"init_weights={config.init_weights!r} at {site.name!r}: it is for whole linear "
                f"layers. Write {instead}."
            )
    return sites


class EvaPlan(InputPlan):
    """The principal components of all layers, until those that are kept have converged."""

    def __init__(self, config: LowRankConfig, options: Mapping[str, Any], anatomy: Anatomy) -> None:
        """Watch all layers."""
        self._config, self._adjusts = config, options["adjust_scaling_factors"]
        sites = sites_of(config, anatomy)
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
        """Return the rank of each layer; the largest ones until each has components."""
        if any(own.components is None for own in self._components.values()):
            return self._most
        paths = [path for path, n in self._most.items() for _ in range(n)]
        shares = torch.cat([own.shares.cpu() for own in self._components.values()])
        first = shares.argsort(descending=True)[: sum(self._ranks.values())].tolist()
        counts = Counter(paths[i] for i in first)
        return {path: counts[path] for path in self._most}

    def check(self) -> None:
        """Check that each layer has got a batch with enough tokens.

        Raises:
            ConfigError: one has not.
        """
        for path, own in self._components.items():
            if own.components is None:
                raise ConfigError(
                    f"init_weights='eva' at {path!r}: no batch brought it {own.count} tokens, as "
                    f"many as components are needed. Write larger batches in init_data."
                )

    def changes(self) -> dict[str, Any]:
        """Return the layers with a rank, their ranks, and the scalings that these adjust."""
        config, ranks = self._config, self.ranks()
        if ranks == self._ranks:
            return {}
        alphas = {
            path: config.alpha_at(path) * (rank / self._ranks[path] if self._adjusts else 1)
            for path, rank in ranks.items()
        }
        kept = [path for path, rank in ranks.items() if rank]
        return {
            "target_modules": tuple(kept),
            "exclude_modules": None,
            "leave_out": (),
            "layers_to_transform": None,
            "rank_pattern": {re.escape(p): ranks[p] for p in kept if ranks[p] != config.r},
            "alpha_pattern": {re.escape(p): alphas[p] for p in kept if alphas[p] != config.alpha},
        }


class CordaPlan(InputPlan):
    """The covariances of all layers, of one pass through the data."""

    def __init__(
        self, config: LowRankConfig, _options: Mapping[str, Any], anatomy: Anatomy
    ) -> None:
        """Watch all layers."""
        self.watched = {site.path: Covariance() for site in sites_of(config, anatomy)}

    def lacking(self, passed: bool) -> frozenset[str]:
        """Return all layers in the first pass, and none after it."""
        return frozenset() if passed else frozenset(self.watched)

    def check(self) -> None:
        """Accept any data: one pass is all."""

    def changes(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


def _original(config: LowRankConfig, _options: Mapping[str, Any], anatomy: Anatomy) -> WeightPlan:
    """Return the plan of LoftQ: the original weights of all layers."""
    return WeightPlan({site.path: (site.d_out, site.d_in) for site in sites_of(config, anatomy)})


PLANS: Mapping[str, Any] = {"eva": EvaPlan, "corda": CordaPlan, FROM_ORIGINAL: _original}
"""Initial values to what they need."""
