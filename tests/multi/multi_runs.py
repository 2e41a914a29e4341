"""Runs of a `MultiAdapterTrainer`, and the same runs one by one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from families import tiny_config
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    TrainingArguments,
)

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, MultiAdapterTrainer

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "save_strategy": "no", "logging_steps": 1,
}  # fmt: skip


def model_of(family: str, configs: Mapping[str, Any]) -> Any:
    """A model in float64 without dropout, with these adapters; BERT has a head for each."""
    torch.manual_seed(0)
    config = tiny_config(family)
    for name in [n for n in config.to_dict() if "dropout" in n or n.endswith("pdrop")]:
        if isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    if family == "bert":
        model = AutoAdapterModel.from_config(config)
    elif family == "t5":
        model = adapterzoo.init(AutoModelForSeq2SeqLM.from_config(config))
    else:
        model = adapterzoo.init(AutoModelForCausalLM.from_config(config))
    model = model.double()
    for number, (name, method) in enumerate(configs.items()):
        torch.manual_seed(10 + number)
        model.add_adapter(name, method)
        if family == "bert":
            model.add_classification_head(name, num_labels=2 + number)
    return model


def rows_of(family: str, name: str, count: int = 12) -> list[dict[str, Any]]:
    """Rows of different lengths, which depend on the name."""
    source = torch.Generator().manual_seed(sum(map(ord, name)))
    made = []
    for number in range(count):
        length = int(torch.randint(4, 9, (1,), generator=source))
        ids = torch.randint(3, 99, (length,), generator=source).tolist()
        made.append({"input_ids": ids, "labels": number % 2 if family == "bert" else ids})
    return made


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch, padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(key: str, fill: int) -> Tensor:
        return torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in rows])

    mask = [[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows]
    batch = {"input_ids": padded("input_ids", 0), "attention_mask": torch.tensor(mask)}
    if isinstance(rows[0]["labels"], int):
        return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}
    return {**batch, "labels": padded("labels", -100)}


def arguments(folder: Path, number: int, **options: Any) -> TrainingArguments:
    """Other steps, batches, rates, accumulations and seeds for each run."""
    own = {
        "max_steps": 2 + number % 3, "per_device_train_batch_size": 2 + number % 2,
        "learning_rate": 1e-2 / (1 + number), "seed": number,
        "gradient_accumulation_steps": 1 + number % 2,
        "lr_scheduler_type": ("linear", "cosine", "constant")[number % 3],
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**QUIET, **own, **options})


def trained(model: Any, names: Any) -> dict[str, Tensor]:
    """The parameters that belong to adapters and heads of these names."""
    parts = {*names}
    return {n: p.detach().clone() for n, p in model.named_parameters() if parts & {*n.split(".")}}


def one_by_one(family: str, configs: Mapping[str, Any], folder: Path, **options: Any) -> Any:
    """What each run trains and logs alone, in a model that has all adapters."""
    found = {}
    for number, name in enumerate(configs):
        model = model_of(family, configs)
        model.train_adapter(name)
        trainer = AdapterTrainer(
            model,
            arguments(folder / name, number, **options),
            train_dataset=rows_of(family, name),
            data_collator=collate,
        )
        trainer.train()
        found[name] = trained(model, [name]), losses(trainer)
    return found


def together(family: str, configs: Mapping[str, Any], folder: Path, **options: Any) -> Any:
    """The trainer of all runs, before it trains."""
    trainer = MultiAdapterTrainer(model_of(family, configs))
    for number, name in enumerate(configs):
        trainer.add(
            name,
            arguments(folder / name, number, **options),
            rows_of(family, name),
            rows_of(family, name, 4),
            data_collator=collate,
        )
    return trainer


def losses(trainer: Any) -> list[float]:
    """The losses that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
