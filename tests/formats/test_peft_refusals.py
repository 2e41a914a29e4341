"""What PEFT's files must not bring in, and what must not be written: errors before any change."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from peft_world import CONFIG, QUIET, TENSORS, change, named, ours, trained
from safetensors.torch import load_file, save_file
from snapshots import snapshot

from adapterzoo import (
    AdapterZooError,
)
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]


@pytest.fixture(scope="module")
def _saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    trained("bert", peft.LoraConfig(task_type="SEQ_CLS", target_modules=["key"], r=4), folder)
    return folder


@pytest.fixture
def folder(_saved, tmp_path):
    """A checkpoint of PEFT, to be damaged."""
    for name in (CONFIG, TENSORS):
        (tmp_path / name).write_bytes((_saved / name).read_bytes())
    return tmp_path


def refused(folder, *words):
    """The message of the error; nothing has changed."""
    model = ours("bert")
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.load_adapter(folder, load_as="a")
    message = str(raised.value)
    for word in (f"load_adapter({str(folder)!r})", *words):
        assert word in message
    assert snapshot(model) == before
    return message


CONFIGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another method": ({"peft_type": "VBLORA"}, ("'VBLORA'", "LORA", "convert SRC DST --to lora")),
    "no change of weights": ({"peft_type": "POLY"}, ("'POLY'", "task_ids", "Use it with PEFT")),
    "no name": ({"peft_type": ["LORA"]}, ("peft_type=['LORA']",)),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, ("base weights", "path_initial_model")),
    "pissa and DoRA": ({"init_lora_weights": "pissa", "use_dora": True}, ("base weights",)),
    "corda": ({"init_lora_weights": "corda"}, ("base weights",)),
    "an unknown start": ({"init_lora_weights": {"a": 1}}, ("base weights",)),
    "aLoRA of text": ({"alora_invocation_tokens": "x"}, ("alora_invocation_tokens='x'", "ids")),
    "aLoRA and DoRA": (
        {"alora_invocation_tokens": [1], "use_dora": True},
        ("alora_invocation_tokens=[1]", "tokens"),
    ),
    "KaSA": ({"kasa_config": {"beta": 1}}, ("singular values",)),
    "QALoRA": ({"use_qalora": True}, ("use_qalora=True",)),
    "more layers": ({"layer_replication": [[0, 1]]}, ("layer_replication",)),
    "experts as text": ({"target_parameters": "experts.w"}, ("='experts.w'", "a list of names")),
    "a huge rank": ({"r": 10**9}, ("r=1000000000", "1 to 65536")),
    "rank 0": ({"r": 0}, ("r=0",)),
    "half a rank": ({"r": 4.0}, ("r=4.0", "whole number")),
    "rank as text": ({"r": "4"}, ("r='4'",)),
    "another rank": ({"r": 8}, ("key/lora_A   file [4, 32]   model [8, 32]",)),
    "alpha as text": ({"lora_alpha": "16"}, ("lora_alpha='16'",)),
    "a huge alpha": ({"lora_alpha": 1e300}, ("lora_alpha=1e+300",)),
    "dropout 1": ({"lora_dropout": 1.0}, ("lora_dropout=1.0",)),
    "a flag as text": ({"use_rslora": "yes"}, ("use_rslora='yes'", "one of False, True")),
    "magnitudes missing": ({"use_dora": True}, ("self.key/m   in the model only",)),
    "a pattern as a list": ({"rank_pattern": [1]}, ("rank_pattern=[1]",)),
    "a pattern with text": ({"alpha_pattern": {"key": "4"}}, ("alpha_pattern", "a number from")),
    "a pattern of rank 1e9": ({"rank_pattern": {"key": 10**9}}, ("rank_pattern", "65536")),
    "no expression": ({"alpha_pattern": {"(": 4}}, ("'('", "regular expression")),
    "a head of no task": ({"task_type": 5}, ("task_type=5",)),
    "modules as a number": ({"modules_to_save": 3}, ("modules_to_save=3",)),
    "rotations": ({"peft_type": "BOFT"}, ("boft_R", "boft_s")),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_that_cannot_be_honoured_are_refused(kind, folder):
    fields, words = CONFIGS[kind]
    change(folder, **fields)
    refused(folder, *words)


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"peft_type": ' * 50_000, '{"a": 1} {}', '{"lora_alpha": NaN}'],
    ids=["list", "half", "deep object", "two", "no number"],
)
def test_configs_that_are_none_are_refused(content, folder):
    (folder / CONFIG).write_bytes(content.encode("latin-1"))
    refused(folder, CONFIG)


def test_a_missing_file_is_named(folder):
    (folder / TENSORS).unlink()
    refused(folder, TENSORS, "adapter_model.bin")
    (folder / "adapter_model.bin").write_bytes(b"")
    (folder / CONFIG).unlink()
    refused(folder, CONFIG)


Tensors = dict[str, torch.Tensor]
START = "base_model.model."
KEY = f"{START}bert.encoder.layer.{{}}.attention.self.key.{{}}"


def key(layer, end="lora_A.weight"):
    return KEY.format(layer, end)


def put(**shapes):
    """Puts tensors of these shapes at the first layer, by the ends of their keys."""
    return lambda found: found.update({key(0, k): torch.ones(*s) for k, s in shapes.items()})


def moved(old, new):
    def change(found):
        for name in [name for name in found if old in name]:
            found[name.replace(old, new)] = found.pop(name)

    return change


def at(name, *shape, **options):
    return lambda found: found.update({f"{START}{name}": torch.ones(*shape, **options)})


def nothing(found):
    found.clear()
    found[f"{START}classifier.bias"] = torch.ones(2)


FILES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a factor is missing": (
        lambda t: t.pop(key(0, "lora_B.weight")), ("layer.0", "key/lora_B   in the model")
    ),
    "a layer too many": (
        lambda t: t.update({key(7): torch.ones(4, 32), key(7, "lora_B.weight"): torch.ones(32, 4)}),
        ("layer.7.attention.self.key.lora_A.weight   in the file only",),
    ),
    "a way up": (at("../../etc/passwd.lora_A.weight", 4, 32), ("../../etc/passwd",)),
    "too wide": (put(**{"lora_A.weight": (4, 48)}), ("lora_A", "[4, 48]", "[4, 32]")),
    "too tall": (put(**{"lora_B.weight": (48, 4)}), ("lora_B", "[48, 4]", "[32, 4]")),
    "flat": (put(**{"lora_A.weight": (4,)}), ("lora_A   file [4]   model",)),
    "rank 0": (
        put(**{"lora_A.weight": (0, 32), "lora_B.weight": (32, 0)}), ("lora_A   file [0, 32]",)
    ),
    "whole numbers": (
        lambda t: t.update({key(0): torch.ones(4, 32, dtype=torch.int64)}),
        ("torch.int64", "float32"),
    ),
    "twice": (put(**{"lora_A.default.weight": (4, 32)}), ("two tensors 'lora_A'",)),
    "one magnitude": (
        put(lora_magnitude_vector=(32,)), ("lora_magnitude_vector   in the file only",)
    ),
    "two methods": (put(boft_R=(1, 8, 4, 4)), ("boft_R",)),
    "a convolution": (
        at("bert.embeddings.patches.lora_A.weight", 4, 3, 2, 2, 1), ("in the file only",)
    ),
    "at the head": (at("classifier.lora_A.weight", 4, 32), ("classifier", "in the file only")),
    "an unknown kind": (put(lora_diag=(4,)), ("lora_diag   in the file only",)),
    "several names": (moved(".weight", ".mine.weight"), ("lora_A.mine.weight   in the file only",)),
    "another tower": (
        moved("model.bert.", "model.vision."), ("vision.encoder.layer.0", "in the file only")
    ),
    "no adapter": (nothing, ("query/lora_A   in the model only",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_tensors_that_do_not_fit_are_refused(kind, folder):
    spoil, words = FILES[kind]
    tensors = load_file(folder / TENSORS)
    spoil(tensors)
    save_file(tensors, folder / TENSORS)
    refused(folder, *words)


@pytest.mark.parametrize("in_config", [True, False])
def test_biases_that_the_config_does_not_say_are_refused(folder, in_config):
    if in_config:
        change(folder, lora_bias=True)
        refused(folder, "key/lora_B_bias   in the model only")
        return
    tensors = load_file(folder / TENSORS)
    for key in [key for key in tensors if "lora_B" in key]:
        tensors[key.replace(".weight", ".bias")] = torch.ones(32)
    save_file(tensors, folder / TENSORS)
    refused(folder, "key/lora_B_bias   in the file only")


def test_a_convolution_turned_by_boft_is_refused(folder):
    change(folder, peft_type="BOFT")
    start = "base_model.model.bert.convolution."
    tensors = {f"{start}boft_R": torch.zeros(1, 9, 4, 4), f"{start}boft_s": torch.ones(1, 32)}
    save_file(tensors, folder / TENSORS)
    refused(folder, "bert.convolution")


@pytest.mark.parametrize(
    ("shape", "words"),
    [((32, 2), ("ia3_l   file [32, 2]",)), ((4, 8), ("ia3_l   file [4, 8]",)),
     ((48, 1), ("ia3_l", "[48]", "[32]"))],
)  # fmt: skip
def test_vectors_of_other_shapes_are_refused(shape, words, folder):
    change(folder, peft_type="IA3")
    save_file({key(n, "ia3_l"): torch.ones(*shape) for n in (0, 1)}, folder / TENSORS)
    refused(folder, *words)


def test_unknown_fields_are_named_in_a_warning(folder):
    change(folder, new_trick=0.5, off=None, none=[])
    with pytest.warns(UserWarning, match=r"unknown fields: 'new_trick'\. They are ignored"):
        ours("bert").load_adapter(folder, load_as="a")


def test_a_head_without_equivalent_can_be_left_out(folder, tmp_path):
    tensors = load_file(folder / TENSORS)
    tensors["base_model.model.strange.weight"] = torch.ones(3, 3)
    save_file(tensors, folder / TENSORS)
    model = named("bert", tmp_path / "base")
    with pytest.raises(CheckpointError, match="with_head=False"):
        model.load_adapter(folder, load_as="a")
    model.load_adapter(folder, load_as="a", with_head=False)
    change(folder, task_type=None)
    with pytest.raises(CheckpointError, match=r"task_type=None.*with_head=False"):
        model.load_adapter(folder, load_as="b")


# --- what PEFT cannot say ---

UNSAYABLE: dict[str, tuple[str, Any, str]] = {
    "a bottleneck": ("bert", "seq_bn", "a BnConfig"),
    "adapters' DoRA": ("bert", "dora[convention='adapterhub']", "convention='adapterhub'"),
    "a gate": ("bert", "lora[use_gating=True]", "use_gating=True"),
    "a union": ("bert", "lora|seq_bn", "BnConfig"),
    "two methods": ("bert", "lora[attn_matrices=['q']]|dora[attn_matrices=['v']]", "architecture"),
    "two scalings": ("bert", "lora|lora[alpha=3]", "differ in scaling"),
    "two dropouts": ("bert", "lora[dropout=0.1]|lora[dropout=0.2]", "dropout"),
    "rotated Conv1D": ("gpt2", "boft[target_modules='all-linear']", "Conv1D"),
    "rotated parts": ("gpt2", "boft[attn_matrices=['q']]", "Conv1D"),
    "a scaled embedding": ("bert", "ia3[target_modules=['word_embeddings']]", "an embedding"),
    "the input of a part": ("gpt2", "ia3[feedforward_modules=['c_attn']]", "input of one part"),
    "two shared pairs": ("bert", "vera[attn_matrices=['q']]|vera[attn_matrices=['v']]", "2 VERA"),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_what_peft_cannot_say_is_an_error_before_anything_is_written(kind, tmp_path):
    family, config, word = UNSAYABLE[kind]
    model = ours(family)
    model.add_adapter("a", config)
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    # a long path is shortened
    for part in ("save_adapter('", word, "format='native'"):
        assert part in str(raised.value)
    assert not (tmp_path / "peft").exists()
    assert snapshot(model) == before


def test_heads_that_peft_does_not_have_are_named(tmp_path):
    model = named("bert", tmp_path / "base")
    model.add_adapter("a", "lora")
    for add in ("add_multiple_choice_head", "add_dependency_parsing_head", "add_masked_lm_head"):
        getattr(model, add)("a", overwrite_ok=True)
        with pytest.raises(CheckpointError, match="Write with_head=False"):
            model.save_adapter(tmp_path / "peft", "a", format="peft")
    model.add_classification_head("a", layers=3, overwrite_ok=True)
    with pytest.raises(AdapterZooError, match="with_head=False"):
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    assert not (tmp_path / "peft").exists()
    model.save_adapter(tmp_path / "peft", "a", with_head=False, format="peft")
    assert json.loads((tmp_path / "peft" / CONFIG).read_text())["task_type"] == "FEATURE_EXTRACTION"
