"""VeRA of PEFT, with its random projections in the file or drawn again from their seed."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from peft_world import CONFIG, QUIET, TENSORS, change, logits, ours, plain, reloaded, trained
from safetensors.torch import load_file, save_file
from snapshots import refused, same_bits, stir

import adapterzoo
from adapterzoo import VeraConfig
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
pytestmark += [
    pytest.mark.filterwarnings(f"ignore:Specified to not {verb} vera_A")
    for verb in ("save", "load")
]

SHARED = {"base_model.vera_A", "base_model.vera_B"}
# layers of several widths
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"},
    "gpt2": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
    "llama": {"target_modules": "all-linear"},
    "t5": {"target_modules": ["q", "wo"]},
    "vit": {"target_modules": ["q_proj", "fc1"]},
    "qwen3": {"target_modules": ["q_proj", "k_proj", "down_proj"]},
    "qwen3_moe": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
}


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


def theirs(family, folder, **fields):
    config = peft.VeraConfig(**FAMILIES[family], r=6, projection_prng_key=7, **fields)
    return trained(family, config, folder, std=0.3)


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "drawn again"])
@pytest.mark.parametrize("family", FAMILIES)
def test_projections_come_and_go_as_they_are(family, saved, tmp_path):
    expected = theirs(family, tmp_path / "theirs", save_projection=saved)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-2
    model = ours(family)
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    assert model.adapters_config["a"].save_projection is saved
    close(logits(model, family), expected)
    model.save_adapter(tmp_path / "back", "a", format="peft", with_head=family == "bert")
    before, after = (load_file(tmp_path / f / TENSORS) for f in ("theirs", "back"))
    assert sorted(before) == sorted(after)
    assert {*before} >= SHARED if saved else not SHARED & {*before}
    assert all(same_bits(before[key], after[key]) for key in before)
    said = json.loads((tmp_path / "back" / CONFIG).read_text())
    assert (said["save_projection"], said["projection_prng_key"]) == (saved, 7)
    close(reloaded(family, tmp_path / "back"), expected)
    # our own format always holds them
    model.save_adapter(tmp_path / "own", "a")
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), expected)


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "drawn again"])
@pytest.mark.parametrize("config", ["vera[r=5]", "vera[r=5,output_lora=True,init_weights_seed=3]"])
def test_peft_loads_ours_and_agrees(config, saved, tmp_path):
    model = ours("llama")
    model.add_adapter("a", f"{config[:-1]},save_projection={saved}]")
    stir(model, "a", std=0.3)
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", format="peft")
    assert len(SHARED & {*load_file(tmp_path / TENSORS)}) == 2 * saved
    expected = logits(model, "llama")
    assert (expected - logits(plain("llama"), "llama")).abs().max() > 1e-2
    close(reloaded("llama", tmp_path), expected)
    other = ours("llama")
    other.load_adapter(tmp_path, load_as="b", set_active=True)
    close(logits(other, "llama"), expected)


@pytest.mark.parametrize("autocast", [True, False])
def test_projections_over_half_precision_are_those_of_peft(autocast, tmp_path):
    fields = {**FAMILIES["llama"], "r": 6, "save_projection": False}
    base = plain("llama").to(torch.bfloat16)
    made = peft.get_peft_model(base, peft.VeraConfig(**fields), autocast_adapter_dtype=autocast)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lambda_b" in name:
                parameter.fill_(0.5)
    made.save_pretrained(tmp_path)
    model = plain("llama").to(torch.bfloat16)
    adapterzoo.init(model)
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    kind = torch.float32 if autocast else torch.bfloat16
    drawn = model.base_model.shared_parameters["a"]
    projected = made.base_model.vera_A["default"], made.base_model.vera_B["default"]
    for own, other in zip((drawn.lora_A, drawn.lora_B), projected, strict=True):
        assert own.dtype is kind
        assert same_bits(own, other)
    # and back, also of a new one
    for name in ("a", "b"):
        if name == "b":
            dtype = "float32" if autocast else None
            model.add_adapter("b", VeraConfig(r=6, save_projection=False, dtype=dtype))
            stir(model, "b", std=0.3)
        model.set_active_adapters(name)
        model.save_adapter(tmp_path / name, name, format="peft")
        assert not SHARED & {*load_file(tmp_path / name / TENSORS)}
        other = peft.PeftModel.from_pretrained(
            plain("llama").to(torch.bfloat16), tmp_path / name, autocast_adapter_dtype=autocast
        )
        close(logits(other, "llama"), logits(model, "llama"))


def test_the_caller_s_default_dtype_does_not_change_the_numbers(tmp_path):
    expected = theirs("llama", tmp_path, save_projection=False)
    model = ours("llama")
    torch.set_default_dtype(torch.float64)
    try:
        model.load_adapter(tmp_path, load_as="a", set_active=True)
    finally:
        torch.set_default_dtype(torch.float32)
    close(logits(model, "llama"), expected)


# --- what does not fit ---


def test_projections_that_cannot_be_drawn_again_are_not_left_out(tmp_path):
    model = ours("bert")
    model.add_adapter("a", VeraConfig(r=4, output_lora=True, save_projection=False))
    model.save_adapter(tmp_path / "whole", "a", format="peft")
    # the widest layers are gone, and PEFT would draw smaller matrices, with other numbers
    with torch.no_grad():
        model.base_model.shared_parameters["a"].lora_A[0, 0] += 1
    with refused(model, CheckpointError, "save_adapter(", "other A and B", "save_projection=True"):
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    assert not (tmp_path / "peft").exists()


def test_projections_wider_than_peft_would_draw_are_not_left_out(tmp_path):
    theirs("bert", tmp_path / "theirs", save_projection=False)
    model = ours("bert")
    # without the block whose layers are wider
    model.load_adapter(tmp_path / "theirs", load_as="a")
    config = model.adapters_config["a"].replace(target_modules=["query"])
    model.add_adapter("b", config)
    model.save_adapter(tmp_path / "b", "b", format="peft")
    model.base_model.shared_parameters["b"] = model.base_model.shared_parameters["a"]
    with refused(model, CheckpointError, "save_adapter(", "other A and B", "save_projection=True"):
        model.save_adapter(tmp_path / "peft", "b", format="peft")


@pytest.mark.parametrize("lost", [("vera_A",), ("vera_A", "vera_B")])
def test_a_file_that_has_lost_its_projections_is_refused(lost, tmp_path):
    theirs("bert", tmp_path, save_projection=True)
    tensors = load_file(tmp_path / TENSORS)
    save_file({k: t for k, t in tensors.items() if not k.endswith(lost)}, tmp_path / TENSORS)
    says = ("vera_A or vera_B", "'save_projection': false", "prng_key")
    model = ours("bert")
    with refused(model, CheckpointError, "load_adapter(", *says):
        model.load_adapter(tmp_path, load_as="a")
    if len(lost) == 2:
        change(tmp_path, save_projection=False)
        model.load_adapter(tmp_path, load_as="a", set_active=True)
        drawn = model.base_model.shared_parameters["a"]
        assert same_bits(drawn.lora_A, tensors["base_model.vera_A"])
        assert same_bits(drawn.lora_B, tensors["base_model.vera_B"])


def test_projections_in_a_file_that_need_not_hold_them_are_used(tmp_path):
    expected = theirs("bert", tmp_path, save_projection=True)
    change(tmp_path, save_projection=False, projection_prng_key=8)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    close(logits(model, "bert"), expected)
