"""Small cases of what `tests/fuzz` found."""

from __future__ import annotations

import torch
from snapshots import stir

from adapterzoo import AdapterSetup, AutoAdapterModel


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


def test_beams_of_a_mixed_batch_as_many_as_its_prompt_has_tokens(tiny):
    model = tiny("t5").double()
    model.add_adapter("a", "seq_bn")
    stir(model, "a")
    model.add_seq2seq_lm_head("a")
    # 2 rows of 2 beams, 4 tokens: a decoder of 2 tokens gets [4, 2, width]
    prompt = torch.arange(3, 11).reshape(2, 4)
    given = {"num_beams": 2, "use_cache": False, "min_new_tokens": 4, "max_new_tokens": 4}
    mixed = model.generate(input_ids=prompt, adapter_names=["a", None], **given)
    with AdapterSetup("a"):
        assert torch.equal(model.generate(input_ids=prompt[:1], **given)[0], mixed[0])
    with AdapterSetup(None):
        assert torch.equal(model.generate(input_ids=prompt[1:], **given)[0], mixed[1])
