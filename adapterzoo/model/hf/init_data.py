"""Initial values from data: inputs of a base model's layers, or their original weights."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, cast

import safetensors
import torch
from torch import Tensor, nn
from transformers import utils
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file

from adapterzoo.anatomy import in_whole
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.contracts import InputPlan, InputStatistics, LayerData, OriginalWeight, WeightPlan
from adapterzoo.errors import ConfigError, listing
from adapterzoo.inject.layers import is_quantized, was_transposed
from adapterzoo.model.activation import AdapterSetup
from adapterzoo.model.state import AdaptedModel, base_prefix, config_of, layer_in

from .info import renamer

_PASSES, _IGNORED = 100, -100

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
"""A folder, a file of safetensors, or a name on the Hub; or tensors by their keys in a model."""
InitData: TypeAlias = Iterable[Mapping[str, Any]] | Source | None
"""Batches, each with the arguments of a call; or where the weights before quantization are."""
Collected: TypeAlias = Mapping[str, LayerData]
"""Path of a layer → what its initial values take from the data."""


def fitted(
    model: AdaptedModel, config: AdapterConfig, plan: InputPlan | WeightPlan | None, data: InitData
) -> tuple[AdapterConfig, Collected]:
    """Return the config with what it takes from the data, and what each layer takes from them.

    Args:
        model: with adapters; the base model alone is called, in evaluation mode.
        config: of a new adapter.
        plan: which data its initial values need; None: none.
        data: those that the user gave.

    Raises:
        ConfigError: initial values need data and there are none, or too few; or there are some,
            and nothing needs them.
    """
    if plan is None:
        raise ConfigError(f"{config!r} does not need any data. Leave init_data out.")
    if isinstance(config, ConfigUnion):
        raise ConfigError("a union takes no init_data. Add its members one by one.")
    if isinstance(plan, WeightPlan):
        return config, collected(model, plan, data)
    if data is None or isinstance(data, (str, Mapping)):
        raise ConfigError(
            f"{config!r} takes initial values from batches of inputs. Write init_data=[batch], "
            "where a batch has the arguments of a call."
        )
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with AdapterSetup(None), torch.no_grad():
            _collect(model, plan, cast("Iterable[Mapping[str, Any]]", data))
    finally:
        for module, training in modes.items():
            module.training = training
    return config.replace(**plan.changes()), plan.watched


def _collect(model: AdaptedModel, plan: InputPlan, data: Iterable[Mapping[str, Any]]) -> None:
    """Pass the data until no layer needs more of them, and at least once."""
    for number in range(_PASSES):
        passed = number > 0
        for batch in data:
            lacking = plan.lacking(passed)
            if not lacking:
                return
            _pass(model, {path: plan.watched[path] for path in lacking}, batch, plan)
        if not plan.lacking(passed=True):
            return
        plan.check()
    left = sorted(plan.lacking(passed=True))
    raise ConfigError(
        f"the inputs of {listing(left)} have not converged after {_PASSES} passes, or there were "
        "none. Write a list of larger batches in init_data."
    )


def _pass(
    model: AdaptedModel,
    watched: Mapping[str, InputStatistics],
    batch: Mapping[str, Any],
    plan: InputPlan,
) -> None:
    """Call the model with a batch, and add the inputs of the watched layers."""
    device = next(model.parameters()).device
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    tokens = _read_tokens(given, plan.skips_unlabeled, config_of(model).is_encoder_decoder)
    sites = {site.path: site for site in (*model.anatomy, *model.anatomy.named)}

    def add(own: InputStatistics, read: Tensor | None, _layer: Any, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        # other inputs than the tokens of the batch, such as those of an encoder, are all read
        fits = read is not None and x.shape[:-1] == read.shape
        own.update(x[read.to(x.device)] if read is not None and fits else x.flatten(0, -2))

    with ExitStack() as stack:
        for path, own in watched.items():
            site = sites[path]
            from_encoder = site.cross and site.role in ("key", "value")
            mask = tokens["decoder" in site.path.split(".") and not from_encoder]
            layer = layer_in(model, path)
            hook = layer.register_forward_pre_hook(functools.partial(add, own, mask))
            stack.callback(hook.remove)
        cast("Any", model)(**given)


def _read_tokens(
    batch: Mapping[str, Any], labeled: bool, has_decoder: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens are read `[rows, tokens]`: of the input, and of a decoder; None: all."""
    own = _mask(batch.get("attention_mask"))
    labels = batch.get("labels") if labeled else None
    known = labels != _IGNORED if isinstance(labels, Tensor) and labels.dim() == 2 else None
    if has_decoder:
        return own, known if known is not None else _mask(batch.get("decoder_attention_mask"))
    tokens = batch.get("input_ids")
    # labels of tokens, not of several classes
    if known is not None and isinstance(tokens, Tensor) and known.shape == tokens.shape:
        own = known if own is None else own & known
    return own, own


def _mask(value: object) -> Tensor | None:
    return value.bool() if isinstance(value, Tensor) and value.dim() == 2 else None


# --- The weights that the layers of a base model had before it was quantized ---


def can_dequantize(model: AdaptedModel) -> bool:
    """Return whether transformers can make the quantized layers of a model plain ones."""
    quantizer = type(getattr(model, "hf_quantizer", None))
    own = getattr(quantizer, "_dequantize", HfQuantizer._dequantize)
    return own is not HfQuantizer._dequantize


