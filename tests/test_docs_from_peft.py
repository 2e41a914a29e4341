"""docs/from-peft.md, row by row: what it says a user has to change, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from families import tiny_inputs
from peft_world import QUIET, ours, plain
from safetensors.torch import load_file, save_file

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


@pytest.mark.parametrize("start", CHECKS)
def test_a_row_is_true(start, tmp_path):
    model = adapterzoo.peft.get_peft_model(plain("llama"), adapterzoo.peft.LoraConfig(r=4))
    CHECKS[start](model, tmp_path)


@row("`from peft import …`")
def another_import(model, folder):
    assert {*adapterzoo.peft.__all__} <= {*dir(peft)}
    with pytest.raises(ImportError, match="XLoraConfig"):
        from adapterzoo.peft import XLoraConfig  # noqa: F401


@row("`peft_model.base_model.model`")
def there_is_no_wrapper(model, folder):
    assert model.get_base_model() is model


@row("parameters such as")
def names_of_parameters(model, folder):
    names = [name for name, _ in model.named_parameters()]
    assert "model.layers.0.self_attn.q_proj.loras.default.lora_A" in names
    model.save_pretrained(folder)
    wrapped = peft.get_peft_model(plain("llama"), peft.LoraConfig(r=4))
    assert {*load_file(folder / "adapter_model.safetensors")} == {
        *peft.get_peft_model_state_dict(wrapped)
    }


@row("`active_adapters()`, a list")
def what_is_active(model, folder):
    assert model.active_adapters == Stack("default")
    assert model.active_adapter == "default"


@row("`LoraConfig(init_lora_weights=False)`")
def initial_values(model, folder):
    for values in ({"init_lora_weights": False}, {"lora_ga_config": {"x": 4}}):
        with pytest.raises(ConfigError, match=next(iter(values))):
            model.add_adapter("b", adapterzoo.peft.LoraConfig(**values))


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


@row("`disable_adapter()` while adapters are merged")
def disabling_what_is_merged(model, folder):
    model.merge_adapter()
    with pytest.raises(StateError, match="unmerge_adapter"), model.disable_adapter():
        pass
    model.unmerge_adapter()
    with model.disable_adapter():
        assert model.active_adapter is None


@row('`merge_adapter(["a"])` twice')
def merging_twice(model, folder):
    model.merge_adapter(["default"])
    with pytest.raises(StateError, match="merged"):
        model.merge_adapter(["default"])


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
