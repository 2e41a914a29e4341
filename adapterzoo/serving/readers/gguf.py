"""How llama.cpp reads an adapter, through its converter to GGUF.

Version: llama.cpp in the sdist of llama-cpp-python 0.3.36. Source files: convert_lora_to_gguf.py
(keys, alpha), conversion/*.py (which models and names), gguf-py/gguf/tensor_mapping.py,
src/llama-adapter.cpp and llama-adapter.h (scale, shapes, norms that are skipped).
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError

from .reading import Reading, Update, type_of

VERSION = "llama.cpp in llama-cpp-python 0.3.36"

_BLOCK = r"model\.layers\.(\d+)\."
_ATTENTION = rf"{_BLOCK}self_attn\.[qkvo]_proj"
_LLAMA = rf"{_ATTENTION}|{_BLOCK}mlp\.(gate|up|down)_proj|model\.embed_tokens|lm_head"
# names in conversion/*.py and tensor_mapping.py that models of transformers have
_MODELS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"), _LLAMA),
    "phi3": rf"{_BLOCK}(self_attn\.(qkv|o)_proj|mlp\.(gate_up|down)_proj)|"
    r"model\.embed_tokens|lm_head",
    "mixtral": rf"{_ATTENTION}|{_BLOCK}block_sparse_moe\.experts\.\d+\.w[123]|"
    r"model\.embed_tokens|lm_head",
    "qwen3_moe": rf"{_LLAMA}|{_BLOCK}mlp\.experts\.\d+\.(gate|up|down)_proj",
    "bert": r"(bert\.)?encoder\.layer\.(\d+)\.(attention\.self\.(query|key|value)|"
    r"attention\.output\.dense|intermediate\.dense|output\.dense)",
}
# w1, w2 and w3 of Mixtral → parameter, and its half
_EXPERTS = {
    "w1": ("gate_up_proj", (0, 2)), "gate_proj": ("gate_up_proj", (0, 2)),
    "w3": ("gate_up_proj", (1, 2)), "up_proj": ("gate_up_proj", (1, 2)),
    "w2": ("down_proj", None), "down_proj": ("down_proj", None),
}  # fmt: skip


def read(config: Mapping[str, Any], tensors: Mapping[str, Tensor], base: nn.Module) -> Reading:
    """Return what llama.cpp makes of an adapter; the arguments are those of `vllm.read`."""
    found = Reading()
    model_type = type_of(base, _MODELS, found)
    if model_type is None:
        return found
    if "lora_alpha" not in config:
        found.refused.append("KeyError: 'lora_alpha'")
        return found
    if config.get("alora_invocation_tokens"):
        found.refused.append("the adapter acts from an invocation on, which weights cannot show")
    pairs: dict[str, dict[str, Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        factor = re.search(r"\.lora_(?:embedding_)?([AB])(\.weight)?$", key)
        if factor is None:
            # `.base_layer.weight` is skipped; norms are converted, but the loader skips them
            if ".base_layer.weight" in key or "_layernorm" in key or ".norm" in key:
                found.dropped.append(key)
            else:
                found.refused.append(f"unexpected name {key!r}")
            continue
        name = key.replace("base_model.model.", "")[: -len(factor[0])]
        pairs.setdefault(name, {})[factor[1]] = tensor
    experts: dict[str, int] = {}
    config_of: Any = base.config
    for name, pair in pairs.items():
        if re.fullmatch(_MODELS[model_type], name) is None:
            found.refused.append(f"cannot map tensor {name!r}")
        elif {*pair} != {"A", "B"}:
            found.refused.append(f"{name!r} has only {[*pair]}")
        elif name == "lm_head" and config_of.tie_word_embeddings:
            found.refused.append("the base model has no tensor 'output.weight'")
        else:
            found.updates.append(_update(name, pair, float(config["lora_alpha"]), base, experts))
    counts = (getattr(config_of, name, None) for name in ("num_local_experts", "num_experts"))
    count = next((n for n in counts if n), 0)
    found.refused += [
        f"unprocessed experts of {path!r}: {n} of {3 * count} matrices"
        for path, n in experts.items() if n != 3 * count
    ]  # fmt: skip
    layers = {*dict(base.named_modules())}
    found.refused += [
        f"{update.path!r} does not exist in the base model"
        for update in found.updates if update.path not in layers
    ]  # fmt: skip
    return found


def _update(
    name: str, pair: Mapping[str, Tensor], alpha: float, base: nn.Module, experts: dict[str, int]
) -> Update:
    """Return the change of a layer, and count the matrices of experts."""
    a, b = pair["A"], pair["B"]
    # get_scale: by the rank of each tensor
    scale = alpha / b.shape[-1] if alpha else 1.0
    expert = re.fullmatch(r"(.+)\.(?:block_sparse_moe|mlp)\.experts\.(\d+)\.(\w+)", name)
    if expert is not None:
        path = f"{expert[1]}.mlp.experts"
        experts[path] = experts.get(path, 0) + 1
        parameter, half = _EXPERTS[expert[3]]
        return Update(path, a, b, scale, parameter, int(expert[2]), half)
    path = name
    names = dict(base.named_modules())
    if path not in names:
        # a BertModel, or a model that contains one
        path = next((p for p in (f"bert.{name}", name.removeprefix("bert.")) if p in names), name)
    return Update(path, a, b, scale, looked_up=isinstance(names.get(path), nn.Embedding))


# --- the converter's file ---

# byte sizes of GGUF's value types; 8 is a string, 9 an array
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _FLOAT = 8, 9, 6
# types of the tensors that the converter writes
_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_ALIGNMENT = 32

# gguf-py/gguf/constants.py: TENSOR_NAMES, → the layer of a block in transformers
_DECODER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_ENCODER = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key",
    "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense",
}  # fmt: skip
_OF_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
# conversion/llama.py: LlamaModel permutes rows of q and k, also of its subclasses here
_PERMUTED = ("llama", "mistral", "mixtral")


def convert(converter: str, folder: str, base: nn.Module) -> Reading:
    """Return what llama.cpp makes of the file that its converter writes from a folder.

    Args:
        converter: path of `convert_lora_to_gguf.py`.
        folder: a PEFT folder.
        base: the plain model.
    """
    found = Reading()
    with tempfile.TemporaryDirectory() as temporary:
        # the converter reads only the config
        base.config.save_pretrained(temporary)  # type: ignore[union-attr, operator]
        file = Path(temporary) / "adapter.gguf"
        ran = subprocess.run(
            [sys.executable, converter, folder, "--base", temporary, "--outfile", str(file)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode or not file.is_file():
            lines = ran.stderr.strip().splitlines() or ["no message"]
            found.refused.append(f"{converter}: {lines[-1]}")
            return found
        values, tensors = _parsed(file.read_bytes())
    kind = values.get("general.type"), values.get("adapter.type")
    if kind != ("adapter", "lora"):
        found.refused.append(f"the file is of the type {kind}")
    if "adapter.alora.invocation_tokens" in values:
        found.refused.append("the adapter acts from an invocation on, which weights cannot show")
    alpha = float(values.get("adapter.lora.alpha") or 0.0)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        start, _, factor = name.rpartition(".lora_")
        if start and factor in ("a", "b"):
            pairs.setdefault(start, {})[factor] = tensor
        elif name.endswith("_norm.weight"):
            found.dropped.append(name)
        else:
            found.refused.append(f"LoRA tensor {name!r} has unexpected suffix")
    for name, pair in pairs.items():
        path = _path(name, base)
        if {*pair} != {"a", "b"}:
            found.refused.append(f"LoRA tensor pair for {name!r} is missing one component")
        elif path is None:
            found.refused.append(f"LoRA tensor {name!r} does not exist in base model")
        else:
            found.updates += _updates(name, path, pair["a"], pair["b"], alpha, base)
    return found


def _path(name: str, base: nn.Module) -> str | None:
    """Return the path of the transformers module for a tensor of llama.cpp."""
    config: Any = base.config
    names = {*dict(base.named_modules())}
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if name == "token_embd.weight":
        path = "model.embed_tokens"
    elif name == "output.weight":
        path = "" if config.tie_word_embeddings else "lm_head"
    elif block is None:
        return None
    elif block[2] in _OF_EXPERTS:
        path = f"model.layers.{block[1]}.mlp.experts"
    elif config.model_type == "bert":
        prefix = "bert." if "bert" in names else ""
        path = f"{prefix}encoder.layer.{block[1]}.{_ENCODER.get(block[2])}"
    else:
        layer = _DECODER.get(block[2], "")
        if config.model_type == "phi3" and block[2] == "ffn_up":
            layer = "mlp.gate_up_proj"
        path = f"model.layers.{block[1]}.{layer}"
    return path if path and path in names else None


def _updates(
    name: str, path: str, a: Tensor, b: Tensor, alpha: float, base: nn.Module
) -> list[Update]:
    scale = alpha / b.shape[-1] if alpha else 1.0
    config: Any = base.config
    kind = name.split(".")[-2]
    if kind in _OF_EXPERTS:
        parameter, half = _EXPERTS[_OF_EXPERTS[kind]]
        return [
            Update(path, a[n], b[n], scale, parameter, n, half) for n in range(a.shape[0])
        ]  # fmt: skip
    if name == "token_embd.weight":
        return [Update(path, a.mT, b, scale, looked_up=True)]
    if config.model_type in _PERMUTED and kind in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
        # undo LlamaModel.permute
        halves = b.unflatten(0, (heads, -1, 2))  # [heads, d_head / 2, 2, rank]
        b = halves.transpose(1, 2).flatten(0, 2)  # [d_out, rank]
    return [Update(path, a, b, scale)]


def _parsed(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the values and the tensors of a GGUF file.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        return _contents(data)
    except (LookupError, RecursionError, ValueError) as error:
        raise CheckpointError(
            f"the converter has not written a whole GGUF file ({error}). Write the path of "
            "llama.cpp's convert_lora_to_gguf.py."
        ) from error


def _contents(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    place = 0

    def taken(size: int) -> bytes:
        nonlocal place
        if size > len(data) - place:
            raise CheckpointError(f"it ends before byte {place + size}")
        place += size
        return data[place - size : place]

    def number(form: str) -> Any:
        (value,) = struct.unpack(f"<{form}", taken(struct.calcsize(f"<{form}")))
        return value

    def text() -> str:
        return taken(number("Q")).decode("utf-8")

    def value(kind: int) -> Any:
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            inner, count = number("I"), number("Q")
            return [value(inner) for _ in range(count)]
        if kind == _FLOAT:
            return number("f")
        return taken(_SIZES[kind])

    if taken(4) != b"GGUF":
        raise CheckpointError("it does not begin with GGUF")
    # the version
    number("I")
    count, entries = number("Q"), number("Q")
    values = {}
    for _ in range(entries):
        key = text()
        values[key] = value(number("I"))
    infos = []
    for _ in range(count):
        name, dims = text(), number("I")
        shape = [number("Q") for _ in range(dims)][::-1]
        infos.append((name, shape, _DTYPES[number("I")], number("Q")))
    start = -(-place // _ALIGNMENT) * _ALIGNMENT
    writable = bytearray(data)
    tensors = {
        name: torch.frombuffer(writable, dtype=dtype, count=math.prod(shape),
                               offset=start + offset).reshape(shape)
        for name, shape, dtype, offset in infos
    }  # fmt: skip
    return values, tensors
