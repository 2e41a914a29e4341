"""One process that trains by transformers' `Trainer` with FSDP2; `test_fsdp.py` starts two."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from families import tiny_config
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import adapterzoo

# its class is that of the blocks, which auto-wrap looks for; the first block has none
METHODS = {
    "lora": "lora",
    "seq_bn": "seq_bn[reduction_factor=4,leave_out=[0]]",
    "loreft": "loreft[dropout=0.0]",
}


def model_of(method: str) -> Any:
    torch.manual_seed(0)
    model = adapterzoo.init(LlamaForCausalLM(tiny_config("llama"))).double()
    model.add_adapter("a", METHODS[method])
    for _, module in model.adapter_modules("a"):
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.1)
    model.train_adapter("a")
    return model


def rows() -> list[dict[str, torch.Tensor]]:
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (32, 7), generator=source)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(method: str, folder: Path, batch_size: int, **options: Any) -> Any:
    """Train, and save the adapter in the folder of the method; return the model."""
    args = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=3, per_device_train_batch_size=batch_size,
        # Adam would make large differences of small ones
        optim="sgd", learning_rate=0.5, max_grad_norm=0.0, lr_scheduler_type="constant",
        use_cpu=True, dataloader_pin_memory=False, save_strategy="no", report_to="none",
        disable_tqdm=True, **options,
    )  # fmt: skip
    model = model_of(method)
    if args.world_size > 1:
        # accelerate shards on a CPU only if it takes it for a GPU
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model, args, train_dataset=rows())
    trainer.train()
    model.save_adapter(folder / method, "a")
    return model


def main(rank: str, port: str, folder: Path) -> None:
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_FSDP": "true"}
    # of ReFT's outputs: nobody writes into them in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for method in METHODS:
        model = train(method, folder, 4, fsdp="full_shard auto_wrap", fsdp_config={"version": 2})
        kinds = {type(p) for p in model.parameters()}
        if kinds != {DTensor}:
            raise RuntimeError(f"{method}: parameters are {kinds}")
        blocks = [isinstance(block, FSDPModule) for block in model.model.layers]
        print(method, "blocks that are sharded:", *blocks, flush=True)  # noqa: T201
    # see examples/distributed.py
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
