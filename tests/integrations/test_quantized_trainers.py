"""Trainers that know nothing of this library, over a base that bitsandbytes has quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset, disable_progress_bars, enable_progress_bars
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_world import PAIRS, QUIET, texts, words

import adapterzoo
import adapterzoo.peft as library
from adapterzoo import AutoAdapterModel

pytest.importorskip("bitsandbytes")
# blocks of 64 numbers have one scale
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip
TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(autouse=True)
def quiet_progress():
    disable_progress_bars()
    yield
    enable_progress_bars()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE)).save_pretrained(path)
    return path


def base(folder: Path, auto: Any = AutoModelForCausalLM, bits: int = 4, **more: Any) -> Any:
    config = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    return auto.from_pretrained(folder, quantization_config=config, **more)


def of_init(plain: Any) -> Any:
    model = adapterzoo.init(plain)
    model.add_adapter("style", "dora[r=4,attn_matrices=['q','v']]")
    model.train_adapter("style")
    return model


def of_library(plain: Any) -> Any:
    config = library.LoraConfig(r=4, target_modules=TARGETS, use_dora=True)
    return library.get_peft_model(plain, config)


MAKE = {"init": of_init, "peft": of_library}


def supervised(model: Any, out: Path, **more: Any) -> Any:
    return SFTTrainer(
        model, args=SFTConfig(str(out), **QUIET), train_dataset=texts(), processing_class=words(),
        **more,
    )  # fmt: skip


def preferred(model: Any, out: Path, **more: Any) -> Any:
    return DPOTrainer(
        model, args=DPOConfig(str(out), **QUIET), train_dataset=Dataset.from_dict(PAIRS),
        processing_class=words(), **more,
    )  # fmt: skip


def rewarded(model: Any, out: Path, **more: Any) -> Any:
    rows = {"chosen": ["the film was good ."] * 8, "rejected": ["the film was bad ."] * 8}
    return RewardTrainer(
        model, args=RewardConfig(str(out), **QUIET), train_dataset=Dataset.from_dict(rows),
        processing_class=words(), **more,
    )  # fmt: skip


def grouped(model: Any, out: Path, **more: Any) -> Any:
    return GRPOTrainer(
        model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=GRPOConfig(
            str(out), num_generations=2, max_completion_length=4, beta=0.1,
            **{**QUIET, "per_device_train_batch_size": 2},
        ),
        train_dataset=Dataset.from_dict({"prompt": PAIRS["prompt"]}),
        processing_class=words(),
        **more,
    )  # fmt: skip


def magnitudes(model: Any) -> dict[str, Tensor]:
    found = {n: p for n, p in model.named_parameters() if n.endswith(".m") or "magnitude" in n}
    assert found
    return {name: p.detach().clone() for name, p in found.items()}


def trained(trainer: Any) -> tuple[list[float], set[str]]:
    """The losses, and the names of what has changed."""
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    now = dict(trainer.model.named_parameters())
    return losses, {n for n, t in before.items() if not torch.equal(now[n], t)}


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_plain_trainer_trains_a_quantized_model(tmp_path, folder, make, bits):
    model = MAKE[make](base(folder, bits=bits))
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    rows = [{"input_ids": [1, 5, 9, 7], "labels": [1, 5, 9, 7]}] * 8
    own = {k: v for k, v in QUIET.items() if k != "gradient_checkpointing"}
    run = Trainer(model, TrainingArguments(str(tmp_path), **own), train_dataset=rows)
    assert model.is_quantized
    losses, changed = trained(run)
    assert losses[-1] < losses[0]
    assert changed == wanted
    # nothing is rounded here
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("trainer", [supervised, preferred, grouped])
def test_trl_rounds_all_but_the_magnitudes_of_dora(tmp_path, folder, make, trainer):
    model = MAKE[make](base(folder))
    before = magnitudes(model)
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    run = trainer(model, tmp_path)
    after = magnitudes(model)
    assert all(torch.equal(after[name], m) for name, m in before.items())
    assert all(m.dtype == torch.float32 for m in after.values())
    own = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert own.keys() == wanted
    assert {dtype for name, dtype in own.items() if name not in after} == {torch.bfloat16}
    losses, changed = trained(run)
    # that of GRPO begins at zero
    assert trainer is grouped or losses[-1] < losses[0]
    assert magnitudes(model).keys() <= changed


@pytest.mark.parametrize("config", ["peft", "native", "string"])
def test_so_does_an_adapter_that_the_trainer_adds(tmp_path, folder, config):
    given: Any = {
        "peft": library.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
        "native": adapterzoo.DoRAConfig(r=4), "string": "dora[r=4]",
    }[config]  # fmt: skip
    run = supervised(base(folder), tmp_path, peft_config=given)
    found = magnitudes(run.model)
    assert all(m.dtype == torch.float32 for m in found.values())
    assert all(run.model.get_parameter(name).requires_grad for name in found)
    others = {n: p for n, p in run.model.named_parameters() if p.requires_grad and n not in found}
    assert {p.dtype for p in others.values()} == {torch.bfloat16}
    losses, changed = trained(run)
    assert losses[-1] < losses[0]
    # steps of A, which begin with the zeros of B, are smaller than its last digit
    assert found.keys() <= changed <= found.keys() | others.keys()


def test_the_losses_are_those_of_peft(tmp_path, folder):
    """Both begin as the identity, with the same A, and round the same parameters."""
    config = {"r": 4, "target_modules": TARGETS, "use_dora": True}
    theirs = peft.get_peft_model(base(folder), peft.LoraConfig(**config))
    theirs.save_pretrained(tmp_path / "a")
    model = adapterzoo.init(base(folder))
    model.load_adapter(tmp_path / "a", load_as="style")
    model.train_adapter("style")
    expected, _ = trained(supervised(theirs, tmp_path))
    found, _ = trained(supervised(model, tmp_path))
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("named", [False, True])
def test_a_reward_model_is_trained(tmp_path, folder, named):
    if named:
        model = base(folder, AutoAdapterModel, dtype=torch.bfloat16)
        model.add_adapter("style", "lora[r=4]")
        model.add_classification_head("style", num_labels=1)
        model.train_adapter("style")
    else:
        model = base(folder, AutoModelForSequenceClassification, num_labels=1, dtype=torch.bfloat16)
        model = of_init(model)
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    losses, changed = trained(rewarded(model, tmp_path))
    assert losses[-1] < losses[0]
    assert {n for n in wanted if "lora_B" in n} < changed <= wanted
