"""The table of adapters."""

from __future__ import annotations

import pytest
import transformers
from families import tiny_config
from snapshots import changes, snapshot

import adapterzoo
from adapterzoo import Fuse, LoRAConfig


@pytest.fixture
def model(tiny):
    model = tiny()
    model.add_adapter("first", LoRAConfig(r=4, target_modules=["query"]))
    model.add_adapter("second", "seq_bn")
    model.add_classification_head("first")
    return model


@pytest.fixture
def tiny_static():
    return adapterzoo.init(transformers.BertForSequenceClassification(tiny_config("bert")))


def test_the_rows_are_counted_by_hand(model):
    base = sum(p.numel() for p in model.base_model.parameters())
    lora, bottleneck = 2 * 4 * (32 + 32), 2 * (32 * 2 + 2 + 2 * 32 + 32)
    base -= lora + bottleneck
    head = (32 * 32 + 32) + (32 * 2 + 2)
    model.train_adapter("first")
    assert model.adapter_summary(as_dict=True) == [
        {"name": "first", "architecture": "lora", "#param": lora, "%param": 100 * lora / base,
         "active": True, "train": True},
        {"name": "second", "architecture": "bottleneck", "#param": bottleneck,
         "%param": 100 * bottleneck / base, "active": False, "train": False},
        {"name": "first", "architecture": "classification head", "#param": head,
         "%param": 100 * head / base, "active": True, "train": True,
         "labels": ["LABEL_0", "LABEL_1"]},
        {"name": "Full model", "#param": base, "%param": 100.0, "train": False},
    ]  # fmt: skip


def test_the_table_shows_the_rows_in_columns(model):
    before = snapshot(model)
    model.set_active_adapters("second")
    header, rule, first, second, head, whole = model.adapter_summary().splitlines()
    rows = model.adapter_summary(as_dict=True)
    percent = [f"{row['%param']:.3f}" for row in rows]
    assert header.split() == ["name", "architecture", "#param", "%param", "active", "train"]
    assert set(rule) == {"-"}
    assert first.split() == ["first", "lora", "512", percent[0], "no", "yes"]
    assert second.split() == ["second", "bottleneck", "324", percent[1], "yes", "yes"]
    assert head.split()[:5] == ["first", "classification", "head:", "LABEL_0,", "LABEL_1"]
    assert whole.split()[-3:] == [f"{rows[-1]['#param']:,}", "100.000", "yes"]
    assert header.index("#param") + len("#param") == first.index("512") + len("512")
    model.set_active_adapters(None)
    assert not changes(before, snapshot(model))


def test_a_static_head_and_its_copies_have_rows(tiny_static):
    model = tiny_static
    model.add_adapter("a", "lora[r=2]")
    model.train_adapter("a")
    *_, own, head, whole = model.adapter_summary(as_dict=True)
    size = sum(p.numel() for p in model.classifier.parameters()) // 2
    assert (own["name"], own["#param"], own["active"], own["train"]) == ("a", size, True, True)
    assert (head["#param"], head["active"], head["train"]) == (size, False, False)
    assert (own["architecture"], head["architecture"]) == ("copy of the head", "head")
    assert whole["name"] == "Full model"


def test_a_printed_model_shows_an_adapted_layer_in_one_line(model):
    model.set_active_adapters("first")
    headline, *lines = repr(model).splitlines()
    every = list(model.parameters())
    trained = sum(p.numel() for p in every if p.requires_grad)
    assert headline == (
        "adapters: 'first', 'second', active Stack('first'); heads: 'first', active 'first'; "
        f"trained: {trained:,} of {sum(p.numel() for p in every):,} parameters"
    )
    [query] = [line.strip() for line in lines if "(query)" in line]
    layer = "(query): Linear(in_features=32, out_features=32, bias=True)"
    assert query == f"{layer} + LoRA 'first' (256 parameters)"
    assert not [line for line in lines if "lora_A" in line or "loras" in line]
    model.merge_adapter("first")
    assert "; merged: 'first'; " in repr(model).splitlines()[0]
    model.reset_adapter()
    model.delete_adapter("first")
    assert f"{layer}\n" in repr(model)


def test_many_adapters_of_a_layer_are_counted(tiny):
    model = tiny()
    for n in range(9):
        model.add_adapter(f"a{n}", "lora[r=1]")
    [query] = [line for line in repr(model).splitlines() if "(query)" in line]
    assert query.endswith("LoRA 'a2' (64 parameters) and 6 more")


def test_a_config_is_shown_as_the_call_that_makes_it():
    union = adapterzoo.ConfigUnion(LoRAConfig(r=4), adapterzoo.SeqBnConfig())
    names = ("ConfigUnion", "LoRAConfig", "SeqBnConfig")
    known = {name: getattr(adapterzoo, name) for name in names}
    for config in (LoRAConfig(r=4), LoRAConfig(), union):
        assert eval(repr(config), known) == config
    assert repr(LoRAConfig(r=4)) == "LoRAConfig(r=4)"


def test_a_fusion_has_a_row_and_does_not_count_as_base_model(model):
    before = model.adapter_summary(as_dict=True)[-1]["#param"]
    model.add_adapter("third", "seq_bn")
    model.add_adapter_fusion(["second", "third"])
    model.train_adapter_fusion(Fuse("second", "third"))
    *_, fusion, _, whole = model.adapter_summary(as_dict=True)
    size = 2 * 3 * 32 * 32 + 2 * 2 * 32  # query, key and value, with two biases
    assert whole["#param"] == before
    assert (fusion["name"], fusion["architecture"]) == ("second,third", "fusion")
    assert (fusion["#param"], fusion["active"], fusion["train"]) == (size, True, True)


def test_a_merged_adapter_is_marked(model):
    model.merge_adapter("first")
    rows = model.adapter_summary(as_dict=True)
    assert [row["name"] for row in rows if row.get("merged")] == ["first"]
    first = model.adapter_summary().splitlines()[2]
    assert first.split()[-2:] == ["merged", "yes"]
