"""What users of `adapters` write means the same here: names, order and defaults of arguments.

Theirs are recorded in tests/data by make_adapters_signatures.py. What is not here, or is other
than there, stands in the tables below with its reason; each line of them is checked too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import stir
from transformers import BertForSequenceClassification, BertModel

import adapterzoo
from adapterzoo import (
    AdapterFusionConfig,
    AdapterSetup,
    BertAdapterModel,
    Fuse,
    LoRAConfig,
    Parallel,
    SeqBnConfig,
    Stack,
    init,
    utils,
)
from adapterzoo.errors import StateError

RECORD = json.loads((Path(__file__).parent / "data" / "adapters_signatures.json").read_text())

# methods of theirs that are not here
ABSENT = {
    "machinery that is not needed where no model is rewritten": (
        "apply_to_adapter_layers", "apply_to_basemodel_childs", "forward_context", "init_adapters",
    ),
    "modules that layers share": ("set_shared_parameters",),
    "made by the configs of heads: add_prediction_head_from_config": (
        "add_prediction_head", "head_type",
    ),
}  # fmt: skip

# methods with an embedding, prefix or reparametrisation of their own, none of which is here
ABSENT_CONFIGS: set[str] = set()
ABSENT_BLOCKS = {"AdapterCompositionBlock"}

# arguments of theirs that are not here: given by name they are an error, never left unread
GONE = {
    "cls_output": "the head takes what it needs out of the outputs",
    "context": "nothing is kept between calls",
    "identifier": "the type is registered by its config class",
    "head": "the same",
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
    **{
        (name, "use_safetensors"): "None: the native format; both kinds of files are read"
        for name in (
            "load_adapter",
            "load_adapter_fusion",
            "load_adapter_setup",
            "load_head",
            "save_adapter",
            "save_adapter_fusion",
            "save_adapter_setup",
            "save_all_adapter_fusions",
            "save_all_adapters",
            "save_all_heads",
            "save_head",
        )
    },
    ("forward_head", "return_dict"): "True, as in the forward of every model of transformers 5",
    ("DoRAConfig", "use_gating"): "gates are of LoRA alone",
    ("DvoRAConfig", "use_gating"): "the same",
    ("IA3Config", "use_gating"): "the same",
    ("MTLLoRAConfig", "use_gating"): "the same",
    ("VeraConfig", "use_gating"): "the same",
    ("VeraConfig", "r"): "256, as in the paper and PEFT",
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
    assert wrong == {
        "forward_head": [
            "cls_output is attention_mask",
            "attention_mask is return_dict",
            "return_dict is input_ids",
            "context is logits_to_keep",
        ],
        "register_custom_head": ["identifier is head_type", "head is cls"],
    }


# of theirs: config, tensors in safetensors, pickled tensors
NAMES = {
    "adapter": ("adapter_config.json", "adapter.safetensors", "pytorch_adapter.bin"),
    "head": ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin"),
    "fusion": (
        "adapter_fusion_config.json",
        "model_adapter_fusion.safetensors",
        "pytorch_model_adapter_fusion.bin",
    ),
}
# what their scripts look for: by default, and with use_safetensors=True
LOOKED_FOR = {
    None: {
        "adapter": (utils.CONFIG_NAME, utils.WEIGHTS_NAME),
        "head": (utils.HEAD_CONFIG_NAME, utils.HEAD_WEIGHTS_NAME),
        "fusion": (utils.ADAPTERFUSION_CONFIG_NAME, utils.ADAPTERFUSION_WEIGHTS_NAME),
    },
    True: {
        "adapter": (utils.CONFIG_NAME, utils.SAFE_WEIGHTS_NAME),
        "head": (utils.HEAD_CONFIG_NAME, utils.SAFE_HEAD_WEIGHTS_NAME),
        "fusion": (utils.ADAPTERFUSION_CONFIG_NAME, utils.SAFE_ADAPTERFUSION_WEIGHTS_NAME),
    },
}


@pytest.mark.parametrize("safe", [None, True])
def test_the_constants_of_utils_name_the_files_that_are_written(tmp_path, tiny, safe):
    model = tiny("bert")
    for name in ("a", "b"):
        model.add_adapter(name)
    model.add_tagging_head("a")
    model.add_adapter_fusion(["a", "b"])
    options = {} if safe is None else {"use_safetensors": safe}
    model.save_adapter(tmp_path / "adapter", "a", with_head=False, **options)
    model.save_head(tmp_path / "head", "a", **options)
    model.save_adapter_fusion(tmp_path / "fusion", "a,b", **options)
    model.save_adapter_setup(tmp_path / "setup", Fuse("a", "b"), **options)
    for kind, names in LOOKED_FOR[safe].items():
        assert {p.name for p in (tmp_path / kind).iterdir()} == set(names)
    assert (tmp_path / "setup" / utils.SETUP_CONFIG_NAME).is_file()


@pytest.mark.parametrize("safe", [True, False])
def test_use_safetensors_chooses_their_files(tmp_path, tiny, safe):
    model = tiny("bert")
    for name in ("a", "b"):
        model.add_adapter(name)
    model.add_tagging_head("a")
    model.add_tagging_head("ab")
    model.add_adapter_fusion(["a", "b"], name="ab")
    model.save_adapter(tmp_path / "adapter", "a", with_head=False, use_safetensors=safe)
    model.save_head(tmp_path / "head", "a", use_safetensors=safe)
    model.save_adapter_fusion(tmp_path / "fusion", "ab", use_safetensors=safe)
    for kind, (config, *tensors) in NAMES.items():
        assert {p.name for p in (tmp_path / kind).iterdir()} == {config, tensors[not safe]}
    model.save_adapter_fusion(tmp_path / "both", "ab", with_head=True, use_safetensors=safe)
    model.save_adapter_fusion(tmp_path / "other", "ab", with_head="a")
    other = tiny("bert")
    info = {}
    assert other.load_adapter(tmp_path / "adapter", loading_info=info) == "a"
    other.add_adapter("b")
    loaded = other.load_adapter_fusion(tmp_path / "both", loading_info=info, set_active=True)
    assert loaded == "ab"
    assert info == {"missing_keys": [], "unexpected_keys": []}
    assert (other.known_heads(), other.active_head) == (("ab",), "ab")
    assert other.active_adapters == Fuse("a", "b", name="ab")
    other.load_head(tmp_path / "other", set_active=False)
    assert (other.known_heads(), other.active_head) == (("ab", "a"), "ab")
    with pytest.raises(ValueError, match="Write only format='peft'"):
        model.save_adapter(tmp_path, "a", use_safetensors=safe, format="peft")


def test_what_a_checkpoint_should_be_is_compared(tmp_path, tiny):
    model = tiny("bert")
    model.config.name_or_path = "my-bert"
    model.add_adapter("a", "lora[r=2]")
    model.add_classification_head("a", num_labels=3)
    for file, options in {"native": {}, "theirs": {"use_safetensors": True}}.items():
        model.save_adapter(tmp_path / file, "a", **options)
        load = functools.partial(tiny("bert").load_adapter, tmp_path / file, overwrite_ok=True)
        load(config="lora[r=2]", model_name="my-bert")
        with pytest.warns(UserWarning, match=r"config=….*r=2 and not 4"):
            load(config="lora[r=4]")
        with pytest.warns(UserWarning, match="model_name='other': .* saved from 'my-bert'"):
            load(model_name="other")
        with pytest.raises(ValueError, match="there is no field"):
            load(config="lora[rank=4]")
    other = tiny("bert")
    other.load_adapter(tmp_path / "native", num_labels=3)
    assert other.get_labels("a") == ["LABEL_0", "LABEL_1", "LABEL_2"]
    with pytest.raises(ValueError, match="Write only num_labels"):
        other.load_adapter(tmp_path / "native", num_labels=3, id2label={0: "x"})


@pytest.mark.parametrize("copied", ["itself", "a copy", "a pickle", "reloaded"])
def test_a_base_model_takes_the_calls_of_its_model(tmp_path, tiny, copied):
    model = tiny("bert")
    model.base_model.add_adapter("a", "seq_bn")
    model.base_model.add_adapter("b", config="seq_bn")
    model.base_model.add_adapter_fusion(["a", "b"])
    if copied == "a copy":
        model = copy.deepcopy(model)
    elif copied == "a pickle":
        model = pickle.loads(pickle.dumps(model))
    elif copied == "reloaded":
        model.save_pretrained(tmp_path / "whole")
        model = type(model).from_pretrained(tmp_path / "whole")
    base = model.base_model
    assert {*base.adapters_config} == {*model.adapters_config} == {"a", "b"}
    base.set_active_adapters("a")
    assert model.active_adapters == base.active_adapters == Stack("a")
    base.active_adapters = "b"
    assert model.active_adapters == Stack("b")
    base.train_adapter_fusion(Fuse("a", "b"))
    assert base.get_fusion_regularization_loss() is not None
    base.get_fusion_regularization_loss = lambda: 5
    assert model.get_fusion_regularization_loss() == 5
    base.save_adapter(tmp_path / "a", "a")
    assert base.load_adapter(tmp_path / "a", load_as="c") == "c"
    base.delete_adapter("c")
    assert type(base).__name__ == "BertModel"
    assert isinstance(base, BertModel)


def test_a_plain_model_has_its_own_class_again(tiny):
    model = init(BertForSequenceClassification(tiny_config("bert")))
    model.add_adapter("a", "lora")
    model.base_model.add_adapter("b", "prefix_tuning")
    assert type(model.unload().base_model) is BertModel
    assert type(model) is BertForSequenceClassification


def cycle(model):
    """As a trainer and its callbacks, which refer to each other."""
    model.myself = [model]
    return model.base_model


@pytest.mark.long
@pytest.mark.parametrize("cls", [None, BertForSequenceClassification])
@pytest.mark.parametrize(
    "kept", [lambda m: m.base_model, lambda m: copy.deepcopy(m.base_model), cycle,
             lambda m: pickle.loads(pickle.dumps(m.base_model))],
    ids=["itself", "a copy", "of a cycle", "a pickle"],
)  # fmt: skip
def test_a_base_model_outlives_its_model(tmp_path, tiny, kept, cls):
    whole = tiny("bert") if cls is None else init(cls(tiny_config("bert")).eval())
    whole.add_adapter("a", "lora", set_active=True)
    stir(whole, "a")
    inputs = tiny_inputs("bert")
    expected, order = whole.base_model(**inputs)[0], [n for n, _ in whole.named_modules()]
    base = kept(whole)
    del whole
    gc.collect()
    assert type(base).__name__ == "BertModel"
    assert torch.equal(base(**inputs)[0], expected)
    base.save_adapter(tmp_path / "a", "a")
    base.load_adapter(tmp_path / "a", load_as="b")
    for name in "ab":
        base.set_active_adapters(name)
        assert torch.equal(base(**inputs)[0], expected)
    base.set_active_adapters(None)
    assert not torch.equal(base(**inputs)[0], expected)
    with AdapterSetup("a"):
        assert torch.equal(base(**inputs)[0], expected)
    base.delete_adapter("b")
    owner = vars(base)["_adapter_owner"].model()
    assert [n for n, _ in owner.named_modules()] == order
    assert copy.deepcopy(base).adapters_config["a"] == base.adapters_config["a"]


@pytest.mark.parametrize("cls", [None, BertForSequenceClassification])
def test_models_are_freed_at_once(tiny, cls):
    gc.collect()
    gc.disable()
    try:
        whole = tiny("bert") if cls is None else init(cls(tiny_config("bert")))
        whole.add_adapter("a", "lora", set_active=True)
        whole(**tiny_inputs("bert"))
        freed = [weakref.ref(whole), weakref.ref(whole.base_model)]
        del whole
        assert [each() for each in freed] == [None, None]
        # with a base model that was kept, once that is dropped too
        base = (tiny("bert") if cls is None else init(cls(tiny_config("bert")))).base_model
        freed = [weakref.ref(vars(base)["_adapter_owner"].model()), weakref.ref(base)]
        assert all(each() is not None for each in freed)
        del base
        gc.collect()
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


def test_what_the_config_of_a_model_shows(tiny):
    model = tiny("bert")
    for name in ("a", "b", "c"):
        model.add_adapter(name, "seq_bn")
    model.add_adapter("u", "seq_bn|lora[r=2,leave_out=[0]]")
    model.add_adapter_fusion(["a", "b"])
    model.add_adapter_fusion(["b", "c"], "static", name="mine")
    view = model.adapters_config
    assert isinstance(view, adapterzoo.ModelAdaptersConfig)
    assert view.config_map[view.adapters["a"]]["non_linearity"] == "relu"
    assert set(view.fusions) == {"a,b", "mine"}
    assert view.fusion_name_map == {"mine": ["b", "c"]}
    assert view.fusion_config_map[view.fusions["mine"]] == AdapterFusionConfig.load("static")
    assert view.get_fusion(["a", "b"]) == (AdapterFusionConfig.load("dynamic"), ["a", "b"])
    assert view.get_fusion("no") == (None, None)
    assert view.match("a", SeqBnConfig) == SeqBnConfig()
    assert view.match("a", LoRAConfig) is view.match("no", LoRAConfig) is None
    assert view.match("u", LoRAConfig, layer_idx=1) == LoRAConfig(r=2, leave_out=[0])
    assert view.match("u", LoRAConfig, layer_idx=0) is None
    assert view.match("a", SeqBnConfig, location_key="mh_adapter") is None
    assert (view.active_setup, view.skip_layers) == (None, None)
    model.set_active_adapters(Parallel("a", "b"), skip_layers=[0])
    assert (view.active_setup, view.skip_layers) == (Parallel("a", "b"), [0])
    assert model.has_parallel_adapters
    model.set_active_adapters("a")
    assert not model.has_parallel_adapters


def test_smaller_methods_of_theirs(tmp_path, tiny):
    model = tiny("bert")
    for name, config in {"a": "seq_bn", "b": "seq_bn", "i": "seq_bn_inv"}.items():
        model.add_adapter(name, config)
    model.add_adapter_fusion(["a", "b"])
    blocks = dict(model.iter_layers())
    assert [*blocks] == [0, 1]
    assert blocks[1] is model.base_model.encoder.layer[1]
    assert {*model.invertible_adapters} == {"i"}
    with pytest.raises(StateError, match=r"del invertible_adapters\['i'\].*delete_adapter\('i'\)"):
        del model.invertible_adapters["i"]
    assert model.get_invertible_adapter() is None
    model.set_active_adapters(Stack("i", "a"))
    assert model.get_invertible_adapter() is model.invertible_adapters["i"]
    assert model.supports_adapter("lora")
    assert model.supports_adapter("bottleneck")
    assert model.supports_adapter("invertible")
    assert not model.supports_adapter(LoRAConfig(target_modules=["no_such_layer"]))
    with pytest.raises(ValueError, match="no config string"):
        model.supports_adapter("no_such_method")
    model.adapter_fusion_to("a,b", dtype=torch.float64)
    dtypes = {p.dtype for _, m in model.fusion_modules("a,b") for p in m.parameters()}
    assert dtypes == {torch.float64}
    model.adapter_fusion_to(Fuse("a", "b"), dtype=torch.float32)
    model.save_all_adapter_fusions(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a,b"]
    table = model.get_input_embeddings().weight
    model.freeze_embeddings(False)
    assert table.requires_grad
    model.freeze_embeddings()
    assert not table.requires_grad
    assert model.model_name == model.config.name_or_path
    assert model.adapter_interface is None


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


def test_the_labels_of_a_static_head():
    labels = {0: "bad", 1: "good"}
    config = tiny_config("bert")
    config.id2label = labels
    model = init(BertForSequenceClassification(config))
    assert model.get_labels_dict() == labels
    assert model.get_labels() == ["bad", "good"]


@pytest.mark.parametrize("setup", ["a", Parallel("a", "b")], ids=repr)
def test_tokens_without_a_batch_are_one_row(tiny, setup):
    model = tiny("bert")
    for name in "ab":
        model.add_adapter(name, "lora")
        stir(model, name)
        model.add_classification_head(name)
    model.set_active_adapters(setup)
    row = {key: value[:1] for key, value in tiny_inputs("bert").items()}
    flat = {key: value[0] for key, value in row.items()}
    label = torch.tensor([1])
    found, expected = model(**flat, labels=label), model(**row, labels=label)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(model(flat["input_ids"]).logits, model(row["input_ids"]).logits)
