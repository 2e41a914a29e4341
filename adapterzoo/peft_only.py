"""Methods that only PEFT has, and what to do with their files."""

from __future__ import annotations

# each is more than a change of weights
_INEXPRESSIBLE = {
    "ADAPTION_PROMPT": "adds a gated prompt inside attention",
    "BEFT": "adds to the outputs of layers",
    "LILY": "mixes factors by a router that reads the input",
    "MULTITASK_PROMPT_TUNING": "has a prompt for each of the task_ids that a call gives",
    "POLY": "mixes adapters by the task_ids that a call gives",
    "SHADOW": "runs a second model beside the base model",
    "XLORA": "mixes adapters by a network that reads the input",
}


def instead(peft_type: object) -> str:
    """Return what to do with a file of a method that does not exist here."""
    if (reason := _INEXPRESSIBLE.get(str(peft_type))) is not None:
        return f"{peft_type} {reason}, so that it cannot become LoRA. Use it with PEFT."
    return (
        "If it changes only weights of layers, convert it through an installed PEFT: write "
        "adapterzoo convert SRC DST --to lora."
    )
