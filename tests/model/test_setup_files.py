"""`save_adapter_setup`, `load_adapter_setup` and their like, in the layout of `adapters`."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_config
from snapshots import output, refused, stir
from transformers import BertForSequenceClassification

import adapterzoo
from adapterzoo import (
    AutoAdapterModel,
    Average,
    BatchSplit,
    Fuse,
    Parallel,
    PromptTuningConfig,
    Split,
    Stack,
)
from adapterzoo.errors import (
    CheckpointError,
    CompositionError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)

PICKLES = {"adapter_config.json", "pytorch_adapter.bin"}
HEAD = {"head_config.json", "pytorch_model_head.bin"}
FUSION = {"adapter_fusion_config.json", "pytorch_model_adapter_fusion.bin"}


def fresh():
    torch.manual_seed(0)
    return AutoAdapterModel.from_config(tiny_config("bert")).eval()


@pytest.fixture
def model():
    made = fresh()
    for number, name in enumerate("abc"):
        made.add_adapter(name, "seq_bn")
        stir(made, name, number)
    made.add_classification_head("c", num_labels=3)
    made.add_tagging_head("tags", num_labels=2)
    made.add_adapter_fusion(["a", "b"])
    return made.eval()


SINGLE = [{"type": "single", "children": [name]} for name in "abc"]
UP = {"type": "single", "children": ["../x"]}
SETUPS = [
    ("c", {"type": "Stack", "children": SINGLE[2:]}),
    (["a", "c"], {"type": "Stack", "children": [SINGLE[0], SINGLE[2]]}),
    (
        Stack(Fuse("a", "b"), "c"),
        {"type": "Stack", "children": [{"type": "Fuse", "children": SINGLE[:2]}, SINGLE[2]]},
    ),
    (
        BatchSplit("a", "c", batch_sizes=[1, 1]),
        {
            "type": "BatchSplit", "children": [SINGLE[0], SINGLE[2]],
            "kwargs": {"batch_sizes": [1, 1]},
        },
    ),
    (Split("a", "b", splits=[3, 4]), {"type": "Split", "children": SINGLE[:2],
                                      "kwargs": {"splits": [3, 4]}}),
    (Parallel("a", "b"), {"type": "Parallel", "children": SINGLE[:2]}),
    (
        Average("a", "b", weights=[0.25, 0.75]),
        {
            "type": "Average", "children": SINGLE[:2],
            "kwargs": {"weights": [0.25, 0.75], "normalize_weights": False},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize("format", ["native", "adapterhub"])
@pytest.mark.parametrize(("setup", "document"), SETUPS, ids=lambda v: type(v).__name__)
def test_a_setup_is_saved_and_loaded(model, tmp_path, setup, document, format):
    model.set_active_adapters(setup)
    model.active_head = "tags"
    expected = output(model)
    model.save_adapter_setup(tmp_path, setup, head_setup="tags", format=format)
    written = json.loads((tmp_path / "adapter_setup.json").read_text())
    assert written == {"adapter_setup": document, "head_setup": "tags", "version": "adapters.1.3.0"}
    again = fresh()
    found = again.load_adapter_setup(tmp_path, set_active=True)
    assert found == (again.active_adapters, "tags")
    assert repr(again.active_adapters) == repr(model.active_adapters)
    assert again.active_head == "tags"
    assert torch.equal(output(again), expected)


def test_the_files_are_those_that_adapters_reads(model, tmp_path):
    model.save_adapter_setup(tmp_path, Stack(Fuse("a", "b"), "c"), ["tags"], format="adapterhub")
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    folders = {"a": PICKLES, "b": PICKLES, "c": PICKLES | HEAD, "a,b": FUSION, "tags": HEAD}
    assert found == {"adapter_setup.json"} | {
        f"{f}/{n}" for f, names in folders.items() for n in names
    }


def test_what_adapters_writes_is_read(model, tmp_path):
    """It saves a head of an adapter's name twice in one folder, and heads as a composition."""
    for name in "ac":
        model.save_adapter(tmp_path / name, name, name == "c", format="adapterhub")
    model.save_head(tmp_path / "tags", "tags", format="adapterhub")
    tags = {"type": "single", "children": ["tags"]}
    batches = {"type": "BatchSplit", "children": [SINGLE[2], tags],
               "kwargs": {"batch_sizes": [1, 1]}}  # fmt: skip
    document = {"adapter_setup": {**batches, "children": [SINGLE[2], SINGLE[0]]},
                "head_setup": batches, "version": "adapters.1.3.0"}  # fmt: skip
    (tmp_path / "adapter_setup.json").write_text(json.dumps(document))
    again = fresh()
    setup, heads = again.load_adapter_setup(tmp_path, set_active=True)
    assert setup == BatchSplit("c", "a", batch_sizes=[1, 1])
    assert heads == BatchSplit("c", "tags", batch_sizes=[1, 1])
    assert again.active_head == heads
    assert again.adapter_fingerprint("a") == model.adapter_fingerprint("a")


