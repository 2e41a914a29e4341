"""Small cases of what `tests/fuzz` found."""

from __future__ import annotations

from adapterzoo import AutoAdapterModel


def through_a_folder(model, folder):
    model.save_pretrained(folder)
    return AutoAdapterModel.from_pretrained(folder)


def test_the_order_of_heads_survives_a_round_trip(tiny, tmp_path):
    model = tiny("bert")
    model.add_tagging_head("z")
    model.add_tagging_head("a")
    loaded = through_a_folder(model, tmp_path)
    assert loaded.known_heads() == ("z", "a")
    assert list(loaded.state_dict()) == list(model.state_dict())


def test_a_loaded_config_has_the_labels_of_the_active_head(tiny, tmp_path):
    model = tiny("bert")
    model.add_classification_head("judge", num_labels=2, id2label={0: "bad", 1: "good"})
    model.add_tagging_head("words", num_labels=3, id2label={0: "x", 1: "y", 2: "z"})
    model.active_head = "judge"
    loaded = through_a_folder(model, tmp_path)
    assert loaded.active_head == "judge"
    assert loaded.config.id2label == {0: "bad", 1: "good"}
    assert loaded.config.problem_type == "single_label_classification"
