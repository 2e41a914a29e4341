"""AdapterHub's names of places, as `adapters` 1.3.0 itself gives them to 28 families, both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from snapshots import adapter_bits, stir
from transformers import (
    AutoConfig,
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DistilBertConfig,
    DistilBertModel,
)

from adapterzoo import (
    AutoAdapterModel,
    BnConfig,
    LoRAConfig,
    MAMConfig,
    PrefixTuningConfig,
    UniPELTConfig,
    init,
)
from adapterzoo.errors import CheckpointError
from adapterzoo.formats.adapterhub import take_apart
from adapterzoo.formats.adapterhub.names import (
    LAYOUTS,
    find_block,
    find_layer,
    find_location,
    find_sublayer,
    location_of,
    name_of,
)
from adapterzoo.formats.checkpoint import places_of
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.spelling import adapterhub_spellings

FILE = Path(__file__).resolve().parents[1] / "data" / "adapterhub_names.json"
FAMILIES = json.loads(FILE.read_text())["families"]


def test_every_family_that_is_written_was_seen_at_the_peer():
    # its places are written out in test_adapterhub_places, from the peer's source
    halves = {f"clip_{tower}" for tower in TOWERS}
    assert set(LAYOUTS) - {"gemma3_text"} - halves <= set(FAMILIES)


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


# a half of CLIP to its config and its classes
TOWERS = {
    "text_model": (CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection),
    "vision_model": (CLIPVisionConfig, CLIPVisionModel, CLIPVisionModelWithProjection),
}


@pytest.mark.parametrize("tower", TOWERS)
def test_a_half_of_clip_has_the_names_that_it_has_in_the_whole(tower, tmp_path):
    """At the peer no class of CLIP has a base model with another path."""
    config, *classes = TOWERS[tower]
    sizes = FAMILIES["clip"]["config"][f"{tower.removesuffix('_model')}_config"]
    models = [init(cls(config(**sizes, projection_dim=16))) for cls in classes]
    kinds = {
        "bottlenecks": BnConfig(mh_adapter=True, output_adapter=True, reduction_factor=4,
                                non_linearity="relu"),
        "lora": LoRAConfig(attn_matrices=("q", "k", "v"), intermediate_lora=True,
                           output_lora=True),
    }  # fmt: skip
    for writer, reader in (models, models[::-1]):
        for kind, asked in kinds.items():
            folder = tmp_path / type(writer).__name__ / kind
            writer.add_adapter(kind, asked)
            stir(writer, kind)
            writer.save_adapter(folder, kind, format="adapterhub-safetensors")
            names = {
                key.partition(f".{kind}.")[0] for key in load_file(*folder.glob("*adapter.s*"))
            }
            theirs = {name.removeprefix("clip.") for name in FAMILIES["clip"][kind]}
            assert names == {name for name in theirs if name.startswith(tower)}
            reader.load_adapter(folder, load_as="back", with_head=False)
            assert adapter_bits(writer, kind) == adapter_bits(reader, "back")
            reader.delete_adapter("back")
            writer.delete_adapter(kind)
    if tower == "text_model":
        writer.add_adapter("inv", "seq_bn_inv")
        writer.save_adapter(tmp_path / "inv", "inv", format="adapterhub-safetensors")
        keys = load_file(*(tmp_path / "inv").glob("*adapter.s*"))
        assert "text_model.invertible_adapters.inv.F.0.weight" in keys
        reader.load_adapter(tmp_path / "inv", with_head=False)
        assert adapter_bits(writer, "inv") == adapter_bits(reader, "inv")


def test_towers_have_prefixes_of_their_own(tmp_path):
    """`adapters` names the table of each tower by the type of its config."""
    text, vision = (TOWERS[tower][0](hidden_size=width, intermediate_size=32, num_hidden_layers=2,
                                     num_attention_heads=4)
                    for tower, width in zip(TOWERS, (32, 48), strict=True))  # fmt: skip
    whole = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict())
    widths = {"clip_text_model_self_prefix": 32, "clip_vision_model_self_prefix": 48}
    for made, locations in (
        (CLIPModel(whole), [*widths]),
        (CLIPTextModel(text), [*widths][:1]),
        (CLIPVisionModelWithProjection(vision), [*widths][1:]),
    ):
        model, folder = init(made), tmp_path / type(made).__name__
        model.add_adapter(
            "a", PrefixTuningConfig(flat=True, prefix_length=3, convention="adapterhub")
        )
        stir(model, "a")
        before = adapter_bits(model, "a")
        model.save_adapter(folder, "a", format="adapterhub-safetensors", with_head=False)
        start = "prefix_tuning.prefix_tunings.a."
        tensors = load_file(*folder.glob("*adapter.s*"))
        # keys and values of two layers
        assert {key: len(tensor) for key, tensor in tensors.items()} == {
            f"{start}{location}.control_trans": 3 * 2 * 2 * widths[location]
            for location in locations
        }
        model.load_adapter(folder, load_as="b")
        assert adapter_bits(model, "b") == before
    model = init(CLIPModel(whole))
    model.add_adapter("mine", "prefix_tuning_flat")
    with pytest.raises(CheckpointError, match=r"towers has a prefix.*format='native'"):
        model.save_adapter(tmp_path / "one", "mine", format="peft")
    model.add_adapter("a", PrefixTuningConfig(flat=True, leave_out=(2, 3), convention="adapterhub"))
    with pytest.raises(CheckpointError, match=r"prefixes in both towers.*format='native'"):
        model.save_adapter(tmp_path / "one", "a", format="adapterhub")


def test_prefixes_of_distilbert_have_the_name_of_the_peer(tmp_path):
    """`adapters` names the location "self" there, and "self_prefix" in BERT and others."""
    config = DistilBertConfig(vocab_size=60, dim=16, hidden_dim=24, n_layers=2, n_heads=2)
    model = init(DistilBertModel(config))
    table = PrefixTuningConfig(prefix_length=3, bottleneck_size=4, convention="adapterhub")
    for name, method in {
        "a": table,
        "b": table.replace(flat=True),
        "mam": MAMConfig(table),
        "unipelt": UniPELTConfig(table).replace(convention="adapterhub"),
    }.items():
        model.add_adapter(name, method)
        stir(model, name)
        before, folder = adapter_bits(model, name), tmp_path / name
        model.save_adapter(folder, name, format="adapterhub-safetensors", with_head=False)
        (file,) = folder.glob("*adapter.s*")
        tensors = load_file(file)
        own = [key for key in tensors if "prefix_tunings." in key]
        assert own
        assert all(f"prefix_tunings.{name}.self." in key for key in own)
        model.load_adapter(folder, load_as="read")
        assert adapter_bits(model, "read") == before
        model.delete_adapter("read")
        # as this library wrote them before
        old = {key.replace(f".{name}.self.", f".{name}.self_prefix."): t
               for key, t in tensors.items()}  # fmt: skip
        save_file(old, file)
        model.load_adapter(folder, load_as="read")
        assert adapter_bits(model, "read") == before
        model.delete_adapter("read")


def test_a_file_of_the_other_half_of_clip_is_refused(tmp_path):
    models = []
    for config, cls, _ in TOWERS.values():
        models.append(init(cls(config(num_hidden_layers=2, hidden_size=32, intermediate_size=32,
                                      num_attention_heads=4))))  # fmt: skip
    models[0].add_adapter("a", "seq_bn")
    models[0].save_adapter(tmp_path, "a", format="adapterhub-safetensors")
    with pytest.raises(CheckpointError, match=r"text_model\.encoder\.layers\.0"):
        models[1].load_adapter(tmp_path)
    assert not models[1].has_adapters()


def info_about(family):
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **FAMILIES[family]["config"])
        return ModelInfo(AutoAdapterModel.from_config(config))


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
