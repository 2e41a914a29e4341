"""Trainings in two processes that fail; `test_training_faults.py` starts them.

Each rank writes what it raises into its log, which the test reads.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from disks import full_disk
from families import tiny_config
from ranks import ended, forked
from training_rank import rank, trainer_of

from adapterzoo import AutoAdapterModel

# as long as a rank that waits for another one is given
PATIENCE = 120.0


def model_of(method: str = "lora[r=8]", name: str = "a") -> Any:
    torch.manual_seed(0)
    model: Any = AutoAdapterModel.from_config(tiny_config("bert")).double()
    model.add_adapter(name, method)
    model.add_classification_head(name, num_labels=3)
    model.train_adapter(name)
    return model


def rows(count: int) -> list[dict[str, Any]]:
    ids = torch.randint(3, 99, (count, 7), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"input_ids": row, "labels": row[0] % 3} for row in ids]


class Once(torch.utils.data.IterableDataset[Any]):
    """Rows that come once, as from a stream."""

    def __init__(self, count: int) -> None:
        self.rows = iter(rows(count))

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def trainer(folder: Path, model: Any, data: Any, **options: Any) -> Any:
    return trainer_of("DDP", "AdapterTrainer", model, folder, data, **options)


class Fills(transformers.TrainerCallback):  # type: ignore[misc]
    """Fill the disk of the first process before the checkpoint of step 4."""

    stack = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if rank() == 0 and state.global_step == 3:
            # until the process ends
            self.stack.enter_context(full_disk())


def full(folder: Path) -> None:
    own = trainer(folder, model_of(), rows(64))
    own.add_callback(Fills())
    own.train()


def after_full(folder: Path) -> None:
    own = trainer(folder, model_of(), rows(64))
    own.train(resume_from_checkpoint=True)
    print("resumed", own.state.global_step)  # noqa: T201  the test reads it


def other(folder: Path) -> None:
    own = trainer(folder / "x", model_of("lora[r=4]"), rows(64))
    own.train(resume_from_checkpoint=str(folder / "checkpoint-2"))


# otherwise the first process reads for all, and accelerate 1.15 fails at the end of a stream
APART = {"accelerator_config": {"dispatch_batches": False}}


def early(folder: Path) -> None:
    model = model_of()
    own = trainer(folder, model, Once(24), max_steps=10, **APART)
    own.train()
    model.verify_replicas()
    print("ended at", own.state.global_step)  # noqa: T201  the test reads it


def unequal(folder: Path) -> None:
    own = trainer(folder, model_of(), Once(64 if rank() == 0 else 24), max_steps=8, **APART)
    own.train()


def said(act: Callable[[Path], None], folder: Path) -> None:
    """Act, and print what is raised."""
    warnings.simplefilter("ignore")
    try:
        act(folder)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error}", flush=True)  # noqa: T201  likewise
        raise
    gc.collect()
    torch.distributed.destroy_process_group()


def main(folder: Path) -> None:
    """Run all; a rank that hangs has the code None."""
    for act, at in (
        (full, "full"), (unequal, "unequal"), (early, "early"), (after_full, "full"),
        (other, "full"),
    ):  # fmt: skip
        (folder / at).mkdir(exist_ok=True)
        codes = ended(forked(2, said, folder / act.__name__, act, folder / at), PATIENCE)
        print(act.__name__, *codes, flush=True)  # noqa: T201  likewise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
