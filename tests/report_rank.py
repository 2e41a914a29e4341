"""One process of a sharded run on the CPU; `test_report.py` starts two and compares their reports.

Prints the report on the model before it is sharded, and after a backward pass that misses a block.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import adapterzoo


def say(model: Any) -> None:
    """Print the report as one line of JSON."""
    sys.stdout.write(json.dumps(model.adapter_report("a").to_dict()) + "\n")


def main(rank: int, rendezvous: str) -> None:
    """Report, shard, run a step whose loss reads two of three blocks, and report again."""
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4,
    )  # fmt: skip
    model = adapterzoo.init(LlamaForCausalLM(config))
    model.add_adapter("a", "lora[r=4]")
    model.train_adapter("a")
    sys.stdout.write(f"{json.dumps(model.adapter_report('a').to_dict())}\n")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    ids = torch.arange(1 + rank, 9 + rank)[None]
    states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    states[2].pow(2).mean().backward()
    sys.stdout.write(f"{json.dumps(model.adapter_report('a').to_dict())}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
