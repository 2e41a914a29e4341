"""Several heads beside a composition: each answers its part, or what was written is refused."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import refused, stir

from adapterzoo import (
    AdapterSetup,
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    Split,
    Stack,
)
from adapterzoo.errors import CompositionError, ConfigError

COMPOSITIONS = [
    BatchSplit("x", "y", batch_sizes=[1, 2]),
    Parallel("x", "y"),
    Stack("x", "y"),
    Split("x", "y", splits=[3, 4]),
    Average("x", "y"),
    Fuse("x", "y"),
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "lora")
        stir(model, name, seed=seed)
    model.add_classification_head("x", num_labels=3)
    model.add_classification_head("y", num_labels=2)
    return model


@pytest.mark.parametrize("heads", COMPOSITIONS, ids=repr)
def test_a_composition_of_heads_is_refused(model, heads):
    hint = "Write set_active_adapters(BatchSplit('a', 'b', batch_sizes=[…]))"
    inputs = tiny_inputs("bert")
    kind = type(heads).__name__
    for active in (None, "a", BatchSplit("a", "b", batch_sizes=1)):
        model.set_active_adapters(active)
        with refused(model, CompositionError, kind, hint, "active_head = ['x', 'y']"):
            model.active_head = heads
        with refused(model, CompositionError, kind, hint):
            model(**inputs, head=heads)
        with refused(model, ConfigError, "head_setup=", kind):
            AdapterSetup("a", head_setup=heads)


@pytest.mark.parametrize("order", [["x", "y"], ["y", "x"]], ids=str)
def test_a_list_of_heads_answers_the_parts_of_the_batch_in_its_order(model, order):
    inputs = tiny_inputs("bert", batch=3)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    model.active_head = order
    found = model(**inputs)
    for output, adapter, head, rows in zip(found, "ab", order, ([0], [1, 2]), strict=True):
        part = {key: value[rows] for key, value in inputs.items()}
        with AdapterSetup(adapter, head_setup=head):
            expected = model(**part).logits
        torch.testing.assert_close(output.logits, expected)


@pytest.mark.parametrize("order", [["x", "y"], ["y", "x"]], ids=str)
def test_a_list_of_heads_answers_the_copies_of_the_batch_in_its_order(model, order):
    inputs = tiny_inputs("bert", batch=2)
    model.set_active_adapters(Parallel("a", "b"))
    model.active_head = order
    for output, adapter, head in zip(model(**inputs), "ab", order, strict=True):
        with AdapterSetup(adapter, head_setup=head):
            expected = model(**inputs).logits
        torch.testing.assert_close(output.logits, expected)
