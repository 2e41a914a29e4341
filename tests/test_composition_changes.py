"""What happens to an active composition when an adapter or a fusion of it goes, or a call fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import output, stir

from adapterzoo import (
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    Stack,
)
from adapterzoo.errors import CompositionError, StateError


def built(*names: str, config: str = "lora") -> Any:
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).double().eval()
    for name in names:
        model.add_adapter(name, config)
        stir(model, name, seed=ord(name))
    return model


def test_a_stack_around_a_part_without_adapter_is_the_rest_of_the_stack():
    model = built("a", "b", "c")
    model.set_active_adapters(Stack("a", Parallel("b", "c")))
    model.delete_adapter("c")
    both = output(model)  # of Stack("a", "b") and of "a"
    for part, setup in zip(both.chunk(2), (Stack("a", "b"), "a"), strict=True):
        model.set_active_adapters(setup)
        torch.testing.assert_close(part, output(model), rtol=1e-12, atol=1e-13)


def test_an_average_of_a_part_without_adapter_adds_nothing_there():
    model = built("a", "b")
    model.set_active_adapters(Average("a", BatchSplit("b", None, batch_sizes=1)))
    first, second = output(model)
    model.set_active_adapters(Average("a", "b"))
    torch.testing.assert_close(first, output(model)[0], rtol=1e-12, atol=1e-13)
    model.set_active_adapters(Average("a", weights=[0.5], normalize_weights=False))
    torch.testing.assert_close(second, output(model)[1], rtol=1e-12, atol=1e-13)


def test_a_fusion_that_is_replaced_while_active_stays_active():
    model = built("s", "u", config="seq_bn")
    model.add_adapter_fusion(["s", "u"], set_active=True)
    model.add_adapter_fusion(["s", "u"], "static", overwrite_ok=True)
    assert model.active_adapters == Fuse("s", "u")
    output(model)


def test_an_adapter_that_cannot_become_active_is_not_added():
    model = built("d", config="dora")
    model.merge_adapter("d")
    before = output(model)
    with pytest.raises(StateError):
        model.add_adapter("e", "dora", set_active=True)
    assert list(model.adapters_config) == ["d"]
    assert torch.equal(output(model), before)


@pytest.mark.parametrize("names", [[], "a", 3])
def test_names_of_rows_are_a_list(names):
    model = built("a")
    with pytest.raises(CompositionError, match=r"Write adapter_names=\['a', None, 'b'\]"):
        model(**tiny_inputs("bert"), adapter_names=names)


def test_a_row_may_take_a_list_as_a_stack():
    model = built("a", "b")
    inputs = tiny_inputs("bert")
    mixed = output(model, **inputs, adapter_names=[["a", "b"], "a"])
    model.set_active_adapters(["a", "b"])
    torch.testing.assert_close(mixed[0], output(model)[0], rtol=1e-12, atol=1e-13)
