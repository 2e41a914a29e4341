"""What trainers give a model: what acts on each row, and the inputs of a loss without a head."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from datasets import Dataset
from families import tiny_config
from transformers import (
    AutoModelForSequenceClassification,
    BlipConfig,
    CLIPConfig,
    DataCollatorWithPadding,
    SiglipConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from words import tokenizer

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, MultiTask, Stack

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "logging_strategy": "no", "save_strategy": "no", "optim": "sgd", "learning_rate": 0.5,
}  # fmt: skip

_SHAPE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_TEXT = {"vocab_size": 60, "max_position_embeddings": 8, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "intermediate_size": 24, **_SHAPE}  # fmt: skip
_IMAGE = {"image_size": 32, "patch_size": 16, "intermediate_size": 24, **_SHAPE}


@pytest.mark.parametrize("config_class", [CLIPConfig, SiglipConfig, BlipConfig])
def test_models_whose_loss_needs_no_head_are_trained_as_by_trainer(tmp_path, config_class):
    rows = [
        {"input_ids": torch.tensor([1, 5 + i, 2]), "pixel_values": torch.randn(3, 32, 32)}
        for i in range(4)
    ]

    def collate(batch):
        return {**default_data_collator(batch), "return_loss": True}

    def trained(trainer):
        torch.manual_seed(0)
        config = config_class(text_config=dict(_TEXT), vision_config=dict(_IMAGE))
        model = AutoAdapterModel.from_config(config)
        model.add_adapter("task", "lora[init_weights='bert']")
        model.train_adapter("task")
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        own = TrainingArguments(str(tmp_path), max_steps=2, **QUIET)
        trainer(model, own, train_dataset=rows, data_collator=collate).train()
        after = {n: p for n, p in model.named_parameters() if n in before}
        assert any(not torch.equal(p, before[n]) for n, p in after.items())
        return after

    # the loss of BLIP does not read what its text model makes of images
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "adapter 'task': no gradient")
        mine = trained(AdapterTrainer)
    theirs = trained(Trainer)
    assert all(torch.equal(p, theirs[n]) for n, p in mine.items())


def texts_as_lists(rows: list[dict[str, Any]]) -> dict[str, Any]:
    texts = {"adapter_names", "task_ids"}
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {key: v if key in texts else torch.tensor(v) for key, v in columns.items()}


COLLATORS = {
    "default": default_data_collator,
    "padding": DataCollatorWithPadding(tokenizer()),
    "own": texts_as_lists,
}
COLUMNS = {
    "names": ("adapter_names", ["a", "b"]),
    "numbers": ("task_ids", [0, 1]),
    "names of tasks": ("task_ids", ["a", "b"]),
}


def two_adapters(named_heads: bool, column: str) -> Any:
    torch.manual_seed(0)
    if named_heads:
        model = AutoAdapterModel.from_config(tiny_config("bert"))
        model.add_classification_head("head", num_labels=2)
    else:
        model = adapterzoo.init(AutoModelForSequenceClassification.from_config(tiny_config("bert")))
    for name in "ab":
        model.add_adapter(name, "lora")
    if column == "task_ids":
        model.train_adapter(MultiTask("a", "b"))
    else:
        model.train_adapter(Stack("a", "b"))
        # the default of rows without a name
        model.set_active_adapters("a")
    return model


def untouched(
    model: Any, trainer: Any, folder: Any, collator: Any, column: str, values: Any
) -> Any:
    """Names of what one step on two rows of each adapter does not change."""
    table = Dataset.from_list([
        {"input_ids": [5, 6, 7 + i], "attention_mask": [1] * 3, "labels": i % 2,
         column: values[i % 2], "dropped": "text"} for i in range(4)
    ])  # fmt: skip
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B" in n}
    own = TrainingArguments(str(folder), max_steps=1, per_device_train_batch_size=4, **QUIET)
    trainer(model, own, collator, table).train()
    return {n for n, p in model.named_parameters() if n in before and torch.equal(p, before[n])}


@pytest.mark.long
@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("named_heads", [True, False])
def test_columns_of_rows_reach_the_model(tmp_path, collator, kind, named_heads):
    column, values = COLUMNS[kind]
    model = two_adapters(named_heads, column)
    made = COLLATORS[collator]
    assert not untouched(model, AdapterTrainer, tmp_path, made, column, values)


@pytest.mark.long
@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("named_heads", [True, False])
def test_plain_trainer_gives_them_to_a_collator_that_keeps_them(tmp_path, kind, named_heads):
    column, values = COLUMNS[kind]
    model = two_adapters(named_heads, column)
    assert not untouched(model, Trainer, tmp_path, texts_as_lists, column, values)
