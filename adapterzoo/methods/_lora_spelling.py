"""LoRA in the peers' files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.fields import Items
from adapterzoo.spelling import (
    AdapterHubSpelling,
    Container,
    Fields,
    PeftField,
    PeftOutput,
    PeftSpelling,
    same,
)

from . import _low_rank_adapterhub, _low_rank_peft
from ._invocation import Invocation
from ._low_rank_arguments import ARGUMENTS, FROM_DATA, INVOCATION, REFUSED, unused_options
from ._peft_arguments import ours


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells LoRA."""
    return _low_rank_adapterhub.spelling(
        config,
        {"use_dora": False},
        Container("loras", "layer"),
        fields=_low_rank_adapterhub.FIELDS | same("use_gating"),
        omitted=("convention",),
    )


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells LoRA."""
    return _low_rank_peft.spelling(
        config,
        {"use_dora": False},
        {"lora_B_bias": ("lora_B.bias",)},
        fields=_low_rank_peft.FIELDS | {INVOCATION: PeftField(None, Invocation())},
        write_layers=_write_layers,
        refused={name: why for name, why in REFUSED.items() if name != INVOCATION},
        optional={"lora_B_bias": "lora_bias"},
        of_parameters=True,
        arguments=replace(
            ARGUMENTS,
            fields={
                **ARGUMENTS.fields,
                **FROM_DATA,
                "lora_bias": ours(False, "lora_bias"),
                INVOCATION: ours(None, INVOCATION),
            },
            unsayable=unused_options,
        ),
    )


def _write_layers(layers: Sequence[PeftOutput]) -> Sequence[Fields]:
    """Return the fields of PEFT's config for each layer, with the invocation if any has one.

    Raises:
        CheckpointError: a layer has adapters with several invocations.
    """
    written = _low_rank_peft.write_layers(layers)
    own = [{_invocation(part.placement.config) for part in layer.parts} for layer in layers]
    if own and set().union(*own) == {()}:
        return written
    for layer, found in zip(layers, own, strict=True):
        if len(found) > 1:
            raise CheckpointError(
                f"the adapters at {layer.parts[0].placement.site.path!r} differ in {INVOCATION} "
                f"({listing(sorted(found))}), and PEFT has one adapter per layer. Write "
                f"{argument('format', 'native')}."
            )
    # an empty value is compared with those of other layers, None is not
    pairs = zip(written, own, strict=True)
    return [{**fields, INVOCATION: next(iter(found))} for fields, found in pairs]


def _invocation(config: AdapterConfig) -> tuple[int, ...]:
    # equals the list that PEFT has
    return Items(config.to_dict().get(INVOCATION) or ())
