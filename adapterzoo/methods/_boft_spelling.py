"""BOFT in PEFT's files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.errors import CheckpointError
from adapterzoo.fields import MAX_WIDTH, Range, Share
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import Fields, PeftField, PeftLayer, PeftOutput, PeftSpelling

from ._peft_arguments import EXCLUDED, STORED, TARGETS, bias, ours
from ._peft_sites import unsayable

_FIELDS = {
    "boft_dropout": PeftField(0.0, Share()),
    "boft_n_butterfly_factor": PeftField(1, Range(1, 30)),
    "boft_block_num": PeftField(0, Range(0, MAX_WIDTH)),
}
_INERT = frozenset(("boft_block_size", "init_weights"))

_ARGUMENTS = PeftArguments(
    class_name="BOFTConfig",
    fields={
        **TARGETS,
        **EXCLUDED,
        **STORED,
        **bias("boft_only"),
        "boft_block_size": ours(4, "boft_block_size"),
        "boft_block_num": ours(0, "boft_block_num"),
        "boft_n_butterfly_factor": ours(1, "boft_n_butterfly_factor"),
        "boft_dropout": ours(0.0, "boft_dropout"),
        "init_weights": ours(True, "init_weights"),
    },
)


def _read_layers(layers: Sequence[PeftLayer]) -> list[Fields]:
    """Return the fields of our config at each layer; the tensors give the factors and blocks.

    Raises:
        CheckpointError: a tensor has another number of dimensions.
    """
    for layer in layers:
        shape = list(layer.tensors["boft_R"].shape)
        if len(shape) != 4 or shape[2] != shape[3]:
            raise CheckpointError(
                f"at {layer.name!r} boft_R is {shape}; it is [factors, blocks, size, size]. Copy "
                f"the file again from where it was saved."
            )
    fields = layers[0].fields
    shapes = [layer.tensors["boft_R"].shape for layer in layers]
    by_number = fields["boft_block_num"] > 0 and len({shape[1] for shape in shapes}) == 1
    claimed = fields["boft_n_butterfly_factor"]
    if odd := sorted({shape[0] for shape in shapes} - {claimed}):
        warnings.warn(
            f"adapter_config.json says boft_n_butterfly_factor={claimed}, and the tensors have "
            f"{odd[0]}: PEFT trains one factor if its CUDA extension does not build, and saves "
            f"the number that was asked for. The factors of the tensors are loaded.",
            stacklevel=2,
        )
    return [
        {
            "boft_n_butterfly_factor": m,
            "boft_block_num": number if by_number else 0,
            "boft_block_size": 0 if by_number else size,
            "boft_dropout": fields["boft_dropout"],
        }
        for m, number, size, _ in shapes
    ]


def _unsayable(placement: Placement) -> str | None:
    """Return why PEFT's format cannot express an adapter."""
    return unsayable(placement, "a BOFTConfig", "PEFT has no BOFT")


def _write_layers(layers: Sequence[PeftOutput]) -> list[Fields]:
    """Return PEFT's config fields for each layer: blocks by size, or number if sizes differ."""
    shapes = [layer.tensors["boft_R"].shape for layer in layers]
    configs = [layer.parts[0].placement.config.to_dict() for layer in layers]
    by_number = len({shape[1] for shape in shapes}) == 1 and (
        bool(configs[0]["boft_block_num"]) or len({shape[-1] for shape in shapes}) > 1
    )
    return [
        {
            "boft_block_size": 0 if by_number else size,
            "boft_block_num": number if by_number else 0,
            "boft_n_butterfly_factor": m,
            "boft_dropout": config["boft_dropout"],
            "init_weights": True,
            "bias": "none",
        }
        for (m, number, _, size), config in zip(shapes, configs, strict=True)
    ]


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells BOFT."""
    return PeftSpelling(
        config=config,
        peft_type="BOFT",
        beside=frozenset({"bias"}),
        arguments=_ARGUMENTS,
        tensors={"boft_R": ("boft_R",), "boft_s": ("boft_s",)},
        fields=_FIELDS,
        inert=_INERT,
        read_layers=_read_layers,
        unsayable=_unsayable,
        write_layers=_write_layers,
    )
