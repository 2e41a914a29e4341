"""LoRA+: which parameters learn faster, beside PEFT, and the trainer that asks for it."""

from __future__ import annotations

import peft
import peft_world
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer as theirs
from snapshots import refused
from transformers import TrainingArguments

from adapterzoo import AdapterTrainer, ConfigUnion, LoRAConfig
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.loraplus import create_loraplus_optimizer

pytestmark = [pytest.mark.filterwarnings(each) for each in peft_world.QUIET]
TARGETS = ["q_proj", "down_proj", "embed_tokens"]
RATES = {"lr": 1e-3, "loraplus_lr_ratio": 16.0, "loraplus_lr_embedding": 1e-5,
         "loraplus_weight_decay": 0.1}  # fmt: skip


def adapted():
    model = peft_world.ours("llama")
    model.add_adapter("a", LoRAConfig(r=4, target_modules=TARGETS), set_active=True)
    model.train_adapter("a")
    return model


def rates_by_name(model, optimizer):
    """Each parameter's learning rate and weight decay; PEFT's names become ours."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)].removeprefix("base_model.model.")
            for old, new in (
                (".default.weight", ""), (".default", ""), ("lora_embedding_", "lora_"),
                (".loras.a", ""),
            ):  # fmt: skip
                name = name.replace(old, new)
            found[name] = group["lr"], group["weight_decay"]
    return found


def test_rates_are_those_of_peft():
    config = peft.LoraConfig(r=4, target_modules=TARGETS)
    other = peft.get_peft_model(peft_world.plain("llama"), config)
    own = adapted()
    expected = rates_by_name(other, theirs(other, torch.optim.AdamW, **RATES))
    found = rates_by_name(own, create_loraplus_optimizer(own, torch.optim.AdamW, **RATES))
    assert found == expected
    assert len({rate for rate, _ in found.values()}) == 3


def test_what_has_one_dimension_learns_as_b():
    model = peft_world.ours("bert")
    union = ConfigUnion(
        LoRAConfig(target_modules=["query"], lora_bias=True), LoRAConfig(target_modules=["dense"])
    )
    model.add_adapter("a", union, set_active=True)
    model.train_adapter("a")
    found = rates_by_name(model, create_loraplus_optimizer(model, torch.optim.SGD, **RATES))
    for name, (rate, _) in found.items():
        slow = name.endswith("lora_A") or (
            name.startswith("classifier") and name.endswith("weight")
        )
        assert rate == pytest.approx(1e-3 if slow else 16e-3), name


def test_the_trainer_makes_one_step_with_these_rates(tmp_path):
    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)} for _ in range(2)]
    moved = {}
    for ratio in (None, 10.0):
        torch.manual_seed(0)
        model = adapted()
        before = {n: p.detach().clone() for n, p in model.named_parameters() if "loras" in n}
        args = TrainingArguments(
            tmp_path / str(ratio), max_steps=1, optim="sgd", learning_rate=1e-2, report_to="none",
            use_cpu=True, disable_tqdm=True, save_strategy="no", max_grad_norm=0,
            per_device_train_batch_size=2,
        )  # fmt: skip
        AdapterTrainer(model, args, train_dataset=rows, loraplus_lr_ratio=ratio).train()
        now = dict(model.named_parameters())
        moved[ratio] = {n: now[n].detach() - t for n, t in before.items() if "embed" not in n}
    assert any(step.abs().max() > 0 for step in moved[None].values())
    for name, step in moved[None].items():
        times = 10 if name.endswith("lora_B") else 1
        torch.testing.assert_close(moved[10.0][name], times * step, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("ratio", [0.5, 0, "16", float("nan")])
def test_a_ratio_that_is_not_legal_is_refused(ratio):
    model = adapted()
    with refused(model, ConfigError, "loraplus_lr_ratio", "from 1.0"):
        create_loraplus_optimizer(model, torch.optim.SGD, lr=1e-3, loraplus_lr_ratio=ratio)


def test_what_has_no_effect_is_refused():
    model = adapted()
    with refused(model, ConfigError, "weight_decay", "loraplus_weight_decay="):
        create_loraplus_optimizer(
            model, torch.optim.SGD, lr=1e-3, loraplus_lr_ratio=2, weight_decay=0.1
        )
    with refused(model, ConfigError, "loraplus_lr_embedding", "loraplus_lr_ratio=16"):
        AdapterTrainer(model, loraplus_lr_embedding=0.1)


def test_a_model_without_factors_is_refused():
    model = peft_world.ours("bert")
    model.add_adapter("a", "seq_bn", set_active=True)
    model.train_adapter("a")
    with refused(model, StateError, "factors A and B", "Leave loraplus_lr_ratio out"):
        create_loraplus_optimizer(model, torch.optim.SGD, lr=1e-3, loraplus_lr_ratio=2)


def test_a_ratio_beside_an_optimizer_is_refused():
    model = adapted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with refused(model, ConfigError, "optimizers", "create_loraplus_optimizer"):
        AdapterTrainer(model, optimizers=(optimizer, None), loraplus_lr_ratio=2.0)
