r"""The base model of an adapter: what files record about it, and a warning if it is another one.

A file has up to four entries: the name of the base model, its commit on the Hub, a digest of its
weights, and, in the native format, a sample of them (`formats.fit`).

The digest is made of the signs of weights. A cast to float32, bfloat16 or float16 rounds every
weight but keeps its sign, so all copies of a base model have the same digest, on any device and
with any sharding:

    v1-⟨the first 32 hexadecimal digits of SHA-256 over the parameters of all blocks in the order
    of their paths: "path shape\n", then the sign bits of up to 1,024 values, as bytes 0 and 1⟩

The values are 16 evenly spread runs of 64 neighbors in memory order, or all values of a smaller
parameter. Parameters outside the blocks do not count: poolers, heads and other layers that a
checkpoint may lack are drawn at random, and token tables are resized. In a model without blocks,
all parameters except embedding tables count.

A relative change ε of all weights flips a share of about ε / π of the signs. The digest of BERT
base covers 169,000 of them: a relative change of 1 in 10,000 shows, and so does a LoRA merged into
some layers. A change outside the blocks, or of only a few weights, does not. The digest is not a
signature.

There is no digest without the original weights: for a quantized model, on the meta device, after
saving merged weights, under FSDP 1, under ZeRO stage 3 with parameters offloaded to NVMe or
quantized, if a `tp_plan` has packed a layer, and in a model wrapped by PEFT.
Nothing is cached: reading the values takes milliseconds, and writes to weights leave no trace.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from adapterzoo import hub
from adapterzoo.errors import BaseModelWarning, in_python
from adapterzoo.folders.formats import Base, base_of
from adapterzoo.formats import fit
from adapterzoo.inject.building import at_hand, is_offloaded, offloaded_value, plain_modules
from adapterzoo.inject.layers import is_quantized

from . import merging, sharding
from .hf.info import name_of
from .state import DEFAULT_EMBEDDINGS, AdaptedModel, config_of, token_table

SAMPLE = "base"
"""The key of the sample of weights in metadata of the native format."""

_VERSION = "v1-"
_DIGITS = 32
_RUNS, _RUN = 16, 64
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_COMMIT = re.compile("[0-9a-f]{40}")


class _Weights(NamedTuple):
    """The weights of a base model, without the changes of adapters.

    Attributes:
        there: those in this process, whole or sharded, by key.
        offloaded: those that accelerate has offloaded: key → module and parameter.
        is_quantized: whether some are quantized.
        is_whole: whether these are all weights: none is quantized, or on the meta device.
    """

    there: dict[str, Tensor]
    offloaded: dict[str, tuple[nn.Module, str]]
    is_quantized: bool
    is_whole: bool


# --- what a file records ---


def entries(model: AdaptedModel, name: str, with_sample: bool) -> dict[str, Any]:
    """Return the entries of an adapter's file about the base model, except its name.

    A collective call if the weights are sharded. For a model without weights, such as one that only
    converts a file, these are the entries of the file that the adapter came from.

    Args:
        model: the model, resharded.
        name: the adapter's name.
        with_sample: whether the file gets a sample of the weights.
    """
    weights = _weights_of(model)
    trained_on = model._adapter_state.find(name).trained_on
    if not weights.there and not weights.offloaded and trained_on:
        return {k: v for k, v in trained_on.items() if k != SAMPLE or with_sample}
    found: dict[str, Any] = Base(None, revision_of(model), _digest(model, weights)).entries()
    if with_sample and (sample := fit.base_sample(_sampled(model, weights, fit.sampled_keys))):
        found[SAMPLE] = sample
    return found


def entries_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries in a file's metadata about the base model, except its name."""
    sample = {SAMPLE: metadata[SAMPLE]} if SAMPLE in metadata else {}
    return sample | base_of(metadata).entries()


def revision_of(model: Any) -> str | None:
    """Return the commit on the Hub that a model was loaded from; None if unknown."""
    # transformers 5.24 and later do not record it
    found = getattr(config_of(model), "_commit_hash", None)
    name = name_of(model)
    return found if found or name is None else hub.only_commit(name)


def _digest(model: AdaptedModel, weights: _Weights) -> str | None:
    """Return the digest of the base model; None without its original weights."""
    blocks = [f"{block.path}." for block in model.anatomy.blocks]
    tables = {path for path, m in plain_modules(model._backbone) if isinstance(m, nn.Embedding)}
    keys = sorted(
        key
        for key in (*weights.there, *weights.offloaded)
        if (key.startswith(tuple(blocks)) if blocks else key.rpartition(".")[0] not in tables)
    )
    is_changed = "peft_config" in vars(model) and sharding.peft_layer(cast("nn.Module", model))
    whole = (
        keys
        and weights.is_whole
        and not is_changed
        and not sharding.is_flattened(cast("nn.Module", model))
    )
    if not whole:
        return None
    tensors: dict[str, Tensor] = {}
    for key in keys:
        offloaded = weights.offloaded.get(key)
        tensors[key] = offloaded_value(*offloaded) if offloaded else weights.there[key]
    if not all(t.dtype in _DTYPES and sharding.is_read_in_parts(t) for t in tensors.values()):
        return None
    hashed = hashlib.sha256()
    for key, signs in sharding.negative_at(tensors, _positions).items():
        hashed.update(f"{key} {sharding.shape_of(tensors[key])}\n".encode())
        hashed.update(signs.numpy().tobytes())
    return f"{_VERSION}{hashed.hexdigest()[:_DIGITS]}"


