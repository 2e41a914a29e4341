"""Files of strangers: what is hostile is refused, runs nothing, and costs nothing."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from snapshots import refused
from torch.utils._python_dispatch import TorchDispatchMode

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError
from adapterzoo.folders.reading import fields_of, read_json
from adapterzoo.formats import files

DATA = Path(__file__).resolve().parents[1] / "data" / "golden_adapterhub" / "bert"
BIN = "pytorch_adapter.bin"


class Runs:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def save_as_zip(file, content, compression):
    with zipfile.ZipFile(file, "w", compression) as opened:
        for name, data in content.items():
            opened.writestr(f"archive/{name}", data)


def evil_torch(file, mark):
    torch.save({"w": torch.ones(1), "x": Runs(mark)}, file)


def evil_zip(file, mark):
    content = {"data.pkl": pickle.dumps(Runs(mark), 2), "version": b"3"}
    save_as_zip(file, content, zipfile.ZIP_STORED)


def whole_module(file, mark):
    torch.save(torch.nn.Linear(1, 1), file)


@pytest.mark.parametrize("evil", [evil_torch, evil_zip, whole_module])
def test_code_is_not_run(tmp_path, evil):
    mark = tmp_path / "ran"
    evil(tmp_path / "x.bin", mark)
    with pytest.raises(CheckpointError, match=r"holds code.*Copy the checkpoint again"):
        files.read_tensors(tmp_path / "x.bin")
    assert not mark.exists()


def test_a_bomb_is_not_unpacked(tmp_path):
    save_as_zip(tmp_path / "x.bin", {"data/0": bytes(10**7)}, zipfile.ZIP_DEFLATED)
    assert (tmp_path / "x.bin").stat().st_size < 10**5
    with pytest.raises(CheckpointError, match=r"compressed.*Copy the checkpoint"):
        files.read_tensors(tmp_path / "x.bin")


def test_entries_that_share_their_bytes_are_not_read(tmp_path):
    whole = io.BytesIO()
    torch.save({"w": torch.zeros(9999), "x": torch.zeros(9999)}, whole)
    file = tmp_path / "x.bin"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(file, "w") as new:
        for entry in old.infolist():
            if entry.filename.endswith("/data/1"):
                # the list of entries has one more, at the place of another
                shared = copy.copy(new.getinfo(entry.filename[:-1] + "0"))
                shared.filename = entry.filename
                new.filelist.append(shared)
            else:
                new.writestr(entry.filename, old.read(entry))
    # torch reads such a file, and doubles it
    assert len(torch.load(file, weights_only=True)["x"]) * 8 > file.stat().st_size
    with pytest.raises(CheckpointError, match=r"entries share bytes.*Copy the checkpoint"):
        files.read_tensors(file)


@pytest.mark.parametrize(
    "content",
    [[torch.ones(1)], {"w": 1}, {1: torch.ones(1)}, {"w": torch.eye(2).to_sparse()},
     {"w": torch.empty(1, device="meta")}, {"w": torch.ones(1, dtype=torch.complex64)}],
)  # fmt: skip
def test_other_things_than_tensors_by_name(tmp_path, content):
    torch.save(content, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"does not map names to plain tensors.*Copy"):
        files.read_tensors(tmp_path / "x.bin")


# torch says that it will remove them
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_are_refused(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(1), 0.1, 0, torch.qint8)
    torch.save({"w": quantized}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"plain tensors.*Copy the checkpoint"):
        files.read_tensors(tmp_path / "x.bin")


class Largest(TorchDispatchMode):
    """Notes the most numbers that one tensor in memory had."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not made.is_meta:
            self.numbers = max(self.numbers, made.numel())
        return made


@pytest.mark.parametrize(
    ("name", "fields"),
    [("adapter", {"r": 65_536}), ("head", {"num_labels": 100_000, "label2id": None}),
     ("head", {"layers": 64})],
)  # fmt: skip
def test_configs_that_ask_for_much_get_no_memory(tmp_path, name, fields):
    shutil.copytree(DATA / "lora", tmp_path / "x")
    file = tmp_path / "x" / f"{name}_config.json"
    document = json.loads(file.read_text())
    document["config"].update(fields)
    file.write_text(json.dumps(document))
    model = AutoAdapterModel.from_pretrained(DATA / "base")
    with Largest() as largest, pytest.raises(CheckpointError, match="nothing has been loaded"):
        model.load_adapter(tmp_path / "x")
    assert 0 < largest.numbers < 10_000


