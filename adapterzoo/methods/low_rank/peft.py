"""PEFT's spelling of methods with low-rank factors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.fields import FACTOR, MAX_WIDTH, AnyValue, Range, Share
from adapterzoo.spelling import (
    Fields,
    PeftField,
    PeftLayer,
    PeftOutput,
    PeftPart,
    PeftSpelling,
    Tensors,
)

from ._beside import BESIDE
from ._low_rank_arguments import ARGUMENTS, INVOCATION, REFUSED
from ._low_rank_config import LowRankConfig
from ._low_rank_parameters import as_parameter, check_parameter, count_of, read
from ._peft_sites import row_numbers, whole_width
from ._started_peft import REPRODUCED

_EMBEDDING_TENSORS = {"lora_A": ("lora_embedding_A",), "lora_B": ("lora_embedding_B",)}
# VeLoRA's, which only the backward pass of PEFT reads
_UNREAD = {"velora_embed": ("lora_velora_embed",)}
FIELDS = {
    "r": PeftField(8, Range(1, MAX_WIDTH)),
    "lora_alpha": PeftField(8.0, FACTOR),
    "lora_dropout": PeftField(0.0, Share()),
    "use_rslora": PeftField(False),
    "init_lora_weights": PeftField(True, AnyValue()),
}
# optional ones are those of some methods only
_SAME = ("use_rslora", "lora_bias", INVOCATION)
_PATTERNS = {"rank_pattern": ("r", "r"), "alpha_pattern": ("lora_alpha", "alpha")}
_INERT = frozenset(
    ("corda_config", "ensure_weight_tying", "eva_config", "loftq_config",
     "lora_ga_config", "megatron_core", "merge_weights", "qalora_group_size", "runtime_config",
     "velora_config")
)  # fmt: skip
_USUAL = {"fields": FIELDS, "refused": REFUSED, "arguments": ARGUMENTS}
# initial values that leave the base weights unchanged
_PURE_INITS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


def _refuse(fields: Mapping[str, Any]) -> str | None:
    """Return why a config of PEFT's LoRA cannot be reproduced."""
    init = fields.get("init_lora_weights")
    if any(init is pure or (isinstance(init, str) and init == pure) for pure in _PURE_INITS):
        return None
    if init in REPRODUCED and not fields.get("use_dora"):
        return None
    return (
        f"it says init_lora_weights={str(init)[:80]!r}: that initialization changed the base "
        f"weights, so A and B belong to weights that this model does not have. Save it with PEFT "
        f"as a plain LoRA: peft_model.save_pretrained(…, "
        f"path_initial_model_for_weight_conversion=…)."
    )


def _read_layer(layer: PeftLayer) -> Fields:
    """Return our config fields at a layer; check its factors against the file's rank."""
    fields = layer.fields
    a, b = layer.tensors["lora_A"], layer.tensors["lora_B"]
    count = count_of(layer.site)
    fits = a.dim() == b.dim() == 2 and a.shape[0] == b.shape[1]
    if not fits or not a.shape[0] or a.shape[0] % count:
        each = f"; the rank counts for each of {count} experts" if count > 1 else ""
        raise CheckpointError(
            f"at {layer.name!r} lora_A is {list(a.shape)} and lora_B {list(b.shape)}; one adapter "
            f"has [rank, d_in] and [d_out, rank]{each}. Copy the file again from where it was "
            f"saved."
        )
    rank = a.shape[0] // count
    if rank != fields["r"]:
        raise CheckpointError(
            f"adapter_config.json has rank {fields['r']} for {layer.name!r} but the tensors have "
            f"rank {rank}, so their scaling is unknown. Correct 'r' or 'rank_pattern' "
            f"in adapter_config.json."
        )
    init, site = fields["init_lora_weights"], layer.site
    drops = site.is_called and site.kind != "embedding"
    return {
        **{name: fields[name] for name in _SAME if name in fields},
        **({"init_weights": init} if init in REPRODUCED else {}),
        "r": rank,
        "alpha": fields["lora_alpha"],
        # embeddings and layers that are only read have no dropout
        "dropout": fields["lora_dropout"] if drops else 0.0,
    }


def unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    config, site = placement.config, placement.site
    if not site.is_called or (site.parameter is not None and "." in site.parameter):
        return f"an adapter at {site.name!r}, and PEFT's would not act: no module there is called"
    if config.to_dict().get("use_gating"):
        return f"{type(config).__name__}(use_gating=True), and PEFT's LoRA has no gate"
    return None


def _write_layer(layer: PeftOutput) -> Fields:
    """Return the fields of PEFT's config for a layer; its adapters must have equal scalings."""
    parts, site = layer.parts, layer.parts[0].placement.site
    rank = layer.tensors["lora_A"].shape[0] // count_of(site)
    configs = [cast("LowRankConfig", part.placement.config) for part in parts]
    one = configs[0]
    said = {(c.scaling_at(site.name), c.use_rslora, c.dropout) for c in configs}
    if len(said) > 1:
        raise CheckpointError(
            f"the adapters at {site.name!r} differ in scaling or dropout (scaling, use_rslora, "
            f"dropout: {listing(sorted(said))}), and PEFT has one of each per layer. Write "
            f"{argument('format', 'native')}."
        )
    check_parameter(layer, one)
    alpha = one.alpha_at(site.name)
    if len(parts) > 1:
        alpha = one.scaling_at(site.name) * (rank**0.5 if one.use_rslora else rank)
        alpha = int(alpha) if alpha == int(alpha) else alpha
    return {
        "r": rank,
        "lora_alpha": alpha,
        # embeddings have no dropout
        "lora_dropout": None if site.kind == "embedding" else one.dropout,
        "use_rslora": one.use_rslora,
        "init_lora_weights": True,
        "bias": "none",
    }


def write_layers(layers: Sequence[PeftOutput]) -> Sequence[Fields]:
    """Return the fields of PEFT's config for each layer."""
    return [_write_layer(layer) for layer in layers]


def spelling(
    config: type[AdapterConfig],
    fixed: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, ...]],
    **more: Any,
) -> PeftSpelling:
    """Return PEFT's spelling of a method that it calls LORA; `tensors`: besides A and B."""
    return PeftSpelling(
        config=config,
        peft_type="LORA",
        fixed=fixed,
        tensors={"lora_A": ("lora_A.weight",), "lora_B": ("lora_B.weight",), **tensors, **_UNREAD},
        maybe=frozenset(_UNREAD),
        embedding_tensors=_EMBEDDING_TENSORS,
        patterns=_PATTERNS,
        beside=BESIDE,
        inert=_INERT,
        refuse=_refuse,
        read=lambda layer: {k: t for k, t in read(layer).items() if k not in _UNREAD},
        write=lambda part: as_parameter(part.placement.site, part.tensors),
        read_layers=lambda layers: [_read_layer(layer) for layer in layers],
        **{**_USUAL, "write_layers": write_layers, "unsayable": unsayable, "join": join, **more},
    )


def join(parts: Sequence[PeftPart], weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one low-rank update of a whole layer that computes what its parts do, for PEFT.

    The rows of the factors A are concatenated; each B fills its own columns in its part's rows.

    Raises:
        CheckpointError: a row has two magnitudes, or an unadapted one has none.
    """
    d_out = whole_width(parts[0].placement.site)
    a, b = parts[0].tensors["lora_A"], parts[0].tensors["lora_B"]
    rank = sum(part.tensors["lora_A"].shape[-2] for part in parts)
    joined = {
        "lora_A": torch.cat([part.tensors["lora_A"] for part in parts], -2),  # [*, rank, d_in]
        "lora_B": b.new_zeros(*a.shape[:-2], d_out, rank),
    }
    start = 0
    for part in parts:
        own = part.placement.site.output_slice
        mine = slice(None) if own is None else row_numbers(own)
        stop = start + part.tensors["lora_A"].shape[-2]
        joined["lora_B"][..., mine, start:stop] = part.tensors["lora_B"]
        start = stop
        for name in part.tensors.keys() & {"lora_B_bias", "m"}:
            tensor = part.tensors[name]
            whole = joined.setdefault(name, tensor.new_zeros(d_out))
            # biases of several adapters at one row add up
            whole[mine] = whole[mine] + tensor
    return as_parameter(parts[0].placement.site, joined)
