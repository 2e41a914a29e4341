"""TRL's trainers on models with adapters: what they train, and what they take as reference."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from snapshots import of_adapter
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from words import SENTENCES, plain, tokenizer

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import StateError

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "dataloader_pin_memory": False, "logging_steps": 1, "save_strategy": "no",
    "learning_rate": 1e-2, "max_steps": 4, "gradient_checkpointing": False,
}  # fmt: skip


def with_named_head(tmp_path: Path) -> Any:
    plain(AutoModelForCausalLM, "llama").save_pretrained(tmp_path)
    model = AutoAdapterModel.from_pretrained(tmp_path)
    model.add_adapter("style", "lora")
    model.train_adapter("style")
    return model


def with_own_head(tmp_path: Path) -> Any:
    model = adapterzoo.init(plain(AutoModelForCausalLM, "llama"))
    model.add_adapter("style", "lora")
    model.train_adapter("style")
    return model


class Losses(TrainerCallback):
    """The losses that are logged."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.found.append(logs["loss"])


def bits(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def fine_tuned(model: Any, folder: Path) -> list[float]:
    losses = Losses()
    SFTTrainer(
        model,
        args=SFTConfig(str(folder), **QUIET),
        train_dataset=Dataset.from_dict({"text": SENTENCES * 4}),
        processing_class=tokenizer(pairs=False),
        callbacks=[losses],
    ).train()
    return losses.found


@pytest.mark.parametrize("make", [with_named_head, with_own_head])
def test_supervised_tuning_lowers_the_loss_and_changes_the_adapter_alone(tmp_path, make):
    model = make(tmp_path)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    before = bits(model)
    losses = fine_tuned(model, tmp_path)
    assert losses[-1] < losses[0]
    assert {n for n, p in bits(model).items() if not torch.equal(p, before[n])} == trained
    assert all(of_adapter(n, "style") or n.startswith("heads.") for n in trained)


def test_both_kinds_of_models_lose_the_same(tmp_path):
    named, own = with_named_head(tmp_path), with_own_head(tmp_path)
    named.get_head("default").requires_grad_(False)
    for (_, mine), (_, theirs) in zip(
        named.adapter_modules("style"), own.adapter_modules("style"), strict=True
    ):
        mine.load_state_dict(theirs.state_dict())
    assert fine_tuned(named, tmp_path) == pytest.approx(fine_tuned(own, tmp_path), rel=1e-5)


def test_the_base_model_is_the_reference_of_a_fresh_adapter(tmp_path):
    """Reference scores computed before the first step are those of the base model: no copy."""
    rows = {"prompt": ["the film was"] * 8, "chosen": [" good ."] * 8, "rejected": [" bad ."] * 8}
    start = with_own_head(tmp_path)
    base = plain(AutoModelForCausalLM, "llama")
    found, models = [], []
    for reference in (base, None):
        model, losses = copy.deepcopy(start), Losses()
        DPOTrainer(
            model,
            ref_model=reference,
            args=DPOConfig(str(tmp_path), **QUIET, precompute_ref_log_probs=reference is None),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tokenizer(pairs=False),
            callbacks=[losses],
        ).train()
        found.append(losses.found)
        models.append(bits(model))
    assert found[0][0] == pytest.approx(0.6931, abs=1e-3)  # ln 2: the adapter is the identity
    assert found[0][-1] < found[0][0] - 1e-3
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    before = bits(start)
    changed = {n for n, p in models[1].items() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in start.named_parameters() if p.requires_grad}


def with_layers_before_the_output(tmp_path: Path) -> Any:
    model = with_named_head(tmp_path)
    model.add_causal_lm_head("style", layers=2)
    model.train_adapter("style")
    return model


def with_a_copy_of_the_output(tmp_path: Path) -> Any:
    model = adapterzoo.init(plain(AutoModelForCausalLM, "llama"))
    model.add_adapter("style", "lora[modules_to_save=['lm_head']]")
    model.train_adapter("style")
    return model


def with_an_inverse_before_the_output(tmp_path: Path) -> Any:
    model = with_named_head(tmp_path)
    model.add_adapter("inverse", "seq_bn_inv[reduction_factor=4]")
    model.train_adapter("inverse")
    return model


def test_layers_that_the_loss_of_trl_leaves_out_are_refused_before_the_first_step(tmp_path):
    """TRL reads the weight of the output layer, and calls neither the layer nor the head."""
    for make, says in (
        (with_layers_before_the_output, "other layers of the head"),
        (with_a_copy_of_the_output, "adapters there"),
        (with_an_inverse_before_the_output, "adapters there"),
    ):
        model = make(tmp_path)
        before = bits(model)
        with pytest.raises(StateError, match=says):
            fine_tuned(model, tmp_path)
        assert all(torch.equal(p, before[n]) for n, p in bits(model).items())
    # as the messages say
    model = with_named_head(tmp_path)
    model.add_causal_lm_head("style", layers=1)
    model.train_adapter("style")
    losses = fine_tuned(model, tmp_path)
    assert losses[-1] < losses[0]
