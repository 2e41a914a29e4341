"""AdapterHub's names of places, as `adapters` 1.3.0 itself gives them to 28 families, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from adapterzoo import AutoAdapterModel, BnConfig, LoRAConfig
from adapterzoo.checkpoint.adapterhub.names import (
    LAYOUTS,
    find_block,
    find_layer,
    find_location,
    find_sublayer,
    location_of,
    name_of,
)
from adapterzoo.checkpoint.adapterhub.read import take_apart
from adapterzoo.checkpoint.places import places_of
from adapterzoo.errors import CheckpointError
from adapterzoo.model.hf.info import info_of
from adapterzoo.spelling import adapterhub_spellings

FILE = Path(__file__).resolve().parents[1] / "data" / "adapterhub_names.json"
FAMILIES = json.loads(FILE.read_text())["families"]


def test_every_family_that_is_written_was_seen_at_the_peer():
    # its places are written out in test_adapterhub_places, from the peer's source
    assert set(LAYOUTS) - {"gemma3_text"} <= set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_the_peer_lead_to_all_places_and_back(family):
    theirs = FAMILIES[family]
    info = info_about(family)
    cross = (
        family in ("bart", "mbart", "mt5", "t5", "encoder-decoder")
        or "encoder_layers" in theirs["config"]
    )
    lora = LoRAConfig(attn_matrices=("q", "k", "v"), intermediate_lora=True, output_lora=True)
    for kind, asked in (
        ("bottlenecks", BnConfig(mh_adapter=True, output_adapter=True, cross_adapter=cross,
                                 reduction_factor=4, non_linearity="relu")),
        ("lora", lora),
    ):  # fmt: skip
        container = adapterhub_spellings[asked.architecture].containers[0]
        places = places_of(asked, info.anatomy)
        found = set()
        for name in theirs[kind]:
            for path in (name, name.removeprefix(f"{info.prefix}.")):
                key = take_apart(f"{path}.a.w", "a", [container])
                assert key is not None
                assert key.parameter == "w"
                location = find_location(info, container, key.path)
                assert location is not None, path
                found.add(location)
        assert len(found) == len(theirs[kind])
        assert found == {location_of(container, place) for place in places}
        if family in LAYOUTS:
            names = {
                f"{name_of(info, container, place, LAYOUTS[family])}.{container.name}"
                for place in places
            }
            # what the peer hangs into a plain base model has no prefix
            expected = {name.removeprefix(f"{info.prefix}.") for name in theirs[kind]}
            assert names == expected


def info_about(family):
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **FAMILIES[family]["config"])
        return info_of(AutoAdapterModel.from_config(config))


def test_what_is_nowhere_leads_nowhere():
    info = info_about("t5")
    far = "encoder.block." + "9" * 5000
    for path in ("", "pooler", "encoder", "encoder.block.9.layer.0", "block.0.layer.0",
                 "transformer.block.0", "0", "encoder.block.-1", far):  # fmt: skip
        assert find_block(info, path) is None, path
    block = info.anatomy.blocks[0]
    for rest in ("", "layer", "layer.9", "layer.0.Other", "cross_attention_adapters"):
        assert find_sublayer(block, rest) is None, rest
        assert find_layer(block, rest) is None, rest


def test_stacks_that_were_renamed_are_told_apart():
    info = info_about("t5")
    for path, layer in (("encoder.layers.1.x", 1), ("transformer.decoder.h.0.x", 2)):
        located = find_block(info, path)
        assert located is not None, path
        assert (located[0].layer, located[1]) == (layer, "x")
    # neither, and both
    assert find_block(info, "layers.1.x") is None
    assert find_block(info, "encoder.decoder.1.x") is None


def test_a_place_without_a_name_is_an_error():
    info = info_about("bert")
    place = places_of(LoRAConfig(target_modules=["word_embeddings"]), info.anatomy)[0]
    with pytest.raises(CheckpointError, match=r"embeddings\.word_embeddings.*format='native'"):
        name_of(info, adapterhub_spellings["lora"].containers[0], place, LAYOUTS["bert"])
