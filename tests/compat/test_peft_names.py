"""PEFT's public names in `adapterzoo.peft`: there, or refused with what to write instead."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import QUIET, plain

import adapterzoo.peft as library
from adapterzoo.compat.peft.classes import NOT_MADE
from adapterzoo.errors import CheckpointError, ConfigError, FieldError
from adapterzoo.peft.optimizers import create_loraplus_optimizer
from adapterzoo.peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
EXACT = {"rtol": 0, "atol": 0}
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "from-peft.md").read_text()
# what PEFT's documentation imports most often
USED = {
    "AutoPeftModel", "AutoPeftModelForCausalLM", "BOFTConfig", "EvaConfig", "IA3Config",
    "LNTuningConfig", "LoHaConfig", "LoKrConfig", "LoraConfig", "MissConfig", "OFTConfig",
    "PeftConfig", "PeftModel", "PeftType", "PrefixTuningConfig", "PromptTuningConfig",
    "PromptTuningInit", "TaskType", "VeraConfig", "cast_mixed_precision_params",
    "get_peft_config", "get_peft_model", "get_peft_model_state_dict", "inject_adapter_in_model",
    "load_peft_weights", "prepare_model_for_kbit_training", "set_peft_model_state_dict",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(peft.__all__))
def test_each_public_name_is_there_or_says_what_to_write(name):
    if name in dir(library):
        assert getattr(library, name) is not None
        return
    assert name not in USED
    assert not hasattr(library, name)
    with pytest.raises(AttributeError, match=rf"has no '{name}'\. Write .*from-peft\.md"):
        getattr(library, name)
    ends = ("Config", "Model", "Encoder", "Embedding", "Init", "Type")
    documented = any(f"`{name}{end}" in DOCUMENTED for end in "`(")
    assert documented or name.startswith("PeftModelFor") or name.endswith(ends)
    with pytest.raises(ImportError, match=rf"has no '{name}'"):
        exec(f"from adapterzoo.peft import {name}")


def test_a_misspelled_name_gets_the_close_one():
    with pytest.raises(ImportError, match=r"has no 'get_peft_modle'\. Write get_peft_model, or"):
        from adapterzoo.peft import get_peft_modle  # noqa: F401
    # modules below it are found
    assert importlib.import_module("adapterzoo.peft.optimizers")


@pytest.mark.parametrize("name", NOT_MADE)
def test_classes_that_scripts_only_import_are_refused_where_they_are_called(name):
    exec(f"from adapterzoo.peft import {name}")
    assert name in peft.__all__
    with pytest.raises(FieldError, match=rf"{name}\(…\): .*[Ww]rite \w+\("):
        getattr(library, name)(task_type="CAUSAL_LM")


def test_enums_are_those_of_peft():
    for name in ("TaskType", "PeftType", "PromptTuningInit"):
        mine, theirs = getattr(library, name), getattr(peft, name)
        assert all(member.value == theirs[member.name].value for member in mine), name
    assert library.LoraConfig().peft_type == library.PeftType.LORA == peft.PeftType.LORA
    assert library.LoraConfig().peft_type.value == "LORA"
    config = library.PromptTuningConfig(
        num_virtual_tokens=3, prompt_tuning_init=library.PromptTuningInit.RANDOM
    )
    assert library.get_peft_model(plain("llama"), config).active_adapter == "default"


@pytest.mark.parametrize("name", ["EvaConfig", "CordaConfig"])
def test_options_of_initial_values_are_objects(name, tmp_path):
    mine, theirs = getattr(library, name), getattr(peft.tuners.lora.config, name)
    known = {field.name: field for field in dataclasses.fields(theirs)}
    for field in dataclasses.fields(mine):
        made = getattr(theirs(), field.name)
        assert made == getattr(mine(), field.name), field.name
        assert field.name in known
    with pytest.raises(TypeError, match="nothing"):
        mine(nothing=1)
    field = name.removesuffix("Config").lower()
    config = library.LoraConfig(init_lora_weights=field, **{f"{field}_config": mine()})
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())[f"{field}_config"]
    model = library.get_peft_model(
        plain("llama"), config, init_data=[{"input_ids": torch.arange(1, 61).view(2, 30)}]
    )
    assert model.active_adapter == "default"


def test_a_dict_becomes_a_config():
    values = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]}
    assert library.get_peft_config(values) == library.LoraConfig(r=4, target_modules=["q_proj"])
    assert peft.get_peft_config(values).r == 4
    with pytest.raises(CheckpointError, match=r"get_peft_config.*'XLORA'"):
        library.get_peft_config({"peft_type": "XLORA"})
    with pytest.raises(FieldError, match="rank"):
        library.get_peft_config({"peft_type": "LORA", "rank": 4})


def adapted(seed: int = 0, r: int = 4) -> Any:
    torch.manual_seed(0)
    model = library.get_peft_model(plain("llama"), library.LoraConfig(r=r))
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def test_weights_of_a_folder_are_loaded_and_set(tmp_path):
    model = adapted(1)
    model.save_pretrained(tmp_path)
    mine = library.load_peft_weights(tmp_path)
    theirs = peft.load_peft_weights(str(tmp_path), device="cpu")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    other = adapted(2)
    library.set_peft_model_state_dict(other, mine)
    inputs = tiny_inputs("llama")
    torch.testing.assert_close(other(**inputs)[0], model(**inputs)[0], **EXACT)
    with pytest.raises(TypeError, match="key_mapping"):
        library.load_peft_weights(tmp_path, key_mapping={})
    with pytest.raises(CheckpointError, match="no such folder"):
        library.load_peft_weights(tmp_path / "nowhere")


def test_an_adapter_is_injected_into_a_model_that_keeps_its_methods():
    model = transformers.LlamaForCausalLM(tiny_config("llama"))
    same = library.inject_adapter_in_model(library.LoraConfig(r=4), model, adapter_name="a")
    assert same is model
    assert not isinstance(model, library.PeftModel)
    assert model.active_adapter == "a"
    assert {n.split(".")[-1] for n, p in model.named_parameters() if p.requires_grad} == {
        "lora_A",
        "lora_B",
    }
    other = transformers.LlamaForCausalLM(tiny_config("llama"))
    with pytest.raises(ConfigError, match="layer_replication"):
        library.inject_adapter_in_model(library.LoraConfig(layer_replication=[[0, 1]]), other)
    assert type(other) is transformers.LlamaForCausalLM


def test_what_is_not_trained_is_cast_to_half_precision():
    model = adapted()
    library.cast_mixed_precision_params(model, torch.bfloat16)
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}


def test_adapters_are_swapped_by_peft_s_functions(tmp_path):
    other = adapted(3, r=2)
    other.save_pretrained(tmp_path)
    model = adapted(1)
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    hotswap_adapter(model, tmp_path, adapter_name="default")
    inputs = tiny_inputs("llama")
    torch.testing.assert_close(model(**inputs)[0], other(**inputs)[0], rtol=1e-5, atol=1e-6)


def test_the_optimizer_of_loraplus_is_at_peft_s_path():
    optimizer = create_loraplus_optimizer(
        adapted(), torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=4.0
    )
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3, 4e-3}


def seq2seq(folder: Any, **options: Any) -> Any:
    return transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, **options)


def test_no_feed_forward_module_is_a_choice(tmp_path):
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(tiny_config("t5")).save_pretrained(tmp_path / "base")
    config = library.IA3Config(task_type="SEQ_2_SEQ_LM", feedforward_modules=[])
    model = library.get_peft_model(seq2seq(tmp_path / "base"), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "a")
    read = peft.PeftModel.from_pretrained(seq2seq(tmp_path / "base"), str(tmp_path / "a"))
    inputs = tiny_inputs("t5")
    torch.testing.assert_close(read.eval()(**inputs)[0], model.eval()(**inputs)[0], **EXACT)


def test_t5_in_8_bits_is_saved(tmp_path):
    pytest.importorskip("bitsandbytes")
    transformers.T5ForConditionalGeneration(tiny_config("t5")).save_pretrained(tmp_path / "base")
    packed = transformers.BitsAndBytesConfig(load_in_8bit=True)
    base = seq2seq(tmp_path / "base", quantization_config=packed)
    config = library.LoraConfig(r=4, target_modules=["q", "v"], task_type="SEQ_2_SEQ_LM")
    model = library.get_peft_model(base, config)
    model.save_pretrained(tmp_path / "a")
    keys = library.load_peft_weights(tmp_path / "a")
    assert keys.keys() == library.get_peft_model_state_dict(model).keys()
    assert all(".lora_" in key for key in keys)
