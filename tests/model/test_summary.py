"""The table of adapters."""

from __future__ import annotations

import pytest
from snapshots import changes, snapshot

from adapterzoo import LoRAConfig


@pytest.fixture
def model(tiny):
    model = tiny()
    model.add_adapter("first", LoRAConfig(r=4, target_modules=["query"]))
    model.add_adapter("second", "seq_bn")
    model.add_classification_head("first")
    return model


def test_the_rows_are_counted_by_hand(model):
    base = sum(p.numel() for p in model.base_model.parameters())
    lora, bottleneck = 2 * 4 * (32 + 32), 2 * (32 * 2 + 2 + 2 * 32 + 32)
    base -= lora + bottleneck
    model.train_adapter("first")
    assert model.adapter_summary(as_dict=True) == [
        {"name": "first", "architecture": "lora", "#param": lora, "%param": 100 * lora / base,
         "active": True, "train": True},
        {"name": "second", "architecture": "bottleneck", "#param": bottleneck,
         "%param": 100 * bottleneck / base, "active": False, "train": False},
        {"name": "Full model", "#param": base, "%param": 100.0, "train": False},
    ]  # fmt: skip


def test_the_table_shows_the_rows_in_columns(model):
    before = snapshot(model)
    model.set_active_adapters("second")
    header, rule, first, second, whole = model.adapter_summary().splitlines()
    assert header.split() == ["name", "architecture", "#param", "%param", "active", "train"]
    assert set(rule) == {"-"}
    assert len(rule) >= max(map(len, (header, first, second, whole)))
    assert first.split() == ["first", "lora", "512", shown(model, 0), "no", "yes"]
    assert second.split() == ["second", "bottleneck", "324", shown(model, 1), "yes", "yes"]
    assert whole.split()[-2:] == ["100.000", "yes"]
    assert f"{model.adapter_summary(as_dict=True)[2]['#param']:,}" in whole
    ends = {line.index(cell) + len(cell) for line, cell in ((header, "#param"), (first, "512"))}
    assert len(ends) == 1
    model.set_active_adapters(None)
    assert not changes(before, snapshot(model))


def shown(model, row):
    return f"{model.adapter_summary(as_dict=True)[row]['%param']:.3f}"


def test_without_adapters_there_is_the_base_model(tiny):
    model = tiny()
    (row,) = model.adapter_summary(as_dict=True)
    assert row["#param"] == sum(p.numel() for p in model.base_model.parameters())
    assert len(model.adapter_summary().splitlines()) == 3
