"""LoHa and LoKr of PEFT: its files give its own outputs here, and it loads ours and agrees."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from peft.tuners.lokr.layer import factorization
from peft_world import CONFIG, QUIET, TENSORS, change, logits, ours, plain, reloaded, trained
from safetensors.torch import load_file, save_file
from snapshots import refused, same_bits, stir

from adapterzoo import ConfigUnion, LoHaConfig, LoKrConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.methods.lycoris.lokr import divided

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

# PEFT has neither of them for Conv1D
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"target_modules": ["query", "output.dense"], "task_type": "SEQ_CLS"},
    "llama": {"target_modules": "all-linear"},
    "t5": {"target_modules": ["q", "wo"]},
    "vit": {"target_modules": ["q_proj", "fc1"]},
    "qwen3": {"target_modules": ["q_proj", "k_proj", "down_proj"]},
    "qwen3_moe": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
}
# LoHa's s is exact in float32, to which PEFT rounds it
PATTERNS = {
    "rank_pattern": {"layer.0.attention.self.query": 2, "output.dense": 4},
    "alpha_pattern": {r"layer\.\d+\.attention\.output\.dense": 3, "query": 0.5},
}
KINDS: dict[str, tuple[type[peft.PeftConfig], dict[str, Any]]] = {
    "loha": (peft.LoHaConfig, {"r": 4, "alpha": 6}),
    "loha dense": (peft.LoHaConfig, {"r": 8, "alpha": 5, "rank_dropout": 0.25}),
    "lokr": (peft.LoKrConfig, {"r": 2, "alpha": 3, "module_dropout": 0.5}),
    "lokr both": (peft.LoKrConfig, {"r": 1, "decompose_both": True, "rank_dropout_scale": True}),
    "lokr whole": (peft.LoKrConfig, {"r": 32, "init_weights": "lycoris"}),
    "lokr of 2": (peft.LoKrConfig, {"r": 3, "decompose_factor": 2, "init_weights": False}),
    # it divides no width
    "lokr up to 5": (peft.LoKrConfig, {"r": 3, "decompose_factor": 5}),
}
CASES = [("bert", kind) for kind in KINDS]
CASES += [(family, kind) for family in FAMILIES if family != "bert" for kind in ("loha", "lokr")]


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


def there_and_back(family, expected, folder):
    """Load PEFT's folder, compare, write both formats, and compare again; the model."""
    model = ours(family)
    model.load_adapter(folder / "theirs", load_as="a", set_active=True)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-3
    close(logits(model, family), expected)
    model.save_adapter(folder / "back", "a", format="peft")
    theirs, mine = (load_file(folder / f / TENSORS) for f in ("theirs", "back"))
    assert all(same_bits(tensor, mine[key]) for key, tensor in theirs.items())
    close(reloaded(family, folder / "back"), expected)
    model.save_adapter(folder / "own", "a")
    other = ours(family)
    other.load_adapter(folder / "own", set_active=True)
    close(logits(other, family), expected)
    return model


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_what_peft_trains_loads_and_goes_back(family, kind, tmp_path):
    cls, fields = KINDS[kind]
    expected = trained(family, cls(**fields, **FAMILIES[family]), tmp_path / "theirs", std=0.3)
    model = there_and_back(family, expected, tmp_path)
    config = model.adapters_config["a"]
    for name, value in fields.items():
        if name != "init_weights":
            assert config[name] == value, name


@pytest.mark.parametrize("cls", [peft.LoHaConfig, peft.LoKrConfig])
def test_ranks_and_alphas_of_layers_are_those_of_the_patterns(cls, tmp_path):
    config = cls(**FAMILIES["bert"], **PATTERNS)
    expected = trained("bert", config, tmp_path / "theirs", std=0.3)
    there_and_back("bert", expected, tmp_path)


def test_peft_divides_widths_as_we_do():
    for width in range(1, 200):
        for factor in (-1, *range(1, 20), width):
            assert divided(width, factor) == factorization(width, factor), (width, factor)


# --- ours in PEFT ---

EXPORTS = {
    "loha": LoHaConfig(r=4, alpha=5),
    "loha all": LoHaConfig(target_modules="all-linear", r=2, rank_pattern={r".*\.0\..*": 4}),
    "loha qv": LoHaConfig(r=2, alpha=3, output_lora=True),
    "lokr": LoKrConfig(r=2, alpha=5),
    "lokr all": LoKrConfig(target_modules="all-linear", r=2, alpha_pattern={r".*\.0\..*": 3.5}),
    "lokr both": LoKrConfig(r=1, decompose_both=True, decompose_factor=4, intermediate_lora=True),
}
EXPORTED = [(family, kind) for family in ("bert", "vit") for kind in EXPORTS]
# query, key and value in one layer, in turns for each head and of unlike widths
EXPORTED += [(family, kind) for family in ("gpt_neox", "phi3") for kind in ("loha", "loha qv")]


