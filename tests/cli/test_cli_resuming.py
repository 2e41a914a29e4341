"""A run that is stopped keeps its last checkpoint, and continues to the same bits."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adapterzoo.cli import training

OPTIONS = ("--epochs", 40, "--batch-size", 8, "--device", "cpu", "--method", "seq_bn")


def test_ctrl_c_keeps_a_checkpoint_and_resume_gives_the_same_bits(run, base, table, tmp_path):
    """A real signal to a real process without a terminal."""
    command = ["train", "--model", base, "--train", table, "--name", "a", *OPTIONS]
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        [sys.executable, "-m", "adapterzoo", *map(str, command), "--output", stopped],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = next(line for line in process.stderr if line.startswith("a: step "))
    assert re.fullmatch(r"a: step 24 of 240, loss \d\.\d{4}\n", first)
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    last = said.splitlines()[-1]
    step = int(re.search(r"train: stopped at step (\d+) of 240; the checkpoint is in", last)[1])
    assert 24 <= step < 240
    assert last.endswith("Write the same command with --resume to continue.")
    assert (stopped / "checkpoints" / "a" / f"checkpoint-{step}" / "trainer_state.json").is_file()
    assert not (stopped / "adapter_config.json").exists()

    resumed = run(*command, "--output", stopped, "--resume", "--json")
    whole = run(*command, "--output", tmp_path / "whole", "--json")
    one, two = json.loads(resumed.stdout), json.loads(whole.stdout)
    assert one["fingerprint"] == two["fingerprint"]
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-5)
    assert not (stopped / "checkpoints").exists()


def test_a_second_ctrl_c_ends_at_once(base, table, tmp_path):
    """Two real signals to a real process, the second before the step has ended."""
    command = ["train", "--model", base, "--train", table, "--name", "a", *OPTIONS]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_STEP, *map(str, command), "--output", tmp_path / "a"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert next(line for line in process.stderr if "a step has begun" in line)
    process.send_signal(signal.SIGINT)
    assert next(line for line in process.stderr if line.startswith("Stopping after this step"))
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out, said) == (130, "", "Stopped at once.\n")
    # no step has ended, and there is nothing to resume from
    assert not list((tmp_path / "a" / "checkpoints").glob("*/*"))


# a step that lasts longer than the test
SLOW_STEP = """
import sys, time
from transformers import TrainerCallback
from adapterzoo.cli import main, training

class Slow(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        print("a step has begun", file=sys.stderr, flush=True)
        end = time.monotonic() + 300
        while time.monotonic() < end:
            time.sleep(0.1)

class Watch(Slow, training._Watch):
    pass

training._Watch = Watch
main(sys.argv[1:], prog_name="adapterzoo")
"""


@pytest.fixture
def stopped(run, base, table, tmp_path, monkeypatch):
    """The command and the folder of a run of two adapters that was stopped after a checkpoint."""
    other = tmp_path / "other.csv"
    shutil.copy(table, other)
    command = ["train", "--model", base, "--train", table, "--train", other, "--epochs", 4,
               "--batch-size", 8, "--save-steps", 3, "--device", "cpu"]  # fmt: skip
    folder = tmp_path / "many"
    end = training._Watch.on_step_end

    def interrupt(self, args, state, control, **kwargs):
        # Ctrl-C between the two runs of a step
        if state.global_step == 7 and self._name == "other":
            signal.raise_signal(signal.SIGINT)
        end(self, args, state, control, **kwargs)

    monkeypatch.setattr(training._Watch, "on_step_end", interrupt)
    said = run(*command, "--output", folder, code=130).stderr
    one, two = map(int, re.search(r"at step (\d+) of 24, (\d+) of 24; the", said).groups())
    assert one == two < 24
    monkeypatch.undo()
    return command, folder, one


def test_several_runs_stop_at_one_step(run, stopped, tmp_path):
    command, folder, step = stopped
    for name in ("rows", "other"):
        names = {each.name for each in (folder / "checkpoints" / name).iterdir()}
        assert {"checkpoint-6", f"checkpoint-{step}"} == names
    resumed = run(*command, "--output", folder, "--resume", "--json").stdout
    whole = run(*command, "--output", tmp_path / "whole", "--json").stdout
    one, two = ([m["fingerprint"] for m in json.loads(text)] for text in (resumed, whole))
    assert one == two


def test_a_run_is_not_lost_or_continued_by_mistake(run, stopped, tmp_path):
    command, folder, _ = stopped
    there = str(folder / "checkpoints")
    said = run(*command, "--output", folder, code=1).stderr
    assert f"{there!r} has the checkpoints of a run that has not ended. Write --resume" in said
    said = run(*command, "--lr", 1, "--output", folder, "--resume", code=1).stderr
    assert "was started with another '--lr'" in said
    tests = ["--eval", command[4], "--eval", command[4]]
    said = run(*command, *tests, "--output", folder, "--resume", code=1).stderr
    assert "was started with another '--eval'" in said
    renamed = Path(shutil.copy(command[6], tmp_path / "renamed.csv"))
    others = [renamed if each == command[6] else each for each in command]
    said = run(*others, "--output", folder, "--resume", code=1).stderr
    assert "was started with another '--train'" in said
    Path(command[6]).write_text("text,label\na,b\nc,d\n")
    said = run(*command, "--output", folder, "--resume", code=1).stderr
    assert "was started with another '--train'" in said
    said = run(*command, "--output", tmp_path / "new", "--resume", code=1).stderr
    assert "Leave out --resume" in said
