"""LoRA in the peers' files."""

from __future__ import annotations

from dataclasses import replace

from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import AdapterHubSpelling, Container, PeftSpelling, same

from . import _low_rank_adapterhub, _low_rank_peft
from ._low_rank_arguments import ARGUMENTS, FROM_DATA, unused_options
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
        optional={"lora_B_bias": "lora_bias"},
        of_parameters=True,
        arguments=replace(
            ARGUMENTS,
            fields={**ARGUMENTS.fields, **FROM_DATA, "lora_bias": ours(False, "lora_bias")},
            unsayable=unused_options,
        ),
    )
