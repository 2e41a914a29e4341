"""What DeepSpeed must be told when `AdapterTrainer` saves and loads its part of a checkpoint.

Tested with DeepSpeed 0.19.8 and transformers 5.24.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adapterzoo.errors import CheckpointError

# a folder of DeepSpeed's own files, and the file that names it
_STEP, _LATEST = "global_step*", "latest"


@contextmanager
def without_frozen(engine: Any) -> Iterator[None]:
    """Let an engine save checkpoints without the frozen parameters in the block.

    Trainer asks for this only for models of PEFT, so that every checkpoint would hold the base; and
    DeepSpeed leaves a tied parameter out under the first of its names alone.

    Args:
        engine: of DeepSpeed.
    """
    state = engine.module_state_dict

    def trained(*args: Any, **kwargs: Any) -> dict[str, Any]:
        every = engine.module.named_parameters(remove_duplicate=False)
        frozen = {name for name, parameter in every if not parameter.requires_grad}
        return {key: t for key, t in state(*args, **kwargs).items() if key not in frozen}

    engine.module_state_dict = trained
    engine.save_checkpoint = functools.partial(
        engine.save_checkpoint, exclude_frozen_parameters=True
    )
    try:
        yield
    finally:
        del engine.save_checkpoint, engine.module_state_dict


def load(engine: Any, folder: Path) -> None:
    """Load the state of the optimizer, the scheduler and the loss scale.

    Trainer loads strictly, and the files have no frozen parameters.

    Args:
        engine: of DeepSpeed.
        folder: of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another engine or number of processes.
    """
    if not any(folder.glob(_STEP)):
        raise CheckpointError(
            f"{str(folder)!r} was not saved under DeepSpeed, which cannot read its optimizer. "
            "Write deepspeed=None, or load_adapter(…) and train without resuming."
        )
    engine.load_checkpoint(str(folder), load_module_strict=False)


def refuse_other(folder: Path) -> None:
    """Refuse a checkpoint with the optimizer of DeepSpeed, which nothing else can read.

    Raises:
        CheckpointError: it is one.
    """
    if any(folder.glob(_STEP)):
        raise CheckpointError(
            f"{str(folder)!r} was saved under DeepSpeed, which alone can read its optimizer. "
            "Write deepspeed=…, or load_adapter(…) and train without resuming."
        )