def collected(model: AdaptedModel, plan: WeightPlan, source: Any) -> Mapping[str, OriginalWeight]:
    """Return the original weight of each quantized layer, which is read when it is needed.

    Args:
        model: with a quantized base model.
        plan: names the layers.
        source: see `Source`; None: what the base model was loaded from.

    Raises:
        ConfigError: no layer is quantized, or the source lacks a weight.
    """
    layers = {path: layer_in(model, path) for path in plan.shapes}
    wanted = {path: layer for path, layer in layers.items() if is_quantized(layer)}
    if not wanted:
        raise ConfigError(
            f"none of {listing(plan.shapes)} is quantized. Load the base model with "
            "quantization_config=BitsAndBytesConfig(load_in_4bit=True)."
        )
    found, name = _tensors_in(model, source)
    renamed = renamer(model)
    start = base_prefix(model)
    read_at = {}
    for key, read in found:
        path, _, parameter = key.rpartition(".")
        if parameter == "weight":
            read_at[renamed(path)] = read
    # the source may be the base model alone
    keys = {path: (in_whole(path, start), path) for path in wanted}
    readers = {p: read_at[key] for p, names in keys.items() for key in names if key in read_at}
    if missing := [path for path in wanted if path not in readers]:
        raise ConfigError(
            f"{name} has no weight of {listing(missing)}. Write init_data=plain.state_dict()."
        )

    def original(path: str, layer: nn.Module) -> Tensor:
        w = readers[path]()
        w = w.mT if was_transposed(layer) else w  # [d_out, d_in]
        is_whole = w.is_floating_point() and not w.is_meta and bool(w.isfinite().all())
        if w.shape != plan.shapes[path] or not is_whole:
            raise ConfigError(
                f"{name} has no finite weight {list(plan.shapes[path])} at {path!r}. Write "
                "init_data='folder' with the model before quantization."
            )
        return w

    return {
        path: OriginalWeight(functools.partial(original, path, layer))
        for path, layer in wanted.items()
    }


def _tensors_in(
    model: AdaptedModel, source: Any
) -> tuple[Iterable[tuple[str, Callable[[], Tensor]]], str]:
    """Return the keys of a source with functions that read their tensors, and its name."""
    if isinstance(source, Mapping):
        return ((key, tensor.detach) for key, tensor in source.items()), "init_data"
    own = config_of(model)._name_or_path
    path = own if source is None else os.fspath(source)
    revision = getattr(config_of(model), "_commit_hash", None) if path == own else None
    try:
        return [*tensors_of(path, {"revision": revision})], repr(path)
    except OSError:
        # transformers raises it for a name that is neither a folder nor a repository
        return [], repr(path)


# --- The tensors of a checkpoint of a model ---

# names of the file with all weights, and of the index if there are several files
_WEIGHTS = (
    (utils.SAFE_WEIGHTS_NAME, utils.SAFE_WEIGHTS_INDEX_NAME),
    (utils.WEIGHTS_NAME, utils.WEIGHTS_INDEX_NAME),
)


def tensors_of(path: str, hub: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the keys of a checkpoint's tensors, with functions that read them.

    Args:
        path: a folder, a file of safetensors, or a name on the Hub; nothing is yielded if there
            are no weights.
        hub: arguments for the Hub, such as `revision`.
    """
    for file in _files(path, hub):
        if file.endswith(".safetensors"):
            opened: Any = safetensors.safe_open(file, framework="pt", device="cpu")
            yield from ((key, functools.partial(_read, opened, key)) for key in [*opened.keys()])
        else:
            loaded = torch.load(file, map_location="cpu", weights_only=True)
            yield from ((key, tensor.detach) for key, tensor in loaded.items())


def _read(opened: Any, key: str) -> Tensor:
    tensor: Tensor = opened.get_tensor(key)
    return tensor.clone(memory_format=torch.contiguous_format)


def _files(path: str, hub: Mapping[str, Any]) -> list[str]:
    if Path(path).suffix == ".safetensors":
        return [path] if Path(path).is_file() else []

    find: Callable[[str], str | None] = functools.partial(
        cached_file, path, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, **hub,
    )  # fmt: skip
    for name, index in _WEIGHTS:
        if whole := find(name):
            return [whole]
        if listed := find(index):
            shards = json.loads(Path(listed).read_text())["weight_map"]
            return [file for name in sorted({*shards.values()}) if (file := find(name))]
    return []


# --- Embeddings of a text, by a model's tokenizer and table of tokens ---


def embedded_text(model: Any, table: nn.Module, text: str) -> Tensor:
    """Return the embeddings `[tokens, d]` of a text.

    Args:
        model: its config names the checkpoint with the tokenizer.
        table: the embedding layer.
        text: any text.

    Raises:
        ConfigError: there is no tokenizer, or the text has no tokens.
    """
    # importing tokenizers takes a tenth of all imports, and most models need none
    from transformers import AutoTokenizer

    name = config_of(model)._name_or_path
    ids = AutoTokenizer.from_pretrained(name)(text)["input_ids"] if name else []
    if not ids:
        raise ConfigError(
            f"prompt_init_text={text!r}: it has no tokens for the tokenizer of {name!r}. Load the "
            f"model from a folder with one."
        )
    weight = cast("Tensor", table._parameters["weight"])
    with torch.no_grad():
        return cast("Tensor", table(torch.tensor(ids, device=weight.device)))  # [tokens, d]