def _positions(size: int) -> Tensor:
    """Return the positions of the values that the digest reads, `[values]`."""
    if size <= _RUNS * _RUN:
        return torch.arange(size, device="cpu")
    middles = torch.tensor(
        [(2 * run + 1) * size // (2 * _RUNS) for run in range(_RUNS)], device="cpu"
    )
    run = torch.arange(_RUN, device="cpu") - _RUN // 2
    return (middles[:, None] + run).flatten()  # [runs, run] → [values]


# --- the weights ---


def _weights_of(model: AdaptedModel) -> _Weights:
    """Return the weights of the base model, as they are without merged adapters."""
    there: dict[str, Tensor] = {}
    offloaded: dict[str, tuple[nn.Module, str]] = {}
    originals = model._adapter_state.originals
    packed = getattr(config_of(model), "quantization_config", None) is not None
    is_whole = not packed
    if merging.lost_originals(model):
        return _Weights({}, {}, packed, False)
    for path, module in plain_modules(model._backbone):
        if is_quantized(module):
            packed, is_whole = True, False
            continue
        for name, tensor in {**module._parameters, **originals.get(path, {})}.items():
            if tensor is None or not tensor.is_floating_point():
                continue
            plain = type(tensor) in (nn.Parameter, Tensor) or sharding.is_sharded(tensor)
            if not plain or (tensor.is_meta and not is_offloaded(module)):
                is_whole = False
            elif tensor.is_meta:
                offloaded[f"{path}.{name}"] = module, name
            elif sharding.size_of(tensor):
                there[f"{path}.{name}"] = tensor
    return _Weights(there, offloaded, packed, is_whole)


def _sampled(
    model: AdaptedModel, weights: _Weights, choose: Callable[[Mapping[str, int]], Iterable[str]]
) -> dict[str, Tensor]:
    """Return some weights of the base model by key, gathered from all processes if sharded.

    Omit vectors of a quantized model, since some quantization methods scale them, and a token
    table that replaces the model's own.

    Args:
        model: the model with adapters, resharded.
        weights: the weights of its base model.
        choose: a function that selects keys, given the number of dimensions of each weight.
    """
    found = dict(weights.there)
    found |= {k: cast("Tensor", m._parameters[n]) for k, (m, n) in weights.offloaded.items()}
    if model._adapter_state.embeddings != DEFAULT_EMBEDDINGS:
        table = token_table(model)
        found = {k: t for k, t in found.items() if table is None or t is not table.weight}
    dims = {key: len(sharding.shape_of(tensor)) for key, tensor in found.items()}
    keys = [*choose({k: dim for k, dim in dims.items() if dim > 1 or not weights.is_quantized})]
    for key in weights.offloaded.keys() & set(keys):
        module, name = weights.offloaded[key]
        with at_hand(module):
            found[key] = cast("Tensor", module._parameters[name])
    return sharding.gathered({key: found[key] for key in keys})


# --- compare ---


def warn_of_another(model: AdaptedModel, metadata: Mapping[str, Any], name: str) -> None:
    """Warn if an adapter was trained on another base model than the one it is loaded into.

    The digests decide if both are known, otherwise the sample of weights in the file. With neither,
    two commits of one repository count as different.

    Args:
        model: the model that the adapter is loaded into.
        metadata: the metadata of the adapter's file, in any format.
        name: the adapter's name.
    """
    trained = base_of(metadata)
    sample = metadata.get(SAMPLE)
    if trained.digest is None and trained.revision is None and not isinstance(sample, Mapping):
        return
    weights = _weights_of(model)
    if not weights.there and not weights.offloaded:
        return
    is_known = trained.digest is not None and trained.digest.startswith(_VERSION)
    here = Base(name_of(model), revision_of(model), _digest(model, weights) if is_known else None)
    # branches and tags may move
    revisions = (here.revision, trained.revision)
    commits = {each for each in revisions if _COMMIT.fullmatch(each or "")}
    is_other = None not in (here.digest, trained.digest) and here.digest != trained.digest
    if not is_other and isinstance(sample, Mapping):
        own = _sampled(model, weights, lambda dims: [key for key in dims if key in sample])
        is_other = fit.is_other_base(sample, own)
    if is_other:
        what = "was trained on other weights than this model's"
    elif here.digest is None and here.name == trained.name and len(commits) == 2:
        what = "was trained on another commit of the base model, and weights cannot be compared"
    else:
        return
    warnings.warn(
        f"the adapter {name!r} {what}:\n  trained on {_described(trained)}\n  this model is "
        f"{_described(here)}\n{_hint(trained)}",
        BaseModelWarning,
        stacklevel=2,
    )


def _described(base: Base) -> str:
    parts = ["a model without a name" if base.name is None else repr(base.name)]
    parts += [] if base.revision is None else [f"at revision {base.revision!r}"]
    parts += [] if base.digest is None else [f"with digest {base.digest}"]
    return " ".join(parts)


def _hint(base: Base) -> str:
    at = "" if base.revision is None else f", revision={base.revision!r}"
    load = f"from_pretrained({base.name!r}{at})" if base.name else "load_adapter(…) of its model"
    silence = "warnings.simplefilter('ignore', adapterzoo.BaseModelWarning)"
    return in_python(
        f"Write {load}, or {silence} if this model is the right one.",
        "Write --model with the base model that it was trained on.",
    )
