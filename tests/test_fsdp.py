"""`fully_shard` on two processes of the CPU: trained, gathered, saved and loaded as one model."""

from __future__ import annotations

import socket

import fsdp_trainer_rank
import pytest
import torch
from ranks import METHODS, run_ranks
from safetensors.torch import load_file

# one whose magnitudes are normed over what is sharded, and all
ALL = [f"{family}-{method}" for family in ("bert", "llama") for method in METHODS]


@pytest.mark.sweep
def test_a_sharded_model_trains_and_is_saved_as_a_whole_one(tmp_path):
    found = run_ranks("fsdp_rank.py", 2, tmp_path / "rendezvous", tmp_path, *ALL)
    assert found == [ALL] * 2


@pytest.mark.sweep
def test_a_trainer_shards_blocks_with_adapters_and_trains_as_one_process(tmp_path):
    """Transformers' `Trainer` with FSDP2; each parameter is a DTensor, see `fsdp_trainer_rank`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_ranks("fsdp_trainer_rank.py", 2, port, tmp_path / "two")
    methods = fsdp_trainer_rank.METHODS
    sharded = [f"{method} blocks that are sharded: True True" for method in methods]
    assert [[line for line in lines if "blocks" in line] for lines in found] == [sharded] * 2
    for method in methods:
        fsdp_trainer_rank.train(method, tmp_path / "one", 8)
        one, two = (
            load_file(tmp_path / each / method / "adapter.safetensors") for each in ("one", "two")
        )
        assert list(one) == list(two)
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=0, atol=1e-10, msg=key)
