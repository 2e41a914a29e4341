"""Files that `adapters` has written of the methods beyond LoRA and bottlenecks, and its outputs.

A few lie in `data/golden_adapterhub`; the others are beside the checkout, if anywhere.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
from families import has_sdpa
from safetensors.torch import load_file

from adapterzoo import (
    AdapterConfig,
    AutoAdapterModel,
    LoRAConfig,
    MAMConfig,
    ParBnConfig,
    PrefixTuningConfig,
    SeqBnConfig,
    UniPELTConfig,
)

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
# every file there: what is in one of them is compared
GOLDEN = [
    pytest.param(file.parent, id=f"{place.name}-{file.parent.parent.name}-{file.parent.name}")
    for place in (HERE, SHARED)
    for file in sorted(place.glob("*/*/adapter_config.json"))
]
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "pixel_values")
PICKLED = "pytorch_adapter.bin"


def has_prefix(folder):
    return any(name in folder.name for name in ("prefix_tuning", "mam", "unipelt"))


def loaded(folder, attention=None):
    # eager attention of transformers makes NaN of padding in float64, where nothing is visible
    family = folder.parent.name
    if has_prefix(folder) and not has_sdpa(family):
        pytest.skip(f"this version of transformers computes the attention of {family} inline")
    if attention is None:
        attention = "sdpa" if has_sdpa(family) and not has_prefix(folder) else "eager"
    model = AutoAdapterModel.from_pretrained(folder.parent / "base", attn_implementation=attention)
    with warnings.catch_warnings():
        # NoReFT and DiReFT are written alike
        warnings.simplefilter("ignore")
        model.eval().load_adapter(folder, set_active=True)
    return model


def inputs_of(expected, start=""):
    """The inputs of an output; None where it has none of its own."""
    # "full." is with the same tokens, all of them real
    own = "" if start == "full." else start
    found = {key: expected[own + key] for key in INPUTS if own + key in expected}
    if start == "full." and "attention_mask" in found:
        found["attention_mask"] = torch.ones_like(found["attention_mask"])
    return {k: t.double() if t.is_floating_point() else t for k, t in found.items()}


def gates(scores, model_type):
    """Block and location to gates."""
    found = {
        f"gating.{block}.{location}": value
        for block, at in scores["golden"].items()
        for location, value in at.items()
    }
    for key in found if model_type == "vit" else ():
        if key.endswith("selfattn_lora"):
            # older versions of ViT compute the query last
            found[key] = found[key].sort(1).values
    return found


@torch.no_grad()
def computed(model, expected):
    """What the model computes of all that a file holds, in float64; by the file's keys."""
    model.double()
    found = {}
    for start in ("", "left.", "full."):
        inputs = inputs_of(expected, start)
        if inputs and any(f"{start}{kind}" in expected for kind in ("logits", "hidden")):
            hears = bool(not start and [key for key in expected if key.startswith("gating.")])
            options = {"output_adapter_gating_scores": True} if hears else {}
            out = model(**inputs, **options)
            found[f"{start}logits"] = out.logits
            found[f"{start}hidden"] = model.base_model(**inputs)[0]
            if hears:
                found |= gates(out.adapter_gating_scores, model.config.model_type)
    for start in ("left.", "full."):
        if f"generate.{start}tokens" in expected:
            prompt = inputs_of(expected, start)
            found[f"generate.{start}tokens"] = model.generate(
                **prompt, do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None
            )
    model.set_active_adapters(None)
    found["hidden_base"] = model.base_model(**inputs_of(expected))[0]
    model.set_active_adapters("golden")
    return found


def check(model, expected, but=()):
    """All that the file holds, at the positions that count; `but` begins what it cannot be."""
    found = computed(model, expected)
    inputs = {start + key for start in ("", "left.") for key in (*INPUTS, "compare")}
    asked = {k: t for k, t in expected.items() if k not in inputs and not k.startswith(but)}
    assert asked.keys() <= found.keys()
    for key, theirs in asked.items():
        ours, theirs = found[key], theirs.double() if theirs.is_floating_point() else theirs
        if model.config.model_type == "vit" and key.endswith("selfattn_lora"):
            theirs = theirs.sort(1).values
        mask = expected.get("left.compare" if key.startswith("left.") else "compare")
        # with a mask of ones every position counts
        whole = key.startswith(("full.", "gating.", "generate."))
        if mask is not None and not whole and ours.shape[:2] == mask.shape:
            ours, theirs = ours[mask.bool()], theirs[mask.bool()]
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )
    return asked


@pytest.mark.parametrize("folder", GOLDEN)
def test_golden_files_give_their_outputs(folder):
    expected = load_file(folder / "expected.safetensors")
    if "direft" not in folder.name:
        check(loaded(folder), expected)
        return
    # what the peer itself computes from its file, which does not say that it is DiReFT
    reloaded = {k.removeprefix("reloaded."): t for k, t in expected.items() if "reloaded" in k}
    check(loaded(folder), expected | reloaded, ("left.logits", "left.hidden", "reloaded."))


