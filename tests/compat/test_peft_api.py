"""`adapterzoo.peft`, and PEFT's methods of our models, beside PEFT itself."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from peft_world import QUIET, ours, plain
from transformers.integrations.peft import PeftAdapterMixin

import adapterzoo.peft
from adapterzoo import AdapterModelMixin, AutoAdapterModel, Stack
from adapterzoo.compat.peft import functions
from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    StateError,
    UnknownNameError,
)
from adapterzoo.peft.utils import hotswap

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
EXACT = {"rtol": 0, "atol": 0}
CLASSES = {
    "CAUSAL_LM": ("llama", "AutoModelForCausalLM"),
    "SEQ_CLS": ("bert", "AutoModelForSequenceClassification"),
    "TOKEN_CLS": ("roberta", "AutoModelForTokenClassification"),
    "SEQ_2_SEQ_LM": ("t5", "AutoModelForSeq2SeqLM"),
    "QUESTION_ANS": ("bert", "AutoModelForQuestionAnswering"),
    "FEATURE_EXTRACTION": ("bert", "AutoModel"),
}
AUTO = {"FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction"}


def example(library: Any, task: str, folder: Path) -> dict[str, Any]:
    """PEFT's documented example of a task: wrap, train a step, save, load again."""
    family, auto = CLASSES[task]
    load = getattr(transformers, auto).from_pretrained
    torch.manual_seed(1)
    config = library.LoraConfig(
        task_type=getattr(library.TaskType, task), r=4, lora_alpha=32, lora_dropout=0.0
    )
    model = library.get_peft_model(load(folder / "base"), config)
    counts = model.get_nb_trainable_parameters()
    start = torch.load(folder / "start.pt") if (folder / "start.pt").exists() else None
    if start is None:
        start = {k: t.clone() for k, t in library.get_peft_model_state_dict(model).items()}
        torch.save(start, folder / "start.pt")
    library.set_peft_model_state_dict(model, start)
    inputs = tiny_inputs(family)
    # a step changes what both train, head included
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for _ in range(3):
        output = model(**inputs)
        loss = output[0].float().square().mean() * 10
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    out = folder / library.__name__
    model.save_pretrained(out)
    model.eval()
    name = AUTO.get(task, auto.replace("AutoModel", "AutoPeftModel"))
    again = getattr(library, name).from_pretrained(out)
    return {
        "counts": counts,
        "losses": losses,
        "logits": model(**inputs)[0],
        "again": again.eval()(**inputs)[0],
        "files": sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()),
    }


@pytest.mark.parametrize("task", CLASSES)
def test_their_example_runs_with_the_import_changed(task, tmp_path):
    family, auto = CLASSES[task]
    torch.manual_seed(0)
    getattr(transformers, auto).from_config(tiny_config(family)).save_pretrained(tmp_path / "base")
    theirs, mine = example(peft, task, tmp_path), example(adapterzoo.peft, task, tmp_path)
    assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
    assert mine["losses"][0] == pytest.approx(theirs["losses"][0], rel=1e-6)
    torch.testing.assert_close(mine["logits"], theirs["logits"], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(mine["again"], mine["logits"], **EXACT)
    # PEFT counts trainable parameters of a head and also its original
    assert mine["counts"][0] == theirs["counts"][0]
    assert mine["files"] == theirs["files"]
    # each library reads the other's folder
    load = getattr(transformers, auto).from_pretrained
    inputs = tiny_inputs(family)
    read = peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapterzoo.peft")
    torch.testing.assert_close(read.eval()(**inputs)[0], mine["logits"], **EXACT)
    read = adapterzoo.peft.PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "peft")
    torch.testing.assert_close(read.eval()(**inputs)[0], theirs["logits"], **EXACT)
    assert not any(p.requires_grad for p in read.parameters())


@pytest.fixture
def wrapped() -> Any:
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(tiny_config("llama"))
    model = adapterzoo.peft.get_peft_model(base, adapterzoo.peft.LoraConfig(r=4))
    assert model is base
    assert isinstance(model, adapterzoo.peft.PeftModel)
    model.add_adapter("b", adapterzoo.peft.LoraConfig(r=2))
    for name in ("default", "b"):
        for _, module in model.adapter_modules(name):
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


INPUTS = {"input_ids": torch.tensor([[1, 2, 3, 4]])}


