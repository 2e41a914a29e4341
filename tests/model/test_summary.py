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
    rows = model.adapter_summary(as_dict=True)
    percent = [f"{row['%param']:.3f}" for row in rows]
    assert header.split() == ["name", "architecture", "#param", "%param", "active", "train"]
    assert set(rule) == {"-"}
    assert first.split() == ["first", "lora", "512", percent[0], "no", "yes"]
    assert second.split() == ["second", "bottleneck", "324", percent[1], "yes", "yes"]
    assert whole.split()[-3:] == [f"{rows[2]['#param']:,}", "100.000", "yes"]
    assert header.index("#param") + len("#param") == first.index("512") + len("512")
    model.set_active_adapters(None)
    assert not changes(before, snapshot(model))
