"""docs/from-peft.md, row by row: what it says a user has to change, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import tiny_inputs
from peft_world import QUIET, ours, plain
from safetensors.torch import load_file, save_file
from torch import nn

import adapterzoo.peft
from adapterzoo import Stack
from adapterzoo.errors import CheckpointError, ConfigError, StateError

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
PAGE = (Path(__file__).parents[1] / "docs" / "from-peft.md").read_text("utf-8")
SECTION = re.search(r"^## What you have to change\n(.*?)(?=^## )", PAGE, re.M | re.S)
assert SECTION
ROWS = [line for line in SECTION[1].splitlines() if line.startswith("| ")][2:]
Check = Callable[[Any, Path], None]
CHECKS: dict[str, Check] = {}


def row(start: str) -> Callable[[Check], Check]:
    """The check of the row that begins so."""

    def enter(check: Check) -> Check:
        assert start not in CHECKS
        CHECKS[start] = check
        return check

    return enter


def test_the_table_fits_on_a_screen_and_each_row_has_a_check():
    assert len(ROWS) <= 16
    assert not [r for r in ROWS if not [c for c in CHECKS if r.startswith(f"| {c}")]]
    assert not [c for c in CHECKS if not [r for r in ROWS if r.startswith(f"| {c}")]]


def test_code_that_looks_for_the_wrappers_finds_the_model():
    config = adapterzoo.peft.LoraConfig(r=4, task_type="CAUSAL_LM")
    model = adapterzoo.peft.get_peft_model(plain("llama"), config)
    assert model.base_model.model is model.get_base_model() is model
    layer, names = model.model.layers[0].self_attn.q_proj, dict(model.named_parameters())
    factor = layer.lora_A["default"].weight
    assert factor is names["model.layers.0.self_attn.q_proj.loras.default.lora_A"]
    assert isinstance(model, adapterzoo.peft.PeftModelForCausalLM)
    assert isinstance(layer, adapterzoo.peft.LoraLayer)
    assert model.active_adapters == model.active_adapters() == ["default"]
    assert model.active_adapters == Stack("default")


def test_configs_are_dataclasses(tmp_path):
    config = dataclasses.replace(adapterzoo.peft.LoraConfig("CAUSAL_LM", r=4), lora_alpha=6)
    assert dataclasses.asdict(config)["lora_alpha"] == 6
    with pytest.raises(TypeError, match="rank"):
        adapterzoo.peft.LoraConfig(rank=4)
    with pytest.warns(UserWarning, match="rank"):
        adapterzoo.peft.PeftConfig.from_peft_type(peft_type="LORA", rank=4)
    model = adapterzoo.peft.get_peft_model(plain("llama"), config)
    assert model.peft_config["default"] is config
    config.lora_alpha = 7
    assert model.model.layers[0].self_attn.q_proj.scaling["default"] == 6 / 4
    model.save_pretrained(tmp_path)
    assert config.from_json_file(tmp_path / "adapter_config.json")["lora_alpha"] == 7


@pytest.mark.parametrize("start", CHECKS)
def test_a_row_is_true(start, tmp_path):
    model = adapterzoo.peft.get_peft_model(plain("llama"), adapterzoo.peft.LoraConfig(r=4))
    CHECKS[start](model, tmp_path)


@row("`from peft import …`")
def another_import(model, folder):
    # the one name that PEFT does not have
    assert {*adapterzoo.peft.__all__} - {*dir(peft)} == {"install"}
    with pytest.raises(ImportError, match="XLoraConfig"):
        from adapterzoo.peft import XLoraConfig  # noqa: F401


@row("parameters such as")
def names_of_parameters(model, folder):
    names = [name for name, _ in model.named_parameters()]
    assert "model.layers.0.self_attn.q_proj.loras.default.lora_A" in names
    model.save_pretrained(folder)
    wrapped = peft.get_peft_model(plain("llama"), peft.LoraConfig(r=4))
    assert {*load_file(folder / "adapter_model.safetensors")} == {
        *peft.get_peft_model_state_dict(wrapped)
    }


@row("`layer.set_adapter(…)`")
def methods_of_one_layer(model, folder):
    model.add_adapter("b", adapterzoo.peft.LoraConfig(r=4))
    one, other = (block.self_attn.q_proj for block in model.model.layers)
    one.set_adapter("b")
    assert model.active_adapters == other.active_adapters == ["b"]
    one.merge()
    assert other.merged_adapters == ["b"]
    one.unmerge()
    assert not other.merged
    one.set_scale("b", 3)
    assert one.scaling["b"] == 3 * other.scaling["b"]
    one.set_adapter("default")
    one.delete_adapter("b")
    assert [*other.lora_A] == [*model.adapters_config] == ["default"]


@row('`LoraConfig(init_lora_weights="lora_ga")`, or `"mica"`')
def initial_values(model, folder):
    for name in ("lora_ga", "mica"):
        with pytest.raises(ConfigError, match=f"init_weights='{name}'"):
            model.add_adapter("b", adapterzoo.peft.LoraConfig(init_lora_weights=name))


@row("functions that give EVA and CorDA")
def initial_values_from_data(model, folder):
    batches = [tiny_inputs("llama")] * 2
    for start in ("eva", "corda"):
        config = adapterzoo.peft.LoraConfig(r=2, init_lora_weights=start)
        with pytest.raises(ConfigError, match="init_data="):
            adapterzoo.peft.get_peft_model(plain("llama"), config)
        adapterzoo.peft.get_peft_model(plain("llama"), config, init_data=batches)


@row("`task_type=…` of another class")
def another_task(model, folder):
    with pytest.raises(ConfigError, match="task_type='SEQ_CLS'"):
        model.add_adapter("b", adapterzoo.peft.LoraConfig(task_type="SEQ_CLS"))


@row("`LoraConfig()` for a type of model")
def without_a_table(model, folder):
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(plain("vit"), peft.LoraConfig())
    wrapped = adapterzoo.peft.get_peft_model(plain("vit"), adapterzoo.peft.LoraConfig())
    ends = {path.rpartition(".")[2] for path, _ in wrapped.adapter_modules("default")}
    found = {site.role for site in wrapped.anatomy if site.path.rpartition(".")[2] in ends}
    assert found == {"query", "value"}


@row("`IA3Config()` for BERT")
def layers_of_bert(model, folder):
    def ends(paths: Any) -> set[str]:
        return {path.split(".", 3)[3] for path in paths if "output" in path and "layer" in path}

    wrapped = peft.get_peft_model(plain("bert"), peft.IA3Config())
    modules = [
        n.removeprefix("base_model.model.bert.")
        for n, m in wrapped.named_modules()
        if hasattr(m, "ia3_l")
    ]
    assert ends(modules) == {"output.dense", "attention.output.dense"} or len(ends(modules)) == 2
    bert = ours("bert")
    bert.add_adapter("a", peft.IA3Config())
    assert ends(path for path, _ in bert.adapter_modules("a")) == {"output.dense"}


@row('`target_modules="all-linear"`')
def all_linear(model, folder):
    bert, config = ours("bert"), peft.LoraConfig(target_modules="all-linear")
    bert.add_adapter("a", config)
    mine = {path for path, _ in bert.adapter_modules("a")}
    wrapped = peft.get_peft_model(plain("bert"), config)
    modules = [n for n, m in wrapped.named_modules() if hasattr(m, "lora_A")]
    theirs = {n.removeprefix("base_model.model.").removeprefix("bert.") for n in modules}
    assert theirs - mine == {"classifier"}
    assert mine <= theirs


@row("`PrefixTuningConfig(prefix_projection=True)`")
def the_width_of_the_mlp(model, folder):
    config = adapterzoo.peft.PrefixTuningConfig(num_virtual_tokens=2, prefix_projection=True)
    with pytest.raises(ConfigError, match="encoder_hidden_size"):
        model.add_adapter("b", config)
    config.encoder_hidden_size = 8
    model.add_adapter("b", config)


@row("a file that does not fit")
def a_file_that_does_not_fit(model, folder):
    model.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    gone = next(iter(tensors))
    save_file({k: t for k, t in tensors.items() if k != gone}, file)
    other = plain("llama")
    with pytest.raises(CheckpointError, match="q_proj"):
        adapterzoo.peft.PeftModel.from_pretrained(other, folder)


@row("`merge_adapter()` of OFT at a convolution")
def merging_a_rotation(model, folder):
    def fresh():
        return nn.Sequential(nn.Conv2d(4, 8, 3)).eval()

    fields = {"target_modules": ["0"], "oft_block_size": 4, "init_weights": False}
    x = torch.randn(2, 4, 6, 6)
    theirs = peft.get_peft_model(fresh(), peft.OFTConfig(r=0, **fields)).eval()
    ours_ = adapterzoo.peft.get_peft_model(fresh(), adapterzoo.peft.OFTConfig(r=0, **fields))
    paper = adapterzoo.peft.get_peft_model(fresh(), adapterzoo.OFTConfig(**fields))
    before = theirs(x), paper(x)
    theirs.merge_adapter()
    assert (theirs(x) - before[0]).abs().max() > 0.01
    with pytest.raises(StateError, match="sums patches"):
        ours_.merge_adapter()
    paper.merge_adapter()
    torch.testing.assert_close(paper(x), before[1], rtol=1e-4, atol=1e-5)


@row("`save_pretrained(…, path_initial_model_for_weight_conversion=…)`")
def converting(model, folder):
    with pytest.raises(ConfigError, match="path_initial_model_for_weight_conversion"):
        model.save_pretrained(folder, path_initial_model_for_weight_conversion=folder)


@row("`hotswap=True` for a method other than LoRA")
def replacing(model, folder):
    source = ours("llama")
    for name, config in (("boft", "boft[boft_block_size=4]"), ("small", "lora[r=2]")):
        source.add_adapter(name, config)
        source.save_adapter(folder / name, name)
    for name, slot in (("boft", "boft[boft_block_size=4]"), ("small", "lora[r=4]")):
        again = ours("llama")
        again.add_adapter("x", slot, set_active=True)
        again.load_adapter(folder / name, load_as="x", hotswap=True)
        again.merge_adapter("x")
        with pytest.raises(StateError, match="merged"):
            again.load_adapter(folder / name, load_as="x", hotswap=True)
