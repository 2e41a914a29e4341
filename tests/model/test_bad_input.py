"""Bad input: the error names the value and the hint, and nothing of the model has changed.

What is wrong with files stands in `test_storing.py`, with merging in `test_merging.py`.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import tiny_inputs
from snapshots import changes, of_adapter, refused, snapshot, stir
from transformers import AutoConfig

from adapterzoo import AutoAdapterModel, LoRAConfig, Parallel, SeqBnConfig, Stack, init
from adapterzoo.errors import (
    CompositionError,
    ConfigError,
    DuplicateNameError,
    SiteError,
    StateError,
    UnknownNameError,
)


@pytest.fixture
def model(tiny):
    """A model in the middle of its work: adapters, heads, one of them trained, one merged."""
    model = tiny()
    for name, config in {"sst2": "lora", "mnli": "double_seq_bn", "base": "lora"}.items():
        model.add_adapter(name, config)
        stir(model, name, seed=len(name))
    model.merge_adapter("base")
    model.add_classification_head("sst2", num_labels=3)
    model.add_tagging_head("tags", num_labels=4)
    model.train_adapter("sst2")
    model.base_model.encoder.layer[1].eval()
    return model


ADD = [
    ("lroa", UnknownNameError, ("'lroa'", "Did you mean 'lora'?")),
    ("zzz", UnknownNameError, ("'zzz'", "Known config strings: ")),
    ("lora[rank=8]", ConfigError, ("'rank'", "Its fields: ", "'r'")),
    ({"architecture": "lora", "rank": 8}, ConfigError, ("'rank'", "Its fields: ")),
    ({"architecture": "lroa"}, UnknownNameError, ("'lroa'", "Did you mean 'lora'?")),
    ("lora[r=0]", ConfigError, ("r=0", "from 1 to 65536", "Write r=1.")),
    ("lora[r=-1]", ConfigError, ("r=-1", "from 1 to 65536", "Write r=1.")),
    ("lora[r=1000000000]", ConfigError, ("r=1000000000", "Write r=65536.")),
    ("lora[r=8.0]", ConfigError, ("r=8.0", "a whole number")),
    ('lora[rank_pattern={"query":0}]', ConfigError, ("r=0", "Write r=1.")),
    ("lora[dropout=1.0]", ConfigError, ("dropout=1.0", "Write dropout=")),
    ("lora[8]", ConfigError, ("'lora[8]'", "Write 'lora' without")),
    (["lora"], ConfigError, ("['lora']", "Write config='seq_bn'")),
    ("seq_bn[reduction_factor=0]", ConfigError, ("reduction_factor=0", "reduction_factor=16")),
    ("seq_bn[reduction_factor=-1]", ConfigError, ("reduction_factor=-1", "reduction_factor=16")),
    ("seq_bn[reduction_factor=1e-9]", ConfigError, ("reduction_factor=1e-09", "exceeds 65536")),
    (SeqBnConfig(reduction_factor={"0": 4}), ConfigError, ("block 1", "{'0': 4, 'default': 16")),
    ("seq_bn[non_linearity='rleu']", ConfigError, ("'rleu'", "relu")),
    (LoRAConfig(target_modules=["nope"]), SiteError, ("'nope'", "'query'", "'all-linear'")),
    (LoRAConfig(target_modules=["query", "nope"]), SiteError, ("matches 'nope'", "'all-linear'")),
    (LoRAConfig(target_modules=".*nope"), SiteError, ("'.*nope'", "'query'", "'all-linear'")),
    (LoRAConfig(target_modules=["LayerNorm"]), SiteError, ("'LayerNorm'", "'all-linear'")),
    (LoRAConfig(exclude_modules=["query", "value"]), SiteError, ("exclude_modules", "in 2 blocks")),
    (LoRAConfig(layers_to_transform=[2]), ConfigError, ("layers_to_transform=[2]", "no block 2")),
    (LoRAConfig(leave_out=[0, 1]), SiteError, ("leave_out", "in 2 blocks")),
    (SeqBnConfig(leave_out=[0, 1]), SiteError, ("left by leave_out", "a shorter leave_out")),
    (SeqBnConfig(cross_adapter=True), SiteError, ("cross_adapter=True", "cross_adapter=False")),
    ({"architecture": "lora", "init_weights": "pizza"}, ConfigError,
     ("init_weights='pizza'", "Write init_weights='lora'")),
    (LoRAConfig(target_modules=["word_embeddings"], dropout=0.1), ConfigError,
     ("no features to drop", "Write dropout=0.0")),
]  # fmt: skip


@pytest.mark.parametrize(("config", "error", "says"), ADD, ids=[str(c)[:50] for c, *_ in ADD])
def test_adding(model, config, error, says):
    for name in ("new", "sst2"):
        with refused(model, error, *says):
            model.add_adapter(name, config, overwrite_ok=True, set_active=True)


# which names are legal is in test_names.py
@pytest.mark.parametrize("name", ["../evil", "train", None])
def test_names(model, name):
    for call in (
        lambda: model.add_adapter(name, "lora"),
        lambda: model.add_classification_head(name),
        lambda: model.add_prediction_head_from_config(name, {"head_type": "tagging"}),
    ):
        with refused(model, ConfigError, repr(name), "Write "):
            call()


def test_taken_names(model):
    says = ("add_adapter('sst2')", "LoRAConfig(", "overwrite_ok=True")
    with refused(model, DuplicateNameError, *says):
        model.add_adapter("sst2", "seq_bn")
    with refused(model, DuplicateNameError, "add_tagging_head('sst2')", "overwrite_ok=True"):
        model.add_tagging_head("sst2")


UNKNOWN = {
    "set_active_adapters": lambda m: m.set_active_adapters("sts2"),
    "a stack": lambda m: m.set_active_adapters(Stack("sst2", "sts2")),
    "active_adapters": lambda m: setattr(m, "active_adapters", "sts2"),
    "train_adapter": lambda m: m.train_adapter("sts2"),
    "train a stack": lambda m: m.train_adapter(["sst2", "sts2"]),
    "delete_adapter": lambda m: m.delete_adapter("sts2"),
    "adapter_modules": lambda m: list(m.adapter_modules("sts2")),
    "adapters_config": lambda m: m.adapters_config["sts2"],
    "adapter_to": lambda m: m.adapter_to("sts2", dtype=torch.float64),
    "merge_adapter": lambda m: m.merge_adapter("sts2"),
    "save_adapter": lambda m: m.save_adapter("never-made", "sts2"),
    "active_head": lambda m: setattr(m, "active_head", "sts2"),
    "active heads": lambda m: setattr(m, "active_head", ["tags", "sts2"]),
    "delete_head": lambda m: m.delete_head("sts2"),
    "get_head": lambda m: m.get_head("sts2"),
    "get_labels": lambda m: m.get_labels("sts2"),
    "save_head": lambda m: m.save_head("never-made", "sts2"),
    "forward": lambda m: m(**tiny_inputs("bert"), head="sts2"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_names(model, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(model, UnknownNameError, "'sts2'", "Did you mean 'sst2'?"):
        UNKNOWN[what](model)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [None, 5, ["sst2"]])
def test_names_that_are_none(model, name):
    calls = [model.get_adapter, model.delete_head]
    # these take lists of names, and without a name the active adapters are merged
    calls += [model.delete_adapter] if not isinstance(name, list) else []
    calls += [model.merge_adapter] if name == 5 else []
    for call in calls:
        with refused(model, UnknownNameError, repr(name), "Known "):
            call(name)


def test_an_unknown_adapter_has_no_modules(model):
    with pytest.warns(UserWarning, match=r"'sts2'.*Did you mean 'sst2'"):
        assert model.get_adapter("sts2") == {}


def test_compositions(model):
    for setup, says in (
        (5, ("5", "Write 'a' or Stack('a', 'b')")),
        (np.array(["sst2"]), ("array(['sst2']", "Write 'a' or Stack('a', 'b')")),
        (["sst2", "sst2"], ("'sst2', 'sst2'", "Write Stack('sst2')")),
        (["sst2", ["mnli"]], ("['mnli']", "Write Stack('a', 'b')")),
    ):
        with refused(model, CompositionError, *says):
            model.set_active_adapters(setup)


@pytest.mark.parametrize("setup", [None, [], Parallel(None, None)])
def test_training_without_an_adapter(model, setup):
    says = (f"train_adapter({setup!r})", "Write add_adapter('my_task')")
    with refused(model, StateError, *says):
        model.train_adapter(setup)


def test_training_what_is_merged(model):
    for setup in ("base", ["sst2", "base"]):
        with refused(model, StateError, "'base' is merged", "Write reset_adapter() first"):
            model.train_adapter(setup)


# --- heads ---

# what else is illegal: heads/test_modules.py
HEADS = [
    ({"num_labels": 0}, ConfigError, ("num_labels=0", "from 1 to 10000000", "Write num_labels=1")),
    ({"num_labels": 2.0}, ConfigError, ("num_labels=2.0", "a whole number")),
    ({"activation_function": "tahn"}, ConfigError, ("'tahn'", "tanh")),
    ({"id2label": {0: "a", 2: "b"}}, ConfigError, ("'b': 2", "from 0 to 1", "Write id2label=")),
]


@pytest.mark.parametrize(("fields", "error", "says"), HEADS, ids=[str(f) for f, *_ in HEADS])
def test_adding_heads(model, fields, error, says):
    for name in ("new", "sst2"):
        with refused(model, error, *says):
            model.add_classification_head(name, overwrite_ok=True, **fields)


def test_head_types(model):
    with refused(model, UnknownNameError, "'clasification'", "Did you mean 'classification'?"):
        model.add_prediction_head_from_config("new", {"head_type": "clasification"})
    with refused(model, UnknownNameError, "'mine'", "Known head types: "):
        model.add_custom_head("mine", "new")
    with refused(model, ConfigError, "'classes'", "Its fields: "):
        model.add_prediction_head_from_config("new", {"head_type": "tagging", "classes": 3})
    with refused(model, ConfigError, "register_custom_head('mine')", "derive the config"):
        model.register_custom_head("mine", 5)
    with refused(model, UnknownNameError, "no head type None", "Known head types: "):
        model.add_prediction_head_from_config("new", {})
    with refused(model, ConfigError, "is not a dict of fields", "Write {'head_type': "):
        model.add_prediction_head_from_config("new", "tagging")
    with refused(model, UnknownNameError, "no head 5", "Known heads: "):
        model.active_head = 5


def test_labels_without_a_head(model, tiny):
    labels = torch.tensor([0, 1])
    for m in (tiny(), model):
        m.active_head = None
        with refused(m, StateError, "labels=…", "Write model.a"):
            m(**tiny_inputs("bert"), labels=labels)


# what else does not fit: heads/test_losses.py
LABELS = [
    ([0, 3], ("3 is not a label", "0 to 2", "as many labels as the data")),
    ([[0, 1], [1, 2]], ("shape [2, 2]", "Write labels of [2]")),
    ([True, False], ("torch.bool", "Write labels.long()")),
]


@pytest.mark.parametrize(("labels", "says"), LABELS)
def test_labels_that_do_not_fit(model, labels, says):
    with refused(model, ConfigError, *says):
        model(**tiny_inputs("bert"), labels=torch.tensor(labels))


def test_labels_for_a_head_that_is_none(model):
    given = {"sst2": torch.tensor([0, 1]), "sts2": torch.tensor([0, 1])}
    with refused(model, UnknownNameError, "labels={'sts2': …}", "Did you mean 'sst2'?"):
        model(**tiny_inputs("bert"), labels=given)


def test_labels_of_the_wrong_argument(model):
    model.add_qa_head("qa")
    two = torch.tensor([0, 1])
    cases = [
        ({"start_positions": two}, ("'qa'", "'end_positions'", "Write all of them or none")),
    ]  # fmt: skip
    for wrong in (two.float(), two[:, None].expand(2, 3)):
        given = {"start_positions": wrong, "end_positions": wrong}
        cases.append((given, (str(wrong.dtype), "one whole number for each row")))
    for given, says in cases:
        with refused(model, ConfigError, *says):
            model(**tiny_inputs("bert"), **given)


def test_labels_that_the_active_head_does_not_take(model):
    model.add_qa_head("qa")
    positions = torch.tensor([0, 1])
    with refused(model, StateError, "labels=…", "no active head takes these"):
        model(**tiny_inputs("bert"), labels=positions)
    # a data set may have labels for several heads
    model.eval()
    both = {"start_positions": positions, "end_positions": positions}
    loss = model(**tiny_inputs("bert"), labels=positions, **both).loss
    assert torch.equal(loss, model(**tiny_inputs("bert"), **both).loss)


@pytest.mark.parametrize("setup", ["mnli", None])
@pytest.mark.parametrize("wrong", [torch.tensor([[1000]]), torch.ones(2, 3)])
def test_a_failed_forward_leaves_the_next_one_right(model, setup, wrong):
    model.set_active_adapters(setup)
    before = snapshot(model)
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=wrong)
    assert not changes(before, snapshot(model))


# --- models ---


def test_what_is_no_model():
    for wrong in (torch.jit.script(torch.nn.Linear(2, 2)), 5, None):
        with pytest.raises(StateError, match=r"Write init\(nn\.Module"):
            init(wrong)


def test_a_model_without_blocks(tiny):
    config = AutoConfig.for_model(
        "resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    model = AutoAdapterModel.from_config(config).eval()
    with pytest.raises(SiteError, match=r"no transformer blocks.*target_modules"):
        model.add_adapter("a", "seq_bn")
    with pytest.raises(SiteError, match=r"no transformer blocks.*target_modules"):
        model.add_adapter("a", "lora")
    # it has no linear layers
    with pytest.raises(SiteError, match=r"no layer matches 'all-linear'"):
        model.add_adapter("a", 'lora[target_modules="all-linear"]')
    with pytest.raises(SiteError, match=r"no layer matches.*some of these names"):
        model.add_adapter("a", LoRAConfig(target_modules=["query"]))
    assert not model.has_adapters()
    assert not [k for k in model.state_dict() if of_adapter(k)]


def test_labels_of_a_number_may_be_anything_but_the_wrong_shape(model):
    model.add_classification_head("score", num_labels=1)
    loss = model(**tiny_inputs("bert"), labels=torch.tensor([0.5, -100.0])).loss.detach()
    assert math.isfinite(loss)
    with refused(model, ConfigError, "shape [3]", "Write labels of [2]"):
        model(**tiny_inputs("bert"), labels=torch.tensor([0.5, 1.0, 2.0]))
