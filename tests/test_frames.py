"""Frames that `torch.compile` compiles while adapters are switched: the table of switching.md."""

import frames_table as tables
import pytest
import torch
from frames_table import frames, made
from swept import all_but
from variants import SWEPT, VARIANTS


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def committed():
    return tables.read(tables.PAGE.read_text(encoding="utf-8"))


# what goes through a slot is in test_hotswap.py
@pytest.mark.long
@pytest.mark.parametrize("variant", SWEPT)
def test_adapters_of_one_config_share_a_frame(variant):
    names = list("abc")
    model = made(dict.fromkeys(names, VARIANTS[variant]))
    assert frames(model, names, model.set_active_adapters) == 1


@pytest.mark.parametrize("row", all_but([*tables.OTHERS][:2], tables.OTHERS))
def test_other_switches_compile_as_often_as_the_page_says(row, committed):
    slot, active = tables.OTHERS[row](6)
    assert (slot, active) == committed[row]


# two minutes
@pytest.mark.sweep
@pytest.mark.parametrize("row", tables.rows())
def test_fifty_switches_compile_as_often_as_the_page_says(row, committed):
    found = tables.rows()[row](tables.SWITCHES)
    assert found == committed[row], "docs/switching.md is stale: write `make frames`"


def test_the_page_has_all_rows_and_one_frame_for_each_structure(committed):
    assert committed.keys() == {*tables.rows()}
    structures = {"LoRA of ranks 2, 4 and 8": 3}
    for row, (slot, active) in committed.items():
        assert slot in (1, None)
        assert active == structures.get(row, 1), row


def test_each_structure_compiles_once_and_is_found_again():
    model = made({"a": "lora[r=2]", "b": "lora[r=3]", "c": "seq_bn", "d": "lora[r=2]"})
    setups = ["a", "b", "c", "d", ["a", "c"], ["d", "c"], ["c", "b"]]
    # a stack of both kinds, and one of another rank
    assert frames(model, setups, model.set_active_adapters) == 5


def test_the_base_model_compiles_once_for_adapters_with_heads():
    model = made(dict.fromkeys("abc", "lora"))
    for name in "abc":
        model.add_classification_head(name, num_labels=3)
    torch._dynamo.reset()
    backend = tables.Counting()
    seen = []
    for name in "abc":
        model.set_active_adapters(name)
        seen.append(tables.output(model))
    model.base_model.compile(fullgraph=True, backend=backend)
    for name, expected in zip("abc", seen, strict=True):
        model.set_active_adapters(name)
        torch.testing.assert_close(tables.output(model), expected, rtol=1e-5, atol=1e-5)
    assert backend.graphs == 1
