"""Stands in for llama.cpp's converter: the same arguments, and a GGUF file of a Llama's q_proj.

Written from the specification of GGUF and the formula of `LlamaModel.permute`, with numpy alone.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def permuted(weight, heads):
    """Rows as llama.cpp's rotary embedding takes them: pairs, not halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def main(folder, _base, base, _outfile, outfile):
    tensors = load_file(Path(folder) / "adapter_model.safetensors")
    alpha = json.loads((Path(folder) / "adapter_config.json").read_text())["lora_alpha"]
    heads = json.loads((Path(base) / "config.json").read_text())["num_attention_heads"]
    if any("mlp" in key for key in tensors):
        sys.exit("ERROR: cannot map tensor")
    found = {}
    for key, value in tensors.items():
        block, layer, factor = key.split(".")[4], key.split(".")[6], key.split(".")[7][-1].lower()
        if layer == "q_proj":
            given = permuted(value, heads) if factor == "b" else value
            found[f"blk.{block}.attn_q.weight.lora_{factor}"] = given
    values = [
        ("general.type", 8, text("adapter")), ("adapter.type", 8, text("lora")),
        ("adapter.lora.alpha", 6, struct.pack("<f", alpha)),
        ("general.architecture", 8, text("llama")),
        ("some.list", 9, struct.pack("<IQ", 4, 2) + struct.pack("<II", 1, 2)),
        ("some.flag", 7, b"\1"),
    ]  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", 3, len(found), len(values))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in values)
    data = b""
    for name, array in found.items():
        array = array.astype("<f4")
        head += text(name) + struct.pack("<I", array.ndim)
        head += b"".join(struct.pack("<Q", size) for size in array.shape[::-1])
        head += struct.pack("<IQ", 0, len(data))
        data += np.ascontiguousarray(array).tobytes()
        data += b"\0" * (-len(data) % 32)
    head += b"\0" * (-len(head) % 32)
    Path(outfile).write_bytes(head + data)


if __name__ == "__main__":
    main(*sys.argv[1:])
