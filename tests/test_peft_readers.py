"""Methods of PEFT that load as another method here: AdaLoRA, p-tuning, CPT and cartridges."""

from __future__ import annotations

import logging

import peft
import pytest
import torch
from families import tiny_inputs
from peft_world import CONFIG, QUIET, TENSORS, change, logits, ours, plain, reloaded
from safetensors.torch import load_file, save_file
from snapshots import refused

import adapterzoo
from adapterzoo import LoRAConfig, PrefixTuningConfig, PromptTuningConfig
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
# PEFT says this of each AdaLoRA, for which the keys are of tensors
pytestmark.append(pytest.mark.filterwarnings("ignore:The following rank_pattern keys"))

LAYERS = {
    "bert": {"target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"},
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    "llama": {"target_modules": ["q_proj", "down_proj"]},
    "t5": {"target_modules": ["q", "wo"]},
    "vit": {"target_modules": ["q_proj", "fc1"]},
    "qwen3": {"target_modules": ["q_proj", "k_proj"]},
    "qwen3_moe": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
}
TASKS = {
    "bert": "SEQ_CLS",
    "gpt2": "CAUSAL_LM",
    "llama": "CAUSAL_LM",
    "qwen3": "CAUSAL_LM",
    "qwen3_moe": "CAUSAL_LM",
    "t5": "SEQ_2_SEQ_LM",
}
# the products that PEFT computes in each call are rounded to float32 once
NEAR = 1e-5


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


def stirred(family, config, std=0.3):
    """The model of PEFT with random values in all that it trains, in float32."""
    model = peft.get_peft_model(plain(family), config)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=source) * std)
    return model.eval()


def loaded(family, folder, caplog, word):
    """The model with the folder's adapter; the log says what became of it."""
    model = ours(family)
    with caplog.at_level(logging.WARNING, "adapterzoo"):
        model.load_adapter(folder, load_as="a", set_active=True)
    assert word in caplog.text
    return model


def adalora(family, **fields):
    given = {"init_r": 4, "target_r": 2, "total_step": 10, "lora_alpha": 6, "lora_dropout": 0.25}
    return stirred(family, peft.AdaLoraConfig(**given | LAYERS[family] | fields))


@pytest.mark.parametrize("family", LAYERS)
def test_adalora_becomes_a_lora(family, tmp_path, caplog):
    theirs = adalora(family)
    expected = logits(theirs, family)
    theirs.save_pretrained(tmp_path / "theirs")
    model = loaded(family, tmp_path / "theirs", caplog, "ADALORA adapter of PEFT becomes a LoRA")
    config = model.adapters_config["a"]
    assert isinstance(config, LoRAConfig)
    assert (config.r, config.dropout, config.rank_pattern) == (4, 0.25, {})
    assert config.scaling_at("x") == pytest.approx(6 / 4.00001, rel=1e-15)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-2
    close(logits(model, family), expected, NEAR)
    # and PEFT's LoRA from there on
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=family == "bert")
    close(reloaded(family, tmp_path / "back"), logits(model, family))


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "left out"])
def test_pruned_ranks_of_adalora_are_gone(masked, tmp_path, caplog):
    theirs = adalora("bert")
    pattern, names = {}, []
    for number, (name, module) in enumerate(theirs.base_model.model.named_modules()):
        if not hasattr(module, "lora_E"):
            continue
        # four, three, … ranks are left, and at last none
        kept = [i >= len(names) for i in range(4)]
        names.append(name)
        pattern[f"{name}.lora_E.default"] = kept
        with torch.no_grad():
            module.lora_E["default"].mul_(torch.tensor(kept)[:, None])
        assert number
    assert [sum(kept) for kept in pattern.values()][:5] == [4, 3, 2, 1, 0]
    expected = logits(theirs, "bert")
    if not masked:
        theirs.peft_config["default"].rank_pattern = pattern
    theirs.save_pretrained(tmp_path)
    assert any(not t.numel() for t in load_file(tmp_path / TENSORS).values()) is not masked
    if not masked:
        # PEFT itself divides by the rank before pruning
        close(reloaded("bert", tmp_path), expected)
    model = loaded("bert", tmp_path, caplog, "becomes a LoRA")
    close(logits(model, "bert"), expected, NEAR)
    config = model.adapters_config["a"]
    found = [config.rank_at(name.removeprefix("bert.")) for name in names[:5]]
    assert found == ([4] * 5 if masked else [4, 3, 2, 1, 1])


def test_an_alpha_of_zero_is_the_rank(tmp_path, caplog):
    theirs = adalora("llama", lora_alpha=0)
    expected = logits(theirs, "llama")
    theirs.save_pretrained(tmp_path)
    close(logits(loaded("llama", tmp_path, caplog, "LoRA"), "llama"), expected, NEAR)


