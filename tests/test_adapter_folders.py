"""`from_pretrained` of an adapter's folder: the base model, with the adapter active."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs

import adapterzoo
from adapterzoo import AutoAdapterModel, load_model
from adapterzoo.errors import CheckpointError

FORMATS = ("native", "peft", "adapterhub", "adapterhub-safetensors")


def saved(folder: Path, format: str) -> tuple[Any, Any]:
    """Folders of a base model, and of an adapter with a head; and its logits."""
    torch.manual_seed(0)
    base = AutoAdapterModel.from_config(tiny_config("bert"))
    base.save_pretrained(folder / "base")
    model = AutoAdapterModel.from_pretrained(folder / "base")
    model.add_adapter("a", "lora[r=4,init_weights='bert']", set_active=True)
    model.add_classification_head("a", num_labels=3, layers=1, use_pooler=True)
    model.save_adapter(folder / "a", "a", format=format)
    return model, model.eval()(**tiny_inputs("bert")).logits


@pytest.mark.parametrize("format", FORMATS)
def test_the_folder_of_an_adapter_gives_the_base_with_it(format, tmp_path):
    _, expected = saved(tmp_path, format)
    for load in (AutoAdapterModel, adapterzoo.BertAdapterModel):
        model = load.from_pretrained(tmp_path / "a").eval()
        assert model.active_adapters == adapterzoo.Stack("a")
        torch.testing.assert_close(model(**tiny_inputs("bert")).logits, expected, rtol=0, atol=0)
    loaded = load_model(tmp_path / "a", AutoAdapterModel, dtype=torch.float64)
    assert loaded.dtype is torch.float64


@pytest.mark.parametrize("format", FORMATS)
def test_a_task_class_gets_the_adapter_and_its_head(format, tmp_path):
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(tiny_config("bert")).save_pretrained(tmp_path / "b")
    model = load_model(tmp_path / "b", transformers.BertForSequenceClassification)
    model.add_adapter("a", "lora[r=4,init_weights='bert']")
    model.train_adapter("a")
    torch.nn.init.normal_(model.classifier.weight)
    model.save_adapter(tmp_path / "a", "a", format=format)
    expected = model.eval()(**tiny_inputs("bert")).logits
    again = load_model(tmp_path / "a", transformers.BertForSequenceClassification).eval()
    torch.testing.assert_close(again(**tiny_inputs("bert")).logits, expected, rtol=0, atol=0)


def test_a_whole_model_beside_an_adapter_is_loaded_as_before(tmp_path):
    model, _ = saved(tmp_path, "peft")
    model.save_pretrained(tmp_path / "a")
    again = AutoAdapterModel.from_pretrained(tmp_path / "a")
    assert again.active_adapters == adapterzoo.Stack("a")


def test_information_about_the_base_is_returned(tmp_path):
    saved(tmp_path, "native")
    model, info = AutoAdapterModel.from_pretrained(tmp_path / "a", output_loading_info=True)
    assert model.has_adapters()
    assert not info["missing_keys"]


def test_an_adapter_that_does_not_name_its_base_is_refused_with_a_hint(tmp_path):
    saved(tmp_path, "peft")
    file = tmp_path / "a" / "adapter_config.json"
    fields = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": None}
    file.write_text(json.dumps(fields), "utf-8")
    with pytest.raises(CheckpointError, match=r"does not name its base.*load_adapter\("):
        AutoAdapterModel.from_pretrained(tmp_path / "a")


def test_a_folder_without_anything_is_the_error_of_transformers(tmp_path):
    with pytest.raises(ValueError, match="Unrecognized model"):
        AutoAdapterModel.from_pretrained(tmp_path)
