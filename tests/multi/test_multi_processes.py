"""Many adapters in one run over several processes train as in one process."""

from __future__ import annotations

import socket

import multi_rank
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file


@pytest.mark.sweep(whole=True)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("world", [2, 4])
def test_several_processes_train_as_one(kind, world, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = run_ranks(
        "multi/multi_rank.py", world, world, port, tmp_path / "many", kind, options=()
    )
    assert [lines[-1] for lines in found] == ["done"] * world
    multi_rank.train(tmp_path / "one", 4)
    for name in multi_rank.CONFIGS:
        one, many = (
            load_file(tmp_path / where / "saved" / name / "adapter.safetensors")
            for where in ("one", "many")
        )
        assert one.keys() == many.keys()
        for key, value in one.items():
            # losses of language models round logits to float32
            torch.testing.assert_close(many[key], value, rtol=0, atol=1e-6, msg=key)
