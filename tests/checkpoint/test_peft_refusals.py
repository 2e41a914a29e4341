"""What PEFT's files must not bring in, and what must not be written: errors before any change."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft_world import CONFIG, QUIET, TENSORS, change, named, ours, trained
from safetensors.torch import load_file, save_file
from snapshots import snapshot

from adapterzoo import (
    AdapterZooError,
    BOFTConfig,
    ConfigUnion,
    DoRAConfig,
    LoRAConfig,
    SeqBnConfig,
)
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]


@pytest.fixture(scope="module")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    trained("bert", peft.LoraConfig(task_type="SEQ_CLS", target_modules=["key"], r=4), folder)
    return folder


@pytest.fixture
def folder(_saved: Path, tmp_path: Path) -> Path:
    """A checkpoint of PEFT, to be damaged."""
    for name in (CONFIG, TENSORS):
        (tmp_path / name).write_bytes((_saved / name).read_bytes())
    return tmp_path


def refused(folder: Path, *words: str) -> str:
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
    "another method": ({"peft_type": "IA3"}, ("peft_type='IA3'", "LORA", "merge_and_unload")),
    "prefixes": ({"peft_type": "PREFIX_TUNING"}, ("PREFIX_TUNING",)),
    "no name": ({"peft_type": ["LORA"]}, ("peft_type=['LORA']",)),
    "pissa": ({"init_lora_weights": "pissa_niter_4"}, ("base weights", "path_initial_model")),
    "olora": ({"init_lora_weights": "olora"}, ("init_lora_weights='olora'",)),
    "corda": ({"init_lora_weights": "corda"}, ("base weights",)),
    "loftq": ({"init_lora_weights": "loftq"}, ("base weights",)),
    "lora-ga": ({"init_lora_weights": "lora_ga"}, ("base weights",)),
    "an unknown start": ({"init_lora_weights": {"a": 1}}, ("base weights",)),
    "aLoRA": ({"alora_invocation_tokens": [1]}, ("alora_invocation_tokens=[1]", "tokens")),
    "KaSA": ({"kasa_config": {"beta": 1}}, ("singular values",)),
    "QALoRA": ({"use_qalora": True}, ("use_qalora=True",)),
    "more layers": ({"layer_replication": [[0, 1]]}, ("layer_replication",)),
    "experts": ({"target_parameters": ["experts.w"]}, ("target_parameters",)),
    "a huge rank": ({"r": 10**9}, ("r=1000000000", "1 to 65536")),
    "rank 0": ({"r": 0}, ("r=0",)),
    "a negative rank": ({"r": -4}, ("r=-4",)),
    "half a rank": ({"r": 4.0}, ("r=4.0", "whole number")),
    "rank true": ({"r": True}, ("r=True",)),
    "rank as text": ({"r": "4"}, ("r='4'",)),
    "rank as a list": ({"r": [4]}, ("r=[4]",)),
    "another rank": ({"r": 8}, ("rank 8", "have 4", "scaled")),
    "alpha as text": ({"lora_alpha": "16"}, ("lora_alpha='16'",)),
    "a huge alpha": ({"lora_alpha": 1e300}, ("lora_alpha=1e+300",)),
    "dropout 1": ({"lora_dropout": 1.0}, ("lora_dropout=1.0",)),
    "a negative dropout": ({"lora_dropout": -0.1}, ("lora_dropout=-0.1",)),
    "a flag as text": ({"use_rslora": "yes"}, ("use_rslora='yes'", "true or false")),
    "magnitudes missing": ({"use_dora": True}, ("use_dora=True", "no magnitudes")),
    "a pattern as a list": ({"rank_pattern": [1]}, ("rank_pattern=[1]",)),
    "a pattern with text": ({"alpha_pattern": {"key": "4"}}, ("alpha_pattern", "numbers")),
    "a pattern of rank 1e9": ({"rank_pattern": {"key": 10**9}}, ("rank_pattern", "65536")),
    "no expression": ({"alpha_pattern": {"(": 4}}, ("'('", "regular expression")),
    "an endless expression": ({"alpha_pattern": {"(a+)+b": 4}}, ("(a+)+b", "hours")),
    "many stars": ({"rank_pattern": {".*.*.*.*.*.*.*x": 4}}, ("hours",)),
    "a long expression": ({"alpha_pattern": {"a" * 20_000: 4}}, ("hours",)),
    "a head of no task": ({"task_type": 5}, ("task_type=5",)),
    "modules as a number": ({"modules_to_save": 3}, ("modules_to_save=3",)),
    "rotations": ({"peft_type": "BOFT"}, ("boft_R", "boft_s")),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_configs_that_cannot_be_honoured_are_refused(kind: str, folder: Path):
    fields, words = CONFIGS[kind]
    change(folder, **fields)
    started = time.process_time()
    refused(folder, *words)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(number: str, folder: Path):
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace('"lora_alpha": 8', f'"lora_alpha": {number}'))
    assert (folder / CONFIG).read_text() != text
    refused(folder, CONFIG)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "5", "{", "[" * 100_000, '{"peft_type": ' * 50_000, "\x00\xff", '{"a": 1} {}'],
    ids=["empty", "list", "number", "half", "deep list", "deep object", "bytes", "two"],
)
def test_configs_that_are_none_are_refused(content: str, folder: Path):
    (folder / CONFIG).write_bytes(content.encode("latin-1"))
    refused(folder, CONFIG)


def test_a_config_of_many_megabytes_is_not_read(folder: Path):
    with (folder / CONFIG).open("r+b") as file:
        file.truncate(2**26)
    refused(folder, "67,108,864 bytes", CONFIG)


def test_a_missing_file_is_named(folder: Path):
    (folder / TENSORS).unlink()
    refused(folder, TENSORS, "adapter_model.bin")
    (folder / "adapter_model.bin").write_bytes(b"")
    (folder / CONFIG).unlink()
    refused(folder, CONFIG)


Tensors = dict[str, torch.Tensor]
KEY = "base_model.model.bert.encoder.layer.{}.attention.self.key.lora_{}.weight"


def _without(tensors: Tensors) -> None:
    del tensors[KEY.format(0, "B")]


def _elsewhere(tensors: Tensors) -> None:
    tensors[KEY.format(7, "A")] = torch.ones(4, 32)
    tensors[KEY.format(7, "B")] = torch.ones(32, 4)


def _upwards(tensors: Tensors) -> None:
    tensors["base_model.model.../../etc/passwd.lora_A.weight"] = torch.ones(4, 32)


def _slashes(tensors: Tensors) -> None:
    tensors["base_model.model.bert/encoder.layer.0.lora_A.weight"] = torch.ones(4, 32)


def _wide(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A")] = torch.ones(4, 48)


def _tall(tensors: Tensors) -> None:
    tensors[KEY.format(0, "B")] = torch.ones(48, 4)


def _flat(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A")] = torch.ones(4)


def _empty(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A")] = torch.ones(0, 32)
    tensors[KEY.format(0, "B")] = torch.ones(32, 0)


def _whole(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A")] = torch.ones(4, 32, dtype=torch.int64)


def _twice(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A").replace("lora_A", "lora_A.default")] = torch.ones(4, 32)


def _magnitude(tensors: Tensors) -> None:
    key = KEY.format(0, "A").replace("lora_A.weight", "lora_magnitude_vector")
    tensors[key] = torch.ones(32)


def _rotated(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A").replace("lora_A.weight", "boft_R")] = torch.ones(1, 8, 4, 4)


def _embedding(tensors: Tensors) -> None:
    start = "base_model.model.bert.embeddings.patches."
    tensors[f"{start}lora_A.weight"] = torch.ones(4, 3, 2, 2, 1)


def _unknown(tensors: Tensors) -> None:
    tensors[KEY.format(0, "A").replace("lora_A.weight", "lora_diag")] = torch.ones(4)


def _several(tensors: Tensors) -> None:
    for key in [*tensors]:
        if "lora_" in key:
            tensors[key.replace(".weight", ".mine.weight")] = tensors.pop(key)


def _tower(tensors: Tensors) -> None:
    for key in [*tensors]:
        tensors[key.replace("model.bert.", "model.vision.")] = tensors.pop(key)


def _head(tensors: Tensors) -> None:
    tensors["base_model.model.classifier.lora_A.weight"] = torch.ones(4, 32)


def _nothing(tensors: Tensors) -> None:
    tensors.clear()
    tensors["base_model.model.classifier.bias"] = torch.ones(2)


FILES: dict[str, tuple[Callable[[Tensors], None], tuple[str, ...]]] = {
    "a factor is missing": (_without, ("no 'lora_B'", "layer.0")),
    "a layer too many": (_elsewhere, ("layer.7", "no layers that can have adapters")),
    "a way up": (_upwards, ("../../etc/passwd",)),
    "slashes": (_slashes, ("bert/encoder",)),
    "too wide": (_wide, ("lora_A", "[4, 48]", "[4, 32]")),
    "too tall": (_tall, ("lora_B", "[48, 4]", "[32, 4]")),
    "flat": (_flat, ("lora_A is [4]", "[rank, d_in]")),
    "rank 0": (_empty, ("lora_A is [0, 32]",)),
    "whole numbers": (_whole, ("torch.int64", "float32")),
    "twice": (_twice, ("two tensors 'lora_A'",)),
    "one magnitude": (_magnitude, ("lack the tensor 'm'",)),
    "two methods": (_rotated, ("boft_R",)),
    "a convolution": (_embedding, ("convolutions",)),
    "at the head": (_head, ("'classifier'", "heads")),
    "an unknown kind": (_unknown, ("lora_diag", "no kind that is known")),
    "several names": (_several, ("lora_A.mine.weight", "alone")),
    "another tower": (_tower, ("vision.encoder.layer.0", "no layers")),
    "no adapter": (_nothing, ("no tensors of LoRA", "classifier.bias")),
}


@pytest.mark.parametrize("kind", FILES)
def test_tensors_that_do_not_fit_are_refused(kind: str, folder: Path):
    spoil, words = FILES[kind]
    tensors = load_file(folder / TENSORS)
    spoil(tensors)
    save_file(tensors, folder / TENSORS)
    refused(folder, *words)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 7, b"\xff" * 64, b"\x00" * 64, (10**15).to_bytes(8, "little") + b"{}"],
    ids=["empty", "short", "a huge header", "zeros", "a petabyte"],
)
def test_a_damaged_safetensors_file_is_refused(content: bytes, folder: Path):
    (folder / TENSORS).write_bytes(content)
    refused(folder, f"{TENSORS} is damaged")


def test_a_cut_file_is_refused(folder: Path):
    whole = (folder / TENSORS).read_bytes()
    for length in (9, len(whole) // 2, len(whole) - 1):
        (folder / TENSORS).write_bytes(whole[:length])
        refused(folder, "damaged")


class _Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


def test_a_pickle_runs_nothing(folder: Path, tmp_path: Path):
    (folder / TENSORS).unlink()
    evil = tmp_path / "was_here"
    for dump in (
        lambda file: torch.save({"a": _Evil(evil)}, file),
        lambda file: file.write_bytes(pickle.dumps(_Evil(evil), protocol=2)),
        lambda file: file.write_bytes(b"not a pickle at all"),
        lambda file: torch.save({"a": torch.ones(2)}, file) or _cut(file),
        lambda file: torch.save([torch.ones(2)], file),
        lambda file: torch.save({"a": 5}, file),
    ):
        dump(folder / "adapter_model.bin")
        refused(folder, "adapter_model.bin")
    assert not evil.exists()


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-60])


@pytest.mark.parametrize("in_config", [True, False])
def test_biases_that_the_config_does_not_say_are_refused(folder: Path, in_config: bool):
    if in_config:
        change(folder, lora_bias=True)
        refused(folder, "lora_bias=True", "no biases", "Copy both files again")
        return
    tensors = load_file(folder / TENSORS)
    for key in [key for key in tensors if "lora_B" in key]:
        tensors[key.replace(".weight", ".bias")] = torch.ones(32)
    save_file(tensors, folder / TENSORS)
    refused(folder, "lora_bias=False", "has biases", "Copy both files again")


def test_a_convolution_turned_by_boft_is_refused(folder: Path):
    change(folder, peft_type="BOFT")
    start = "base_model.model.bert.convolution."
    tensors = {f"{start}boft_R": torch.zeros(1, 9, 4, 4), f"{start}boft_s": torch.ones(1, 32)}
    save_file(tensors, folder / TENSORS)
    refused(folder, "bert.convolution")


def test_unknown_fields_are_named_in_a_warning(folder: Path):
    change(folder, new_trick=0.5, off=None, none=[])
    with pytest.warns(UserWarning, match=r"not known here: 'new_trick'\. They are ignored"):
        ours("bert").load_adapter(folder, load_as="a")


def test_a_head_without_equivalent_can_be_left_out(folder: Path, tmp_path: Path):
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
    "a bottleneck": ("bert", SeqBnConfig(), "a BnConfig"),
    "adapters' DoRA": ("bert", DoRAConfig(convention="adapterhub"), "convention='adapterhub'"),
    "a gate": ("bert", LoRAConfig(use_gating=True), "use_gating=True"),
    "a union": ("bert", ConfigUnion(LoRAConfig(), SeqBnConfig()), "BnConfig"),
    "two methods": (
        "bert",
        ConfigUnion(LoRAConfig(attn_matrices=("q",)), DoRAConfig(attn_matrices=("v",))),
        "architecture",
    ),
    "two scalings": ("bert", ConfigUnion(LoRAConfig(), LoRAConfig(alpha=3)), "the scaling at"),
    "two dropouts": (
        "bert",
        ConfigUnion(LoRAConfig(dropout=0.1), LoRAConfig(dropout=0.2)),
        "dropout",
    ),
    "rotated Conv1D": ("gpt2", BOFTConfig(target_modules="all-linear"), "Conv1D"),
    "rotated parts": ("gpt2", BOFTConfig(attn_matrices=("q",)), "Conv1D"),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_what_peft_cannot_say_is_an_error_before_anything_is_written(kind: str, tmp_path: Path):
    family, config, word = UNSAYABLE[kind]
    model = ours(family)
    model.add_adapter("a", config)
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    message = str(raised.value)
    assert "save_adapter('a')" in message
    assert word in message
    assert "format='native'" in message
    assert not (tmp_path / "peft").exists()
    assert snapshot(model) == before


def test_heads_that_peft_does_not_have_are_named(tmp_path: Path):
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
