"""The rank and the scaling of each layer, in the configs of methods that have both."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from adapterzoo.anatomy import Anatomy
from adapterzoo.config_base import config_class
from adapterzoo.configs import Placement
from adapterzoo.fields import FACTOR, MAX_WIDTH, SEED, Range, field

from ._init import DTYPE, DTYPES
from ._patterns import Patterns, check_keys, matching
from ._targets import TargetedConfig

_RANK = Range(1, MAX_WIDTH)
SIZES = frozenset({"r", "alpha", "rank_pattern", "alpha_pattern"})
"""The fields of ranks and scalings."""


@config_class
class SizedConfig(TargetedConfig):
    """Base of the configs whose adapters have a rank and a scaling.

    Attributes:
        r: rank, 1 to 65,536.
        alpha: numerator of the scaling.
        rank_pattern: path endings or regular expressions to the rank of the layers they match.
        alpha_pattern: the same for alpha.
        init_weights_seed: makes the initial values independent of earlier random numbers.
        dtype: of the parameters, by name ("float32"); None for that of the layer.
    """

    r: int = field(8, _RANK)
    alpha: float = field(8, FACTOR)
    rank_pattern: Mapping[str, int] = field({}, Patterns("r", _RANK, 8))
    alpha_pattern: Mapping[str, float] = field({}, Patterns("alpha", FACTOR, 8))
    init_weights_seed: int | None = field(None, SEED)
    dtype: str | None = field(None, DTYPE)

    @property
    def slot_fields(self) -> frozenset[str]:
        """The ranks too, and the scaling, which a factor can take over."""
        return super().slot_fields | SIZES

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return one placement for each layer that the config names.

        Raises:
            SiteError: no layer matches, or none matches a key of `rank_pattern` or `alpha_pattern`.
        """
        placements = super().placements(anatomy)
        # a key may match a layer of a block that is left out
        by_layer = self.leave_out or self.layers_to_transform is not None
        sites = [*anatomy, *anatomy.parameters] if by_layer else [p.site for p in placements]
        names = [site.name for site in sites]
        for field_name in ("rank_pattern", "alpha_pattern"):
            check_keys(type(self).__name__, field_name, getattr(self, field_name), names)
        return placements

    def rank_at(self, name: str) -> int:
        """Return the rank of the adapter at a site, by `Site.name`."""
        return matching(self.rank_pattern, name, self.r)

    def alpha_at(self, name: str) -> float:
        """Return the numerator of the scaling of the adapter at a site, by `Site.name`."""
        return matching(self.alpha_pattern, name, self.alpha)

    def dtype_at(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the parameters at a layer of the given dtype."""
        return DTYPES[self.dtype] if self.dtype else dtype
