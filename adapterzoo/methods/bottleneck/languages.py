"""A base model without its language adapters: how `adapters` runs X-MOD with any adapter.

`adapters` 1.3 deletes the language adapters of X-MOD. With s the stream that they would read, a
block continues with LN(s), where LN is the norm before them (`adapter_layer_norm`, or the one
that the block reuses). In `ConfigUnion(config, NoLanguageAdaptersConfig())` the other config is an
adapter of that base model. With `site_convention="xmod"`, bottlenecks after the feed-forward part
skip the language adapters themselves; `leave_out` names their blocks.

Differs from the paper (Pfeiffer et al. 2022, arXiv:2205.06266): there each language's adapter acts.
Differs from PEFT: it has no such method. Differs from adapters: the model keeps its language
adapters, which act again without this adapter, and in other rows of a batch.
Cost per site: no parameters; one norm instead of a language adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import AdapterConfig, Layers, Placement, architectures, config_class, field
from adapterzoo.contracts import BaseLayer, LanguageFreeAdapter
from adapterzoo.errors import SiteError
from adapterzoo.spelling import AdapterHubSpelling, spelled

JOINING = (
    "ConfigUnion(config, NoLanguageAdaptersConfig()), a bottleneck with site_convention='xmod'"
)


def check_languages(anatomy: Anatomy, asked: str) -> None:
    """Check that the model has language adapters.

    Args:
        anatomy: the model's anatomy.
        asked: the caller that needs them, for the message.

    Raises:
        SiteError: the model has none.
    """
    if not any(block.languages for block in anatomy.blocks):
        raise SiteError(
            f"{asked}: the blocks of this model have no language adapters to leave out; those of "
            f"X-MOD have some. Write a config without it."
        )


def norm_of(path: str, base: BaseLayer) -> Callable[[Tensor], Tensor]:
    """Return LN, the norm before the model's language adapters.

    Args:
        path: path of the module that ends with them.
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


def _added(configs: Sequence[AdapterConfig], anatomy: Anatomy) -> AdapterConfig | None:
    """Return the config for the blocks where no bottleneck skips the language adapters."""
    sites = {p.site.path for config in configs for p in config.placements(anatomy)}
    blocks = [block for block in anatomy.blocks if block.languages]
    if all(block.languages in sites for block in blocks):
        return None
    return NoLanguageAdaptersConfig(
        leave_out=tuple(block.layer for block in blocks if block.languages in sites)
    )


def _adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    return AdapterHubSpelling(
        config=config, architecture=(config.architecture,), fields={}, containers=(), added=_added
    )


# no config string: it is not a method on its own
@architectures.register("no_language_adapters")
@spelled(_adapterhub)
@config_class
class NoLanguageAdaptersConfig(AdapterConfig):
    """Config of a base model without its language adapters.

    Attributes:
        leave_out: numbers of blocks that keep theirs, or skip them by a bottleneck with
            `site_convention="xmod"`.
    """

    architecture: ClassVar[str] = "no_language_adapters"
    starts_as_identity = False

    leave_out: tuple[int, ...] = field((), Layers())

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the sites of the language adapters, block after block."""
        check_languages(anatomy, type(self).__name__)
        blocks = [b for b in anatomy.blocks if b.languages and b.layer not in self.leave_out]
        if not blocks:
            raise SiteError(
                f"{type(self).__name__}(leave_out={list(self.leave_out)!r}): no block is left; the "
                f"model has blocks 0 to {len(anatomy.blocks) - 1}. Write a shorter leave_out."
            )
        return [
            Placement(
                Site(b.languages, "other", b.layer, b.stack, "output", b.d_model, b.d_model), self
            )
            for b in blocks
        ]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> LanguageFreeAdapter:
        """Return the adapter, which has no parameters."""
        return NoLanguageAdapters(site.path)


class NoLanguageAdapters(LanguageFreeAdapter):
    """s ↦ LN(s)."""

    reads_call = True
    is_base = True
    joining = JOINING

    def __init__(self, path: str) -> None:
        """Store the path of the module that ends with language adapters."""
        super().__init__()
        self.path = path

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return LN(s). `x` is s `[*batch, d_model]`."""
        return norm_of(self.path, base)(x)