def test_the_check_bites():
    """A file without its adapter, and one with a tensor that nothing compares."""
    folder = HERE / "bert" / "unipelt"
    model, expected = loaded(folder), load_file(folder / "expected.safetensors")
    assert len(check(model, expected)) > 8
    for key in ("full.logits", "gating.1.selfattn_lora", "hidden", "hidden_base", "logits"):
        with pytest.raises(AssertionError, match=key):
            check(model, expected | {key: expected[key] + 1e-4})
    with pytest.raises(AssertionError):
        check(model, expected | {"other.logits": expected["logits"]})


@pytest.mark.parametrize("folder", [golden for golden in GOLDEN if has_prefix(golden.values[0])])
def test_every_attention_computes_the_same(folder):
    """The peer's own sdpa ignores prefixes in padded batches: its files were made with eager."""
    check(loaded(folder, "sdpa"), load_file(folder / "expected.safetensors"))


@pytest.mark.parametrize("folder", [g for g in GOLDEN if "direft" in g.id])
def test_a_file_may_say_that_it_is_direft(folder, tmp_path):
    copy = tmp_path / "direft"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    values = json.loads((copy / "adapter_config.json").read_text())
    values["config"]["subtract_projection"] = False
    (copy / "adapter_config.json").write_text(json.dumps(values))
    model = AutoAdapterModel.from_pretrained(folder.parent / "base").eval()
    model.load_adapter(copy, set_active=True)
    check(model, load_file(folder / "expected.safetensors"), ("reloaded.",))


MADE = {
    "prefix_tuning_flat": AdapterConfig.load(
        "prefix_tuning_flat[prefix_length=5,convention='adapterhub']"
    ),
    "mam": MAMConfig(
        PrefixTuningConfig(bottleneck_size=12, prefix_length=5, convention="adapterhub"),
        ParBnConfig(reduction_factor=4),
    ),
    "unipelt": UniPELTConfig(
        PrefixTuningConfig(bottleneck_size=12, prefix_length=5),
        SeqBnConfig(reduction_factor=4),
        LoRAConfig(r=4, alpha=4),
    ).replace(convention="adapterhub"),
}


@pytest.mark.parametrize("folder", [g for g in GOLDEN if g.values[0].name in MADE])
def test_a_fresh_adapter_of_a_named_config_is_written_as_by_adapters(folder, tmp_path):
    """The config and every key, so that a trained one gives the same file."""
    model, config = loaded(folder), MADE[folder.name]
    theirs = json.loads((folder / "adapter_config.json").read_text())["config"]
    if config.architecture == "prefix_tuning":
        config = config.replace(bottleneck_size=theirs["bottleneck_size"])
    model.add_adapter("golden", config, overwrite_ok=True)
    model.save_adapter(tmp_path, "golden", format="adapterhub")
    ours = json.loads((tmp_path / "adapter_config.json").read_text())["config"]
    for each in theirs.get("configs", ()):
        if each.get("architecture") == "lora":
            # of a gated one it has no effect
            each["alpha"] = each["r"]
    assert ours == theirs
    keys = torch.load(folder / PICKLED, weights_only=True).keys()
    written = torch.load(tmp_path / PICKLED, weights_only=True).keys()
    assert written == {key for key in keys if ".pool." not in key}


@pytest.mark.parametrize("folder", GOLDEN)
def test_what_is_written_back_is_what_was_read(folder, tmp_path):
    """All keys and, but for the completed bases of LoReFT, all tensors."""
    model = loaded(folder)
    model.save_adapter(tmp_path / "x", "golden", format="adapterhub")
    theirs, ours = (torch.load(f / PICKLED, weights_only=True) for f in (folder, tmp_path / "x"))
    # adapters saves every table once more for each layer
    theirs = {key: tensor for key, tensor in theirs.items() if ".pool." not in key}
    assert ours.keys() == theirs.keys()
    orthogonal = any("parametrizations" in key for key in theirs)
    for key, tensor in theirs.items() if not orthogonal else ():
        # of a file without suffix positions, the unit of the suffix has no effect
        assert torch.equal(ours[key], tensor) or "units.1" in key, key
    said = [json.loads((f / "adapter_config.json").read_text()) for f in (folder, tmp_path / "x")]
    for each in (values for file in said for values in file["config"].get("configs", ())):
        # the alpha of a gated LoRA has no effect
        each.pop("alpha", None)
    for file in said:
        if not file["config"].get("original_ln_before"):
            # it then has none
            file["config"].pop("residual_before_ln", None)
    assert said[0]["config"] == said[1]["config"]
    again = AutoAdapterModel.from_pretrained(folder.parent / "base").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again.load_adapter(tmp_path / "x", set_active=True)
    expected = load_file(folder / "expected.safetensors")
    inputs = {key: expected[key] for key in INPUTS if key in expected}
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    with torch.no_grad():
        found = [m.double()(**inputs).logits for m in (model, again)]
    torch.testing.assert_close(*found, rtol=0, atol=2e-5)
