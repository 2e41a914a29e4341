"""One adapter of the table of tokens and of the output layers with its weight."""

from __future__ import annotations

import copy
import json
import warnings

import peft
import pytest
import torch
from families import tiny_config
from peft_world import CONFIG, QUIET, TENSORS, built, inputs_of, logits
from safetensors.torch import load_file
from snapshots import refused, stir

import adapterzoo
import adapterzoo.peft
from adapterzoo import LoRAConfig
from adapterzoo.errors import CheckpointError, ConfigError, StateError

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True."),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to"),
    pytest.mark.filterwarnings("ignore:You have requested .ensure_weight_tying."),
]

# class → family, names of the table, of the output layer and of a layer in the blocks
CLASSES = {
    "LlamaForCausalLM": ("llama", "embed_tokens", "lm_head", "q_proj"),
    "GPT2LMHeadModel": ("gpt2", "wte", "lm_head", "c_attn"),
    "BertForMaskedLM": ("bert", "word_embeddings", "decoder", "query"),
    "T5ForConditionalGeneration": ("t5", "encoder.embed_tokens", "lm_head", "q"),
}
NEAR = {"rtol": 0, "atol": 1e-9}


def made(architecture: str, tied: bool = True):
    """A tiny model of a class, of the same weights each time."""
    config = tiny_config(CLASSES[architecture][0])
    config.tie_word_embeddings = tied
    return built(architecture, config)


def fields(architecture: str, case: str):
    """The config of a case: which of the layers are named, and where."""
    _, table, output, inner = CLASSES[architecture]
    names = {"table": [table], "output": [output], "both": [table, output]}[case.split()[-1]]
    if case.startswith("copy"):
        return {"target_modules": [inner], "modules_to_save": names}
    return {"target_modules": [inner, *names]}


def with_one(architecture: str, case: str):
    model = adapterzoo.init(made(architecture)).double()
    config = LoRAConfig(r=3, alpha=6, ensure_weight_tying=True, **fields(architecture, case))
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    return model


