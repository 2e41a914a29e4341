"""The files of every method, head and fusion in every format, to the byte.

Tensors have the same bytes on every processor where they hold what the adapter does. A few are
computed when they are written; of these the table has the norm and a sum, rounded.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertForSequenceClassification

from adapterzoo import init
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import AdapterZooError
from adapterzoo.formats.checkpoint import formats
from adapterzoo.heads import HeadConfig, head_types
from adapterzoo.methods.fusion import fusion_configs

from .methods import add, fill, filled, methods, refusal, tensors_of, undropped
from .values import sums

# "adapterhub" holds the same as "adapterhub-safetensors", but pickled
FORMATS = [name for name in formats if name != "adapterhub"]
# beside bert for all methods, one config of each architecture: fused layers, and two stacks
OTHERS = ("gpt2", "bart")
OF_HEAD = {"causal_lm": "gpt2", "seq2seq_lm": "bart", "image_classification": "vit"}
_DTYPES = {"F32": torch.float32, "F64": torch.float64}

Row = dict[str, Any]


def rows() -> dict[str, Callable[[], Row]]:
    """The rows of the table, to be computed."""
    found: dict[str, Callable[[], Row]] = {}
    seen: set[str] = set()
    for name, config in methods().items():
        first = config.architecture not in seen
        seen.add(config.architecture)
        for family in ("bert", *(OTHERS if first else ())):
            found[f"{name} in {family}"] = lambda c=config, f=family: of_method(c, f)
    for kind in head_types:
        found[f"head {kind}"] = lambda k=kind: of_static_head() if k == "static" else of_head(k)
    for kind in fusion_configs:
        found[f"fusion {kind}"] = lambda k=kind: of_fusion(k)
    return found


def of_method(config: AdapterConfig, family: str) -> Row:
    """The files of an adapter by format."""
    model = filled(family, torch.float32)
    try:
        add(model, "a", config)
    except AdapterZooError as error:
        return {"added": refusal(error)}
    return saved(lambda folder, form: model.save_adapter(folder, "a", format=form))


def of_head(kind: str) -> Row:
    """The files of a head by format."""
    model = filled(OF_HEAD.get(kind, "bert"), torch.float32)
    model.add_prediction_head_from_config("h", HeadConfig.from_dict({"head_type": kind}))
    fill(model.get_head("h").named_parameters())
    return saved(lambda folder, form: model.save_head(folder, "h", format=form))


def of_static_head() -> Row:
    """The files of an adapter with its copy of the head of a task class."""
    config = undropped("bert")
    model: Any = init(BertForSequenceClassification(config).eval())
    fill(model.named_parameters())
    add(model, "a", AdapterConfig.load("lora"))
    model.train_adapter("a")
    return saved(lambda folder, form: model.save_adapter(folder, "a", format=form))


def of_fusion(kind: str) -> Row:
    """The files of a fusion by format."""
    model = filled("bert", torch.float32)
    for name in "ab":
        add(model, name, AdapterConfig.load("seq_bn"))
    model.add_adapter_fusion(["a", "b"], kind)
    fill(tensors_of("a,b", model.fusion_modules("a,b")))
    return saved(lambda folder, form: model.save_adapter_fusion(folder, "a,b", format=form))


def saved(save: Callable[[Path, str], None]) -> Row:
    """What a call writes in each format, or its refusal."""
    found: Row = {}
    for form in FORMATS:
        with tempfile.TemporaryDirectory() as name:
            try:
                save(Path(name), form)
            except AdapterZooError as error:
                found[form] = refusal(error)
                continue
            found[form] = {file.name: read(file) for file in sorted(Path(name).iterdir())}
    return found


def read(file: Path) -> Any:
    """The content of a file in JSON types; of tensors the dtype, the shape and a digest."""
    content = file.read_bytes()
    if file.suffix == ".json":
        return _short(json.loads(content))
    if file.suffix != ".safetensors":
        return digest(content)
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    found = {f"metadata {k}": _value(v) for k, v in sorted(header.pop("__metadata__").items())}
    for key, about in sorted(header.items()):
        first, last = about["data_offsets"]
        values = content[end + first : end + last]
        what = computed(key, about, values) or digest(values)
        found[key] = f"{about['dtype']} {about['shape']} {what}"
    return found


def _value(text: str) -> Any:
    # a document is in the JSON file too
    if not text.startswith("{"):
        return text
    values = json.loads(text)
    return {"sha256": values["sha256"]} if "sha256" in values else values


def _short(document: dict[str, Any]) -> dict[str, Any]:
    # the sample of the base model is long
    base = document.get("base")
    if base is not None:
        document["base"] = digest(json.dumps(base, sort_keys=True).encode())
    return document


def computed(key: str, about: dict[str, Any], values: bytes) -> str:
    """Norm and sum of a tensor that has other values than `fill` gives; empty for others."""
    dtype = _DTYPES.get(about["dtype"])
    if dtype is None or not values:
        return ""
    tensor: Tensor = torch.frombuffer(bytearray(values), dtype=dtype).double()
    if torch.equal((tensor * 2**16).round(), tensor * 2**16):
        return ""
    return "computed, {:.4g} {:.2f}".format(*sums([(key, tensor)]))


def digest(content: bytes) -> str:
    """The start of a SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]
