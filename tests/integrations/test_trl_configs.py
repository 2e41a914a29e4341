"""`peft_config=…` of TRL's trainers, and their checkpoints: adapters of this library alone."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from datasets import Dataset
from fresh import run as in_fresh_processes
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import AutoModelForSequenceClassification, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl_world import LORA, QUIET, World, pairs, texts, words

import adapterzoo
import adapterzoo.peft as library
from adapterzoo.errors import StateError, UnknownNameError


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def supervised(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    return SFTTrainer(
        model, args=SFTConfig(str(folder), **{**QUIET, **own}), train_dataset=texts(),
        eval_dataset=texts(), processing_class=words(), **chosen,
    )  # fmt: skip


def preferred(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    return DPOTrainer(
        model, args=DPOConfig(str(folder), **{**QUIET, **own}), train_dataset=pairs(),
        eval_dataset=pairs(), processing_class=words(), **chosen,
    )  # fmt: skip


def rewarded(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    rows = Dataset.from_dict(
        {"chosen": ["the film was good ."] * 8, "rejected": ["the film was bad ."] * 8}
    )
    return RewardTrainer(
        model, args=RewardConfig(str(folder), **{**QUIET, **own}), train_dataset=rows,
        eval_dataset=rows, processing_class=words(), **chosen,
    )  # fmt: skip


def grouped(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    config = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
    return GRPOTrainer(
        model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=GRPOConfig(str(folder), **{**QUIET, **config, **own}),
        train_dataset=pairs().select_columns("prompt"),
        processing_class=words(),
        **chosen,
    )


def leaving_one_out(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    config = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4}
    return RLOOTrainer(
        model,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        args=RLOOConfig(str(folder), **{**QUIET, **config, **own}),
        train_dataset=pairs().select_columns("prompt"),
        processing_class=words(),
        **chosen,
    )


def judged(model: Any, folder: Path, **chosen: Any) -> Any:
    own = {k: chosen.pop(k) for k in [*chosen] if k not in ("peft_config", "callbacks")}
    columns = {"completion": [" good .", " bad ."] * 4, "label": [True, False] * 4}
    return KTOTrainer(
        model, args=KTOConfig(str(folder), **{**QUIET, **own}),
        train_dataset=Dataset.from_dict({"prompt": ["the film was"] * 8, **columns}),
        processing_class=words(), **chosen,
    )  # fmt: skip


TRAINERS = {
    "sft": supervised, "dpo": preferred, "reward": rewarded, "grpo": grouped,
    "rloo": leaving_one_out, "kto": judged,
}  # fmt: skip
# they compare with a reference
REFERRING = ("dpo", "rloo", "kto")


def plain(world: World, trainer: str) -> Any:
    if trainer != "reward":
        return world.plain()
    torch.manual_seed(1)
    return AutoModelForSequenceClassification.from_pretrained(world.base, num_labels=1)


def bits(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- what `peft_config` may be ---

CONFIGS: dict[str, Any] = {
    "adapterzoo.peft": lambda: library.LoraConfig(**LORA),
    "a config": lambda: adapterzoo.LoRAConfig(r=4),
    "a string": lambda: "lora[r=4]",
    "no method of PEFT": lambda: adapterzoo.SeqBnConfig(reduction_factor=4),
}


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("config", CONFIGS)
def test_the_trainer_adds_an_adapter_of_this_library(world, config, trainer):
    run = TRAINERS[trainer](plain(world, trainer), world.folder / "out",
                            peft_config=CONFIGS[config]())  # fmt: skip
    model = run.model
    assert isinstance(model, adapterzoo.AdapterModelMixin)
    assert isinstance(model, library.PeftModel) == (config == "adapterzoo.peft")
    assert not any(isinstance(module, BaseTunerLayer) for module in model.modules())
    assert [*model.adapters_config] == ["default"]
    wanted = {n for n, p in model.named_parameters() if p.requires_grad}
    own = {n for n in wanted if n.startswith("score.") or ".copies." in n}
    assert all(".default." in name for name in wanted - own)
    before = bits(model)
    run.train()
    changed = {n for n, t in bits(model).items() if not torch.equal(t, before[n])}
    assert changed
    assert changed <= wanted


def test_the_model_may_be_a_folder(world):
    run = supervised(str(world.base), world.folder / "out", peft_config="lora[r=4]")
    run.train()
    assert [*run.model.adapters_config] == ["default"]


def test_the_losses_are_those_of_peft(world):
    """With the config of either library, and the same initial values."""
    theirs = supervised(world.plain(), world.folder / "a", peft_config=peft.LoraConfig(**LORA))
    assert isinstance(theirs.model, peft.PeftModel)
    tensors = peft.get_peft_model_state_dict(theirs.model)
    mine = supervised(world.plain(), world.folder / "b", peft_config=library.LoraConfig(**LORA))
    library.set_peft_model_state_dict(mine.model, tensors)
    found = []
    for run in (mine, theirs):
        run.train()
        found.append([row["loss"] for row in run.state.log_history if "loss" in row])
    assert found[1][-1] < found[1][0]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_what_is_no_config_is_refused(world):
    with pytest.raises(TypeError, match="PeftConfig"):
        supervised(world.plain(), world.folder, peft_config=8)
    with pytest.raises(UnknownNameError, match="'lora'"):
        supervised(world.plain(), world.folder, peft_config="loar")
    for make in (world.named, world.of_library):
        model = make(world.trained())
        with pytest.raises(StateError, match="Leave peft_config out"):
            supervised(model, world.folder, peft_config="lora[r=4]")
        # as the message says
        supervised(model, world.folder)


@pytest.mark.sweep(whole=True)
def test_the_order_of_imports_does_not_matter(world):
    """TRL's modules are told when they are loaded, or at once."""
    code = f"""
        import importlib
        for name in NAMES:
            getattr(importlib.import_module(name), "AutoAdapterModel", None)
            getattr(importlib.import_module(name), "SFTTrainer", None)
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}]
        from trl import SFTConfig, SFTTrainer
        from trl_world import QUIET, texts, words
        run = SFTTrainer(
            {str(world.base)!r}, args=SFTConfig({str(world.folder)!r}, **QUIET),
            train_dataset=texts(), processing_class=words(), peft_config="lora[r=4]",
        )
        run.train()
        assert [*run.model.adapters_config] == ["default"]
    """
    code = textwrap.dedent(code)
    pieces = [
        f"NAMES = {names}\n{code}" for names in (["trl", "adapterzoo"], ["adapterzoo", "trl"])
    ]
    for status, printed in in_fresh_processes(pieces, world.folder):
        assert status == 0, printed


