"""What changes while a Trainer runs: its optimizer holds the tensors that it was made with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_config
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import adapterzoo
from adapterzoo import AdapterTrainer, AutoAdapterModel, Fuse
from adapterzoo.errors import StateError
from adapterzoo.peft import get_peft_model

QUIET: dict[str, Any] = {
    "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    "logging_strategy": "no", "save_strategy": "no", "optim": "sgd", "learning_rate": 0.5,
    "max_steps": 3,
}  # fmt: skip
ROWS = [{"input_ids": torch.tensor([1, 5, 9]), "labels": torch.tensor([1, 5, 9])}] * 8
TRAINERS = pytest.mark.parametrize("trainer", [Trainer, AdapterTrainer])


def llama(method: str = "lora") -> Any:
    torch.manual_seed(0)
    model = adapterzoo.init(LlamaForCausalLM(tiny_config("llama")))
    for name in ("a", "b"):
        model.add_adapter(name, method)
    return model


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trainable(model: Any) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def changed(model: Any, before: dict[str, torch.Tensor]) -> set[str]:
    return {n for n, p in model.named_parameters() if n in before and not torch.equal(p, before[n])}


class At(TrainerCallback):
    """Calls a function once, after the first step."""

    def __init__(self, call: Any, at: int = 1) -> None:
        self.call, self.at = call, at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.call()


def run(trainer: Any, model: Any, folder: Any, call: Any, at: int = 1) -> None:
    args = TrainingArguments(str(folder), **QUIET)
    trainer(model, args, train_dataset=ROWS, callbacks=[At(call, at)]).train()


CHANGES = {
    "train_adapter('b')": lambda model: model.train_adapter("b"),
    "delete_adapter('a')": lambda model: model.delete_adapter("a"),
    "add_adapter('a'": lambda model: model.add_adapter("a", "lora", overwrite_ok=True),
    "merge_adapter('a')": lambda model: model.merge_adapter("a"),
    "unload(": lambda model: model.unload(),
}


@pytest.mark.long
@TRAINERS
@pytest.mark.parametrize("says", CHANGES)
def test_what_the_optimizer_does_not_follow_is_refused(tmp_path, trainer, says):
    model = llama()
    model.train_adapter("a")
    active, trained = model.active_adapters, trainable(model)
    with pytest.raises(StateError) as error:
        run(trainer, model, tmp_path, lambda: CHANGES[says](model))
    assert says in str(error.value)
    assert "after trainer.train()" in str(error.value)
    assert model.active_adapters == active
    assert trainable(model) == trained
    # as the message says
    CHANGES[says](model)


@TRAINERS
def test_a_fusion_is_neither_trained_nor_deleted_on_the_way(tmp_path, trainer):
    model, fuse = llama("seq_bn[reduction_factor=4]"), Fuse("a", "b")
    model.add_adapter_fusion(fuse)
    model.train_adapter("a")
    with pytest.raises(StateError, match="after trainer"):
        run(trainer, model, tmp_path, lambda: model.train_adapter_fusion(fuse))
    model.train_adapter_fusion(fuse)
    with pytest.raises(StateError, match="after trainer"):
        run(trainer, model, tmp_path, lambda: model.delete_adapter_fusion(fuse))


@TRAINERS
def test_a_head_that_is_trained_is_not_deleted(tmp_path, trainer):
    model = AutoAdapterModel.from_config(tiny_config("llama"))
    model.add_adapter("a", "lora")
    model.add_causal_lm_head("a", layers=2)
    model.train_adapter("a")
    with pytest.raises(StateError, match=r"delete_head\('a'\).*running Trainer"):
        run(trainer, model, tmp_path, lambda: model.delete_head("a"))


@TRAINERS
def test_what_the_run_trains_can_be_chosen_again(tmp_path, trainer):
    """Both are in the optimizer, so the second half of the run trains `b` alone."""
    model = llama()
    model.train_adapter(adapterzoo.Stack("a", "b"))
    middle: dict[str, torch.Tensor] = {}

    def narrow() -> None:
        model.train_adapter("b")
        middle.update(bits(model))

    run(trainer, model, tmp_path, narrow)
    assert changed(model, middle) == trainable(model)
    assert all(".b." in name for name in trainable(model))


@TRAINERS
def test_other_adapters_and_the_last_step_are_free(tmp_path, trainer):
    model = llama()
    model.train_adapter("a")

    def elsewhere() -> None:
        model.add_adapter("c", "lora")
        model.delete_adapter("b")

    before = bits(model)
    run(trainer, model, tmp_path, elsewhere)
    assert changed(model, before) == trainable(model)
    run(trainer, model, tmp_path, lambda: model.train_adapter("c"), at=3)
    assert all(".c." in name for name in trainable(model))


def test_a_reference_of_peft_is_only_active_for_a_while(tmp_path):
    """As in a loss that compares the adapter with another: what is trained stays so."""
    plain = LlamaForCausalLM(tiny_config("llama"))
    model = get_peft_model(plain, adapterzoo.LoRAConfig(r=2), "a")
    model.add_adapter("ref", adapterzoo.LoRAConfig(r=2))
    before = bits(model)

    def compare() -> None:
        model.set_adapter("ref")
        assert not any(p.requires_grad for p in model.parameters())
        model.set_adapter("a")

    run(Trainer, model, tmp_path, compare)
    moved = changed(model, before)
    assert moved
    assert all(".a." in name for name in moved)
