"""`save_pretrained` of `PeftModel`: the config as it was edited, a model card, PEFT's options."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoConfig

from adapterzoo import hub
from adapterzoo.anatomy import unwrapped
from adapterzoo.errors import CheckpointError, ConfigError, StateError
from adapterzoo.folders.formats import META, beside_peft
from adapterzoo.folders.names import CARD, CONFIG
from adapterzoo.folders.reading import read_json
from adapterzoo.formats import files
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.inject.building import plain_modules
from adapterzoo.model.hf.info import name_of
from adapterzoo.model.mixin import AdapterModelMixin
from adapterzoo.model.state import (
    AdaptedModel,
    config_of,
    is_plain,
    modules_of,
    output_embeddings_of,
    token_table,
)

from .classes import PeftConfig, from_values, plain_value
from .methods import encoded

SAFE, PICKLED = format_of_peft.FILES
PREFIX = "base_model.model."
"""The start of the keys of a model that PEFT has wrapped."""

# fields that name layers; if they are empty, PEFT fills in those of the model's type
_SELECTED = ("target_modules", "feedforward_modules")

# tasks of PEFT → those of the Hub
_PIPELINES = {
    "CAUSAL_LM": "text-generation",
    "FEATURE_EXTRACTION": "feature-extraction",
    "QUESTION_ANS": "question-answering",
    "SEQ_CLS": "text-classification",
    "TOKEN_CLS": "token-classification",
}


@dataclasses.dataclass
class Kept:
    """The config of an adapter as its user sees it.

    Attributes:
        own: our config, which identifies the adapter even if its name is used again.
        given: the user's object.
        before: its values when the adapter was added.
    """

    own: object
    given: Any
    before: Mapping[str, Any]

    def edited(self) -> dict[str, Any]:
        """Return the fields that have changed since, as in a file."""
        now = {name: plain_value(value) for name, value in self.given.to_dict().items()}
        return {name: value for name, value in now.items() if value != self.before.get(name)}


def keep(model: Any, name: str, given: Any) -> None:
    """Keep the user's config of an adapter that has been added; it gets the layers' names.

    Args:
        model: the model with the adapter.
        name: the adapter's name.
        given: a config object of PEFT.
    """
    own = model._adapter_state.find(name).config
    if idle := [n for n in _SELECTED if getattr(given, n, ()) is None]:
        with contextlib.suppress(CheckpointError):
            document = encoded(model, name)[0]
            for field in idle:
                found = document.get(field)
                setattr(given, field, {*found} if isinstance(found, list) else found)
    before = {key: plain_value(value) for key, value in given.to_dict().items()}
    _book(model).kept[name] = Kept(own, given, before)


class ShownConfigs(dict[str, Any]):
    """The configs of a model by name, as users see them."""

    def pop(self, name: str, default: Any = None) -> Any:
        """Return the config of a name; frameworks also pop those of deleted adapters."""
        return super().pop(name, default)


@dataclasses.dataclass
class Book:
    """The configs of a model, and the dict of them that users see."""

    kept: dict[str, Kept] = dataclasses.field(default_factory=dict)
    shown: ShownConfigs = dataclasses.field(default_factory=ShownConfigs)


def _book(model: Any) -> Book:
    found: Book = vars(model).setdefault("_peft_configs", Book())
    return found


def set_mode(model: Any, name: str, is_trainable: bool) -> None:
    """Set `inference_mode` in an adapter's config; in its file it is always true.

    Args:
        model: the model with the adapter.
        name: the adapter's name.
        is_trainable: whether the adapter is trained.
    """
    with contextlib.suppress(CheckpointError):
        config_of_adapter(model, name).inference_mode = not is_trainable
    kept = _book(model).kept.get(name)
    if kept is None:
        return
    kept.before = {**kept.before, "inference_mode": not is_trainable}


def config_of_adapter(model: Any, name: str) -> PeftConfig:
    """Return PEFT's config of an adapter: the user's object, or one created from the adapter.

    Args:
        model: the model with the adapter.
        name: the adapter's name.

    Raises:
        CheckpointError: PEFT's format cannot express the adapter.
    """
    kept, own = _book(model).kept, model._adapter_state.find(name).config
    if name not in kept or kept[name].own is not own:
        keep(model, name, from_values(encoded(model, name)[0], {}))
    found: PeftConfig = kept[name].given
    return found


def configs_of(model: Any) -> dict[str, PeftConfig]:
    """Return PEFT's configs of the adapters that its format can express, by name."""
    book, there = _book(model), model.adapters_config
    for name in there:
        with contextlib.suppress(CheckpointError):
            config_of_adapter(model, name)
    book.kept = {name: book.kept[name] for name in there if name in book.kept}
    book.shown.clear()
    book.shown.update({name: each.given for name, each in book.kept.items()})
    return book.shown