def test_a_task_class(tmp_path):
    torch.manual_seed(0)
    model = adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))).eval()
    model.add_adapter("a", "seq_bn", set_active=True)
    stir(model, "a")
    with torch.no_grad():
        model.classifier.weight.add_(1)
    expected = output(model)
    model.save_adapter_setup(tmp_path, "a", head_setup=True)
    torch.manual_seed(0)
    again = adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))).eval()
    assert again.load_adapter_setup(tmp_path, set_active=True)[1] is True
    assert torch.equal(output(again), expected)


def test_a_failed_load_leaves_the_head_of_a_task_class(tmp_path):
    model = adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))).eval()
    for name, joins in (("a", "inputs"), ("b", "embeddings")):
        model.add_adapter(name, PromptTuningConfig(prompt_length=2, joins=joins))
    with torch.no_grad():
        model.classifier.weight.add_(1)
    # it can be saved, and not be active
    model.save_adapter_setup(tmp_path, Stack("a", "b"), head_setup=True)
    again = adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))).eval()
    with refused(again, CompositionError, "add tokens at 'inputs', 'embeddings'", "Activate them"):
        again.load_adapter_setup(tmp_path, set_active=True)
    again.load_adapter_setup(tmp_path)
    assert torch.equal(again.classifier.weight, model.classifier.weight)


@pytest.mark.parametrize("format", ["native", "adapterhub"])
def test_all_fusions(model, tmp_path, format):
    model.add_adapter_fusion(["b", "c"], name="mine")
    model.save_all_adapter_fusions(tmp_path, {"task": "x"}, format=format)
    assert {p.name for p in tmp_path.iterdir()} == {"a,b", "mine"}
    for name in ("a,b", "mine"):
        model.delete_adapter_fusion(name)
        model.load_adapter_fusion(tmp_path / name)
    assert [n for n, _ in model.fusion_modules("mine")]


def test_all_or_nothing(model, tmp_path):
    model.save_adapter_setup(tmp_path, Stack(Fuse("a", "b"), "c"), ["tags"])
    with refused(model, DuplicateNameError, "'a,b'", "delete_adapter_fusion"):
        model.load_adapter_setup(tmp_path)
    again = fresh()
    again.add_adapter("c")
    with refused(again, DuplicateNameError, "'c'", "load_as"):
        again.load_adapter_setup(tmp_path)
    again = fresh()
    again.add_tagging_head("tags")
    with refused(again, DuplicateNameError, "'tags'", "another name"):
        again.load_adapter_setup(tmp_path, set_active=True)
    (tmp_path / "a,b" / "adapter_fusion.safetensors").write_bytes(b"x")
    with refused(fresh(), CheckpointError, "damaged", "Copy"):
        fresh().load_adapter_setup(tmp_path)
    again = fresh()
    with refused(again, CheckpointError, "damaged", "Copy"):
        again.load_adapter_setup(tmp_path)


def test_what_is_refused(model, tmp_path):
    with refused(model, StateError, "no adapter", "Stack('a', 'b')"):
        model.save_adapter_setup(tmp_path, None)
    with refused(model, UnknownNameError, "'x'", "'a'"):
        model.save_adapter_setup(tmp_path, Stack("a", "x"))
    with refused(model, UnknownNameError, "'b,c'", "'a,b'"):
        model.save_adapter_setup(tmp_path, Fuse("b", "c"))
    with refused(model, UnknownNameError, "'x'", "'tags'"):
        model.save_adapter_setup(tmp_path, "a", head_setup=["x"])
    with refused(model, CompositionError, "3", "Stack('a', 'b')"):
        model.save_adapter_setup(tmp_path, 3)
    assert not list(tmp_path.iterdir())
    with refused(model, CheckpointError, "adapter_setup.json", "save_adapter_setup"):
        model.load_adapter_setup(tmp_path)
    for wrong in (
        {"adapter_setup": 3}, {"adapter_setup": {"type": "Stak", "children": []}}, {},
        {"adapter_setup": {"type": "Stack", "children": [3]}},
        {"adapter_setup": SETUPS[0][1], "head_setup": 3},
        {"adapter_setup": SETUPS[0][1], "head_setup": "../x"},
        {"adapter_setup": {"type": "Stack", "children": [UP]}},
        {"adapter_setup": {"type": "Stack", "children": SINGLE, "kwargs": {"x": 1}}},
    ):  # fmt: skip
        (tmp_path / "adapter_setup.json").write_text(json.dumps(wrong))
        with refused(model, CheckpointError, "adapter_setup.json", "Copy the checkpoint again"):
            model.load_adapter_setup(tmp_path)
