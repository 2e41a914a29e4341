"""Tiny models for TRL's trainers: as PEFT makes them, and as this library does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from words import SENTENCES, plain, tokenizer

import adapterzoo
import adapterzoo.peft as library

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "dataloader_pin_memory": False, "logging_steps": 1, "save_strategy": "no",
    "learning_rate": 0.5, "optim": "sgd", "max_steps": 3, "gradient_checkpointing": False,
    "max_grad_norm": 0.0,
}  # fmt: skip
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
PAIRS = {
    "prompt": ["the film was"] * 8, "chosen": [" good ."] * 8, "rejected": [" bad ."] * 8,
}  # fmt: skip


def texts() -> Dataset:
    return Dataset.from_dict({"text": SENTENCES * 4})


def pairs() -> Dataset:
    return Dataset.from_dict(PAIRS)


def words() -> Any:
    return tokenizer(pairs=False)


class World:
    """A base model and trained adapters in folders; all models are made of these.

    Attributes:
        base: the folder of the base model, which the config of each model names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.base = folder, folder / "base"
        plain(AutoModelForCausalLM, "llama").save_pretrained(self.base)

    def plain(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.base)

    def trained(self, **fields: Any) -> Path:
        """The folder of an adapter whose update is not zero, written by PEFT."""
        folder = self.folder / "trained"
        torch.manual_seed(3)
        config = peft.LoraConfig(**{**LORA, "init_lora_weights": False, **fields})
        made = peft.get_peft_model(self.plain(), config)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "modules_to_save" in name or "magnitude" in name:
                    parameter.mul_(1.1)
        made.save_pretrained(folder)
        return folder

    def of_peft(self, adapter: Path) -> Any:
        return peft.PeftModel.from_pretrained(self.plain(), adapter, is_trainable=True)

    def of_library(self, adapter: Path) -> Any:
        return library.PeftModel.from_pretrained(self.plain(), adapter, is_trainable=True)

    def named(self, adapter: Path) -> Any:
        model = adapterzoo.init(self.plain())
        model.load_adapter(adapter, load_as="style")
        model.train_adapter("style")
        return model

    def with_heads(self, adapter: Path) -> Any:
        model = adapterzoo.AutoAdapterModel.from_pretrained(self.base)
        model.load_adapter(adapter, load_as="style", with_head=False)
        model.train_adapter("style")
        model.get_head("default").requires_grad_(False)
        return model


def logged(trainer: Any, *names: str) -> list[list[float]]:
    """The numbers of each step that a trainer has logged."""
    return [[row[n] for n in names] for row in trainer.state.log_history if "loss" in row]
