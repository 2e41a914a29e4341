"""OFT in PEFT's files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError
from adapterzoo.fields import MAX_WIDTH, Positive, Range, Share
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import Fields, PeftField, PeftLayer, PeftOutput, PeftSpelling

from ._peft_arguments import EXCLUDED, STORED, TARGETS, bias, ours
from ._peft_sites import unsayable
from ._skew import TERMS

_FIELDS = {
    "r": PeftField(0, Range(0, MAX_WIDTH)),
    "module_dropout": PeftField(0.0, Share()),
    "block_share": PeftField(False),
    "use_cayley_neumann": PeftField(True),
    "num_cayley_neumann_terms": PeftField(5, TERMS),
    "coft": PeftField(False),
    "eps": PeftField(6e-5, Positive()),
}
_ARGUMENTS = PeftArguments(
    class_name="OFTConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias("oft_only"),
        **{name: ours(field.default, name) for name, field in _FIELDS.items()},
        "oft_block_size": ours(32, "oft_block_size"),
        "init_weights": ours(True, "init_weights"),
    },
)
# the first release of PEFT with today's Neumann series
_RELEASE = "0.18.0"


def _refuse(fields: Mapping[str, Any]) -> str | None:
    """Return why a config of PEFT's OFT cannot be reproduced."""
    said = fields.get("peft_version")
    match = re.match(r"(\d{1,9})\.(\d{1,9})", said) if isinstance(said, str) else None
    is_old = match is None or (int(match[1]), int(match[2])) < (0, 18)
    if not is_old or not fields.get("use_cayley_neumann", True):
        return None
    return (
        f"it says use_cayley_neumann=True, and peft_version={str(said)[:40]!r}: before {_RELEASE} "
        f"PEFT's Neumann series had another last term, so the adapter would compute something "
        f"else. Merge it with the release that trained it. If that was {_RELEASE} or later, write "
        f'"peft_version": "{_RELEASE}" there.'
    )


def _features(site: Site) -> int:
    """Return how many features the adapter rotates."""
    return site.d_out if site.kind == "embedding" else site.d_in


def _block_size(layer: PeftLayer) -> int:
    """Return the block size that a layer's tensor has.

    Raises:
        CheckpointError: no size gives such a tensor.
    """
    shape, width = list(layer.tensors["oft_R"].shape), _features(layer.site)
    b = (1 + math.isqrt(1 + 8 * shape[-1])) // 2 if shape else 0
    rows = 1 if layer.fields["block_share"] else width // max(b, 1)
    if b < 2 or width % b or shape != [rows, b * (b - 1) // 2]:
        raise CheckpointError(
            f"at {layer.name!r} oft_R is {shape}; with block_share="
            f"{layer.fields['block_share']} it is [{'1' if rows == 1 else 'd / b'}, b (b - 1) / 2] "
            f"for blocks of b > 1 of the d={width} features. Copy both files again from where "
            f"they were saved."
        )
    return b


def _read_layers(layers: Sequence[PeftLayer]) -> list[Fields]:
    """Return the fields of our config at each layer; the tensors give the blocks."""
    sizes = [_block_size(layer) for layer in layers]
    numbers = {_features(layer.site) // b for layer, b in zip(layers, sizes, strict=True)}
    said = dict(layers[0].fields)
    by_number = said.pop("r") > 0 and len(numbers) == 1
    # without their flags they have no effect
    if not said["use_cayley_neumann"]:
        del said["num_cayley_neumann_terms"]
    if not said["coft"]:
        del said["eps"]
    r = numbers.pop() if by_number else 0
    return [{**said, "r": r, "oft_block_size": 0 if by_number else b} for b in sizes]


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    return unsayable(placement, "an OFTConfig", "PEFT has no OFT")


def _write_layers(layers: Sequence[PeftOutput]) -> list[Fields]:
    """Return PEFT's config fields for each layer: blocks by size, or number if sizes differ."""
    placements = [layer.parts[0].placement for layer in layers]
    configs = [placement.config.to_dict() for placement in placements]
    widths = [_features(placement.site) for placement in placements]
    sizes = [
        c["oft_block_size"] or width // c["r"] for c, width in zip(configs, widths, strict=True)
    ]
    numbers = [width // b for width, b in zip(widths, sizes, strict=True)]
    by_number = len({*numbers}) == 1 and (bool(configs[0]["r"]) or len({*sizes}) > 1)
    return [
        {
            **{name: config[name] for name in _FIELDS},
            "r": number if by_number else 0,
            "oft_block_size": 0 if by_number else size,
            "peft_version": _RELEASE,
            "init_weights": True,
            "bias": "none",
        }
        for config, size, number in zip(configs, sizes, numbers, strict=True)
    ]


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells OFT."""
    return PeftSpelling(
        config=config,
        peft_type="OFT",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"oft_R": ("oft_R.weight",)},
        embedding_tensors={"oft_R": ("oft_embedding_R.weight",)},
        fields=_FIELDS,
        inert=frozenset(("oft_block_size", "init_weights")),
        refuse=_refuse,
        read_layers=_read_layers,
        unsayable=_unsayable,
        write_layers=_write_layers,
    )
