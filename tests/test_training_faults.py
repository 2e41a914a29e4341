"""Faults of distributed trainings: an error in all processes, no hang, nothing saved is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import training_rank
from faults import model_of, rows
from ranks import TESTS

from adapterzoo import AdapterTrainer
from adapterzoo.errors import CheckpointError


def command(*args):
    """The lines that a script of this folder prints, in a fresh process."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.mark.sweep(whole=True)
def test_a_fault_of_one_process_ends_all(tmp_path):
    codes = dict(line.split(" ", 1) for line in command(TESTS / "faults.py", tmp_path))
    raised = {
        name: [
            [line for line in Path(f"{tmp_path / name} {rank}").read_text().splitlines()
             if line.startswith(("raised", "resumed", "ended"))]
            for rank in (0, 1)
        ]
        for name in codes
    }  # fmt: skip
    assert "None" not in " ".join(codes.values())
    first, second = (lines[0] for lines in raised["full"])
    assert "CheckpointError" in first
    assert "cannot be written" in first
    assert "CheckpointError: process 0: " in second
    assert raised["after_full"] == [["resumed 4"]] * 2
    for lines in raised["other"]:
        assert lines[0].startswith("raised CheckpointError: checkpoint ")
        assert "LoRAConfig(r=4)" in lines[0]
    assert raised["early"] == [["ended at 3"]] * 2
    # the process that has more batches finds the other one gone
    assert "0" not in codes["unequal"].split()
    assert (tmp_path / "unequal" / "checkpoint-2" / "trainer_state.json").is_file()


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_what_is_killed_goes_on_bit_for_bit(engine):
    lines = command(TESTS / "killed_training.py", "--kills", "3", "--engine", engine)
    assert lines[-1].endswith("Other bits: none.")


def trained(folder, name="a"):
    model = model_of(name=name)
    trainer = training_rank.trainer_of("1 process", "AdapterTrainer", model, folder, rows(64))
    trainer.train()


def test_two_trainings_do_not_write_one_checkpoint(tmp_path):
    trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'a' of another run\. Write another output_"):
        trained(tmp_path, "b")
    assert not (tmp_path / "checkpoint-2" / "b").exists()


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path):
    trained(tmp_path)
    # as a killed process leaves it
    (tmp_path / "checkpoint-4" / "trainer_state.json").write_text('{"epoch": ')
    again = training_rank.trainer_of("1 process", "AdapterTrainer", model_of(), tmp_path, rows(64))
    seen = []
    restore = again._restore
    again._restore = lambda folder: (seen.append(Path(folder).name), restore(folder))
    again.train(resume_from_checkpoint=True)
    assert seen == ["checkpoint-2"]
    assert isinstance(again, AdapterTrainer)


def test_only_deepspeed_reads_its_own_checkpoints(tmp_path):
    trained(tmp_path)
    (tmp_path / "checkpoint-2" / "global_step2").mkdir()
    again = training_rank.trainer_of("1 process", "AdapterTrainer", model_of(), tmp_path, rows(64))
    with pytest.raises(CheckpointError, match=r"saved under DeepSpeed.*Write deepspeed=…"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