def adapted(model: nn.Module) -> Any:
    """Return the model with adapters inside torch's wrappers.

    Args:
        model: a model with adapters, or a wrapper of it.

    Raises:
        StateError: the model cannot have adapters.
    """
    own = unwrapped(model)
    if not isinstance(own, AdapterModelMixin):
        raise StateError("it has no adapters. Write get_peft_model(model, LoraConfig(…)) first.")
    return own


@contextlib.contextmanager
def whole(model: Any) -> Iterator[Any]:
    """Yield a model without torch's wrappers; FSDP1 gathers its parameters for the block.

    Args:
        model: a model with adapters, or a wrapper of it.

    Raises:
        StateError: the model cannot have adapters.
    """
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            yield adapted(model.module)
    else:
        yield adapted(model)


@contextlib.contextmanager
def with_values(model: Any, name: str, given: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Give an adapter the values of a state dict of the whole model in the block.

    Args:
        model: the model with the adapter.
        name: the adapter's name.
        given: tensors by the model's keys; they may lack the adapter's. None: its own.
    """
    own = {id(t) for _, m in modules_of(model, name) for t in m.state_dict(keep_vars=True).values()}
    found = {} if given is None else model.state_dict(keep_vars=True)
    pairs = [(t, given[key]) for key, t in found.items() if given and id(t) in own and key in given]
    before = [(t, t.data) for t, _ in pairs]
    try:
        for tensor, value in pairs:
            tensor.data = value.detach().to(tensor.device)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


def embedding_tensors(model: AdaptedModel, asked: str | bool) -> dict[str, Tensor]:
    """Return the tables that a file holds in addition to an adapter, by PEFT's keys.

    Args:
        model: the adapter's model.
        asked: whether the file has the token tables, input and output; "auto": if the
            vocabulary has another size than in the checkpoint of the base model.

    Raises:
        ConfigError: the value is invalid.

    Warns:
        UserWarning: the model has no such table.
    """
    if asked not in ("auto", True, False):
        raise ConfigError(
            f"save_embedding_layers={asked!r} is none of 'auto', True, False. Write 'auto'."
        )
    if asked == "auto":
        asked = _is_resized(model)
    if not asked:
        return {}
    tables = {id(m) for m in (token_table(model), output_embeddings_of(model)) if m is not None}
    if not tables:
        warnings.warn("save_embedding_layers=True: the model has no table of tokens.", stacklevel=4)
    modules: Any = plain_modules(model)  # type: ignore[arg-type]
    return {
        f"base_model.model.{path}.weight": module._parameters["weight"].detach()
        for path, module in modules
        if id(module) in tables
    }


def _is_resized(model: AdaptedModel) -> bool:
    """Return whether the vocabulary has another size than in the checkpoint of the base model."""
    name, own = name_of(model), getattr(config_of(model), "vocab_size", None)
    if name is None or own is None:
        return False
    try:
        saved = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError):
        # without that checkpoint, nothing is known
        return False
    return bool(own != getattr(saved, "vocab_size", own))


def finish(
    model: Any, name: str, folder: Path, tables: Mapping[str, Tensor], safe_serialization: bool
) -> None:
    """Complete a folder that has just been saved in PEFT's format.

    Args:
        model: the model with the adapter.
        name: the adapter's name.
        folder: the adapter's folder.
        tables: the tables to write beside the adapter, from `embedding_tensors`.
        safe_serialization: whether tensors stay in safetensors; if not, they become a pickle.
    """
    config_of_adapter(model, name)
    changed = _book(model).kept[name].edited()
    contents: dict[str, bytes] = {}
    if tables or not safe_serialization:
        tensors = {**files.tensors_in(folder, (SAFE,)), **tables}
        if safe_serialization:
            meta = beside_peft(folder, META)
            contents[SAFE] = files.tensor_bytes(tensors, {META: meta} if meta else {})
        else:
            stream = io.BytesIO()
            torch.save(tensors, stream)
            contents[PICKLED] = stream.getvalue()
    if changed or contents:
        document = {**read_json(folder / CONFIG), **changed}
        contents[CONFIG] = files.json_bytes(document)
        files.write_all(folder, contents, () if safe_serialization else (SAFE,))


@contextlib.contextmanager
def changed(folder: Path, config: Any, key_mapping: Mapping[str, str] | None) -> Iterator[Path]:
    """Yield a PEFT folder with another config and other keys; the folder itself if nothing changes.

    Args:
        folder: a folder with an adapter.
        config: a PEFT config; None: that of the folder.
        key_mapping: regular expressions for keys → what to write instead.
    """
    if config is None and not key_mapping:
        yield folder
        return
    tensors = files.tensors_in(folder, format_of_peft.FILES)
    for pattern, other in (key_mapping or {}).items():
        tensors = {re.sub(pattern, other, key): tensor for key, tensor in tensors.items()}
    values = read_json(folder / CONFIG)
    if config is not None:
        own = {name: plain_value(value) for name, value in config.to_dict().items()}
        values = {**values, **own, "peft_version": values.get("peft_version")}
    with tempfile.TemporaryDirectory() as made:
        contents = {SAFE: files.tensor_bytes(tensors, {}), CONFIG: files.json_bytes(values)}
        files.write_all(Path(made), contents)
        yield Path(made)


def write_folder(folder: Path, config: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write the folder of an adapter as PEFT does.

    Args:
        folder: the adapter's folder.
        config: PEFT's config.
        tensors: by PEFT's keys, of a model that it has wrapped or not.
    """
    values = {name: plain_value(value) for name, value in config.to_dict().items()}
    named = {PREFIX + key.removeprefix(PREFIX): tensor for key, tensor in tensors.items()}
    files.write_all(folder, {SAFE: files.tensor_bytes(named, {}), CONFIG: files.json_bytes(values)})


def write_card(model: Any, folder: Path) -> None:
    """Write `README.md`, or complete the metadata of an existing one.

    Args:
        model: a model with adapters.
        folder: folder of the card.
    """
    path, base = folder / CARD, name_of(model)
    kinds = (getattr(c.peft_type, "value", c.peft_type) for c in configs_of(model).values())
    tags = sorted({str(kind).lower() for kind in kinds})
    tags += ["transformers"] if not is_plain(model) else []
    tags += [] if base is None else [f"base_model:adapter:{base}"]
    tags += getattr(model, "model_tags", None) or []
    tasks = {getattr(c.task_type, "value", c.task_type) for c in configs_of(model).values()}
    pipeline = _PIPELINES.get(tasks.pop()) if len(tasks) == 1 else None
    known = {"library_name": "peft", "base_model": base, "pipeline_tag": pipeline}
    fields = {name: value for name, value in known.items() if value is not None}
    named = "a model" if base is None else f"`{base}`"
    text = f"\n# Adapter for {named}\n\nSaved by adapterzoo, in the format of PEFT.\n"
    files.write_all(folder, {path.name: hub.completed_card(path, fields, tags, text)})
