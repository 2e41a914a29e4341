"""Headers and digests, read without torch, beside what torch reads."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import safetensors.torch
import torch
from safetensors.torch import save_file

from adapterzoo.errors import CheckpointError
from adapterzoo.folders.reading import digests_in, headers_in
from adapterzoo.formats import files, fit

DTYPES = tuple(safetensors.torch._TYPES.values())
# those that pickles had before torch 1.6
OLD = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def tensors(dtypes):
    return {f"{dtype}": torch.ones(i, 3, 2).to(dtype) for i, dtype in enumerate(dtypes)}


def described(found):
    return {k: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in found.items()}


def test_headers_of_safetensors(tmp_path):
    file, expected = tmp_path / "a.safetensors", tensors(DTYPES)
    save_file(expected, file)
    assert headers_in(file) == described(expected)
    assert digests_in(file, headers_in(file)) == fit.digests(expected)


def with_a_note(tensor):
    tensor.note = "torch keeps it"
    return tensor


MADE = {
    "a tensor": lambda tensor: tensor,
    "a parameter": torch.nn.Parameter,
    "a buffer": torch.nn.Buffer,
    "a tensor with an attribute": with_a_note,
    "a parameter with an attribute": lambda tensor: with_a_note(torch.nn.Parameter(tensor)),
}


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("made", MADE)
def test_headers_of_pickles(tmp_path, is_zip, made):
    file, dtypes = tmp_path / "a.bin", DTYPES if is_zip else OLD
    expected = {key: t for key, t in tensors(dtypes).items() if t.is_floating_point()}
    torch.save({key: MADE[made](tensor) for key, tensor in expected.items()}, file,
               _use_new_zipfile_serialization=is_zip)  # fmt: skip
    assert headers_in(file) == described(files.read_tensors(file)) == described(expected)


@pytest.mark.parametrize("is_zip", [True, False])
def test_headers_of_the_state_of_a_module(tmp_path, is_zip):
    file, state = tmp_path / "a.bin", torch.nn.Linear(2, 3).state_dict()
    torch.save(state, file, _use_new_zipfile_serialization=is_zip)
    assert headers_in(file) == described(state)


class Planted:
    """Is written into a pickle as a tensor with another shape or storage."""

    def __init__(self, storage, shape):
        self.given = storage, 0, shape, (1,), False, OrderedDict()

    def __reduce__(self):
        return torch._utils._rebuild_tensor_v2, self.given


@pytest.mark.parametrize(("storage", "shape"), [("float32", ("a",)), ("foo", (1,)), ({}, (1,)),
                                                ("float32", (-1,))])  # fmt: skip
def test_headers_that_are_no_facts(tmp_path, storage, shape):
    file = tmp_path / "a.bin"
    # as torch 1.5 wrote it: three pickles about the file come first
    file.write_bytes(b"".join(map(pickle.dumps, (1, 1, {}, {"a": Planted(storage, shape)}))))
    with pytest.raises(CheckpointError, match="does not map names to plain tensors"):
        headers_in(file)


@pytest.mark.parametrize(
    "content", [{"a": 1}, ["a"], {"a": torch.device("cpu")}, {1: torch.ones(1)}]
)
def test_a_pickle_of_something_else(tmp_path, content):
    torch.save(content, tmp_path / "a.bin")
    for read in (headers_in, files.read_tensors):
        with pytest.raises(CheckpointError, match=r"does not map names|holds code"):
            read(tmp_path / "a.bin")
