"""The table of `docs/training-matrix.md`: some cells, run again; `make training` runs all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import training_rank
import training_table as table
from safetensors.torch import load_file, save_file

PAGE = table.read(table.PAGE.read_text(encoding="utf-8"))


def test_the_page_is_that_of_its_cells_and_none_is_wrong():
    assert PAGE.keys() <= {(case, engine) for case in table.cases() for engine in table.ENGINES}
    assert not [cell for cell in PAGE.items() if table.WRONG in cell[1]]
    assert table.render(PAGE) == table.PAGE.read_text(encoding="utf-8")


@pytest.fixture
def trained(tmp_path):
    case = "AdapterTrainer/lora/float"
    training_rank.train(table.ONE, case, tmp_path, "train")
    return case, lambda: table.cell(table.ONE, case, tmp_path, tmp_path, {("train", case): "done"})


def test_a_cell_of_one_process(trained):
    case, cell = trained
    assert cell() == PAGE[case, table.ONE]


def test_a_wrong_cell_would_be_seen(trained, tmp_path):
    """Other bits after resuming, another file, and the base model in a checkpoint."""
    case, cell = trained
    file = tmp_path / case / "resumed" / "adapter.safetensors"
    tensors = load_file(file)
    first = min(tensors)
    tensors[first] = torch.nextafter(tensors[first], torch.full_like(tensors[first], 9.0))
    save_file(tensors, file)
    assert cell() == "right; wrong: resume"
    (tmp_path / case / "trainer" / "checkpoint-2" / "model.safetensors").touch()
    assert cell() == "right; wrong: checkpoint, resume"


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("engine", ["DDP", "FSDP2", "HSDP", "ZeRO-2", "ZeRO-3"])
def test_a_part_of_the_cells(engine):
    if not table.installed(engine):
        pytest.skip("deepspeed is not installed")
    if ("AdapterTrainer/lora/float", engine) not in PAGE:
        pytest.skip("the page lacks this cell")
    # in a fresh process, whose forks are the ranks
    run = subprocess.run(
        [sys.executable, table.__file__, "--check", engine, "AdapterTrainer", "lora", "float"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
