"""Files that are cut or have flipped bits: a reader says so, and nothing else is raised."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from peft_world import QUIET, ours, plain
from snapshots import stir

from adapterzoo.errors import AdapterZooError, CheckpointError
from adapterzoo.serving import verify
from adapterzoo.serving.readers import READERS, gguf

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]
STAND_IN = Path(__file__).parent / "converter.py"
FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A base model, an adapter, and its export to each server."""
    folder = tmp_path_factory.mktemp("damaged")
    model = ours("llama")
    model.add_adapter("a", "lora[r=4,alpha=6,attn_matrices=['q']]")
    stir(model, "a")
    model.save_adapter(folder / "a", "a")
    model.save_adapter(folder / "served", "a", format="peft", serve="any")
    return plain("llama"), folder / "a", folder / "served"


def damaged(data, own):
    """Bytes with a part cut off, removed, doubled or zero, or with flipped bits."""
    first, last = sorted((own.randrange(len(data)), own.randrange(len(data))))
    kind = own.randrange(5)
    if kind == 0:
        return data[:first]
    if kind == 1:
        return data[:first] + data[last:]
    if kind == 2:
        return data[:last] + data[first:]
    if kind == 3:
        size = min(last - first, 16)
        return data[:first] + bytes(size) + data[first + size :]
    # most of them where files describe themselves
    flipped, end = bytearray(data), own.choice([64, 512, len(data)])
    for _ in range(own.choice([1, 1, 3, 20])):
        flipped[own.randrange(min(end, len(data)))] ^= 1 << own.randrange(8)
    return bytes(flipped)


VALUES = [None, True, 0, -1, 1e308, 10**30, "", "(", "x", [], ["("], [None], {}, {"(": 2},
          {"": None}, {"q_proj": "x"}, {"q_proj": 0}]  # fmt: skip


def changed(config, own):
    """The text of a config with a wrong value."""
    values = json.loads(config)
    names = [*values, "lora_alpha", "r", "rank_pattern", "alpha_pattern", "target_modules"]
    for _ in range(own.choice([1, 1, 2])):
        name = own.choice(names)
        if own.random() < 0.2:
            values.pop(name, None)
        else:
            values[name] = own.choice(VALUES)
    return json.dumps(values).encode()


@pytest.mark.parametrize("server", READERS)
@pytest.mark.sweep
def test_a_damaged_folder_is_refused_or_read(server, written):
    base, original, served = written
    whole = {name: (served / name).read_bytes() for name in FILES}
    refused = equal = 0
    try:
        for number in range(60):
            own = random.Random(number)
            name = own.choice(FILES)
            change = changed if name == FILES[0] and own.random() < 0.7 else damaged
            (served / name).write_bytes(change(whole[name], own))
            try:
                equal += verify(served, server, base, original).is_equal
            except AdapterZooError:
                refused += 1
            (served / name).write_bytes(whole[name])
        assert verify(served, server, base, original).is_equal
    finally:
        for name, data in whole.items():
            (served / name).write_bytes(data)
    # damage of each kind, so that the test can fail
    assert refused > 5
    assert equal < 40


def test_a_damaged_gguf_file_is_refused(written, tmp_path):
    base, _, served = written
    file = tmp_path / "whole.gguf"
    sizes = ["--base", str(tmp_path), "--outfile", str(file)]
    base.config.save_pretrained(tmp_path)
    subprocess.run([sys.executable, STAND_IN, str(served), *sizes], check=True)
    whole = file.read_bytes()
    _, tensors = gguf._parsed(whole)
    assert tensors
    refused = 0
    for number in range(500):
        try:
            gguf._parsed(damaged(whole, random.Random(number)))
        except CheckpointError:
            refused += 1
    assert refused > 100
    # as many values as fit no file
    counts = whole[:8] + struct.pack("<QQ", 2**63, 2**63) + whole[24:]
    with pytest.raises(CheckpointError, match="has not written a whole GGUF file"):
        gguf._parsed(counts)


def test_a_converter_whose_file_is_damaged_proves_nothing(written, tmp_path):
    base, original, served = written
    script = tmp_path / "converter.py"
    script.write_text(
        STAND_IN.read_text() + "\nfile = Path(sys.argv[-1])\n"
        "file.write_bytes(file.read_bytes()[:100])\n"
    )
    with pytest.raises(CheckpointError, match="Write the path of"):
        verify(served, "gguf", base, original, converter=script)
