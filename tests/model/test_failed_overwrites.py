"""What fails to take the place of an adapter changes nothing, the order of tensors neither."""

from __future__ import annotations

import pytest
from snapshots import changes, snapshot, stir

from adapterzoo import BOFTConfig, Fuse
from adapterzoo.errors import AdapterZooError
from adapterzoo.model import activation

BOFT = BOFTConfig(boft_block_size=4)


@pytest.fixture
def model(tiny):
    """Three adapters at the same layers, the first of which can be replaced by what cannot act."""
    model = tiny()
    for name in ("a", "b", "c"):
        model.add_adapter(name, "lora")
        stir(model, name, seed=ord(name))
    model.merge_adapter("c")
    return model


def overwrite(model, folder):
    model.add_adapter("a", BOFT, overwrite_ok=True, set_active=True)


def load(model, folder):
    model.load_adapter(folder, load_as="a", overwrite_ok=True, set_active=True)


def average(model, folder):
    model.average_adapter("a", ["x", "y"], overwrite_ok=True, set_active=True)


def add(model, folder):
    model.add_adapter("new", BOFT, set_active=True)


CALLS = {"add": add, "overwrite": overwrite, "load": load, "average": average}


@pytest.mark.parametrize("call", CALLS)
def test_a_failed_overwrite_keeps_the_order_of_the_state_dict(model, tiny, tmp_path, call):
    other = tiny()
    other.add_adapter("x", BOFT)
    other.save_adapter(tmp_path, "x")
    for name in "xy":
        model.add_adapter(name, BOFT)
    model.set_active_adapters("b")
    before, keys = snapshot(model), list(model.state_dict())
    with pytest.raises(AdapterZooError, match="would act on weights that hold 'c'"):
        CALLS[call](model, tmp_path)
    assert list(model.state_dict()) == keys
    assert list(model.adapters_config) == ["a", "b", "c", "x", "y"]
    assert not changes(before, snapshot(model))


def test_a_failed_fusion_keeps_the_order_of_the_state_dict(tiny, monkeypatch):
    model = tiny()
    for name in "abc":
        model.add_adapter(name, "seq_bn")
    for pair in ("ab", "bc"):
        model.add_adapter_fusion(Fuse(*pair))
    keys = list(model.state_dict())
    before = snapshot(model)
    monkeypatch.setattr(activation, "make_plan", failing)
    with pytest.raises(AdapterZooError, match="as it happens"):
        model.add_adapter_fusion(Fuse("a", "b"), overwrite_ok=True, set_active=True)
    monkeypatch.undo()
    assert list(model.state_dict()) == keys
    assert not changes(before, snapshot(model))


def failing(*args, **kwargs):
    raise AdapterZooError("as it happens")