# headers of safetensors: test_security.py
@pytest.mark.parametrize("data", [b"", b"\x80\x02.", b"PK\x03\x04", b"\0" * 64, b"\xff" * 64])
def test_damage(tmp_path, data):
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged|does not map names"):
        files.read_tensors(tmp_path / "x.bin")


def test_a_header_that_is_too_large_is_not_read(tmp_path):
    file = tmp_path / "x.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 33 * 2**20) + b"{")
        stream.truncate(34 * 2**20)
    with pytest.raises(CheckpointError, match=r"damaged: its header is too large"):
        files.read_tensors(file)


def test_every_cut_is_noticed(tmp_path):
    whole = (DATA / "lora" / BIN).read_bytes()
    for size in range(0, len(whole), 1009):
        (tmp_path / "x.bin").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="Copy the checkpoint again"):
            files.read_tensors(tmp_path / "x.bin")


def test_every_cut_of_a_pickle_of_old_releases_is_noticed(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "x.bin").read_bytes()
    for size in range(0, len(whole), 5):
        (tmp_path / "x.bin").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="Copy the checkpoint again"):
            files.read_tensors(tmp_path / "x.bin")
    # the name of the storage stands where it is used and, last, where its numbers follow
    name = re.findall(rb"\d{6,}", whole)[-1]
    start = whole.rindex(name)
    (tmp_path / "x.bin").write_bytes(whole[:start] + b"0" * len(name) + whole[start + len(name) :])
    with pytest.raises(CheckpointError, match="Copy the checkpoint again"):
        files.read_tensors(tmp_path / "x.bin")


def test_pickles_of_old_releases_of_torch_are_read(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "x.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(files.read_tensors(tmp_path / "x.bin")["w"], torch.ones(3))
    torch.save({"w": torch.nn.Parameter(torch.ones(3))}, tmp_path / "y.bin")
    assert not files.read_tensors(tmp_path / "y.bin")["w"].requires_grad


def test_safetensors_are_taken_before_a_pickle(tmp_path):
    shutil.copytree(DATA / "lora", tmp_path / "x")
    tensors = torch.load(tmp_path / "x" / BIN, weights_only=True)
    save_file(tensors, tmp_path / "x" / "adapter.safetensors")
    evil_torch(tmp_path / "x" / BIN, tmp_path / "ran")
    model = AutoAdapterModel.from_pretrained(DATA / "base")
    assert model.load_adapter(tmp_path / "x") == "golden"


@pytest.mark.parametrize(
    ("text", "says"),
    [(b"", "is not JSON"), (b"{", "is not JSON"), (b"[1]", "holds a list"),
     (b'{"a": NaN}', "NaN is not a number of JSON"),
     (b'{"a": -Infinity}', "-Infinity is not a number"),
     (b'{"a": 1e999}', "1e999 is not a number"), (b"[" * 200_000, "is not JSON"),
     (b'{"a":' * 100_000, "is not JSON"), (b"\xff\xfe\x00", "is not JSON"),
     (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON")],
)  # fmt: skip
def test_json_that_is_no_config(tmp_path, text, says):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=f"{says}.*Copy the checkpoint"):
        read_json(tmp_path / "x.json")
    assert not fields_of(tmp_path / "x.json")


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.json' cannot be read.*Copy the checkpoint"):
        read_json(tmp_path / "x.json")
    with pytest.raises(CheckpointError, match="Copy the checkpoint"):
        files.read_tensors(tmp_path / "x.bin")
    assert not fields_of(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", BIN, "head_config.json",
                                     "pytorch_model_head.bin"])  # fmt: skip
def test_a_checkpoint_without_one_of_its_files(tmp_path, missing):
    shutil.copytree(DATA / "lora", tmp_path / "x")
    (tmp_path / "x" / missing).unlink()
    model = AutoAdapterModel.from_pretrained(DATA / "base")
    name = missing if missing.endswith(".json") else "has no tensors"
    with refused(model, CheckpointError, name, "Copy the checkpoint again"):
        model.load_adapter(tmp_path / "x")