# --- checkpoints ---


def of_init(world: World, trainer: str) -> Any:
    model = adapterzoo.init(plain(world, trainer))
    torch.manual_seed(2)
    model.add_adapter("style", "lora[r=4,dropout=0.1]")
    model.train_adapter("style")
    return model


def of_library(world: World, trainer: str) -> Any:
    torch.manual_seed(2)
    task = "SEQ_CLS" if trainer == "reward" else "CAUSAL_LM"
    config = library.LoraConfig(**LORA, lora_dropout=0.1, task_type=task)
    return library.get_peft_model(plain(world, trainer), config)


def with_heads(world: World, trainer: str) -> Any:
    model = adapterzoo.AutoAdapterModel.from_pretrained(world.base)
    torch.manual_seed(2)
    model.add_adapter("style", "lora[r=4,dropout=0.1]")
    if trainer == "reward":
        model.add_classification_head("style", num_labels=1)
    model.train_adapter("style")
    return model


MADE = {"init": of_init, "peft": of_library, "heads": with_heads}
CUT = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "disable_dropout": False}


def cut(trainer: str) -> dict[str, Any]:
    return {k: v for k, v in CUT.items() if k != "disable_dropout" or trainer != "sft"}


@pytest.mark.long
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("make", MADE)
def test_a_run_is_resumed_from_adapters_alone(world, make, trainer):
    whole = TRAINERS[trainer](MADE[make](world, trainer), world.folder / "out", **cut(trainer))
    size = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    whole.train()
    shutil.rmtree(world.folder / "out" / "checkpoint-4")
    folder = world.folder / "out" / "checkpoint-2"
    stored = sum(f.stat().st_size for f in folder.rglob("*.safetensors"))
    assert 0 < stored < size / 2
    other = MADE[make](world, trainer)
    for parameter in other.parameters():
        if parameter.requires_grad:
            parameter.data.add_(1.0)
    again = TRAINERS[trainer](other, world.folder / "out", **cut(trainer))
    assert (folder / "reference.safetensors").is_file() == (trainer in REFERRING)
    again.train(resume_from_checkpoint=True)
    expected = bits(whole.model)
    assert all(torch.equal(t, expected[name]) for name, t in bits(again.model).items())


class Keep(TrainerCallback):
    """The values of the model at each step that is saved."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_save(self, args, state, control, model=None, **kwargs):
        self.seen[state.global_step] = bits(model)


@pytest.mark.long
@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("trainer", ["sft", "dpo", "reward"])
def test_the_best_model_is_loaded_from_adapters_alone(world, make, trainer):
    keep = Keep()
    run = TRAINERS[trainer](
        MADE[make](world, trainer), world.folder / "out", callbacks=[keep], max_steps=2,
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1,
        # the loss falls, so that the greatest one is the first
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    run.train()
    first, last = keep.seen[1], keep.seen[2]
    assert any(not torch.equal(first[n], last[n]) for n in first)
    assert all(torch.equal(t, first[name]) for name, t in bits(run.model).items())
    run.save_model(str(world.folder / "end"))
    adapter = world.folder / "end"
    if make != "peft":
        adapter /= "style"
        assert not (world.folder / "end" / "config.json").exists()
    fresh = MADE[make](world, trainer)
    name = "default" if make == "peft" else "style"
    if make == "peft":
        fresh.load_adapter(adapter, name, is_trainable=True)
    else:
        fresh.load_adapter(adapter, load_as=name, overwrite_ok=True)
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    with torch.no_grad():
        found, expected = fresh.eval()(**batch).logits, run.model.eval()(**batch).logits
    if trainer != "reward" or make == "heads":
        torch.testing.assert_close(found, expected)
