"""Names: what is legal is safe as a folder and as a part of a state-dict key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from adapterzoo import Fuse
from adapterzoo.errors import ConfigError
from adapterzoo.inject.adapted import AdapterDict
from adapterzoo.names import check_name
from adapterzoo.peft import LoraConfig, get_peft_model

LEGAL = [
    "a", "sst-2", "my task", "é", "任务", "lora", "adapters", "heads", "head", "mlp", "query", "0",
    "a" * 128, "-", "{}", "%s", "a+b", "a$", "^a", "weight", "lora_A", "trained", "Train",
    "é" * 100, "任" * 66, "lora[r=8, alpha=16]", "a,b", "a[0]", "a;b", "it's", "[keys]", "a{2}",
]  # fmt: skip
ILLEGAL = [
    "", ".", "..", "a/b", "../a", "/etc/passwd", "a\\b", "C:a", "a.b", "a|b", "*",
    "a?", 'a"', "<a>", " a", "a ", "\ta", "a\n", "a\nb", "a\0", "\x7f", "a" * 129,
    "(a)", "a[", "lora[lr=1e-4]", "a[[b]]", "a{2}{3}", "a]]+++",
    "train", "type", "forward", "keys", "pop", "training", "__class__", "_modules",
    "任" * 128, "é" * 101, "任务" * 33 + "abc", "train/", "__base__",
]  # fmt: skip


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name):
    assert check_name(name) is name


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_with_value_and_hint(name):
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    text = str(caught.value)
    assert repr(name) in text
    hint = re.search(r"Write '([^']*)'\.$", text)
    assert hint is not None, text
    assert check_name(hint[1]) == hint[1]


@pytest.mark.parametrize("name", [None, 5, b"a", ["a"], True])
def test_names_are_strings(name):
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    assert repr(name) in str(caught.value)
    assert "Write 'my_task'" in str(caught.value)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(max_size=20))
@example(" ")
@example("a\u2028")
@example("\u00a0a")
@example("..\u00b7")
@example("train")
@example("values")
@example("prefix")
@example("name_prefix")
def test_what_is_legal_stays_one_folder_and_one_key(name):
    try:
        check_name(name)
    except ConfigError as error:
        hint = re.search(r"Write '([^']*)'\.$", str(error))
        assert hint is not None
        check_name(hint[1])
        return
    assert len(Path(name).parts) == 1
    assert name not in {"", ".", ".."}
    assert name == name.strip()
    assert not set(name) & set('./\\:|()*?"<>\0\n\r\t')
    shelf = AdapterDict()
    shelf[name] = nn.Linear(1, 1)
    assert list(shelf.state_dict()) == [f"{name}.weight", f"{name}.bias"]
    # as transformers finds it
    assert getattr(shelf, name) is shelf[name] is shelf.get_submodule(name)


def test_the_word_for_the_base_model_is_no_name_on_any_road(tiny, tmp_path):
    model = tiny()
    for name in "ab":
        model.add_adapter(name, "lora[r=2]")
    model.save_adapter(tmp_path, "a")
    for road in (
        lambda name: model.add_adapter(name, "lora"),
        lambda name: model.load_adapter(tmp_path, load_as=name),
        lambda name: model.add_classification_head(name),
        lambda name: model.average_adapter(name, ["a", "b"]),
        lambda name: model.convert_adapter("a", "lora", new_name=name, rank=2),
        lambda name: model.add_adapter_fusion(Fuse("a", "b", name=name)),
        lambda name: model.add_embeddings(name, tokenizer=None),
        lambda name: get_peft_model(tiny(), LoraConfig(r=2), adapter_name=name),
    ):
        with pytest.raises(ConfigError, match="in adapter_names it means the base model"):
            road("__base__")
    assert {*model.adapters_config} == {"a", "b"}
