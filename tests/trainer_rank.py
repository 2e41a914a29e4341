"""One process that trains by `AdapterTrainer` on the CPU; `test_launchers.py` starts two.

Rows differ in the number of labels that count, and so do the processes' batches.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import tiny_config
from transformers import BertForTokenClassification, TrainingArguments, default_data_collator

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel

KINDS = ("static", "named", "several")


def model_of(kind):
    torch.manual_seed(0)
    config = tiny_config("bert")
    # dropout draws other numbers in each process
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.num_labels = 3
    if kind == "static":
        model = adapterzoo.init(BertForTokenClassification(config))
    else:
        model = AutoAdapterModel.from_config(config)
        for name in ("a", "b")[: 1 + (kind == "several")]:
            model.add_tagging_head(name, num_labels=3)
    model.add_adapter("a", "lora[init_weights='bert']")
    model.train_adapter("a")
    if kind == "several":
        model.active_head = ["a", "b"]
    return model


def rows():
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (64, 7), generator=source)
    ignored = torch.rand(64, 7, generator=source) < torch.rand(64, 1, generator=source)
    labels = (ids % 3).masked_fill(ignored, -100)
    return [{"input_ids": i, "labels": label} for i, label in zip(ids, labels, strict=True)]


def of_several(batch):
    collated = default_data_collator(batch)
    whole = collated["input_ids"] % 3
    # the heads differ in the number of labels, in the batch of the first process alone
    odd = whole.clone()
    if not dist.is_initialized() or dist.get_rank() == 0:
        odd[:, 0] = -100
    return {**collated, "labels": {"a": whole, "b": odd}}


def train(kind, folder, batch_size):
    args = TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=2,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        # Adam would make large differences of small ones
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = model_of(kind)
    collate = of_several if kind == "several" else default_data_collator
    trainer = AdapterTrainer(model, args, data_collator=collate, train_dataset=rows())
    trainer.train()
    if args.world_size > 1:
        model.verify_replicas()
    if trainer.is_world_process_zero():
        model.save_adapter(folder / kind, "a")


if __name__ == "__main__":
    for kind in KINDS:
        train(kind, Path(sys.argv[1]), 4)
    # see examples/distributed.py: no DDP module may own the group when Python ends
    gc.collect()
    dist.destroy_process_group()
