"""DoRA in the peers' files: LoRA with magnitudes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.spelling import AdapterHubSpelling, Container, PeftPart, PeftSpelling, Tensors

from . import _low_rank_adapterhub, _low_rank_peft
from ._peft_sites import row_numbers


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells DoRA."""
    return _low_rank_adapterhub.spelling(
        config,
        {"use_dora": True, "use_gating": False},
        Container(
            "loras",
            "layer",
            read=_low_rank_adapterhub.read_magnitudes,
            write=_low_rank_adapterhub.write_magnitudes,
        ),
        implied={"convention": "adapterhub"},
        fused="adapters cannot run DoRA in a fused layer",
        unsayable=_unsayable_hub,
    )


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells DoRA."""
    return _low_rank_peft.spelling(
        config,
        {"use_dora": True, "lora_bias": False},
        {"m": ("lora_magnitude_vector", "lora_magnitude_vector.weight")},
        wide=("m",),
        unsayable=_unsayable_peft,
        join=_join,
    )


def _unsayable_hub(config: AdapterConfig) -> str | None:
    if config.to_dict()["convention"] != "adapterhub":
        return (
            "adapters computes another DoRA, without the scaling in the norm and with a scaled "
            "bias: convention='adapterhub'"
        )
    return _low_rank_adapterhub.unsayable(config)


def _unsayable_peft(placement: Placement) -> str | None:
    if placement.config.to_dict()["convention"] != "paper":
        return "DoRAConfig(convention='adapterhub'), but PEFT's DoRA is the paper's"
    if (parameter := placement.site.parameter) is not None:
        return f"DoRA at the parameter {parameter!r}, where PEFT has LoRA only"
    return _low_rank_peft.unsayable(placement)


def _join(parts: Sequence[PeftPart], weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one adapter of a whole layer; unadapted rows keep the norm of the base weight.

    Raises:
        CheckpointError: a row has two magnitudes, or the norm of an unadapted one is unknown.
    """
    site = parts[0].placement.site
    slices = [part.placement.site.output_slice for part in parts]
    rows = [n for own in slices if own is not None for n in row_numbers(own).tolist()]
    if None in slices or len(set(rows)) < len(rows):
        raise CheckpointError(
            f"at {site.path!r} {len(parts)} adapters with magnitudes share rows, and PEFT's one "
            f"adapter for the whole layer cannot compute the same. Write "
            f"{argument('format', 'native')}, or train "
            f"with target_modules={[site.path.rpartition('.')[2]]!r}."
        )
    joined = _low_rank_peft.join(parts, weight)
    if len(rows) < len(joined["m"]):
        joined["m"] = _with_norms(joined["m"], torch.tensor(rows), site, weight())
    return joined


def _with_norms(m: Tensor, covered: Tensor, site: Site, weight: Tensor | None) -> Tensor:
    # a part of a sharded weight has no norm of its own
    plain = type(weight) in (Tensor, torch.nn.Parameter)
    if weight is None or not plain or weight.dim() != 2 or not weight.is_floating_point():
        raise CheckpointError(
            f"at {site.path!r} only some rows of a fused layer are adapted, and the norms of the "
            f"others cannot be computed from a quantized or sharded weight. Write "
            f"{argument('format', 'native')}."
        )
    rows = weight.detach().to(m).T if site.transposed else weight.detach().to(m)  # [d_out, d_in]
    whole: Tensor = torch.linalg.vector_norm(rows, dim=1)  # [d_out]
    whole[covered] = m[covered]
    return whole
