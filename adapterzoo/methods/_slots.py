"""Ranks and scalings of adapters whose values go into another one."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from torch import Tensor

from adapterzoo.contracts import upcast
from adapterzoo.errors import ConfigError


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
