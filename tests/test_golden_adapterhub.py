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
from torch import Tensor

from adapterzoo import AutoAdapterModel

HERE = Path(__file__).resolve().parent / "data" / "golden_adapterhub"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden" / "adapterhub"
FAMILIES = ("bert", "roberta", "gpt2", "llama", "t5", "vit")
BOTTLENECKS = ("seq_bn", "double_seq_bn", "par_bn")
LAYERS = 2


def cases(methods: tuple[str, ...]) -> list[object]:
    """Folders of the golden adapters of the methods, those of the repository first."""
    here = [HERE / family / method for family in FAMILIES for method in methods]
    shared = [SHARED / family / method for family in FAMILIES for method in methods]
    return [
        pytest.param(folder, id=f"{label}-{folder.parent.name}-{folder.name}")
        for label, folders in (("here", filter(Path.is_dir, here)), ("shared", shared))
        for folder in folders
    ]


def tensors(folder: Path, name: str) -> dict[str, Tensor]:
    return torch.load(folder / name, map_location="cpu", weights_only=True)


def golden_model(folder: Path):
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


def fill_head(model, folder: Path) -> None:
    """Copy the golden head's tensors; all of them, into all of the head's."""
    file = tensors(folder, "pytorch_model_head.bin")
    assert all(key.startswith("heads.golden.") for key in file)
    values = {key.removeprefix("heads.golden."): value for key, value in file.items()}
    model.heads["golden"].load_state_dict(values)


def check(model, folder: Path) -> None:
    """Hidden state and logits are the golden ones, and not those of the base model."""
    expected = load_file(folder / "expected.safetensors")
    outputs = {key: expected.pop(key) for key in ("hidden", "hidden_base", "logits")}
    with torch.no_grad():
        hidden = model.base_model(**expected)[0]
        logits = model(**expected).logits
        model.set_active_adapters(None)
        base = model.base_model(**expected)[0]
    torch.testing.assert_close(hidden, outputs["hidden"], rtol=0, atol=1e-5)
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(base, outputs["hidden_base"], rtol=0, atol=1e-5)
    assert (outputs["hidden"] - outputs["hidden_base"]).abs().max() > 0.01


# where adapters keeps bottlenecks: block number in its stack, and the part of the block
PLACE = re.compile(
    r"^\w+\.(?:(?P<stack>encoder|decoder)\.)?(?:layer|layers|h|block)\.(?P<layer>\d+)\.(?P<part>.*?)"
    r"\.?adapters\.golden\.(?P<suffix>.+)$"
)
ATTENTION = {"attention.output", "attention_adapters", "layer.0"}
OUTPUT = {"output", "output_adapters", "output.output_adapters", "layer.1", "layer.2"}


def bottleneck_place(key: str) -> tuple[int, str, str]:
    """(block number over all stacks, location, name of the parameter) of a golden tensor."""
    found = PLACE.match(key)
    assert found is not None, key
    layer = int(found["layer"])
    if found["stack"] == "decoder":
        layer += LAYERS
    assert (found["part"] in ATTENTION) != (found["part"] in OUTPUT), key
    return layer, "mh_adapter" if found["part"] in ATTENTION else "output_adapter", found["suffix"]


@pytest.mark.parametrize("folder", cases(BOTTLENECKS))
def test_bottlenecks_give_the_golden_outputs(folder: Path):
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoints in {folder.parents[1].name}/")
    model = golden_model(folder)
    by_module: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, value in tensors(folder, "pytorch_adapter.bin").items():
        layer, location, suffix = bottleneck_place(key)
        by_module.setdefault((layer, location), {})[suffix] = value
    adapters = model.get_adapter("golden")
    places = {(layer, at) for layer, locations in adapters.items() for at in locations}
    assert places == set(by_module)
    for (layer, location), values in by_module.items():
        adapters[layer][location].load_state_dict(values)
    fill_head(model, folder)
    check(model, folder)


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


def lora_place(key: str) -> tuple[tuple[int, str, bool], str]:
    """((block number over all stacks, role, cross-attention), parameter) of a golden tensor."""
    found = LORA_PLACE.match(key)
    assert found is not None, key
    layer = int(found["layer"]) + LAYERS * (found["stack"] == "decoder")
    path = found["layer_path"]
    role = next(r for end, r in LORA_ROLES.items() if re.search(rf"(^|\.){end}$", path))
    return (layer, role, "EncDecAttention" in path), found["suffix"]


@pytest.mark.parametrize("folder", cases(("lora",)))
def test_lora_gives_the_golden_outputs(folder: Path):
    if not folder.is_dir():
        pytest.skip(f"no golden checkpoints in {folder.parents[1].name}/")
    model = golden_model(folder)
    rank = json.loads((folder / "adapter_config.json").read_text())["config"]["r"]
    file: dict[tuple[int, str, bool], dict[str, Tensor]] = {}
    for key, value in tensors(folder, "pytorch_adapter.bin").items():
        place, suffix = lora_place(key)
        file.setdefault(place, {})[suffix] = value
    # adapters keeps the parts of a fused layer in one tensor, one under the other
    for layer, role, cross in [place for place in file if place[1] == "qkv"]:
        fused = file.pop((layer, role, cross))
        for i, part in enumerate(("query", "key", "value")):
            rows = fused["lora_B"].shape[0] // 3
            file[layer, part, cross] = {
                "lora_A": fused["lora_A"][i * rank : (i + 1) * rank],
                "lora_B": fused["lora_B"][i * rows : (i + 1) * rows],
            }
    modules = dict(model.adapter_modules("golden"))
    sites = {
        (site.layer, site.role, site.cross): site
        for role in ("query", "key", "value", "mlp_in", "mlp_out")
        for site in model.anatomy.select(role, cross=None)
    }
    assert sites.keys() == file.keys()
    for place, values in file.items():
        module = modules[sites[place].path]
        part = module if sites[place].rows is None else module.get_submodule(place[1])
        part.load_state_dict(values)
    fill_head(model, folder)
    check(model, folder)
