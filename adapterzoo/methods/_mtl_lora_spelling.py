"""MTL-LoRA in AdapterHub's files."""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import AdapterHubSpelling, Container, same

from . import _low_rank_adapterhub


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells MTL-LoRA; its files cannot hold a dense matrix Λ."""
    return _low_rank_adapterhub.spelling(
        config,
        {"use_dora": False, "use_gating": False, "task_specific_matrix_type": "singular_values"},
        Container("loras", "layer"),
        architecture="mtl_lora",
        fields=_low_rank_adapterhub.FIELDS | same("n_up_projection", "weights_sharpness"),
        fused="adapters cannot run MTL-LoRA in a fused layer",
    )
