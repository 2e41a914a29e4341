"""PEFT's files of LoRA whose base weight PEFT has changed."""

from __future__ import annotations

import math

from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.spelling import PeftLayer, Tensors

from ._starts import factors

# PEFT's files of these hold the trained factors; `pissa_niter_…` draws random numbers
REPRODUCED = ("pissa", "olora")


def read_start(layer: PeftLayer) -> Tensors:
    """Return the tensors of a layer, and the part that PEFT has subtracted from its weight.

    Raises:
        CheckpointError: the layer has no weight to compute it from, or one that is not finite.
    """
    init, fields = layer.fields["init_lora_weights"], layer.fields
    if init not in REPRODUCED:
        return layer.tensors
    w = layer.weight()
    if w is None:
        raise CheckpointError(
            f"adapter_config.json says init_lora_weights={init!r}: PEFT has subtracted a part of "
            f"the weight of {layer.name!r}, and here it is quantized or has no values, so that "
            f"the part is unknown. Load the adapter into the model in the dtype of its training."
        )
    rank = layer.tensors["lora_A"].shape[0]
    s = fields["lora_alpha"] / (math.sqrt(rank) if fields["use_rslora"] else rank)
    try:
        a, b = factors(init, w.to(compute_dtype(w.dtype)), rank, s, None)
    except ConfigError as error:
        raise CheckpointError(f"at {layer.name!r}: {error}") from error
    like = layer.tensors["lora_A"]
    return layer.tensors | {"start.lora_A": a.to(like), "start.lora_B": b.to(like)}
