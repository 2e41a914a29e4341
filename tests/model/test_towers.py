"""Models of several towers: their features with adapters, and heads where they can run."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import same_bits, stir
from transformers import CLIPModel, DPRConfig, DPRQuestionEncoder

import adapterzoo
from adapterzoo import AutoAdapterModel, Parallel, init
from adapterzoo.heads import ClassificationConfig

TOWERS = {"text": ("input_ids", "attention_mask"), "image": ("pixel_values",)}


def made(kind, family="clip", rows=2):
    config = tiny_config(family)
    torch.manual_seed(0)
    if kind == "named":
        model = AutoAdapterModel.from_config(config)
    else:
        model = init(AutoAdapterModel.from_config(config).backbone_class(config))
    for seed, name in enumerate("ab", start=1):
        model.add_adapter(name, "lora")
        stir(model, name, seed=seed)
    return model.eval(), tiny_inputs(family, batch=rows)


def features(model, tower, inputs, **kwargs):
    own = {name: inputs[name] for name in TOWERS[tower]}
    with torch.no_grad():
        return getattr(model, f"get_{tower}_features")(**own, **kwargs).pooler_output


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("kind", ["named", "init"])
def test_features_are_those_of_the_whole_model(kind, family, tower):
    model, inputs = made(kind, family)
    answers = {}
    for name in (None, "a", "b"):
        model.set_active_adapters(name)
        with torch.no_grad():
            whole = model(**inputs)[f"{tower}_embeds"]
        answers[name] = features(model, tower, inputs)
        norm = answers[name] / answers[name].norm(dim=-1, keepdim=True)
        torch.testing.assert_close(norm, whole, rtol=1e-5, atol=1e-5)
    assert all(not same_bits(answers[None], answers[name]) for name in "ab")
    plain = model.base_model if kind == "named" else model
    model.set_active_adapters(None)
    assert same_bits(features(plain, tower, inputs), answers[None])


@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize("kind", ["named", "init"])
def test_rows_of_one_tower_take_their_own_adapters(kind, tower):
    model, inputs = made(kind, rows=3)
    rows = ["b", None, "a"]
    mixed = features(model, tower, inputs, adapter_names=rows).double()
    for row, name in enumerate(rows):
        model.set_active_adapters(name)
        alone = features(model, tower, inputs).double()[row]
        torch.testing.assert_close(mixed[row], alone, rtol=1e-5, atol=1e-5)
    model.set_active_adapters(Parallel("a", "b"))
    both = features(model, tower, inputs)
    assert both.shape[0] == 6
    model.set_active_adapters("b")
    torch.testing.assert_close(both[3:], features(model, tower, inputs), rtol=1e-5, atol=1e-5)
    with pytest.raises(adapterzoo.AdapterZooError, match="names 2 rows"):
        features(model, tower, inputs, adapter_names=["a", "b"])


def test_a_tower_takes_the_head(tmp_path):
    config = tiny_config("clip")
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(tmp_path)
    inputs = tiny_inputs("clip")
    for tower, names in TOWERS.items():
        name = {"text": "CLIPTextAdapterModel", "image": "CLIPVisionAdapterModel"}[tower]
        cls = getattr(adapterzoo, name)
        model, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        model.add_classification_head("x", num_labels=3)
        answer = model(**{name: inputs[name] for name in names})
        assert answer.logits.shape == (2, 3)


def test_a_model_that_only_pools_takes_a_head_on_that():
    config = DPRConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    model = AutoAdapterModel.from_config(config)
    assert model.backbone_class is DPRQuestionEncoder
    model.add_prediction_head_from_config("x", ClassificationConfig(use_pooler=True))
    assert model(**tiny_inputs("bert")).logits.shape == (2, 2)
