"""LN tuning in PEFT's files; AdapterHub does not have it."""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig
from adapterzoo.peft_arguments import PeftArguments
from adapterzoo.spelling import PeftSpelling

from ._peft_arguments import EXCLUDED, TARGETS

_ARGUMENTS = PeftArguments(
    class_name="LNTuningConfig",
    fields={
        "target_modules": TARGETS["target_modules"],
        "modules_to_save": TARGETS["modules_to_save"],
        **EXCLUDED,
    },
)


def peft(config: type[AdapterConfig]) -> PeftSpelling:
    """Return how PEFT spells LN tuning: a copy of each norm."""
    return PeftSpelling(
        config=config,
        peft_type="LN_TUNING",
        arguments=_ARGUMENTS,
        tensors={
            "layer.weight": ("ln_tuning_layers.weight",),
            "layer.bias": ("ln_tuning_layers.bias",),
        },
        of_norms=True,
        # RMS norms have no bias
        maybe=frozenset({"layer.weight", "layer.bias"}),
    )