def test_adapters_are_saved_to_the_folders_that_peft_has(wrapped, tmp_path):
    wrapped.save_pretrained(tmp_path / "all")
    assert (tmp_path / "all" / "adapter_config.json").is_file()
    assert (tmp_path / "all" / "b" / "adapter_model.safetensors").is_file()
    wrapped.save_pretrained(tmp_path / "one", selected_adapters=["b"])
    assert {p.name for p in (tmp_path / "one").iterdir()} == {"README.md", "b"}
    with pytest.raises(UnknownNameError, match=r"save_pretrained.*there is no adapter 'c'"):
        wrapped.save_pretrained(tmp_path / "two", selected_adapters=["b", "c"])
    with pytest.raises(ConfigError, match="path_initial_model_for_weight_conversion"):
        wrapped.save_pretrained(tmp_path / "two", path_initial_model_for_weight_conversion="x")
    assert not (tmp_path / "two").exists()


def test_setting_an_adapter_trains_it_in_the_same_mode(wrapped):
    expected = wrapped(**INPUTS).logits
    wrapped.set_adapter("b")
    assert wrapped.active_adapter == "b"
    assert not wrapped.training
    assert wrapped.adapter_summary(as_dict=True)[1]["train"]
    assert not wrapped.adapter_summary(as_dict=True)[0]["train"]
    wrapped.set_adapter("default", inference_mode=True)
    assert not any(p.requires_grad for p in wrapped.parameters())
    torch.testing.assert_close(wrapped(**INPUTS).logits, expected, **EXACT)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_the_methods(wrapped, again):
    other = again(wrapped)
    assert isinstance(other, adapterzoo.peft.PeftModel)
    torch.testing.assert_close(other(**INPUTS).logits, wrapped(**INPUTS).logits, **EXACT)


