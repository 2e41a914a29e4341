"""A model owns its config: two models of one config object know nothing of each other."""

from __future__ import annotations

import pytest
from families import tiny_config
from transformers import BertForSequenceClassification, BertModel

import adapterzoo
from adapterzoo import AutoAdapterModel, BertAdapterModel, init, load_model


def by_path(config, path):
    return AutoAdapterModel.from_pretrained(path, config=config)


MAKERS = {
    "from_config": lambda config, path: AutoAdapterModel.from_config(config),
    "from_pretrained": by_path,
    "constructor": lambda config, path: BertAdapterModel(config),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_two_models_of_one_config_have_their_own_heads(tmp_path, maker):
    config = tiny_config("bert")
    BertModel(config).save_pretrained(tmp_path / "base")
    before = config.to_dict()
    first, second = (MAKERS[maker](config, tmp_path / "base") for _ in range(2))
    first.add_classification_head("a", num_labels=3, id2label={0: "x", 1: "y", 2: "z"})
    second.add_tagging_head("b", num_labels=5)
    assert first.config.id2label == {0: "x", 1: "y", 2: "z"}
    assert list(first.config.prediction_heads) == ["a"]
    assert list(second.config.prediction_heads) == ["b"]
    assert len(second.config.id2label) == 5
    assert config.to_dict() == before
    first.save_pretrained(tmp_path / "first")
    assert AutoAdapterModel.from_pretrained(tmp_path / "first").known_heads() == ("a",)
    # the base model's config is the model's
    assert first.base_model.config is first.config


def test_models_that_get_adapters_have_their_own_config(tmp_path):
    config = tiny_config("bert")
    first, second = (init(BertForSequenceClassification(config)) for _ in range(2))
    assert len({id(c) for c in (config, first.config, second.config)}) == 3
    first.config.id2label = {0: "no", 1: "yes"}
    assert second.config.id2label == config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    modules = [m for m in first.modules() if "config" in vars(m)]
    assert len(modules) >= 5
    assert all(m.config is first.config for m in modules)


def test_the_towers_of_a_model_keep_to_the_parts_of_its_config():
    config = tiny_config("clip")
    model = init(adapterzoo.auto.adapter_class(config).backbone_class(config))
    assert model.config is not config
    assert model.text_model.config is model.config.text_config is not config.text_config
    assert model.vision_model.config is model.config.vision_config


def test_load_model_leaves_the_config_that_it_is_given(tmp_path):
    config = tiny_config("bert")
    model = init(BertForSequenceClassification(config))
    model.add_adapter("a", "lora", set_active=True)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, type(model))
    assert type(loaded) is type(model)
    assert list(loaded.adapters_config) == ["a"]
    assert "adapters" not in vars(loaded.config)
