"""Files that `adapters` has written of the methods beyond LoRA and bottlenecks, and its outputs.

A few lie in `data/golden_adapterhub`; the others are beside the checkout, if anywhere.
"""

import json
import warnings
from pathlib import Path

import pytest
import torch
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
from adapterzoo.errors import CheckpointError, UnknownNameError

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5", "vit")
METHODS = (
    "ia3", "lora_scale", "vera", "vera_kv", "dvora", "dvora_kv", "loreft", "loreft_prefix",
    "noreft", "direft", "direft_prefix", "prefix_tuning", "prefix_tuning_flat", "mam", "unipelt",
    "seq_bn_inv", "double_seq_bn_inv", "prompt_tuning", "prompt_tuning_after_bos",
)  # fmt: skip
GOLDEN = [
    pytest.param(place / family / method, id=f"{place.name}-{family}-{method}")
    for place in (HERE, SHARED)
    for family in FAMILIES
    for method in METHODS
    if (place / family / method).is_dir()
]
# what adapters 1.3 has beyond these
ABSENT = ("compacter",)
INPUTS = ("input_ids", "attention_mask", "decoder_input_ids", "pixel_values")
PICKLED = "pytorch_adapter.bin"


def has_prefix(folder):
    return any(name in folder.name for name in ("prefix_tuning", "mam", "unipelt"))


def loaded(folder, attention=None):
    # eager attention of transformers makes NaN of padding in float64, where nothing is visible
    attention = attention or ("eager" if has_prefix(folder) else "sdpa")
    model = AutoAdapterModel.from_pretrained(folder.parent / "base", attn_implementation=attention)
    with warnings.catch_warnings():
        # NoReFT and DiReFT are written alike
        warnings.simplefilter("ignore")
        model.eval().load_adapter(folder, set_active=True)
    return model


def check(model, expected, outputs):
    """The peer's outputs at the positions that count, in float64."""
    model.double()
    for start in ("", "left.", "full."):
        inputs = {key: expected[start + key] for key in INPUTS if start + key in expected}
        if f"{start}logits" not in expected or not inputs or (outputs and start):
            continue
        inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
        with torch.no_grad():
            found = model(**inputs).logits
        theirs = outputs.get(f"{start}logits", expected[f"{start}logits"]).double()
        mask = expected.get(f"{start}compare")
        if mask is not None and found.shape[:2] == mask.shape:
            found, theirs = found[mask.bool()], theirs[mask.bool()]
        torch.testing.assert_close(found, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("folder", GOLDEN)
def test_golden_files_give_their_outputs(folder):
    expected = load_file(folder / "expected.safetensors")
    # what the peer itself computes from its file, which does not say that it is DiReFT
    reloaded = {"logits": expected["reloaded.logits"]} if "direft" in folder.name else {}
    check(loaded(folder), expected, reloaded)


@pytest.mark.parametrize("folder", [golden for golden in GOLDEN if has_prefix(golden.values[0])])
def test_every_attention_computes_the_same(folder):
    """The peer's own sdpa ignores prefixes in padded batches: its files were made with eager."""
    check(loaded(folder, "sdpa"), load_file(folder / "expected.safetensors"), {})


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
    check(model, load_file(folder / "expected.safetensors"), {})


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
        if "units.1" not in key or "suffix" not in folder.name:
            assert ours[key].shape == tensor.shape
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


@pytest.mark.skipif(not SHARED.is_dir(), reason="the golden files are not beside the checkout")
@pytest.mark.parametrize("method", ABSENT)
def test_a_method_that_is_absent_is_named(method):
    folder = SHARED / "bert" / method
    model = AutoAdapterModel.from_pretrained(SHARED / "bert" / "base")
    before = list(model.state_dict())
    with pytest.raises((CheckpointError, UnknownNameError)):
        model.load_adapter(folder)
    assert list(model.state_dict()) == before
