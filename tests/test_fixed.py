"""Files, outputs, gradients and public names are those of tests/data/fixed_*.json."""

from __future__ import annotations

import copy

import pytest
import torch
from fixed import files, methods, names, tables, values

from adapterzoo import composition
from adapterzoo.composition import Composition as Node

FILES, VALUES = files.rows(), values.rows()
STORED = {part: tables.read(part) for part in tables.PARTS}


def check(part, found, stored):
    lines = [*tables.differences(stored, found)]
    if lines:
        hint = f'If the change is meant, write `make fixed ARGS="{part} --write"`.'
        pytest.fail("\n".join([*lines, hint]), pytrace=False)


@pytest.mark.parametrize("row", sorted({*FILES, *STORED["files"]}))
def test_files(row):
    check("files", {row: FILES.get(row, dict)()}, {row: STORED["files"].get(row, {})})


@pytest.mark.parametrize("row", sorted({*VALUES, *STORED["values"]}))
def test_values(row):
    check("values", {row: VALUES.get(row, dict)()}, {row: STORED["values"].get(row, {})})


def test_names():
    check("names", names.compute(), STORED["names"])


def test_every_composition_is_tried():
    tried = {type(compose(4, 5)) for compose in values.COMPOSITIONS.values()} - {str}
    known = {cls for cls in vars(composition).values() if isinstance(cls, type)}
    assert tried == {cls for cls in known if issubclass(cls, Node) and cls is not Node}


def test_a_millionth_of_an_output_is_seen(monkeypatch):
    def add(model, name, config):
        methods.add(model, name, config)
        with torch.no_grad():
            for _, module in model.adapter_modules(name):
                module.lora_B.mul_(1 + 1e-6)

    monkeypatch.setattr(values, "add", add)
    monkeypatch.setattr(values, "SIZES", {"few": values.SIZES["few"]})
    stored = STORED["values"]["lora"]
    changed = {line.partition(":")[0] for line in tables.differences(stored, VALUES["lora"]())}
    computed = {key for key, cell in stored.items() if key.endswith("few") and type(cell) is dict}
    assert len(computed) == 8
    assert {f"{key} / {name}" for key in computed for name in ("output", "lora_A")} <= changed


def test_a_tensor_of_another_name_or_content_is_named():
    stored = STORED["files"]["lora in bert"]
    found = copy.deepcopy(stored)
    tensors = found["peft"]["adapter_model.safetensors"]
    first, second = sorted(key for key in tensors if "layer.0.attention.self.query" in key)
    tensors[f"{first}s"] = tensors.pop(first)
    tensors[second] = tensors[first.replace("layer.0", "layer.1")]
    del found["native"]["adapter_config.json"]["config"]["alpha"]
    start = "peft / adapter_model.safetensors"
    lines = [line.partition(";")[0] for line in tables.differences(stored, found)]
    assert [line.rpartition(": ")[0] for line in lines] == [
        "native / adapter_config.json / config / alpha",
        *(f"{start} / {key}" for key in (first, f"{first}s", second)),
    ]
    assert [line.rpartition(": ")[2] for line in lines[:3]] == ["gone", "gone", "new"]


def test_an_argument_of_another_name_or_default_is_seen():
    def f(name, rank=8): ...
    def g(name, r=8): ...
    def h(name, rank=4): ...
    def annotated(name: str, rank: int = 8) -> None: ...

    assert names.called(f) == names.called(annotated) == "(name, rank=8)"
    for other in (g, h):
        assert [*tables.differences({"f": names.called(f)}, {"f": names.called(other)})]


def test_what_differs_by_rounding_keeps_its_digits(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "DATA", tmp_path)
    tables.write("values", {"a": {"x": [1.23456789012345, 0.5], "y": [2.0, 1.0]}})
    first = tables.file_of("values").read_text()
    assert "[1.23456789012, 0.5]" in first
    tables.write("values", {"a": {"x": [1.23456789023, 0.5 + 1e-10], "y": [2.0, 1.0]}})
    assert tables.file_of("values").read_text() == first
    tables.write("values", {"a": {"x": [1.2345679, 0.5], "y": [2.0, 1.0]}})
    assert "[1.2345679, 0.5]" in tables.file_of("values").read_text()
