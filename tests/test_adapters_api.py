"""What users of `adapters` write means the same here: names, order and defaults of arguments.

Theirs are recorded in tests/data by make_adapters_signatures.py. What is not here, or is other
than there, stands in the tables below with its reason; each line of them is checked too.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import adapterzoo
from adapterzoo import AdapterZooError, BertAdapterModel

RECORD = json.loads((Path(__file__).parent / "data" / "adapters_signatures.json").read_text())

# methods of theirs that are not here
ABSENT = {
    "the input embeddings are frozen like any other part": ("freeze_embeddings",),
    "machinery that is not needed where no model is rewritten": (
        "apply_to_adapter_layers", "apply_to_basemodel_childs", "forward_context",
        "has_parallel_adapters", "init_adapters", "model_name", "supports_adapter",
    ),
    "modules that layers share": ("set_shared_parameters",),
    "made by the configs of heads: add_prediction_head_from_config": (
        "add_prediction_head", "head_type",
    ),
    "adapter_to moves what a fusion is made of": ("adapter_fusion_to",),
}  # fmt: skip

# methods with an embedding, prefix or reparametrisation of their own, none of which is here
ABSENT_CONFIGS: set[str] = set()
ABSENT_BLOCKS = {"AdapterCompositionBlock"}

# arguments of theirs that are not here: given by name they are an error, never left unread
GONE = {
    "use_safetensors": "it is always safetensors",
    "custom_weights_loaders": "what is saved with an adapter is its head",
    "config": "the checkpoint says what it is",
    "model_name": "a checkpoint that does not fit says so",
    "cls_output": "the head takes what it needs out of the outputs",
    "context": "nothing is kept between calls",
    "identifier": "the type is registered by its config class",
    "head": "the same",
    "with_head": "a fusion has none",
    "adapters_config": "adapters are added one by one",
    "interface": "where adapters can sit is found, not described",
    "model_name_or_path": "path",
    "*model_args": "from_pretrained of transformers takes all by name",
    "architecture": "one class for each method",
    "composition_mode": "LoRAConfig(composition_mode=…) makes a config of another class",
    "use_dora": "the same",
    "vera_d": "the same",
    "vera_b": "the same",
}

# (where, argument) whose default or place is another
OTHER = {
    ("forward_head", "return_dict"): "True, as in the forward of every model of transformers 5",
    ("DoRAConfig", "use_gating"): "gates are of LoRA alone",
    ("DvoRAConfig", "use_gating"): "the same",
    ("IA3Config", "use_gating"): "the same",
    ("MTLLoRAConfig", "use_gating"): "the same",
    ("VeraConfig", "use_gating"): "the same",
    ("VeraConfig", "init_weights"): "A and B are drawn as in the paper",
    ("VeraConfig", "init_weights_seed"): "projection_prng_key",
    ("VeraConfig", "r"): "256, as in the paper and PEFT",
    ("DvoRAConfig", "init_weights"): "A and B are drawn as in the paper",
    ("DvoRAConfig", "init_weights_seed"): "projection_prng_key",
    ("DvoRAConfig", "r"): "256, as VeRA",
}


def mine(function: Any) -> list[list[str]]:
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        name = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "")
        given = parameter.default is not parameter.empty
        found.append([name + parameter.name, *([repr(parameter.default)] if given else [])])
    return found


def positional(function: Any) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.name != "self"]


def plain(default: str) -> str:
    """A default as it is compared: lists of theirs are tuples here."""
    return default.replace("[", "(").replace("]", ")").replace(",)", ")")


def differences(where: str, theirs: list[list[str]], ours: list[list[str]]) -> list[str]:
    """Arguments of theirs that are missing here or have another default."""
    here = {name: default for name, *default in ours}
    many = any(name.startswith("*") and not name.startswith("**") for name in here)
    rest = any(name.startswith("**") for name in here)
    found = []
    for name, *default in theirs:
        if name.startswith("*"):
            if not (rest if name.startswith("**") else many):
                found.append(f"{where}({name}): missing")
        elif name not in here:
            found.append(f"{where}({name}): missing")
        elif default and [*map(plain, here[name])] != [*map(plain, default)]:
            found.append(f"{where}({name}={default[0]}): {name}={''.join(here[name])}")
    return found


def misread(theirs: list[list[str]], ours: list[str]) -> list[str]:
    """Arguments of theirs that, given by position, would be another argument here."""
    names = []
    for name, *_ in theirs:
        if name.startswith("*"):
            break
        names.append(name)
    return [f"{a} is {b}" for a, b in zip(names, ours, strict=False) if a != b]


def absent_methods() -> set[str]:
    return {name for names in ABSENT.values() for name in names}


def test_every_method_of_theirs_is_here_or_in_the_table():
    missing = {name for name in RECORD["model"] if name not in dir(BertAdapterModel)}
    assert missing == absent_methods()


COMMON = sorted(name for name in RECORD["model"] if name in dir(BertAdapterModel))


@pytest.mark.parametrize("name", COMMON)
def test_a_call_of_a_method_means_what_it_means_there(name):
    theirs, member = RECORD["model"][name], inspect.getattr_static(BertAdapterModel, name)
    if theirs == "property":
        assert isinstance(member, property)
        return
    function = getattr(BertAdapterModel, name)
    check(name, theirs, function)


def check(name: str, theirs: list[list[str]], function: Any, rest: bool = False) -> None:
    allowed = {*GONE, *(argument for where, argument in OTHER if where == name)}
    known = [entry for entry in theirs if entry[0] not in allowed]
    if rest:
        taken = {argument for argument, *_ in mine(function)}
        known = [entry for entry in known if entry[0] in taken]
    found = differences(name, known, mine(function))
    # what names no option may be absent: unknown ones are errors
    assert [f for f in found if "**" not in f] == []
    if not any(argument in GONE for argument, *_ in theirs):
        assert misread(theirs, positional(function)) == []


def test_arguments_that_are_gone_are_not_taken_for_others():
    """Theirs by position after one that is gone: an error, or the same argument."""
    wrong = {}
    for name in COMMON:
        theirs = RECORD["model"][name]
        if theirs != "property":
            found = misread(theirs, positional(getattr(BertAdapterModel, name)))
            wrong.update({name: found} if found else {})
    # one argument that is another one here, or the same one under another name
    formats = {name: ["use_safetensors is format"] for name in ("save_head", "save_all_heads")}
    loaders = ("save_adapter", "save_adapter_fusion", "save_all_adapters")
    formats |= {name: ["custom_weights_loaders is format"] for name in loaders}
    assert wrong == {
        **formats,
        "forward_head": [
            "cls_output is attention_mask",
            "attention_mask is return_dict",
            "return_dict is input_ids",
            "context is logits_to_keep",
        ],
        "register_custom_head": ["identifier is head_type", "head is cls"],
    }


@pytest.mark.parametrize("value", [True, False, [], [object()]])
def test_what_is_no_format_is_refused(tmp_path, tiny, value):
    """Where theirs has `use_safetensors` or loaders, ours has the name of a format."""
    model = tiny("bert")
    model.add_adapter("a")
    model.add_tagging_head("a")
    for save in (
        lambda: model.save_adapter(tmp_path, "a", True, None, value),
        lambda: model.save_all_adapters(tmp_path, True, None, value),
        lambda: model.save_head(tmp_path, "a", value),
        lambda: model.save_all_heads(tmp_path, value),
    ):
        with pytest.raises((AdapterZooError, TypeError)):
            save()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", sorted(set(RECORD["configs"]) - ABSENT_CONFIGS))
def test_a_config_has_their_fields_and_defaults(name):
    cls = getattr(adapterzoo, name)
    ours = []
    for field in dataclasses.fields(cls):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        ours.append([field.name, *([] if default is dataclasses.MISSING else [repr(default)])])
    allowed = {*GONE, *(argument for where, argument in OTHER if where == name)}
    theirs = [entry for entry in RECORD["configs"][name] if entry[0] not in allowed]
    assert differences(name, theirs, ours) == []


def test_every_config_and_composition_of_theirs_is_here_or_in_the_table():
    here = set(adapterzoo.__all__)
    assert set(RECORD["configs"]) - here == ABSENT_CONFIGS
    assert set(RECORD["blocks"]) - here == ABSENT_BLOCKS


@pytest.mark.parametrize("name", sorted(set(RECORD["blocks"]) - ABSENT_BLOCKS))
def test_a_composition_takes_theirs(name):
    cls = getattr(adapterzoo, name)
    assert differences(name, [e for e in RECORD["blocks"][name] if e[0][0] != "*"], mine(cls)) == []
    assert mine(cls)[0] == ["*children"]


@pytest.mark.parametrize("name", sorted(RECORD["functions"]))
def test_functions_and_trainers_take_theirs(name):
    function = getattr(adapterzoo, name)
    # trainers hand on what they do not look at
    check(name, RECORD["functions"][name], function, rest=name.endswith("Trainer"))


def test_the_tables_have_no_line_too_many():
    used = {
        argument
        for part in ("model", "configs", "functions")
        for entries in RECORD[part].values()
        if entries != "property"
        for argument, *_ in entries
    }
    assert set(GONE) <= used
    for where, argument in OTHER:
        entries = {**RECORD["model"], **RECORD["configs"]}[where]
        assert argument in [name for name, *_ in entries]


def test_the_comparison_bites():
    theirs = [["name"], ["rank", "8"], ["**kwargs"]]
    assert differences("f", theirs, [["name"], ["rank", "8"], ["**kwargs"]]) == []
    assert differences("f", theirs, [["name"], ["rank", "4"], ["**kwargs"]]) == [
        "f(rank=8): rank=4"
    ]
    assert differences("f", theirs, [["name"], ["**kwargs"]]) == ["f(rank): missing"]
    assert differences("f", theirs, [["name"], ["rank", "8"]]) == ["f(**kwargs): missing"]
    assert misread(theirs, ["name", "other"]) == ["rank is other"]
    assert misread(theirs, ["name"]) == []
