"""Every spelling of a class loads what was saved: heads, what is active, and the report."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import same_bits
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification

from adapterzoo import AutoAdapterModel, BertAdapterModel, init, load_model
from adapterzoo.auto import adapter_class

CLASSES = {
    "AutoAdapterModel": lambda: AutoAdapterModel,
    "BertAdapterModel": lambda: BertAdapterModel,
    "adapter_class": lambda: adapter_class(tiny_config("bert")),
}


def task_model():
    torch.manual_seed(0)
    config = tiny_config("bert")
    labels = ["bad", "so", "good"]
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    return AutoModelForSequenceClassification.from_config(config).eval()


@pytest.mark.parametrize("name", CLASSES)
def test_a_task_checkpoint_keeps_its_head(tmp_path, name):
    static = task_model()
    static.save_pretrained(tmp_path)
    model, info = CLASSES[name]().from_pretrained(tmp_path, output_loading_info=True)
    assert model.active_head == "default"
    assert model.get_labels() == ["bad", "so", "good"]
    assert not info["unexpected_keys"]
    assert not info["missing_keys"]
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        assert same_bits(model.eval()(**inputs).logits, static(**inputs).logits)
    assert type(CLASSES[name]().from_pretrained(tmp_path)) is type(model)


def test_what_no_head_takes_is_still_reported(tmp_path):
    static = task_model()
    static.more = torch.nn.Linear(2, 2)
    static.save_pretrained(tmp_path)
    _, info = BertAdapterModel.from_pretrained(tmp_path, output_loading_info=True)
    assert {"more.weight", "more.bias"} <= {
        k.removeprefix("bert.") for k in info["unexpected_keys"]
    }


@pytest.mark.parametrize("active", [None, "a", ["a", "b"]])
@pytest.mark.parametrize("adapter", [False, True])
def test_the_active_head_comes_back(tmp_path, active, adapter):
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_classification_head("a")
    model.add_classification_head("b")
    if adapter:
        model.add_adapter("x")
    model.active_head = active
    model.save_pretrained(tmp_path)
    for cls in (AutoAdapterModel, BertAdapterModel):
        loaded = cls.from_pretrained(tmp_path)
        assert loaded.known_heads() == ("a", "b")
        assert loaded.active_head == active


def test_load_model_takes_the_class_of_a_model_with_adapters(tmp_path):
    model = init(task_model())
    model.add_adapter("a", "lora", set_active=True)
    model.save_pretrained(tmp_path)
    loaded = [load_model(tmp_path, cls) for cls in (type(model), BertForSequenceClassification)]
    for each in loaded:
        assert type(each) is type(model)
        assert repr(each.active_adapters) == "Stack('a')"
    named = AutoAdapterModel.from_config(tiny_config("bert"))
    named.add_adapter("a", "lora")
    named.add_classification_head("a")
    named.save_pretrained(tmp_path / "named")
    again = load_model(tmp_path / "named", type(named))
    assert type(again) is type(named)
    assert again.known_heads() == ("a",)
