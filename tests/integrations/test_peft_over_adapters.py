"""PEFT around a model with adapters, and adapters on a model that has PEFT's layers."""

from __future__ import annotations

import importlib

import peft
import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import stir
from transformers import AutoModelForCausalLM

from adapterzoo import init
from adapterzoo.errors import StateError
from adapterzoo.model.state import tensors_of

CONFIGS = ['lora[attn_matrices=["q","k","v","o"]]', "boft", "dora", "seq_bn"]


def plain():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config("llama")).eval()


def lora(**kwargs):
    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **kwargs)


def with_adapter(config):
    model = init(plain())
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    return model


def logits(model):
    with torch.no_grad():
        return model(**tiny_inputs("llama")).logits


@pytest.mark.parametrize("config", CONFIGS)
def test_the_active_adapter_acts_below_peft(config, tmp_path):
    model = with_adapter(config)
    expected = logits(model)
    base = logits(plain())
    assert not torch.equal(expected, base)
    wrapped = peft.get_peft_model(model, lora())
    # PEFT's own adapter starts as the identity
    assert torch.equal(logits(wrapped), expected)
    model.set_active_adapters(None)
    assert torch.equal(logits(wrapped), base)
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a")
    other = init(plain())
    other.load_adapter(tmp_path, set_active=True)
    assert torch.equal(logits(other), expected)
    wrapped.unload()
    assert torch.equal(logits(model), expected)


def test_peft_takes_no_layer_with_adapters_for_its_own():
    """Whether `adapterzoo.peft` has been imported or not."""
    importlib.import_module("adapterzoo.peft")
    model = with_adapter(CONFIGS[0])
    expected = logits(model)
    peft.get_peft_model(model, lora()).unload()
    assert torch.equal(logits(model), expected)


def test_pefts_own_adapter_trains_above_the_active_one():
    model = with_adapter(CONFIGS[0])
    wrapped = peft.get_peft_model(model, lora())
    wrapped(**tiny_inputs("llama")).logits.square().sum().backward()
    grads = {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}
    assert grads
    assert all(".default." in name for name in grads)
    assert any(g.count_nonzero() for g in grads.values())


@pytest.mark.parametrize("config", CONFIGS)
def test_what_would_change_the_layers_is_refused_below_peft(config):
    model = with_adapter(config)
    wrapped = peft.get_peft_model(model, lora())
    expected = logits(wrapped)
    for call in (
        lambda: model.add_adapter("b", "lora"),
        lambda: model.delete_adapter("a"),
        lambda: model.merge_adapter("a"),
        lambda: model.unload(),
    ):
        with pytest.raises(StateError, match=r"PEFT has wrapped.*unload\(\)"):
            call()
    assert torch.equal(logits(wrapped), expected)


def test_init_refuses_a_model_with_layers_of_peft():
    wrapped = peft.get_peft_model(plain(), lora())
    inside = wrapped.get_base_model()
    integrated = plain()
    peft.inject_adapter_in_model(lora(), integrated, "x")
    for model in (wrapped, inside, integrated):
        kind = type(model)
        with pytest.raises(StateError, match=r"PEFT has wrapped.*unload\(\)"):
            init(model)
        assert type(model) is kind
    init(wrapped.unload()).add_adapter("a", "lora")


@pytest.mark.parametrize("config", ['lora[attn_matrices=["q","k","v","o"]]', "seq_bn"])
def test_trl_wraps_a_model_with_an_active_adapter(config, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from words import SENTENCES, tokenizer
    from words import plain as untouched

    model = init(untouched(AutoModelForCausalLM, "llama"))
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    before = {name: t.clone() for name, t in tensors_of(model, "a").items()}
    options = {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "save_strategy": "no",
    }
    trainer = trl.SFTTrainer(
        model,
        args=trl.SFTConfig(str(tmp_path), **options),
        train_dataset=Dataset.from_dict({"text": SENTENCES * 4}),
        processing_class=tokenizer(pairs=False),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    trainer.train()
    changed = [n for n, p in trainer.model.named_parameters() if ".default." in n and p.any()]
    assert any("lora_B" in name for name in changed)
    after = tensors_of(model, "a")
    assert all(torch.equal(before[name], after[name]) for name in before)