CASES = ["table", "output", "both", "copy of table", "copy of output"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", CLASSES)
def test_the_model_is_that_with_another_table(architecture, case, tmp_path):
    family, _, _, inner = CLASSES[architecture]
    model = with_one(architecture, case)
    expected = made(architecture).double()
    inside = expected.get_input_embeddings().weight
    with torch.no_grad():
        for path, module in model.adapter_modules("a"):
            if path.endswith(inner):
                merged = 2 * module.lora_B @ module.lora_A
                layer = expected.base_model.get_submodule(path)
                is_wide = type(layer).__name__ == "Conv1D"
                layer.weight += merged.T if is_wide else merged
            elif case.startswith("copy"):
                inside.copy_(module.layer.weight)
            elif path.rpartition(".")[2] != "embed_tokens" or family != "t5":
                # all modules with the table share this one
                inside += 2 * (module.lora_B @ module.lora_A).T
    inputs = inputs_of(family)
    with torch.no_grad():
        found, plain = model(**inputs).logits, expected(**inputs).logits
    torch.testing.assert_close(found, plain, **NEAR)

    model.save_adapter(tmp_path, "a")
    again = adapterzoo.init(made(architecture)).double()
    again.load_adapter(tmp_path, load_as="b", set_active=True)
    torch.testing.assert_close(again(**inputs).logits, found, **NEAR)
    torch.testing.assert_close(copy.deepcopy(again)(**inputs).logits, found, **NEAR)
    names = ["b", None]
    mixed = again(**inputs, adapter_names=names).logits
    torch.testing.assert_close(mixed[0], found[0], **NEAR)
    again.set_active_adapters(None)
    torch.testing.assert_close(mixed[1], again(**inputs).logits[1], **NEAR)

    again.merge_adapter("b")
    torch.testing.assert_close(again(**inputs).logits, found, **NEAR)
    again.reset_adapter()
    torch.testing.assert_close(again(**inputs).logits[1], mixed[1], **NEAR)
    whole = model.merge_and_unload()
    torch.testing.assert_close(whole(**inputs).logits, found, **NEAR)
    assert whole.get_output_embeddings().weight is whole.get_input_embeddings().weight


def test_its_gradient_is_that_of_both_layers():
    # Llama's norms compute in float32
    model = with_one("GPT2LMHeadModel", "table")
    inputs = inputs_of("gpt2")
    model.train_adapter("a")
    model.eval()
    model(**inputs).logits.square().mean().backward()
    own = dict(model.adapter_modules("a"))["wte"]
    named = [n for n, p in model.named_parameters() if p.requires_grad and "c_attn" not in n]
    assert len(named) == 2
    step, slope = 1e-6, []
    with torch.no_grad():
        direction = torch.randn_like(own.lora_A)
        for sign in (1, -1):
            own.lora_A += sign * step * direction
            slope.append(model(**inputs).logits.square().mean())
            own.lora_A -= sign * step * direction
    found = (slope[0] - slope[1]) / (2 * step)
    torch.testing.assert_close(found, (own.lora_A.grad * direction).sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_files_are_those_of_peft(architecture, case, tmp_path):
    """PEFT itself ties nothing where only a table of another name than its list has is named."""
    family = CLASSES[architecture][0]
    config = peft.LoraConfig(r=3, ensure_weight_tying=True, **fields(architecture, case))
    theirs = peft.get_peft_model(made(architecture), config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter) / 5
    expected = logits(theirs, family, None)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    mine = adapterzoo.peft.PeftModel.from_pretrained(made(architecture), tmp_path / "theirs")
    near = {"rtol": 0, "atol": 2e-5}
    torch.testing.assert_close(logits(mine.eval(), family, None), expected, **near)
    mine.save_pretrained(tmp_path / "mine", save_embedding_layers=False)
    keys = [{*load_file(tmp_path / each / TENSORS)} for each in ("mine", "theirs")]
    assert keys[0] == keys[1]
    again = peft.PeftModel.from_pretrained(made(architecture), tmp_path / "mine").eval()
    torch.testing.assert_close(logits(again, family, None), expected, **near)


def test_peft_s_own_flag_makes_it(tmp_path):
    for lib in (peft, adapterzoo.peft):
        config = lib.LoraConfig(target_modules=["lm_head", "q_proj"], ensure_weight_tying=True)
        lib.get_peft_model(made("LlamaForCausalLM"), config).save_pretrained(tmp_path)
        found = json.loads((tmp_path / CONFIG).read_text())
        assert found["ensure_weight_tying"] is True
        assert any("embed_tokens" in key for key in load_file(tmp_path / TENSORS))


def test_heads_with_names_that_are_tied_follow_the_table(tmp_path):
    made("LlamaForCausalLM").save_pretrained(tmp_path / "base")
    model = adapterzoo.AutoAdapterModel.from_pretrained(tmp_path / "base").eval()
    config = LoRAConfig(r=3, target_modules=["embed_tokens"], ensure_weight_tying=True)
    model.add_adapter("a", config, set_active=True)
    assert model.active_head == "default"
    stir(model, "a")
    own = dict(model.adapter_modules("a"))["embed_tokens"]
    inputs = inputs_of("llama")
    with torch.no_grad():
        found = model(**inputs).logits
        plain = made("LlamaForCausalLM")
        plain.get_input_embeddings().weight += own.scaling * (own.lora_B @ own.lora_A).T
        torch.testing.assert_close(found, plain(**inputs).logits, rtol=0, atol=1e-5)
    with refused(model, CheckpointError, "has named heads", "native"):
        model.save_adapter(tmp_path / "x", "a", format="peft")


def test_what_is_not_tied_is_said():
    model = adapterzoo.init(made("LlamaForCausalLM", tied=False))
    tied = {"ensure_weight_tying": True}
    with pytest.warns(UserWarning, match="no layer is tied to the table"):
        model.add_adapter("a", LoRAConfig(target_modules=["embed_tokens", "lm_head"], **tied))
    assert {path for path, _ in model.adapter_modules("a")} == {"embed_tokens", "..lm_head"}
    model = adapterzoo.init(made("LlamaForCausalLM"))
    with pytest.warns(UserWarning, match="is adapted"):
        model.add_adapter("a", LoRAConfig(target_modules=["q_proj"], **tied))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.add_adapter("b", LoRAConfig(trainable_token_indices=[1], **tied))


def test_what_cannot_be_tied_is_refused():
    config = adapterzoo.peft.LoraConfig(
        target_modules=["lm_head"], use_dora=True, ensure_weight_tying=True
    )
    with pytest.raises(ConfigError, match="ensure_weight_tying"):
        adapterzoo.peft.get_peft_model(made("LlamaForCausalLM"), config)
    model = with_one("LlamaForCausalLM", "output").float()
    with refused(model, StateError, "'a'", "delete_adapter"):
        model.resize_token_embeddings(120)
    copied = with_one("LlamaForCausalLM", "copy of table").float()
    copied.resize_token_embeddings(120)
    assert copied(**inputs_of("llama")).logits.shape[-1] == 120
