"""Files: old or new, never half; the same content gives the same bytes."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapterzoo.errors import CheckpointError
from adapterzoo.formats import files, native
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.fit import check_fit, differences

FP16, FP32 = torch.float16, torch.float32
DOCUMENT = {"format": "adapterzoo", "version": 1, "name": "a", "ünï": [1, None, 0.5]}


def tensors(value=1.0):
    return {
        "b/w": torch.full((3, 2), value),
        "a/w": torch.full((2,), value, dtype=torch.bfloat16),
        "a/empty": torch.zeros(0, 4),
        "a/scalar": torch.tensor(value, dtype=torch.float64),
    }


def content(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "new" / "deep" / "x.safetensors"
    files.write_tensors(file, DOCUMENT, tensors())
    document, read = native.read(file)
    assert document == DOCUMENT
    assert sorted(read) == sorted(tensors())
    for key, tensor in tensors().items():
        assert read[key].dtype is tensor.dtype
        assert torch.equal(read[key], tensor)
    # any safetensors reader reads it too
    assert sorted(load_file(file)) == sorted(tensors())


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
     torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, FP16, torch.bfloat16, FP32,
     torch.float64, torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
     torch.float8_e8m0fnu],
    ids=str,
)  # fmt: skip
def test_tensors_of_each_dtype_are_read_as_safetensors_reads_them(tmp_path, dtype):
    numbers = torch.tensor([[0, 1, 3], [1, 0, 2]])
    save_file({"b": numbers.to(dtype), "a": torch.zeros(0, 2, dtype=dtype)}, tmp_path / "x")
    read, expected = files.read_safetensors(tmp_path / "x"), load_file(tmp_path / "x")
    assert [*read] == ["a", "b"]
    for key, tensor in read.items():
        assert tensor.dtype is dtype is expected[key].dtype
        assert tensor.shape == expected[key].shape
        assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8))


def test_tensors_lie_in_memory_of_their_own(tmp_path):
    save_file({"a": torch.zeros(3), "b": torch.ones(5)}, tmp_path / "x")
    read = files.read_safetensors(tmp_path / "x")
    assert [t.untyped_storage().nbytes() for t in read.values()] == [12, 20]
    # kernels of the CPU may add numbers up in another order where memory is not aligned
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read.values())
    (tmp_path / "x").write_bytes(b"\0" * (tmp_path / "x").stat().st_size)
    assert torch.equal(read["b"], torch.ones(5))


def test_views_and_shared_memory_are_written_apart(tmp_path):
    w = torch.arange(12.0).view(3, 4)
    odd = {"t": w.T, "row": w[1], "same": w, "expanded": torch.ones(1).expand(3)}
    files.write_tensors(tmp_path / "x", {}, {**odd, "grad": torch.nn.Parameter(w)})
    read = native.read(tmp_path / "x")[1]
    assert all(torch.equal(read[key], tensor) for key, tensor in odd.items())
    assert not read["grad"].requires_grad


def test_equal_content_gives_equal_bytes(tmp_path):
    backwards = dict(reversed(tensors().items()))
    files.write_tensors(tmp_path / "one", DOCUMENT, tensors())
    files.write_tensors(tmp_path / "two", dict(reversed(DOCUMENT.items())), backwards)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    files.write_tensors(tmp_path / "two", DOCUMENT, tensors(2.0))
    assert (tmp_path / "one").read_bytes() != (tmp_path / "two").read_bytes()


def test_files_have_the_mode_that_open_gives(tmp_path):
    for mask in (0o022, 0o077):
        before = os.umask(mask)
        try:
            files.write_all(tmp_path, {"x.json": b"{}"})
            Path(tmp_path / "plain").write_text("")
        finally:
            os.umask(before)
        modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("x.json", "plain")}
        assert modes == {0o666 & ~mask}
        (tmp_path / "plain").unlink()


# --- what cannot be written ---


@pytest.mark.parametrize(
    ("millions", "what"), [(17, "the config, with meta_dict,"), (40, "names, shapes and")]
)
def test_what_would_not_be_read_again_is_not_written(tmp_path, millions, what):
    files.write_all(tmp_path, native.encode(Checkpoint(DOCUMENT, tensors()), "adapter"))
    document = {**DOCUMENT, "meta": {"log": "x" * (millions * 10**6)}}
    large = Checkpoint(document, tensors(2.0))
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match=f"{what}.*smaller meta"):
        files.write_all(tmp_path, native.encode(large, "adapter"))
    assert content(tmp_path) == before


# --- what cannot be read ---


def test_no_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no such file\. Copy the checkpoint"):
        native.read(tmp_path / "x")
    with pytest.raises(CheckpointError, match=r"there is no such file\. Copy the checkpoint"):
        native.load(tmp_path / "x", "adapter")
    for stem in ("adapter", "head", "adapter_fusion"):
        says = rf"{stem}\.safetensors.*there is no such file"
        with pytest.raises(CheckpointError, match=says):
            native.load(tmp_path, stem)


@pytest.mark.parametrize(
    "data",
    [b"x", b"\0" * 8, (2).to_bytes(8, "little") + b"{", (4).to_bytes(8, "little") + b"null",
     b"PK\3\4" * 8],
)  # fmt: skip
def test_damage(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"Copy the checkpoint again|Write a folder"):
        native.read(tmp_path / "x")


def test_every_cut_is_noticed(tmp_path):
    files.write_tensors(tmp_path / "x", DOCUMENT, tensors())
    whole = (tmp_path / "x").read_bytes()
    for size in range(0, len(whole), 5):
        (tmp_path / "x").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="Copy the checkpoint again"):
            native.read(tmp_path / "x")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [(None, "is not a file that adapterzoo"),
     ({"format": "pt"}, "is not a file that adapterzoo"),
     ({"adapterzoo": "{"}, "is not JSON"),
     ({"adapterzoo": "[1]"}, "holds a list, not an object. Copy the checkpoint"),
     ({"adapterzoo": "{}"}, "has version None")],
)  # fmt: skip
def test_files_of_others(tmp_path, metadata, says):
    save_file(tensors(), tmp_path / "adapter.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError) as caught:
        native.load(tmp_path, "adapter")
    assert says in str(caught.value)


# --- the format ---


def test_adapter_and_head_are_told_apart(tmp_path):
    stored = Checkpoint(
        {"name": "a"}, tensors(), {"0.weight": torch.ones(2), "head/x": torch.ones(1)}
    )
    files.write_all(tmp_path, native.encode(stored, "adapter"))
    read = native.load(tmp_path, "adapter")
    assert sorted(read.adapter) == sorted(tensors())
    assert sorted(read.head) == ["0.weight", "head/x"]
    assert read.metadata == {"format": "adapterzoo", "version": 1, "name": "a"}
    assert json.loads((tmp_path / "adapter_config.json").read_text()) == read.metadata


def test_a_layer_called_head_is_a_layer(tmp_path):
    stored = Checkpoint({}, {"head/w": torch.ones(1)}, {"w": torch.ones(2)})
    files.write_all(tmp_path, native.encode(stored, "adapter"))
    read = native.load(tmp_path, "adapter")
    assert (list(read.adapter), list(read.head)) == (["head/w"], ["w"])


def test_differences_are_listed_by_kind_and_name():
    two = torch.zeros(2)
    ours = {"a": two, "b": two, "d": two.half(), "e": two}
    theirs = {"c": two, "b": torch.zeros(3), "d": two, "e": two}
    lines = [
        "c   in the file only",
        "a   in the model only",
        "b   file [3]   model [2]",
        f"dtype of 1 tensors   file {FP32}   model {FP16}   (pass dtype={FP16} to convert)",
    ]
    assert differences(theirs, ours, None) == lines
    assert differences(theirs, ours, torch.float16) == lines[:3]
    assert differences(ours, ours, None) == []
    check_fit("Model", ours, ours, None)
    with pytest.raises(CheckpointError) as caught:
        check_fit("Model", theirs, ours, None)
    assert str(caught.value) == (
        "4 differences from this Model; nothing has been loaded:\n  " + "\n  ".join(lines)
    )
