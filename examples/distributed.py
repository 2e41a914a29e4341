"""Trains one adapter in several processes: one for each GPU, or on the CPU where there is none.

    torchrun --nproc-per-node 2 examples/distributed.py --tiny
    accelerate launch --num_processes 2 examples/distributed.py --tiny
    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
        --fsdp_transformer_layer_cls_to_wrap BertLayer examples/distributed.py --tiny
    accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 \
        examples/distributed.py --tiny

`--tiny` makes a small BERT with random weights and rows with a rule in them, so that nothing is
downloaded. Without it the model and the reviews of quickstart are used, or those that are named.
On a machine without GPUs write `accelerate launch --multi_gpu`: its `--cpu` starts one process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from _data import SNIPPETS, DataError, load_task, packaged_model
from adapterzoo import AdapterTrainer, AutoAdapterModel

NAME = "reviews"


def main() -> None:
    """Trains, compares the processes and saves."""
    options = parse()
    # the same fresh adapter in all processes; with stage 3 of ZeRO, models that are made after
    # `TrainingArguments` cannot get adapters
    set_seed(options.seed)
    model, train_rows, collate = tiny(options) if options.tiny else real(options)
    model.add_adapter(NAME, config=options.method)
    model.add_classification_head(NAME, num_labels=2)
    model.train_adapter(NAME)
    on_cpu = options.cpu or not torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=str(options.output / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        # opens the process group that the launcher has prepared: nccl on GPUs, else gloo
        use_cpu=on_cpu,
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=not on_cpu,
        logging_steps=max(options.steps // 4, 1),
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = AdapterTrainer(model, args, data_collator=collate, train_dataset=train_rows)
    result = trainer.train()
    if dist.is_initialized():
        model.verify_replicas()
    # in all processes: each may have a part of the parameters, and the first one writes
    trainer.save_model(str(options.output))
    fingerprint = model.adapter_fingerprint(NAME)
    if trainer.is_world_process_zero():
        print(f"processes {args.world_size}, steps {result.global_step}")
        print(f"mean loss {result.training_loss:.4f}")
        print(f"saved {options.output / NAME}: {fingerprint}")
    if dist.is_initialized():
        # the others wait for the file
        dist.barrier()
        # the last owner of a process group must not be the DDP module inside of the trainer: when
        # Python ends, the two would wait for one another
        del trainer
        gc.collect()
        dist.destroy_process_group()


def tiny(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]], Any]:
    """A small model with random weights, and rows whose label is that of their first token."""
    config = AutoConfig.for_model(
        "bert",
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        # dropout draws other numbers in each process: without it any number of them agrees
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(32, (options.rows, 8))
    rows = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    return AutoAdapterModel.from_config(config), rows, default_data_collator


def real(options: argparse.Namespace) -> tuple[Any, list[dict[str, Any]], Any]:
    """A pretrained encoder and tokenised reviews."""
    path = options.model or str(packaged_model())
    tokenizer = AutoTokenizer.from_pretrained(path)
    task = load_task(options.dataset, options.rows, 1, options.seed)
    tokens = tokenizer(task.train.texts, truncation=True, max_length=128)
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            tokens["input_ids"], tokens["attention_mask"], task.train.labels, strict=True
        )
    ]
    return AutoAdapterModel.from_pretrained(path), rows, DataCollatorWithPadding(tokenizer)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="random model, made-up rows")
    parser.add_argument("--model", help="path or Hub name of an encoder; all-MiniLM-L6-v2 if none")
    parser.add_argument("--dataset", default=SNIPPETS, help="Hub name; %(default)s if none")
    parser.add_argument("--method", default="lora", help="config string of the adapter")
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of each process")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    parser.add_argument("--output", type=Path, default=Path("runs/distributed"))
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"distributed: {error}")
