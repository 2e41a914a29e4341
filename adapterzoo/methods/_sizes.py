"""Checks of sites, ranks and scalings, which several families have."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import upcast
from adapterzoo.errors import ConfigError
from adapterzoo.fields import MAX_WIDTH, Range
from adapterzoo.patterns import check_keys

from ._targets import TargetedConfig

RANK = Range(1, MAX_WIDTH)
SIZES = frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"})
"""The fields of ranks and scalings."""


def check_site(config: AdapterConfig, site: Site, *dropouts: str, embeddings: bool = False) -> None:
    """Check that a site has the features that an adapter reads and drops.

    Args:
        config: of the adapter.
        site: of the adapter.
        *dropouts: the fields of the config that drop features or parts of the update.
        embeddings: whether the method can adapt embeddings, if nothing is dropped.

    Raises:
        ConfigError: it has not.
    """
    given = ", ".join(f"{name}={config[name]}" for name in dropouts)
    call = f"{type(config).__name__}({given}) at {site.path!r}"
    is_embedding = site.kind == "embedding"
    if is_embedding and not embeddings:
        raise ConfigError(
            f"{call}: the method cannot adapt an embedding. Write exclude_modules=[{site.path!r}]."
        )
    if any(config[name] for name in dropouts) and (is_embedding or site.is_only_read):
        what = "reads token numbers" if is_embedding else "computes with its parameters"
        zeros = ", ".join(f"{name}=0.0" for name in dropouts)
        raise ConfigError(f"{call}: the module {what}, so nothing can be dropped. Write {zeros}.")


def check_size_keys(
    config: TargetedConfig, placements: Sequence[Placement], anatomy: Anatomy
) -> None:
    """Check that each key of `rank_pattern` and `alpha_pattern` matches a layer.

    Raises:
        SiteError: one matches none.
    """
    # a key may match a layer of a block that is left out
    by_layer = config.leave_out or config.layers_to_transform is not None
    sites = [*anatomy, *anatomy.parameters] if by_layer else [p.site for p in placements]
    names = [site.name for site in sites]
    for field_name in ("rank_pattern", "alpha_pattern"):
        check_keys(type(config).__name__, field_name, config[field_name], names)


def refuse_larger(config: object, rank: int, ranks: Iterable[int]) -> None:
    """Refuse ranks that are larger than that of a slot.

    Args:
        config: that has them.
        rank: of the slot.
        ranks: of the adapter.

    Raises:
        ConfigError: one is larger.
    """
    if (most := max(ranks)) > rank:
        raise ConfigError(
            f"{type(config).__name__}(r={most}) has a larger rank than the slot, which has {rank}. "
            f"Write enable_peft_hotswap(target_rank={most})."
        )


def rescaled(
    tensors: Mapping[str, Tensor], scaling: float, slot: float, keys: Container[str]
) -> dict[str, Tensor]:
    """Return the tensors, with the ratio of two scalings in some of them.

    Args:
        tensors: of an adapter.
        scaling: its own.
        slot: the scaling of the adapter that takes the tensors.
        keys: of tensors whose product with the scaling is the update.

    Raises:
        ConfigError: the slot multiplies by zero, and the adapter does not.
    """
    if scaling == slot:
        return dict(tensors)
    if slot == 0:
        raise ConfigError(
            f"the slot has the scaling 0 and the values need {scaling:g}, so that no tensors give "
            f"the same update. Add the slot with another alpha."
        )
    ratio = scaling / slot
    return {
        key: (upcast(t, t) * ratio).to(t.dtype) if key in keys else t for key, t in tensors.items()
    }
