"""Saved models: what stands in their config.json, read by this release and by others."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_config, tiny_inputs
from transformers import AutoModel, BertModel, PreTrainedModel

from adapterzoo import AutoAdapterModel, init, load_model
from adapterzoo.errors import CheckpointError, StateError

# what AdapterHub's adapters 1.3.0 writes beside the fields of transformers; no "format"
THEIRS = {
    "adapters": {"a": "9076f36a74755ac4"},
    "config_map": {"9076f36a74755ac4": {"mh_adapter": False, "output_adapter": True}},
    "fusion_config_map": {},
    "fusion_name_map": {},
    "fusions": {},
}


def saved(folder, entry=None):
    """A saved base model, perhaps with an entry of its config.json."""
    torch.manual_seed(0)
    AutoModel.from_config(tiny_config("bert")).save_pretrained(folder)
    if entry is not None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "adapters": entry}))
    return folder


def load(folder):
    return load_model(folder, BertModel)


@pytest.mark.parametrize("of", [AutoAdapterModel.from_pretrained, load])
@pytest.mark.parametrize("name", ["adapterzoo-2", "other", ""])
def test_adapters_of_another_format_are_not_lost_unseen(of, name, tmp_path):
    saved(tmp_path, {"format": name, "adapters": []})
    with pytest.raises(CheckpointError) as caught:
        of(tmp_path)
    text = str(caught.value)
    assert f"format {name!r}" in text
    assert "pip install -U adapterzoo" in text


def test_a_plain_model_does_not_hide_them_either(tmp_path):
    path = saved(tmp_path, {"format": "adapterzoo-2", "adapters": []})
    with pytest.raises(CheckpointError, match=r"pip install -U adapterzoo"):
        BertModel.from_pretrained(path)
    # as in a process that imports adapterzoo afterwards
    load = vars(PreTrainedModel)["from_pretrained"]._unpatched.__func__
    plain = load(BertModel, path)
    with pytest.raises(StateError, match=r"load_model\(path, BertModel\)"):
        init(plain)


@pytest.mark.parametrize("entry", [THEIRS, [], "adapters", {"format": 3}])
def test_what_others_keep_under_the_word_is_left_alone(entry, tmp_path):
    plain = AutoModel.from_pretrained(saved(tmp_path / "plain")).eval()
    model = AutoAdapterModel.from_pretrained(saved(tmp_path / "theirs", entry)).eval()
    assert not model.adapters_config.adapters
    inputs = tiny_inputs("bert")
    assert torch.equal(model(**inputs).last_hidden_state, plain(**inputs).last_hidden_state)
