"""A distributed training that is killed at random steps and resumed until it is done.

`python tests/killed_training.py --kills 20 --engine FSDP2` kills one process with SIGKILL each
time, sees that the others end by themselves, and compares the last checkpoint with that of a
training that nobody disturbed: adapter, optimizer and log, bit for bit. `test_faults.py` does it
three times.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from ranks import TESTS
from training_rank import ENGINES

SAVE = 2
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
# a rank that waits for another one would wait for minutes
PATIENCE = 60.0


# --- a rank ---


def rank(engine: str, folder: Path, steps: int) -> None:
    """Train, from the last checkpoint if there is one, and print each step."""
    import transformers
    from families import tiny_config
    from training_rank import trainer_of

    from adapterzoo import AutoAdapterModel

    class Steps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if args.process_index == 0:
                print("step", state.global_step, flush=True)  # noqa: T201  the parent reads it

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
    if torch.distributed.is_initialized():
        # see examples/distributed.py
        del trainer
        gc.collect()
        torch.distributed.destroy_process_group()


def started(folder: Path) -> bool:
    """Whether a checkpoint has been written to its end."""
    return any(folder.glob("checkpoint-*/trainer_state.json"))


# --- the parent ---


def start(engine: str, processes: int, folder: Path, steps: int) -> list[subprocess.Popen[str]]:
    """Start the ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    common = {
        **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "WORLD_SIZE": str(processes),
    }  # fmt: skip
    command = [sys.executable, __file__, "--rank", "--engine", engine, "--steps", str(steps)]
    command += ["--folder", str(folder)]
    ranks = []
    for number in range(processes):
        own = {**common, "RANK": str(number), "LOCAL_RANK": str(number)}
        with (folder.parent / f"{folder.name} {number}.txt").open("w") as errors:
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            ranks.append(subprocess.Popen(command, env=own, **pipes))
    return ranks


def killed(ranks: list[subprocess.Popen[str]], at: int, draw: random.Random) -> int:
    """Kill a rank when a step is done, or somewhat later; return the last step seen."""
    seen, stdout = 0, ranks[0].stdout
    assert stdout is not None
    for line in stdout:
        seen = int(line.split()[1])
        if seen >= at:
            break
    # also while a checkpoint is written
    time.sleep(draw.random() * 0.1)
    draw.choice(ranks).kill()
    return seen


def ended(ranks: list[subprocess.Popen[str]]) -> list[int]:
    """Return how the ranks end by themselves."""
    deadline = time.monotonic() + PATIENCE
    try:
        for each in ranks:
            each.communicate(timeout=max(deadline - time.monotonic(), 0.1))
    finally:
        for each in ranks:
            each.kill()
    return [each.returncode for each in ranks]


def undisturbed(engine: str, processes: int, folder: Path, steps: int) -> None:
    """Train without a stop."""
    ranks = start(engine, processes, folder, steps)
    for each in ranks:
        each.communicate(timeout=600)
    assert [each.returncode for each in ranks] == [0] * processes, "the training has failed"


def disturbed(
    engine: str, processes: int, folder: Path, steps: int, kills: int, draw: random.Random
) -> list[int]:
    """Kill and resume; return the steps at which ranks were killed."""
    found: list[int] = []
    while True:
        done = max(map(number, folder.glob("checkpoint-*/trainer_state.json")), default=0)
        ranks = start(engine, processes, folder, steps)
        if len(found) < kills and done < steps - 1:
            found.append(killed(ranks, draw.randint(done + 1, min(done + 3, steps - 1)), draw))
            codes = ended(ranks)
            # a rank that hangs would be killed by `ended`, with an error here
            assert 0 not in codes, f"{codes}: a rank has ended as if nothing had happened"
            continue
        for each in ranks:
            each.communicate(timeout=600)
        assert [each.returncode for each in ranks] == [0] * processes, "it cannot be resumed"
        return found


def number(file: Path) -> int:
    """The step of a checkpoint's file."""
    return int(file.parent.name.removeprefix("checkpoint-"))


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
    parser.add_argument("--rank", action="store_true", help="used by the command itself")
    parser.add_argument("--engine", choices=ENGINES, default="DDP")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="twice as many as kills and four more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.rank:
        warnings.simplefilter("ignore")
        rank(given.engine, given.folder, given.steps)
        return
    steps = given.steps or 2 * given.kills + 4
    with tempfile.TemporaryDirectory() as at:
        folder, draw = Path(given.folder or at), random.Random(given.seed)
        undisturbed(given.engine, given.processes, folder / "undisturbed", steps)
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
