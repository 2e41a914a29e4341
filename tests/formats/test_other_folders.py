"""Folders that hold something else than the adapter or head that is asked for."""

from __future__ import annotations

import logging

import pytest
from families import tiny_config
from snapshots import refused

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError


@pytest.fixture
def model():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in ("ner", "pos"):
        model.add_adapter(name, "lora")
    model.add_classification_head("ner")
    model.train_adapter("ner")
    return model


def test_another_folder_is_named_by_its_files(model, tmp_path):
    model.save_head(tmp_path / "head", "ner")
    model.save_pretrained(tmp_path / "model")
    for folder, file in (("head", "head.safetensors"), ("model", "model.safetensors")):
        with refused(model, CheckpointError, "its files: ", repr(file)):
            model.load_adapter(tmp_path / folder, load_as="again")
    assert "ner" in AutoAdapterModel.from_pretrained(tmp_path / "model").adapters_config


@pytest.mark.parametrize("form", ["native", "adapterhub", "adapterhub-safetensors"])
def test_what_is_replaced_is_named(form, model, tmp_path, caplog):
    """Saving again under the same name, beside the others and over another kind says nothing."""
    caplog.set_level(logging.WARNING, "adapterzoo")
    model.add_classification_head("pos")
    for name in ("a", "b"):
        model.add_adapter(name, "seq_bn")
    for names in (["a", "b"], ["b", "a"]):
        model.add_adapter_fusion(names)
    saves = {
        "adapter": (lambda name: model.save_adapter(tmp_path, name, format=form), "ner", "pos"),
        "head": (lambda name: model.save_head(tmp_path / "h", name, format=form), "ner", "pos"),
        "adapter fusion": (
            lambda name: model.save_adapter_fusion(tmp_path / "f", name, format=form),
            "a,b", "b,a",
        ),
    }  # fmt: skip
    for kind, (save, one, other) in saves.items():
        save(one)
        save(one)
        assert not caplog.records, kind
        save(other)
        (record,) = caplog.records
        said = record.getMessage()
        assert f"held the {kind} {one!r}, which {other!r} replaces. Write another folder" in said
        caplog.clear()
    for _ in range(2):
        model.save_all_adapters(tmp_path / "all", format=form)
        model.save_pretrained(tmp_path)
    assert not caplog.records
