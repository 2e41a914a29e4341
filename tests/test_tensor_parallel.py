"""Models that transformers splits over processes (`tp_plan="auto"`): adapters as in one process."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import tensor_parallel_rank
import torch
from ranks import run_ranks
from safetensors.torch import load_file

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"


def run(folder, world, *cases):
    """What each process prints; without the names of the cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # accelerate reads it
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    arguments = (world, folder / "rendezvous", folder, *cases)
    found = run_ranks("tensor_parallel_rank.py", world, *arguments, options=())
    for lines in found:
        assert [line for line in lines if line in cases] == [*cases]
    return [[line for line in lines if line not in cases] for lines in found]


def test_adapters_of_a_split_model_are_those_of_one_process(tmp_path):
    """A family with biases and fused layers, in two processes."""
    run(tmp_path, 2, "quick-gpt_neox", "refused-gpt_neox")


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "phi3"])
def test_more_families_in_four_processes(family, tmp_path):
    """Norms of heads, tied output layers, biases, and layers that are gathered."""
    run(tmp_path, 4, f"swept-{family}", f"files-{family}")


@pytest.mark.sweep(whole=True)
def test_compositions_and_files_in_a_split_model(tmp_path):
    run(tmp_path, 2, "compositions-gpt_neox", "files-gpt_neox")


@pytest.mark.sweep(whole=True)
def test_the_page_tells_what_each_method_does_in_a_split_model(tmp_path):
    """Each method acts as in one process, or is refused by its name."""
    found = run(tmp_path, 2, "cells-gpt_neox")
    assert found[0] == found[1]
    table = PAGE.read_text().partition("| method | column-parallel")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `([a-z0-9_+]+)` \| (.*) \|$", table, re.MULTILINE)
    assert [f"{name} | {cells}" for name, cells in rows] == sorted(found[0])


@pytest.mark.sweep(whole=True)
def test_trainers_of_a_split_model_train_as_one_process(tmp_path):
    run(tmp_path, 2, "trainers-gpt_neox")
    tensor_parallel_rank.train(tmp_path / "gpt_neox", tmp_path / "one", False)
    for name in ("Trainer", "AdapterTrainer"):
        split, one = (tmp_path / which / name for which in ("trainers-gpt_neox", "one"))
        values, expected = (load_file(f / "adapter" / "adapter.safetensors") for f in (split, one))
        assert list(values) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=1e-10, msg=key)
        files = [sorted(str(p.relative_to(f)) for p in f.rglob("*")) for f in (split, one)]
        assert files[0] == files[1]
