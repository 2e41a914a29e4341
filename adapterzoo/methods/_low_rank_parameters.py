"""LoRA of parameters in PEFT's layout: one adapter for each of a module's fused experts.

PEFT has lora_A `[experts · rank, d_in]`, experts first, and lora_B `[d_out, rank · experts]`, ranks
first. It takes the last two dimensions of a parameter as d_out and d_in, unless it has three and
its module says `is_transposed`; where the module does not say so, A belongs to the outputs.
"""

from __future__ import annotations

from adapterzoo.anatomy import Site
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.spelling import PeftLayer, PeftOutput, Tensors

from ._low_rank_config import LowRankConfig
from ._started_peft import REPRODUCED, read_start


def count_of(site: Site) -> int:
    """Return how many adapters are in the tensors of a site."""
    return site.experts or 1


def read(layer: PeftLayer) -> Tensors:
    """Return our tensors `[*experts, rank, d_in]` and `[*experts, d_out, rank]` of PEFT's.

    Raises:
        CheckpointError: PEFT has changed the weight in a way that is not known here.
    """
    if not layer.is_parameter:
        return read_start(layer)
    init, site = layer.fields["init_lora_weights"], layer.site
    if init in REPRODUCED:
        raise CheckpointError(
            f"adapter_config.json says init_lora_weights={init!r} with target_parameters: that "
            f"initialization changed the weight of {layer.name!r}. Merge the adapter with PEFT, "
            f"and load the merged model."
        )
    a, b, count = layer.tensors["lora_A"], layer.tensors["lora_B"], count_of(site)
    a = a.unflatten(0, (count, -1))  # [experts, rank, d_in]
    b = b.unflatten(1, (-1, count)).movedim(2, 0)  # [experts, d_out, rank]
    if _is_flipped(site):
        a, b = b.mT, a.mT
    if not site.experts:
        a, b = a[0], b[0]
    return {**layer.tensors, "lora_A": a.contiguous(), "lora_B": b.contiguous()}


def as_parameter(site: Site, tensors: Tensors) -> Tensors:
    """Return PEFT's tensors of ours; undoes `read`, and leaves those of layers as they are.

    Args:
        site: of the adapter.
        tensors: by our parameter names.
    """
    if site.parameter is None:
        return tensors
    a, b = tensors["lora_A"], tensors["lora_B"]
    if not site.experts:
        a, b = a[None], b[None]
    if _is_flipped(site):
        a, b = b.mT, a.mT
    a = a.flatten(0, 1)  # [experts · rank, d_in]
    b = b.movedim(0, 2).flatten(1)  # [d_out, rank · experts]
    return {**tensors, "lora_A": a.contiguous(), "lora_B": b.contiguous()}


def check_parameter(layer: PeftOutput, config: LowRankConfig) -> None:
    """Check that PEFT can have the adapter, if it must be one of a parameter.

    Raises:
        CheckpointError: it has dropout or a bias.
    """
    site = layer.parts[0].placement.site
    if layer.is_parameter and (config.dropout or "lora_B_bias" in layer.tensors):
        raise CheckpointError(
            f"the adapter at {site.name!r} has dropout={config.dropout} or a bias of B, and PEFT "
            f"can adapt the layer only as a parameter (target_parameters), which has neither. "
            f"Write {argument('format', 'native')}."
        )


def _is_flipped(site: Site) -> bool:
    """Return whether PEFT's A belongs to the outputs of the weight."""
    if site.experts:
        return site.transposed != site.says_transposed
    return site.transposed or site.kind == "embedding"
