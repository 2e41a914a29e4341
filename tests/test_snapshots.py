"""The helper that says whether a model has changed notices each thing that can."""

from __future__ import annotations

import pytest
import torch
from snapshots import changes, refused, snapshot, stir

from adapterzoo import LoRAConfig, Stack
from adapterzoo.errors import ConfigError, UnknownNameError


@pytest.fixture
def model(tiny):
    model = tiny()
    model.add_adapter("a", "lora")
    model.add_adapter("b", "seq_bn")
    model.add_classification_head("a", num_labels=3)
    stir(model, "a")
    return model


@torch.no_grad()
def flip_one_sign(model):
    weight = model.base_model.embeddings.LayerNorm.bias
    assert weight[0] == 0
    weight[0] = -0.0


def freeze_one(model):
    next(model.parameters()).requires_grad_(False)


def train_one(model):
    model.base_model.encoder.layer[1].train()


def swap_class(model):
    layer = model.base_model.encoder.layer[0].output.dense
    layer.__class__ = type("Other", (type(layer),), {})


def swap_parameter(model):
    layer = model.base_model.encoder.layer[0].output.dense
    layer.bias = torch.nn.Parameter(layer.bias.detach().clone())


@pytest.mark.parametrize(
    "change",
    [
        flip_one_sign,
        freeze_one,
        train_one,
        swap_class,
        swap_parameter,
        lambda m: m.set_active_adapters("a"),
        lambda m: m.set_active_adapters(None, skip_layers=[1]),
        lambda m: m.delete_adapter("b"),
        lambda m: m.add_adapter("b", "lora", overwrite_ok=True),
        lambda m: m.add_adapter("a", LoRAConfig(alpha=9), overwrite_ok=True),
        lambda m: m.add_tagging_head("c"),
        lambda m: m.delete_head("a"),
        lambda m: setattr(m, "active_head", None),
        lambda m: m.merge_adapter("a"),
        lambda m: setattr(m.config, "hidden_act", "relu"),
        lambda m: setattr(m._active, "override", m.make_plan(Stack("a"))),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
        lambda m: setattr(m.base_model.pooler, "note", 1),
    ],
)
def test_a_snapshot_notices(model, change):
    before = snapshot(model)
    assert not changes(before, snapshot(model))
    change(model)
    assert changes(before, snapshot(model))


def unknown(model):
    model.set_active_adapters("c")


def test_refused_passes_on_the_right_error(model):
    with refused(model, UnknownNameError, "'c'", "'a'", "'b'"):
        unknown(model)


def half_done(model):
    model.delete_head("a")
    unknown(model)


@pytest.mark.parametrize(
    ("call", "error", "says", "complaint"),
    [
        (id, UnknownNameError, ("'c'", "'a'"), (pytest.fail.Exception, "DID NOT RAISE")),
        (unknown, ConfigError, ("'c'", "'a'"), (UnknownNameError, "'c'")),
        (unknown, UnknownNameError, ("'x'",), (AssertionError, "not in")),
        (unknown, UnknownNameError, ("'c'",), (AssertionError, "the hint")),
        (half_done, UnknownNameError, ("'c'", "'a'"), (AssertionError, None)),
    ],
)
def test_refused_complains(model, call, error, says, complaint):
    kind, text = complaint
    with pytest.raises(kind, match=text), refused(model, error, *says):
        call(model)
