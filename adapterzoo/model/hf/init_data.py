"""Initial values from data: inputs of a base model's layers, or their original weights."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias, cast

import safetensors
import torch
from torch import Tensor, nn
from transformers import utils
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.contracts import InputPlan, InputStatistics, LayerData, OriginalWeight, WeightPlan
from adapterzoo.errors import ConfigError, listing
from adapterzoo.inject import quantized
from adapterzoo.inject.building import layer_at
from adapterzoo.model.activation import AdapterSetup
from adapterzoo.model.state import AdaptedModel, base_prefix

from .backbone import renamer

_PASSES, _IGNORED = 100, -100

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor]
"""A folder, a file of safetensors, or a name on the Hub; or tensors by their keys in a model."""
InitData: TypeAlias = Iterable[Mapping[str, Any]] | Source | None
"""Batches, each with the arguments of a call; or where the weights before quantization are."""
Collected: TypeAlias = Mapping[str, LayerData]
"""Path of a layer → what its initial values take from the data."""


def fitted(
    model: AdaptedModel, config: AdapterConfig, data: InitData
) -> tuple[AdapterConfig, Collected]:
    """Return the config with what it takes from the data, and what each layer takes from them.

    Args:
        model: with adapters; the base model alone is called, in evaluation mode.
        config: of a new adapter.
        data: as the initial values of the config need them.

    Raises:
        ConfigError: initial values need data and there are none, or too few; or there are some,
            and nothing needs them.
    """
    plans = [member.init_plan(model.anatomy) for member in config.members]
    plan = next((p for p in plans if p is not None), None)
    if plan is None:
        if data is not None:
            raise ConfigError(
                f"init_data is given, and {config!r} does not need any: leave init_data out."
            )
        return config, {}
    if isinstance(config, ConfigUnion):
        raise ConfigError(
            f"{config!r}: initial values from data are not for a union. Leave init_weights out, or "
            "add its members one by one."
        )
    if isinstance(plan, WeightPlan):
        return config, collected(model, plan, data)
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable | None):
        raise ConfigError(
            f"init_data is a {type(data).__name__}, not a list of batches. Write init_data=[batch]."
        )
    if data is None:
        raise ConfigError(
            f"{config!r}: initial values come from data, and there are none. Write "
            "init_data=batches, where a batch has the arguments of a call."
        )
    batches = cast("Iterable[Mapping[str, Any]]", data)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with AdapterSetup(None), torch.no_grad():
            _collect(model, plan, batches)
    finally:
        for module, training in modes.items():
            module.training = training
    return config.replace(**plan.changes()), plan.watched


def _collect(model: AdaptedModel, plan: InputPlan, data: Iterable[Mapping[str, Any]]) -> None:
    """Pass the data until no layer needs more of them, and at least once."""
    for number in range(_PASSES):
        passed = number > 0
        count = 0
        for batch in data:
            lacking = plan.lacking(passed)
            if not lacking:
                return
            count += 1
            if not isinstance(batch, Mapping):
                raise ConfigError(
                    f"a batch of init_data is a {type(batch).__name__}, not a dict. Write "
                    f"{{'input_ids': batch}}."
                )
            _pass(model, {path: plan.watched[path] for path in lacking}, batch, plan)
        if not count:
            raise ConfigError(
                "init_data has no more batches, and is read several times. Write a list of "
                "batches or a DataLoader."
            )
        if not plan.lacking(passed=True):
            return
        plan.check()
    left = sorted(plan.lacking(passed=True))
    raise ConfigError(
        f"the inputs of {listing(left)} have not converged after {_PASSES} passes, or there were "
        "none. Write larger batches in init_data."
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
    kept = _kept(given, plan.skips_unlabeled, model.config.is_encoder_decoder)
    sites = {site.path: site for site in model.anatomy}
    with ExitStack() as stack:
        for path, own in watched.items():
            site = sites[path]
            from_encoder = site.cross and site.role in ("key", "value")
            mask = kept["decoder" in site.path.split(".") and not from_encoder]
            hook = layer_at(model._backbone, path).register_forward_pre_hook(
                _adding(path, own, mask)
            )
            stack.callback(hook.remove)
        cast("Any", model)(**given)


def _adding(
    path: str, own: InputStatistics, kept: Tensor | None
) -> Callable[[Any, tuple[Any, ...]], None]:
    def add(_layer: Any, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        # other inputs than the tokens of the batch, such as those of an encoder, are all read
        fits = kept is not None and x.shape[:-1] == kept.shape
        try:
            own.update(x[kept.to(x.device)] if kept is not None and fits else x.flatten(0, -2))
        except ConfigError as error:
            raise ConfigError(f"at {path!r}: {error}") from error

    return add


def _kept(
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


def collected(model: AdaptedModel, plan: WeightPlan, source: Any) -> Mapping[str, OriginalWeight]:
    """Return the original weight of each quantized layer, which is read when it is needed.

    Args:
        model: with a quantized base model.
        plan: names the layers.
        source: see `Source`; None: what the base model was loaded from.

    Raises:
        ConfigError: no layer is quantized, or the source lacks a weight.
    """
    layers = {path: layer_at(model._backbone, path) for path in plan.shapes}
    wanted = {path: layer for path, layer in layers.items() if quantized.is_quantized(layer)}
    if not wanted:
        raise ConfigError(
            f"none of the adapted layers, {listing(plan.shapes)}, is quantized. Load the base "
            "model with quantization_config=BitsAndBytesConfig(load_in_4bit=True)."
        )
    found, name = _tensors_in(model, source)
    renamed = renamer(model)
    start = base_prefix(model)
    readers = {}
    for key, read in found:
        path, _, parameter = key.rpartition(".")
        if parameter == "weight":
            readers[renamed(path).removeprefix(start)] = read
    if missing := [path for path in wanted if path not in readers]:
        raise ConfigError(
            f"{name} has no weight of {listing(missing)}. Write init_data=plain.state_dict()."
        )
    return {
        path: OriginalWeight(
            functools.partial(_checked, readers[path], layer, path, plan.shapes[path], name)
        )
        for path, layer in wanted.items()
    }


def _checked(
    read: Callable[[], Tensor], layer: nn.Module, path: str, shape: tuple[int, int], name: str
) -> Tensor:
    """Return an original weight `[d_out, d_in]`.

    Raises:
        ConfigError: it does not belong to the layer.
    """
    w = read()
    if quantized.was_transposed(layer):
        w = w.mT
    if w.shape != shape or not w.is_floating_point():
        kind = str(w.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name} has {kind} {list(w.shape)} at {path!r}, not a weight {list(shape)}. Write "
            "init_data='folder' with the model before quantization."
        )
    if w.is_meta or not bool(w.isfinite().all()):
        raise ConfigError(
            f"{name} has values that are not finite. Write init_data='folder' with the model "
            "before quantization."
        )
    return w


def _tensors_in(
    model: AdaptedModel, source: Any
) -> tuple[Iterator[tuple[str, Callable[[], Tensor]]], str]:
    """Return the keys of a source with functions that read their tensors, and its name.

    Raises:
        ConfigError: there is no such source.
    """
    if isinstance(source, Mapping) and all(isinstance(t, Tensor) for t in source.values()):
        given: dict[str, Tensor] = {str(key): tensor for key, tensor in source.items()}
        return ((key, tensor.detach) for key, tensor in given.items()), "init_data"
    if source is not None and not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"init_data is a {type(source).__name__}, not a folder, a name on the Hub or a state "
            "dict. Write init_data='folder'."
        )
    own = model.config._name_or_path
    path = own if source is None else os.fspath(source)
    revision = getattr(model.config, "_commit_hash", None) if path == own else None
    files = _files(path, revision)
    if not files:
        raise ConfigError(
            f"the weights before quantization are not in {path!r}, which has no "
            f"{utils.SAFE_WEIGHTS_NAME}. Write init_data='folder', or init_data=plain.state_dict()."
        )
    return _in_files(files), repr(path)


def _files(path: str, revision: str | None) -> list[str]:
    """Return the files of safetensors of a model; empty if there are none."""
    if Path(path).suffix == ".safetensors":
        return [path] if Path(path).is_file() else []
    find = functools.partial(
        cached_file, path, revision=revision, _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
    )  # fmt: skip
    try:
        if whole := find(utils.SAFE_WEIGHTS_NAME):
            return [whole]
        if index := find(utils.SAFE_WEIGHTS_INDEX_NAME):
            return list(get_checkpoint_shard_files(path, index, revision=revision)[0])
    except OSError:
        # transformers raises it for a name that is neither a folder nor a repository
        return []
    return []


def _in_files(files: list[str]) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for file in files:
        with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
            for key in opened.keys():  # noqa: SIM118  it is not a mapping
                yield key, functools.partial(_read, file, key)


def _read(file: str, key: str) -> Tensor:
    with safetensors.safe_open(file, framework="pt", device="cpu") as opened:
        tensor: Tensor = opened.get_tensor(key)
    return tensor.clone(memory_format=torch.contiguous_format)


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

    name = getattr(model.config, "_name_or_path", "")
    try:
        ids = AutoTokenizer.from_pretrained(name)(text)["input_ids"] if name else []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer in {name!r} ({error}). Write tokenizer.save_pretrained({name!r})."
        ) from error
    if not ids:
        raise ConfigError(
            f"the text has no tokens for the tokenizer of {name!r}. Load the model from a folder "
            "with one."
        )
    weight = cast("Tensor", table._parameters["weight"])
    with torch.no_grad():
        return cast("Tensor", table(torch.tensor(ids, device=weight.device)))  # [tokens, d]