@pytest.mark.parametrize(("family", "kind"), EXPORTED)
def test_peft_loads_ours_and_agrees(family, kind, tmp_path):
    model = ours(family)
    model.add_adapter("a", EXPORTS[kind])
    stir(model, "a", std=0.3)
    model.set_active_adapters("a")
    expected = logits(model, family)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-3
    model.save_adapter(tmp_path, "a", format="peft")
    # the warnings that QUIET lets pass are not about fields that PEFT does not have
    close(reloaded(family, tmp_path), expected)
    other = ours(family)
    other.load_adapter(tmp_path, load_as="b", set_active=True)
    close(logits(other, family), expected)


UNSAYABLE = {
    "conv1d": ("gpt2", LoHaConfig(), ["'h.0.attn.c_attn'", "a Conv1D"]),
    "conv1d, lokr": ("gpt2", LoKrConfig(target_modules="all-linear"), ["a Conv1D"]),
    "experts": ("qwen3_moe", LoHaConfig(intermediate_lora=True), ["parameter 'gate_up_proj'"]),
    "parts of a layer": ("phi3", LoKrConfig(), ["parts of the layer ('query', 'value')"]),
    "one row twice": ("bert", ConfigUnion(LoHaConfig(), LoHaConfig(r=2)), ["share rows"]),
    "two scalings": (
        "phi3",
        ConfigUnion(LoHaConfig(attn_matrices=("q",)), LoHaConfig(attn_matrices=("v",), alpha=2)),
        ["differ in scaling"],
    ),
    "two factors": (
        "bert",
        ConfigUnion(
            LoKrConfig(attn_matrices=("q",)), LoKrConfig(attn_matrices=("v",), decompose_factor=4)
        ),
        ["differ in decompose_factor (-1, 4)"],
    ),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_what_peft_cannot_say_is_refused(kind, tmp_path):
    family, config, words = UNSAYABLE[kind]
    model = ours(family)
    model.add_adapter("a", config)
    with refused(model, CheckpointError, "save_adapter(", *words, "format='native'"):
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    assert not (tmp_path / "peft").exists()


# --- files that do not fit ---


def test_the_convolution_of_a_model(tmp_path):
    fields = {"target_modules": ["projection"], "use_effective_conv2d": True}
    expected = trained("vit", peft.LoHaConfig(**fields, r=2), tmp_path)
    model = ours("vit")
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    close(logits(model, "vit"), expected)


def test_the_decomposition_of_convolutions_does_not_matter_without_one(tmp_path):
    config = peft.LoHaConfig(**FAMILIES["bert"], r=2, use_effective_conv2d=True)
    expected = trained("bert", config, tmp_path)
    model = ours("bert")
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    close(logits(model, "bert"), expected)


@pytest.mark.parametrize("name", ["lokr_w2_b", "lokr_w1"])
def test_a_layer_that_lacks_a_matrix_is_refused(name, tmp_path):
    trained("bert", peft.LoKrConfig(**FAMILIES["bert"], r=2), tmp_path)
    tensors = load_file(tmp_path / TENSORS)
    del tensors[next(key for key in tensors if key.endswith(name))]
    save_file(tensors, tmp_path / TENSORS)
    model = ours("bert")
    with refused(model, CheckpointError, "load_adapter(", f"/{name}   in the model only"):
        model.load_adapter(tmp_path, load_as="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"r": 3}, ["lokr_w2_a", "file [8, 2]", "model [8, 3]"]),
     ({"decompose_factor": 2}, ["lokr_w1", "file [4, 4]", "model [2, 2]"]),
     ({"decompose_factor": "2"}, ["decompose_factor='2'", "whole number"]),
     ({"rank_dropout": 1.5}, ["rank_dropout=1.5", "from 0 to below 1"]),
     ({"r": 0}, ["r=0", "from 1"])],
)  # fmt: skip
def test_a_config_that_does_not_fit_the_tensors_is_refused(fields, words, tmp_path):
    trained("bert", peft.LoKrConfig(target_modules=["query"], r=2), tmp_path)
    assert (tmp_path / CONFIG).is_file()
    change(tmp_path, **fields)
    model = ours("bert")
    with refused(model, CheckpointError, "load_adapter(", *words):
        model.load_adapter(tmp_path, load_as="a")
