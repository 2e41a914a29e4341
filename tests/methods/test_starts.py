"""Initial values of LoRA that PEFT takes from the base weight, beside PEFT itself."""

from __future__ import annotations

import copy

import peft
import peft_world
import pytest
import torch
from families import tiny_inputs
from peft_world import logits
from snapshots import refused

import adapterzoo
from adapterzoo import LoRAConfig
from adapterzoo.errors import ConfigError
from adapterzoo.methods.low_rank.starts import factors

pytestmark = [pytest.mark.filterwarnings(each) for each in peft_world.QUIET]
TARGETS = {
    "bert": ["query", "dense"],
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "down_proj"],
    "t5": ["q", "wo"],
}
# PEFT's OLoRA cannot be added to a transposed layer
BOTH = [(f, s) for f in TARGETS for s in ("pissa", "olora") if (f, s) != ("gpt2", "olora")]


def theirs(family, start, **more):
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=TARGETS[family], init_lora_weights=start,
        fan_in_fan_out=family == "gpt2", **more,
    )  # fmt: skip
    return peft.get_peft_model(peft_world.plain(family), config).eval()


def ours(family, start, **more):
    model = peft_world.ours(family)
    config = LoRAConfig(
        r=4, alpha=6, target_modules=TARGETS[family], init_weights=start, init_weights_seed=1,
        **more,
    )  # fmt: skip
    model.add_adapter("a", config, set_active=True)
    model.train_adapter("a")
    return model.eval()


def outputs(model, family):
    inputs = tiny_inputs(family)
    return model(**inputs).logits


def moved(model):
    """Trained, as it were: every trainable parameter is another one."""
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=source)
                parameter.add_(0.1 * noise.to(parameter))
    return model


def gradients(model, marks):
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and "lora_" in name:
            for mark in (*marks, ".weight", "base_model.model."):
                name = name.replace(mark, "")
            found[name] = parameter.grad
    return found


@pytest.mark.parametrize(("family", "start"), BOTH)
def test_the_first_step_is_pefts(family, start):
    own, other = ours(family, start), theirs(family, start)
    expected, found = outputs(other, family), outputs(own, family)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for each in (expected, found):
        each.square().mean().backward()
    mine, yours = gradients(own, [".loras.a"]), gradients(other, [".default"])
    assert mine.keys() == yours.keys()
    assert mine
    for name, gradient in mine.items():
        # singular vectors have no sign
        largest = yours[name].abs().max()
        torch.testing.assert_close(
            gradient.abs(), yours[name].abs(), rtol=0, atol=float(1e-3 * largest)
        )


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "orthogonal", "gaussian"])
def test_the_base_keeps_its_bits_and_the_output_its_values(start):
    before = peft_world.plain("llama").state_dict()
    model = ours("llama", start)
    expected = logits(peft_world.plain("llama"), "llama")
    # the product of orthogonal factors is zero as far as they are orthogonal in float32
    near = 1e-5 if start == "orthogonal" else 1e-9
    torch.testing.assert_close(logits(model, "llama"), expected, rtol=near, atol=near)
    model.delete_adapter("a")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "orthogonal"])
@pytest.mark.parametrize("rslora", [False, True])
def test_files_hold_an_equal_adapter(start, rslora, tmp_path):
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"q_proj": 3}}
    model = moved(ours("llama", start, use_rslora=rslora, **patterns))
    expected = logits(model, "llama")
    for name in ("native", "peft"):
        model.save_adapter(tmp_path / name, "a", format=name)
        other = peft_world.ours("llama")
        other.load_adapter(tmp_path / name, load_as="b", set_active=True)
        torch.testing.assert_close(logits(other, "llama"), expected, rtol=1e-9, atol=1e-9)
    # the native one goes on training as before, PEFT's has twice the rank
    again = peft_world.ours("llama")
    again.load_adapter(tmp_path / "native", load_as="b")
    assert again.adapters_config.get("b").init_weights == start
    read = peft.PeftModel.from_pretrained(peft_world.plain("llama"), tmp_path / "peft")
    torch.testing.assert_close(logits(read, "llama"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "start"), BOTH)
