"""One process of a run of many adapters; `test_multi_processes.py` starts several."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import tiny_config
from multi_runs import QUIET, collate, rows_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPTNeoXForCausalLM, TrainingArguments

import adapterzoo
from adapterzoo import MultiAdapterTrainer

CONFIGS = {"first": "lora[r=4]", "second": "seq_bn[reduction_factor=4]", "third": "dora[r=2]"}


def train(folder: Path, batch: int, is_sharded: bool = False, **options: Any) -> Any:
    """Train three runs of different lengths, and save the adapters."""
    torch.manual_seed(0)
    # norms of many families round to float32
    model = adapterzoo.init(GPTNeoXForCausalLM(tiny_config("gpt_neox"))).double()
    for number, (name, method) in enumerate(CONFIGS.items()):
        torch.manual_seed(10 + number)
        model.add_adapter(name, method)
    if is_sharded:
        # embeddings and head, which runs call by themselves, stay whole
        for block in model.anatomy.blocks:
            fully_shard(model.base_model.get_submodule(block.path))
        if not any(isinstance(p, DTensor) for p in model.parameters()):
            raise RuntimeError("nothing is sharded")
    many = MultiAdapterTrainer(model)
    for number, name in enumerate(CONFIGS):
        args = TrainingArguments(
            str(folder / "runs" / name), **{**QUIET, **options}, max_steps=2 + number, seed=number,
            per_device_train_batch_size=batch,
            # Adam would make large differences of small ones
            optim="sgd", learning_rate=0.5,
            gradient_accumulation_steps=1 + number % 2,
        )  # fmt: skip
        rows = rows_of("gpt_neox", name, 24)
        many.add(name, args, rows, data_collator=collate)
    many.train()
    if not all(run.is_mixed for run in many.runs.values()):
        raise RuntimeError("a run was not mixed")
    if dist.is_initialized():
        model.verify_replicas()
    for name in CONFIGS:
        model.save_adapter(folder / "saved" / name, name)
    return many


def main(rank: str, world: str, port: str, folder: Path, kind: str) -> None:
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    train(folder, 4 // int(world), kind == "fsdp", save_strategy="steps", save_steps=2)
    print("done", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5])