def test_adalora_with_tensors_that_do_not_fit_is_refused(tmp_path):
    adalora("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    key = next(key for key in tensors if key.endswith("lora_E"))
    save_file(tensors | {key: torch.ones(3, 1)}, tmp_path / TENSORS)
    model = ours("llama")
    with refused(model, CheckpointError, "load_adapter(", "lora_E [3, 1]"):
        model.load_adapter(tmp_path, load_as="a")
    del tensors[key]
    save_file(tensors, tmp_path / TENSORS)
    with refused(model, CheckpointError, "load_adapter(", "do not fit together: lora_A"):
        model.load_adapter(tmp_path, load_as="a")


# --- prompts ---


def prompt_of(kind, family):
    task = {"task_type": TASKS[family]}
    if kind == "CPT":
        masks = {"cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]}
        return peft.CPTConfig(**task, cpt_token_ids=[3, 5, 8, 9], **masks)
    encoder = {"encoder_reparameterization_type": kind, "encoder_hidden_size": 12}
    return peft.PromptEncoderConfig(**task, num_virtual_tokens=4, **encoder)


PROMPTS = [(family, kind) for family in TASKS for kind in ("MLP", "LSTM")]
PROMPTS += [(family, "CPT") for family in TASKS if TASKS[family] == "CAUSAL_LM"]


def real(found, family):
    """The logits without those of padding, which is the model's own affair."""
    return found[:-1] if TASKS[family] == "CAUSAL_LM" else found


@pytest.mark.parametrize(("family", "kind"), PROMPTS)
def test_a_prompt_loads_as_a_prompt(family, kind, tmp_path, caplog):
    theirs = stirred(family, prompt_of(kind, family))
    theirs.save_pretrained(tmp_path / "theirs")
    expected = theirs_of(family, tmp_path / "theirs")
    word = "CPT" if kind == "CPT" else "P_TUNING"
    model = loaded(family, tmp_path / "theirs", caplog, f"{word} adapter of PEFT becomes a prompt")
    config = model.adapters_config["a"]
    assert isinstance(config, PromptTuningConfig)
    assert (config.prompt_length, config.joins) == (4, "inputs")
    found = logits(model, family)
    assert found.shape == expected.shape
    close(real(found, family), real(expected, family))
    without = logits(plain(family), family)
    tail = found[:, -without.shape[1] :] if found.dim() == 3 else found
    assert (tail - without).abs().max() > 1e-3
    # and PEFT's prompt tuning from there on
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=family == "bert")
    close(real(theirs_of(family, tmp_path / "back"), family), real(found, family))


def theirs_of(family, folder):
    model = peft.PeftModel.from_pretrained(plain(family), folder)
    if TASKS[family] != "CAUSAL_LM":
        return logits(model, family)
    # CPT pops labels that are not there
    with torch.no_grad():
        return model.double().eval()(**tiny_inputs(family), labels=None).logits


# --- cartridges ---


@pytest.mark.parametrize("frozen", [0, 2])
@pytest.mark.parametrize("family", [f for f in TASKS if TASKS[f] == "CAUSAL_LM"])
def test_a_cartridge_loads_as_a_prefix(family, frozen, tmp_path, caplog):
    fields = {"num_virtual_tokens": 3, "num_frozen_tokens": frozen}
    theirs = stirred(family, peft.CartridgeConfig(task_type="CAUSAL_LM", **fields))
    expected = logits(theirs, family)
    theirs.save_pretrained(tmp_path / "theirs")
    model = loaded(family, tmp_path / "theirs", caplog, "CARTRIDGE adapter of PEFT becomes a pre")
    config = model.adapters_config["a"]
    assert isinstance(config, PrefixTuningConfig)
    assert (config.prefix_length, config.flat, config.positions) == (3, True, "shifted")
    close(logits(model, family), expected)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-2
    # and PEFT's prefix tuning from there on
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=False)
    close(reloaded(family, tmp_path / "back"), expected)


# --- they are only read ---


def test_what_is_only_read_is_listed_as_readable_and_not_as_writable(tmp_path):
    adalora("llama").save_pretrained(tmp_path)
    assert (tmp_path / CONFIG).is_file()
    change(tmp_path, peft_type="NOTHING")
    with pytest.raises(CheckpointError) as caught:
        ours("llama").load_adapter(tmp_path, load_as="a")
    for name in ("ADALORA", "P_TUNING", "CPT", "CARTRIDGE"):
        assert name in str(caught.value)
    model = ours("llama")
    model.add_adapter("a", "seq_bn")
    with pytest.raises(adapterzoo.AdapterZooError, match=r"PEFT has") as caught:
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    assert "ADALORA" not in str(caught.value).upper()
