"""A distributed training that is killed at random steps and resumed until it is done.

`python tests/killed_training.py --kills 20 --engine FSDP2` kills one process with SIGKILL each
time, sees that the others end by themselves, and compares the last checkpoint with that of a
training that nobody disturbed: adapter, optimizer and log, bit for bit.
`test_training_faults.py` does it three times.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import sys
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from families import tiny_config
from ranks import ended, forked
from training_rank import ENGINES, trainer_of

from adapterzoo import AutoAdapterModel

SAVE = 2
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
# a rank that waits for another one would wait for minutes
PATIENCE = 60.0


# --- a rank ---


def rank(engine: str, folder: Path, steps: int, told: Connection) -> None:
    """Train, from the last checkpoint if there is one, and tell each step."""

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.process_index == 0:
                told.send(state.global_step)

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    # with dropout, so that the states of the generators matter
    model: Any = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a", "lora[r=4,dropout=0.1]")
    model.add_classification_head("a", num_labels=3)
    model.train_adapter("a")
    ids = torch.randint(3, 99, (64, 7), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": row, "labels": row[0] % 3} for row in ids]
    trainer = trainer_of(
        engine, "AdapterTrainer", model, folder, rows, max_steps=steps, save_steps=SAVE,
        save_total_limit=3, logging_steps=1,
    )  # fmt: skip
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, ADAMW)
    trainer.add_callback(Steps())
    trainer.train(resume_from_checkpoint=started(folder))
    # see examples/distributed.py
    del trainer
    gc.collect()
    torch.distributed.destroy_process_group()


def started(folder: Path) -> bool:
    """Whether a checkpoint has been written to its end."""
    return any(folder.glob("checkpoint-*/trainer_state.json"))


# --- the parent ---


def start(
    engine: str, processes: int, folder: Path, steps: int
) -> tuple[list[ForkProcess], Connection]:
    """Start the ranks; return them, and what tells their steps."""
    heard, told = multiprocessing.Pipe(duplex=False)
    ranks = forked(processes, rank, Path(f"{folder} rank"), engine, folder, steps, told)
    # so that it ends with the ranks
    told.close()
    return ranks, heard


def killed(ranks: list[ForkProcess], heard: Connection, at: int, draw: random.Random) -> int:
    """Kill a rank when a step is done, or somewhat later; return the last step seen."""
    seen = 0
    while seen < at:
        seen = heard.recv()
    # also while a checkpoint is written
    time.sleep(draw.random() * 0.1)
    draw.choice(ranks).kill()
    return seen


def trained(engine: str, processes: int, folder: Path, steps: int) -> None:
    """Train to the end."""
    ranks, _heard = start(engine, processes, folder, steps)
    codes = ended(ranks, 600)
    if any(codes) or None in codes:
        raise RuntimeError(f"the training has failed: {codes}, see {folder} rank")


def disturbed(
    engine: str, processes: int, folder: Path, steps: int, kills: int, draw: random.Random
) -> list[int]:
    """Kill and resume; return the steps at which ranks were killed."""
    found: list[int] = []
    while len(found) < kills:
        files = folder.glob("checkpoint-*/trainer_state.json")
        done = max((int(f.parent.name.removeprefix("checkpoint-")) for f in files), default=0)
        ranks, heard = start(engine, processes, folder, steps)
        at = draw.randint(done + 1, min(done + 3, steps - 1))
        found.append(killed(ranks, heard, at, draw))
        codes = ended(ranks, PATIENCE)
        if None in codes or 0 in codes:
            raise RuntimeError(f"{codes}: a rank hangs, or has ended as if nothing had happened")
        sys.stderr.write(f"killed at step {found[-1]}: {codes}\n")
    trained(engine, processes, folder, steps)
    return found


def result(folder: Path, steps: int) -> dict[str, object]:
    """What the last checkpoint holds: the adapter's file, the optimizer's bits, the losses."""
    last = folder / f"checkpoint-{steps}"
    log = json.loads((last / "trainer_state.json").read_text())["log_history"]
    found: dict[str, object] = {
        "adapter": (last / "a" / "adapter.safetensors").read_bytes(),
        "losses": [(line["step"], line["loss"]) for line in log if "loss" in line],
    }
    if (last / "optimizer.pt").is_file():
        state = torch.load(last / "optimizer.pt", weights_only=True)["state"]
        found["optimizer"] = [
            (n, k, torch.as_tensor(v).tolist())
            for n, each in state.items()
            for k, v in each.items()
        ]
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="DDP")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="twice as many as kills and four more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    steps = given.steps or 2 * given.kills + 4
    with tempfile.TemporaryDirectory() as at:
        folder, draw = Path(given.folder or at), random.Random(given.seed)
        trained(given.engine, given.processes, folder / "undisturbed", steps)
        found = disturbed(
            given.engine, given.processes, folder / "disturbed", steps, given.kills, draw
        )
        own, other = (result(folder / run, steps) for run in ("disturbed", "undisturbed"))
    wrong = [key for key, value in other.items() if own[key] != value]
    sys.stdout.write(
        f"{given.engine}, {given.processes} processes, {steps} steps: killed {len(found)} times, "
        f"at the steps {', '.join(map(str, found))}.\n"
        f"Compared with the undisturbed training: {', '.join(other)}. "
        f"Other bits: {', '.join(wrong) or 'none'}.\n"
    )
    sys.exit(bool(wrong or len(found) < given.kills))


if __name__ == "__main__":
    main()
