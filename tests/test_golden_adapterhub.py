"""Checkpoints and outputs that AdapterHub's `adapters` 1.3.0 made, reproduced from its tensors.

A small part of them lies in `data/golden_adapterhub`; the others are beside the repository, and
their tests are skipped where they are not there.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adapterzoo import AutoAdapterModel

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5", "vit")
BOTTLENECKS = ("seq_bn", "double_seq_bn", "par_bn")
LAYERS = 2


def cases(methods):
    """Folders of the golden adapters of the methods, those of the repository first."""
    here = [HERE / family / method for family in FAMILIES for method in methods]
    shared = [SHARED / family / method for family in FAMILIES for method in methods]
    return [
        pytest.param(folder, id=f"{label}-{folder.parent.name}-{folder.name}")
        for label, folders in (("here", filter(Path.is_dir, here)), ("shared", shared))
        for folder in folders
    ]


def tensors(folder, name):
    return torch.load(folder / name, map_location="cpu", weights_only=True)


def golden_model(folder):
    """The base model with the golden adapter's config and the golden head, both still fresh."""
    model = AutoAdapterModel.from_pretrained(folder.parent / "base").eval()
    adapter = json.loads((folder / "adapter_config.json").read_text())
    head = json.loads((folder / "head_config.json").read_text())
    # fields of methods that adapters keeps in LoRA's config, at the values that turn them off
    off = {"composition_mode": "add", "use_dora": False, "vera_b": None, "vera_d": None}
    config = {k: v for k, v in adapter["config"].items() if off.get(k, ...) != v}
    model.add_adapter("golden", config=config)
    model.add_prediction_head_from_config("golden", head["config"])
    model.set_active_adapters("golden")
    return model


def fill_head(model, folder):
    """Copy the golden head's tensors; all of them, into all of the head's."""
    file = tensors(folder, "pytorch_model_head.bin")
    assert all(key.startswith("heads.golden.") for key in file)
    values = {key.removeprefix("heads.golden."): value for key, value in file.items()}
    model.heads["golden"].load_state_dict(values)


def check(model, folder):
    """Hidden state and logits are the golden ones, and not those of the base model."""
    expected = load_file(folder / "expected.safetensors")
    outputs = {key: expected.pop(key).double() for key in ("hidden", "hidden_base", "logits")}
    # in float64: how far the peer's float32 is from it is the same on every processor
    model.double()
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in expected.items()}
    with torch.no_grad():
        hidden = model.base_model(**inputs)[0]
        logits = model(**inputs).logits
        model.set_active_adapters(None)
        base = model.base_model(**inputs)[0]
    torch.testing.assert_close(hidden, outputs["hidden"], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(base, outputs["hidden_base"], rtol=0, atol=1e-5)
    assert (outputs["hidden"] - outputs["hidden_base"]).abs().max() > 0.01


# the last parts of the paths that adapters writes, to the role of the layer
LORA_ROLES = {
    "query": "query", "q": "query", "q_proj": "query",
    "key": "key", "k": "key", "k_proj": "key",
    "value": "value", "v": "value", "v_proj": "value",
    "intermediate.dense": "mlp_in", "wi": "mlp_in", "c_fc": "mlp_in", "up_proj": "mlp_in",
    "output.dense": "mlp_out", "wo": "mlp_out", "mlp.c_proj": "mlp_out", "down_proj": "mlp_out",
    "c_attn": "qkv",
}  # fmt: skip
LORA_PLACE = re.compile(
    r"^\w+\.(?:(?P<stack>encoder|decoder)\.)?(?:layer|layers|h|block)\.(?P<layer>\d+)\."
    r"(?P<layer_path>.*)\.loras\.golden\.(?P<suffix>lora_[AB])$"
)


def lora_place(key):
    """((block number over all stacks, role, cross-attention), parameter) of a golden tensor."""
    found = LORA_PLACE.match(key)
    assert found is not None, key
    layer = int(found["layer"]) + LAYERS * (found["stack"] == "decoder")
    path = found["layer_path"]
    role = next(r for end, r in LORA_ROLES.items() if re.search(rf"(^|\.){end}$", path))
    return (layer, role, "EncDecAttention" in path), found["suffix"]
