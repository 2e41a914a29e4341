"""What a native checkpoint says is what was written; edits by hand are refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshots import adapter_bits, refused, stir

from adapterzoo.errors import AdapterZooError, CheckpointError
from adapterzoo.formats import native

FILE, CONFIG = "adapter.safetensors", "adapter_config.json"


@pytest.fixture
def model(tiny):
    found = tiny("bert")
    found.add_adapter("a", "lora[r=4,alpha=8]")
    stir(found, "a")
    return found


@pytest.fixture
def saved(model, tmp_path):
    model.save_adapter(tmp_path / "saved", "a", meta_dict={"why": "é", "n": [1, 2.5, None]})
    return tmp_path / "saved"


def metadata_of(folder):
    with safe_open(folder / FILE, framework="pt") as opened:
        return dict(json.loads(opened.metadata()["adapterzoo"]))


def write_inside(folder, document, tensors=None):
    """Put another document, or other tensors, into the file, and no digest anew."""
    tensors = load_file(folder / FILE) if tensors is None else tensors
    save_file(tensors, folder / FILE, metadata={"adapterzoo": json.dumps(document)})


def edit(folder, change):
    document = json.loads((folder / CONFIG).read_text())
    change(document)
    (folder / CONFIG).write_text(json.dumps(document))


def more_alpha(document):
    document["config"]["alpha"] = 16


def test_metadata_that_changed_in_its_file_are_refused(model, saved):
    metadata = metadata_of(saved)
    right = metadata["sha256"]
    more_alpha(metadata)
    write_inside(saved, metadata)
    edit(saved, more_alpha)
    says = ("load_adapter('", FILE, f"its SHA-256 is not {right!r}")
    with refused(model, CheckpointError, *says, "nothing has been loaded", "Copy the checkpoint"):
        model.load_adapter(saved, load_as="b")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another value": (more_alpha, "another 'config'"),
    "a field more": (lambda d: d.update(x=True), "another 'x'"),
    "a field less": (lambda d: d.pop("name"), "another 'name'"),
    "one of another type": (lambda d: d.update(version=True), "another 'version'"),
    "meta": (lambda d: d["meta"].update(why="e"), "another 'meta'"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_config_that_was_edited_is_refused(model, saved, change):
    spoil, says = CHANGES[change]
    edit(saved, spoil)
    words = (CONFIG, says, "nothing has been loaded", f"Delete {CONFIG}")
    with refused(model, CheckpointError, *words):
        model.load_adapter(saved, load_as="b")
    # what the message says to write
    (saved / CONFIG).unlink()
    model.load_adapter(saved, load_as="b")
    assert adapter_bits(model, "b") == adapter_bits(model, "a")


def test_a_config_in_other_lines_is_the_same(model, saved):
    document = json.loads((saved / CONFIG).read_text())
    text = json.dumps(dict(reversed(document.items())), indent=7, ensure_ascii=False)
    (saved / CONFIG).write_text(text, "utf-8")
    assert model.load_adapter(saved, load_as="b") == "b"


@pytest.mark.parametrize("text", ["", "[]", '{"meta": NaN}', "[" * 10_000])
def test_a_config_that_is_none_is_refused(model, saved, text):
    (saved / CONFIG).write_text(text)
    with refused(model, CheckpointError, CONFIG, "Copy the checkpoint again"):
        model.load_adapter(saved, load_as="b")


def test_other_tensors_than_those_that_were_written_are_refused(model, saved):
    metadata, tensors = metadata_of(saved), load_file(saved / FILE)
    key = sorted(tensors)[0]
    for changed in (
        {**tensors, "strange": torch.zeros(1)},
        {k: t for k, t in tensors.items() if k != key},
        {**tensors, key: -tensors[key]},
        {**tensors, key: tensors[key].double()},
    ):
        write_inside(saved, metadata, changed)
        with refused(model, CheckpointError, FILE, "SHA-256 is not", "Copy the checkpoint"):
            model.load_adapter(saved, load_as="b")


@pytest.mark.parametrize("where", ["file", "copy"])
def test_objects_in_objects_without_end_are_refused(model, saved, where):
    """How deep JSON may be is another number in each release of Python."""
    if where == "file":
        text = (
            json.dumps(metadata_of(saved))[:-1] + ', "meta": ' + '{"a":' * 2000 + "1" + "}" * 2001
        )
        save_file(load_file(saved / FILE), saved / FILE, metadata={"adapterzoo": text})
    else:
        (saved / CONFIG).write_text('{"a":' * 100_000)
    with refused(model, CheckpointError, "not JSON", "Copy the checkpoint again"):
        model.load_adapter(saved, load_as="b")


STRANGE: list[Any] = [None, 10**40, "../x", [1]]


@pytest.mark.parametrize("kind", ["native", "adapterhub"])
def test_any_value_in_a_field_of_a_fusion_is_legal_or_an_error(tiny, tmp_path, kind):
    model = tiny("bert")
    for name in ("a", "b"):
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(["a", "b"])
    model.save_adapter_fusion(tmp_path, "a,b", format=kind)
    model.delete_adapter_fusion("a,b")
    config, file = tmp_path / "adapter_fusion_config.json", tmp_path / "adapter_fusion.safetensors"
    whole = json.loads(config.read_text())
    tensors = load_file(file) if kind == "native" else {}
    legal = 0
    for value in STRANGE:
        changed = [{**whole, key: value} for key in whole]
        changed += [{**whole, "config": whole["config"] | {key: value}} for key in whole["config"]]
        for document in changed:
            config.write_text(json.dumps(document))
            if kind == "native":
                hashed = native.hashed(document, tensors)
                save_file(tensors, file, {"adapterzoo": json.dumps(hashed)})
            name = None
            with contextlib.suppress(AdapterZooError):
                name = model.load_adapter_fusion(tmp_path, set_active=True)
            if name is not None:
                legal += 1
                model(torch.tensor([[1, 2, 3]]))
                model.set_active_adapters(None)
                model.delete_adapter_fusion(name)
            assert [*model.adapters_config] == ["a", "b"]
    # what nothing depends on may say anything
    assert legal > 10