def test_a_file_of_peft_that_changed_its_base_loads(family, start, tmp_path):
    other = moved(theirs(family, start))
    expected = outputs(other, family).detach()
    other.save_pretrained(tmp_path)
    model = peft_world.ours(family)
    # what is merged at the moment is not a part of the weight
    model.add_adapter("merged", LoRAConfig(target_modules=TARGETS[family], init_weights="bert"))
    model.merge_adapter("merged")
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    model.reset_adapter()
    torch.testing.assert_close(outputs(model, family), expected, rtol=1e-4, atol=1e-4)


def test_the_start_is_merged_averaged_and_copied_with_its_adapter():
    model = moved(ours("llama", "pissa")).double()
    expected = outputs(model, "llama").detach()
    model.average_adapter("mean", ["a", "a"], [0.5, 0.5])
    model.set_active_adapters("mean")
    torch.testing.assert_close(outputs(model, "llama"), expected, rtol=1e-9, atol=1e-9)
    assert model.adapters_config.get("mean").r == 8
    model.set_active_adapters("a")
    same = copy.deepcopy(model)
    torch.testing.assert_close(outputs(same, "llama"), expected, rtol=0, atol=0)
    model.merge_adapter("a")
    torch.testing.assert_close(outputs(model, "llama"), expected, rtol=1e-9, atol=1e-9)


def test_each_row_has_the_start_of_its_adapter():
    model = moved(ours("llama", "pissa"))
    model.add_adapter("b", LoRAConfig(r=4, target_modules=TARGETS["llama"], init_weights="bert"))
    inputs = tiny_inputs("llama")
    rows = len(inputs["input_ids"])
    names = ["a" if row % 2 else "b" for row in range(rows)]
    mixed = model(**inputs, adapter_names=names).logits
    for row, name in enumerate(names):
        model.set_active_adapters(name)
        alone = model(**inputs).logits[row]
        torch.testing.assert_close(mixed[row], alone, rtol=1e-4, atol=1e-5)


def test_only_what_is_trained_drops_features():
    # PEFT's base has lost the start, so dropout does not reach it
    own, other = ours("llama", "pissa", dropout=0.999), theirs("llama", "pissa", lora_dropout=0.999)
    plain = outputs(peft_world.plain("llama"), "llama")
    torch.manual_seed(0)
    found, expected = outputs(own.train(), "llama"), outputs(other.train(), "llama")
    assert (found - plain).abs().max() > 0.1 * (expected - plain).abs().max() > 0


def test_factors_in_float64():
    w = torch.randn(9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, values, vh = torch.linalg.svd(w)
    a, b = factors("pissa", w, 3, 0.5, None)
    expected = u[:, :3] @ values[:3].diag() @ vh[:3]
    torch.testing.assert_close(0.5 * (b @ a), expected)
    torch.testing.assert_close(a @ a.T, b.T @ b)
    a, b = factors("pissa_niter_200", w, 3, 0.5, torch.Generator().manual_seed(1))
    torch.testing.assert_close(0.5 * (b @ a), expected)
    a, b = factors("olora", w, 3, 0.5, None)
    q, r = torch.linalg.qr(w)
    torch.testing.assert_close(b @ a, q[:, :3] @ r[:3])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"r": 33}, ("rank 33", "r=32")),
        ({"alpha": 0}, ("scaling above 0", "alpha=8")),
        ({"target_modules": ["embed_tokens"]}, ("embed_tokens", "init_weights='lora'")),
        ({"init_weights": "orthogonal", "r": 3}, ("odd", "r=4")),
        ({"init_weights": "pissa_niter_0"}, ("'pissa_niter_0'", "pissa_niter_4")),
    ],
)
def test_refused(config, words):
    model = peft_world.ours("llama")
    with refused(model, ConfigError, *words):
        asked = {"target_modules": ["q_proj"], "init_weights": "pissa", **config}
        model.add_adapter("a", LoRAConfig(**asked))
    assert adapterzoo.LoRAConfig(init_weights="pissa").init_weights == "pissa"
