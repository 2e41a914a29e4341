"""MiSS in PEFT's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.fields import MAX_WIDTH, Range, Share
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import (
    Fields,
    PeftField,
    PeftLayer,
    PeftOutput,
    PeftPart,
    PeftSpelling,
    Tensors,
)

from ._peft_arguments import EXCLUDED, TARGETS, bias, ours
from ._peft_sites import row_numbers, unsayable, whole_width
from ._shards import FORMS

_FIELDS = {
    "r": PeftField(64, Range(1, MAX_WIDTH)),
    "init_weights": PeftField(True, FORMS),
    "miss_dropout": PeftField(0.0, Share()),
}
_INERT = frozenset(("mini_r",))
_ARGUMENTS = PeftArguments(
    class_name="MissConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **bias("MiSS_only"),
        **{name: ours(field.default, name) for name, field in _FIELDS.items()},
        "mini_r": ours(1, "mini_r"),
    },
)


def _read_layer(layer: PeftLayer) -> Fields:
    """Return the fields of our config at a layer; the tensor gives the sizes.

    Raises:
        CheckpointError: the tensor does not fit the form and the widths.
    """
    form, shape = layer.fields["init_weights"], list(layer.tensors["miss_block"].shape)
    r, d_in, d_out = layer.fields["r"], layer.site.d_in, layer.site.d_out
    legal = {"bat": [d_out // r, r, r], "mini": [r, shape[-1] if shape else 0]}.get(
        form, [r, d_out]
    )
    divides = d_out % r == d_in % r == 0 if form == "bat" else legal[-1] and not d_out % legal[-1]
    if shape != legal or not divides or r > d_in:
        words = {"bat": "[d_out / r, r, r]", "mini": "[r, a divisor of d_out]"}
        raise CheckpointError(
            f"at {layer.name!r} miss_block is {shape}; with r={r} and init_weights={form!r} it is "
            f"{words.get(form, '[r, d_out]')} for d_in={d_in} and d_out={d_out}. Copy both files "
            f"again from where they were saved."
        )
    return {
        "r": r,
        # False is the form of True with other initial values
        "init_weights": form or True,
        "mini_r": shape[-1] if form == "mini" else 1,
        # without effect in PEFT's "bat"
        "miss_dropout": 0.0 if form == "bat" else layer.fields["miss_dropout"],
    }


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    return unsayable(placement, "a MissConfig", "PEFT has no MiSS")


def _join(parts: Sequence[PeftPart], _weight: Callable[[], Tensor | None]) -> Tensors:
    """Return one D of a whole layer, with zeros in the columns of parts that have no adapter.

    Raises:
        CheckpointError: the parts differ in r, or are of the form "bat".
    """
    site = parts[0].placement.site
    d_out = whole_width(site)
    blocks = [part.tensors["miss_block"] for part in parts]
    if len({block.shape[0] for block in blocks}) > 1 or blocks[0].dim() != 2:
        raise CheckpointError(
            f"the adapters at {site.path!r} differ in r, or have init_weights='bat', and PEFT has "
            f"one matrix of r rows per layer. Write {argument('format', 'native')}."
        )
    joined = blocks[0].new_zeros(blocks[0].shape[0], d_out)
    for part, block in zip(parts, blocks, strict=True):
        own = part.placement.site.output_slice
        mine = torch.arange(d_out) if own is None else row_numbers(own)
        # those of several adapters at one column add up
        joined[:, mine] += block.repeat(1, len(mine) // block.shape[1])  # [r, part of d_out]
    return {"miss_block": joined}


def _write_layer(layer: PeftOutput) -> Fields:
    """Return the fields of PEFT's config for a layer.

    Raises:
        CheckpointError: joined adapters differ in dropout.
    """
    configs = [part.placement.config.to_dict() for part in layer.parts]
    block, one = layer.tensors["miss_block"], configs[0]
    if len({config["miss_dropout"] for config in configs}) > 1:
        raise CheckpointError(
            f"the adapters at {layer.parts[0].placement.site.path!r} differ in miss_dropout, and "
            f"PEFT has one for each layer. Write {argument('format', 'native')}."
        )
    is_joined = len(configs) > 1 or layer.parts[0].placement.site.output_slice is not None
    form = one["init_weights"] if one["init_weights"] in ("mini", "bat") and not is_joined else True
    return {
        "r": block.shape[-1 if form == "bat" else 0],
        "init_weights": form,
        "mini_r": block.shape[-1] if form == "mini" else 1,
        "miss_dropout": one["miss_dropout"],
        "bias": "none",
    }


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells MiSS."""
    return PeftSpelling(
        config=config,
        peft_type="MISS",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"miss_block": ("miss_block",)},
        fields=_FIELDS,
        inert=_INERT,
        read_layers=lambda layers: [_read_layer(layer) for layer in layers],
        unsayable=_unsayable,
        join=_join,
        write_layers=lambda layers: [_write_layer(layer) for layer in layers],
    )
