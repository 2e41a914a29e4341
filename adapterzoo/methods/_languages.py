"""The stream of a block without its language adapters (X-MOD), as `adapters` computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import layer_norm

from adapterzoo.anatomy import Anatomy
from adapterzoo.contracts import BaseLayer
from adapterzoo.errors import SiteError

JOINING = (
    "ConfigUnion(config, NoLanguageAdaptersConfig()), a bottleneck with site_convention='xmod'"
)


def check_languages(anatomy: Anatomy, asked: str) -> None:
    """Check that the model has language adapters.

    Args:
        anatomy: of the model.
        asked: what needs them.

    Raises:
        SiteError: it has none.
    """
    if not any(block.languages for block in anatomy.blocks):
        raise SiteError(
            f"{asked}: the blocks of this model have no language adapters to leave out; those of "
            f"X-MOD have some. Write a config without it."
        )


def norm_of(path: str, base: BaseLayer) -> Callable[[Tensor], Tensor]:
    """Return LN, the norm that the model has in front of its language adapters.

    Args:
        path: of the module that ends in them.
        base: the layer, in a call.
    """
    module: Any = base.part(path)
    norm = module.adapter_layer_norm
    if norm is None and module.adapter_reuse_layer_norm:
        norm = module.LayerNorm
    if norm is None:
        return lambda x: x
    # adapters of other rows may act in the module
    return lambda x: layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