def test_merging_gives_the_plain_class(wrapped):
    expected = wrapped(**INPUTS).logits
    plain = wrapped.merge_and_unload()
    assert type(plain) is transformers.LlamaForCausalLM
    torch.testing.assert_close(plain(**INPUTS).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_config_that_is_refused_leaves_a_plain_model():
    base = transformers.LlamaForCausalLM(tiny_config("llama"))
    with pytest.raises(ConfigError, match="use_qalora=True"):
        adapterzoo.peft.get_peft_model(base, adapterzoo.peft.LoraConfig(use_qalora=True))
    assert type(base) is transformers.LlamaForCausalLM


def test_half_precision_trains_in_float32_as_in_peft():
    base = transformers.LlamaForCausalLM(tiny_config("llama")).bfloat16()
    model = adapterzoo.peft.get_peft_model(base, adapterzoo.peft.LoraConfig(r=4))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert model(**INPUTS).logits.dtype is torch.bfloat16


def test_configs_are_objects_with_their_fields(tmp_path):
    config = adapterzoo.peft.LoraConfig(r=4, target_modules=["q_proj"])
    config.r = 6
    config.save_pretrained(tmp_path)
    assert adapterzoo.peft.PeftConfig.from_pretrained(tmp_path) == config
    assert peft.PeftConfig.from_pretrained(str(tmp_path)).r == 6
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        adapterzoo.peft.LoraConfig(rank=4)
    with pytest.raises(AttributeError, match="XLoraConfig"):
        _ = adapterzoo.peft.XLoraConfig


def test_values_of_another_adapter_are_refused(wrapped):
    tensors = adapterzoo.peft.get_peft_model_state_dict(wrapped)
    before = {k: t.clone() for k, t in tensors.items()}
    with pytest.raises(CheckpointError, match="set_peft_model_state_dict"):
        adapterzoo.peft.set_peft_model_state_dict(wrapped, tensors, adapter_name="b")
    with pytest.raises(CheckpointError, match="set_peft_model_state_dict"):
        adapterzoo.peft.set_peft_model_state_dict(wrapped, dict([*tensors.items()][1:]))
    now = adapterzoo.peft.get_peft_model_state_dict(wrapped)
    assert all(torch.equal(now[key], tensor) for key, tensor in before.items())


def test_the_auto_class_of_another_task_is_refused(wrapped, tmp_path):
    wrapped.base_model.config._name_or_path = str(tmp_path)
    wrapped.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'CAUSAL_LM'.*Write AutoPeftModelForCausalLM"):
        adapterzoo.peft.AutoPeftModelForSequenceClassification.from_pretrained(tmp_path)


# --- models without the mixin ---


def test_nothing_of_transformers_mixin_is_inherited():
    names = [n for n, m in vars(PeftAdapterMixin).items() if inspect.isfunction(m) and n[0] != "_"]
    assert {"set_adapter", "enable_peft_hotswap"} <= {*names}
    for cls in (type(ours("bert")), AutoAdapterModel.from_config(tiny_config("bert")).__class__):
        for name in names:
            home = next(c for c in cls.__mro__ if name in vars(c))
            assert home is AdapterModelMixin, name


@pytest.fixture
def two() -> Any:
    model = ours("llama")
    for name in ("a", "b"):
        model.add_adapter(name, "lora[r=2,init_weights='bert']")
    model.set_active_adapters("a")
    return model


def test_adapters_are_disabled_in_a_block_and_until_they_are_enabled(two):
    on = two(**INPUTS).logits
    with two.disable_adapter():
        off = two(**INPUTS).logits
    base = ours("llama")(**INPUTS).logits
    torch.testing.assert_close(off, base, **EXACT)
    torch.testing.assert_close(two(**INPUTS).logits, on, **EXACT)
    two.disable_adapters()
    torch.testing.assert_close(two(**INPUTS).logits, base, **EXACT)
    two.disable_adapter_layers()
    two.enable_adapter_layers()
    assert two.active_adapters == Stack("a")
    two.enable_adapters()
    torch.testing.assert_close(two(**INPUTS).logits, on, **EXACT)
    two.set_active_adapters(None)
    with pytest.raises(StateError, match=r"enable_adapters\(\).*Write set_adapter"):
        two.enable_adapters()
    for name, says in (("a", "'a' is merged"), ("b", "'a', 'b' are merged")):
        two.merge_adapter(name)
        for refused in (two.disable_adapters, lambda: two.disable_adapter().__enter__()):
            with pytest.raises(StateError, match=rf"{says}\. Write unmerge_adapter\(\)"):
                refused()


def test_setting_adapters_leaves_the_base_model_alone(two):
    two.requires_grad_(False)
    two.set_adapter(["a", "b"])
    assert two.active_adapter == ["a", "b"]
    trained = {n for n, p in two.named_parameters() if p.requires_grad}
    assert trained
    assert all(".loras." in name for name in trained)
    two.set_adapter("b")
    assert {n for n, p in two.named_parameters() if p.requires_grad} == {
        n for n in trained if ".b." in n
    }
    with pytest.raises(UnknownNameError, match=r"set_adapter\('c'\): there is no adapter 'c'"):
        two.set_adapter("c")
    assert two.active_adapter == "b"


def test_several_adapters_are_merged_and_deleted_by_one_call(two):
    two.set_active_adapters(Stack("a", "b"))
    expected = two(**INPUTS).logits
    two.merge_adapter(["a", "b"])
    torch.testing.assert_close(two(**INPUTS).logits, expected, rtol=1e-4, atol=1e-4)
    two.unmerge_adapter()
    torch.testing.assert_close(two(**INPUTS).logits, expected, **EXACT)
    two.merge_adapter()
    assert two._adapter_state.merged == ("a", "b")
    two.unmerge_adapter()
    with pytest.raises(UnknownNameError, match="'c'"):
        two.delete_adapter(["a", "c"])
    assert [*two.adapters_config] == ["a", "b"]
    two.delete_adapter(adapter_names=["a", "b"])
    assert not two.has_adapters()


def test_parameters_are_counted_and_printed(two, capsys):
    two.train_adapter("a")
    trainable = sum(p.numel() for p in two.parameters() if p.requires_grad)
    total = sum(p.numel() for p in two.parameters())
    assert two.get_nb_trainable_parameters() == (trainable, total)
    two.print_trainable_parameters()
    assert capsys.readouterr().out == (
        f"trainable params: {trainable:,d} || all params: {total:,d} || "
        f"trainable%: {100 * trainable / total:.4f}\n"
    )


def test_the_config_may_come_first_as_in_transformers():
    model = ours("llama")
    model.eval()
    model.add_adapter(peft.LoraConfig(r=2))
    model.add_adapter(peft.LoraConfig(r=4), adapter_name="x")
    assert [*model.adapters_config] == ["default", "x"]
    assert model.active_adapter == "x"
    assert not model.training
    assert {
        n.split(".loras.")[1].split(".")[0] for n, p in model.named_parameters() if p.requires_grad
    } == {"x"}
    model.add_adapter("y", peft_config=peft.LoraConfig(r=4))
    assert model.active_adapter == "x"


def test_loading_takes_the_name_as_in_peft(two, tmp_path):
    two.save_adapter(tmp_path, "a", format="peft")
    model = ours("llama")
    assert model.load_adapter(tmp_path, adapter_name="x") == "x"
    assert model.active_adapter == "x"
    model.load_adapter(tmp_path, adapter_name="y", is_trainable=True)
    assert model.active_adapter == "x"
    assert [row.get("train") for row in model.adapter_summary(as_dict=True)][:2] == [False, True]


def test_tensors_are_those_of_the_file(two, tmp_path):
    two.save_adapter(tmp_path, "a", format="peft")
    theirs = peft.load_peft_weights(str(tmp_path), device="cpu")
    mine = two.get_adapter_state_dict()
    assert theirs.keys() == mine.keys()
    assert all(torch.equal(theirs[key], mine[key]) for key in mine)
    with pytest.raises(ConfigError, match="Leave it out"):
        two.get_adapter_state_dict("a", state_dict={})
    two.set_active_adapters(None)
    with pytest.raises(StateError, match="'a', 'b'"):
        two.get_adapter_state_dict()


def test_a_base_model_has_the_same_methods(two):
    two.base_model.set_adapter("b")
    assert two.active_adapter == "b"
    with two.base_model.disable_adapter():
        assert two.active_adapter is None


def test_defaults_of_configs_belong_to_one_object():
    adapterzoo.peft.LoraConfig().rank_pattern["q_proj"] = 2
    assert adapterzoo.peft.LoraConfig().rank_pattern == {}


def test_enabling_restores_the_layers_to_skip():
    model = ours("llama")
    model.add_adapter("a", "lora[init_weights='bert']")
    model.set_active_adapters("a", skip_layers=[0])
    inputs = tiny_inputs("llama")
    expected = model(**inputs).logits
    model.disable_adapters()
    model.enable_adapters()
    torch.testing.assert_close(model(**inputs).logits, expected, rtol=0, atol=0)


def test_values_of_a_merged_adapter_cannot_be_set():
    model = adapterzoo.peft.get_peft_model(plain("llama"), adapterzoo.peft.LoraConfig(r=4))
    values = adapterzoo.peft.get_peft_model_state_dict(model)
    model.merge_adapter()
    with pytest.raises(StateError, match="merged"):
        adapterzoo.peft.set_peft_model_state_dict(model, values)


def test_a_model_whose_adapter_does_not_load_stays_plain(tmp_path):
    model = plain("llama")
    cls = type(model)
    with pytest.raises(AdapterZooError):
        adapterzoo.peft.PeftModel.from_pretrained(model, tmp_path / "nothing")
    assert type(model) is cls
    with pytest.raises(ConfigError, match="LoraConfig"):
        adapterzoo.peft.get_peft_model(model, None)


# of the public functions that take a model, those for models without adapters too
FOR_ALL = {
    "_get_submodules",
    "cast_mixed_precision_params",
    "disable_input_dtype_casting",
    "get_base_model_state_dict",
    "get_peft_model",
    "inject_adapter_in_model",
    "prepare_model_for_kbit_training",
    "set_base_model_state_dict",
}
ARGUMENTS = {
    "adapter_name": "default",
    "config": None,
    "model_name_or_path": "folder",
    "path": "folder",
    "peft_model_state_dict": {},
    "rank": 2,
    "state_dict": {},
    "target_rank": 2,
}


def taking_a_model() -> dict[str, Any]:
    rooms = (adapterzoo.peft, hotswap, functions)
    every = {name: getattr(room, name) for room in rooms for name in room.__all__}
    taking = ("model", "peft_model")
    return {
        name: function
        for name, function in every.items()
        if inspect.isfunction(function) and {*taking} & {*inspect.signature(function).parameters}
    }


@pytest.mark.parametrize("kind", ["module", "model"])
@pytest.mark.parametrize("name", sorted(taking_a_model().keys() - FOR_ALL))
def test_functions_say_that_a_model_has_no_adapters(name, kind):
    if kind == "module":
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))
    else:
        model = transformers.AutoModel.from_config(tiny_config("bert"))
    values = {**ARGUMENTS, "model": model, "peft_model": model}
    given = inspect.signature(taking_a_model()[name]).parameters
    arguments = {key: values[key] for key in given if key in values}
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(StateError, match=r"Write get_peft_model\(model, "):
        taking_a_model()[name](**arguments)
    assert {*before} == {*model.state_dict()}
