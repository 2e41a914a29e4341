"""Headers and digests, read without torch, beside what torch reads."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from adapterzoo.errors import CheckpointError
from adapterzoo.folders.reading import digests_in, headers_in
from adapterzoo.formats import files, fit

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
EIGHT_BITS = torch.float8_e4m3fn, torch.float8_e5m2


def tensors(dtypes):
    return {f"{dtype}": torch.ones(i, 3, 2).to(dtype) for i, dtype in enumerate(dtypes)}


def described(found):
    return {k: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for k, t in found.items()}


def test_headers_of_safetensors(tmp_path):
    file, expected = tmp_path / "a.safetensors", tensors((*DTYPES, *EIGHT_BITS))
    save_file(expected, file)
    assert headers_in(file) == described(expected)
    assert digests_in(file) == fit.digests(expected)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("made", [lambda t: t, torch.nn.Parameter])
def test_headers_of_pickles(tmp_path, is_zip, made):
    file = tmp_path / "a.bin"
    dtypes = (*DTYPES, *EIGHT_BITS) if is_zip else DTYPES
    expected = {key: t for key, t in tensors(dtypes).items() if t.is_floating_point()}
    torch.save({key: made(tensor) for key, tensor in expected.items()}, file,
               _use_new_zipfile_serialization=is_zip)  # fmt: skip
    assert headers_in(file) == described(files.read_tensors(file)) == described(expected)


@pytest.mark.parametrize(
    "content", [{"a": 1}, ["a"], {"a": torch.device("cpu")}, {1: torch.ones(1)}]
)
def test_a_pickle_of_something_else(tmp_path, content):
    torch.save(content, tmp_path / "a.bin")
    for read in (headers_in, files.read_tensors):
        with pytest.raises(CheckpointError, match=r"does not map names|holds code"):
            read(tmp_path / "a.bin")
