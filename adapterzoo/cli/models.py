"""Base models for the commands: with weights, or only their structure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from adapterzoo import formats
from adapterzoo.auto import AutoAdapterModel
from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    ConfigError,
    StateError,
)
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.heads import STATIC, head_types
from adapterzoo.model import init
from adapterzoo.model.heads.named import FIELD
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_classes import task_class, text_config

from .checkpoints import CheckpointFolder
from .checks import no_model
from .output import note

T = TypeVar("T")

_MAX_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model with the adapter or head of a checkpoint.

    Attributes:
        model: the model.
        name: name of the adapter or head in the model.
        stored: the checkpoint, converted to the native form.
    """

    model: Any
    name: str
    stored: Checkpoint


def base_of(checkpoint: CheckpointFolder, model: str | None) -> str:
    """Return the base model: the user's choice, or the one named in the checkpoint.

    Args:
        checkpoint: checkpoint of an adapter or a head.
        model: the user's choice; None: not given.

    Raises:
        ConfigError: there is neither.
    """
    base = model or checkpoint.base
    if base is None:
        raise ConfigError(f"{checkpoint.path!r} does not name its base model. Write --model.")
    return base


def load(cls: Any, base: str, **kwargs: Any) -> Any:
    """Load the config, the weights or the tokenizer of a base model.

    Args:
        cls: a class of transformers, or `AutoAdapterModel`.
        base: folder or name on the Hub.
        **kwargs: arguments of `from_pretrained`.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    try:
        # with the default, transformers would ask at the terminal whether to run code
        return cls.from_pretrained(base, trust_remote_code=False, **kwargs)
    except AdapterZooError:
        raise
    # an unknown name, a folder without config, an unknown model type, truncated weights
    except (safetensors.SafetensorError, ImportError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise no_model(base, reason) from error


def tokenizer_of(base: str) -> Any:
    """Load the tokenizer of a base model, and give it a padding token if it has none.

    Args:
        base: folder or name on the Hub.

    Raises:
        CheckpointError: it cannot be loaded, or has no token to pad with.
    """
    tokenizer = load(transformers.AutoTokenizer, base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise CheckpointError(
            f"the tokenizer of {base!r} has no token to pad with. Write "
            f"tokenizer.pad_token = … and tokenizer.save_pretrained(…) in Python."
        )
    return tokenizer


def tokens_of_text(model: Any, tokenizer: Any, wanted: int | None) -> int:
    """Return the maximum number of tokens per text: the user's choice, or less if there is a limit.

    Args:
        model: its number of positions is a limit.
        tokenizer: its maximum length is a limit.
        wanted: the user's choice; None: 128.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    for table in model.modules():
        # RoBERTa and its relatives count positions from the row after that of padding
        if isinstance(table, nn.Embedding) and table.num_embeddings == positions:
            positions -= 0 if table.padding_idx is None else table.padding_idx + 1
            break
    limits = (tokenizer.model_max_length, positions, wanted or _MAX_LENGTH)
    return min(n for n in limits if isinstance(n, int) and n > 0)


def on_fitted(
    checkpoint: CheckpointFolder,
    base: str,
    work: Callable[[Fitted], T],
    name: str | None = None,
    writes: str = "native",
) -> T:
    """Return the result of `work` on a model with a checkpoint, if possible without weights.

    The base model's weights are read if they are needed: if a head's output layer is the base
    model's embedding, or if a file has or must have copies of some.

    Args:
        checkpoint: checkpoint of an adapter or a head.
        base: folder or name on the Hub.
        work: called once; if it needs weights, it is called again, with them.
        name: new name; None: its own.
        writes: the format in which `work` saves the adapter or head.

    Raises:
        CheckpointError: the checkpoint does not fit the model (the message lists every
            difference), or the base model cannot be loaded.
    """
    head = head_types.get(checkpoint.head_type or "")
    # files of other formats copy the embedding into such a head
    copies = (
        head is not None and head.scores_vocabulary and {checkpoint.format, writes} != {"native"}
    )
    if not copies and FIELD not in (checkpoint.head or {}):
        # torch and a conversion raise these if they need values of weights on the meta device
        with contextlib.suppress(NotImplementedError, StateError):
            cls = _class_of(checkpoint)
            make = cls.from_config if cls is AutoAdapterModel else cls._from_config
            with torch.device("meta"):
                # other attention implementations do not support the meta device
                model = make(
                    load(AutoConfig, base), dtype=checkpoint.dtype, attn_implementation="eager"
                )
            return work(_filled(checkpoint, init(model).eval(), name))
    return work(fitted(checkpoint, base, name))


def fitted(checkpoint: CheckpointFolder, base: str, name: str | None = None) -> Fitted:
    """Load a checkpoint into its base model, with weights; arguments as in `on_fitted`.

    Raises:
        CheckpointError: the checkpoint does not fit the model, or the base model cannot be loaded.
    """
    model = init(load(_class_of(checkpoint), base, dtype=checkpoint.dtype)).eval()
    return _filled(checkpoint, model, name)


def load_into(checkpoint: CheckpointFolder, model: Any, name: str, **kwargs: Any) -> None:
    """Load an adapter into a model with weights; print a note if its values are rounded.

    Args:
        checkpoint: checkpoint of an adapter.
        model: a model that can have adapters.
        name: name of the adapter in the model.
        **kwargs: further arguments of `load_adapter`.

    Raises:
        CheckpointError: the adapter does not fit the model.
    """
    kwargs["fingerprint"] = checkpoint.pinned
    try:
        model.load_adapter(checkpoint.folder, load_as=name, **kwargs)
    except CheckpointError:
        # nothing has been loaded; differences other than dtypes raise again
        model.load_adapter(checkpoint.folder, load_as=name, dtype=model.dtype, **kwargs)
        stored, own = checkpoint.dtype, model.dtype
        if torch.promote_types(stored, own) != own:
            note(f"The adapter has been rounded from {stored} to {own}, the base model's dtype.")


def _filled(checkpoint: CheckpointFolder, model: Any, name: str | None) -> Fitted:
    stored = formats.read(checkpoint.folder, checkpoint.kind, ModelInfo(model))
    fetched = checkpoint.folder != Path(checkpoint.path)
    if name is None and fetched and stored.metadata.get("name") is None:
        # in the cache, a folder has the name of its commit
        name = Path(checkpoint.path).name
    if checkpoint.kind == "head":
        return Fitted(model, model.load_head(checkpoint.folder, load_as=name), stored)
    loaded = model.load_adapter(checkpoint.folder, load_as=name, fingerprint=checkpoint.pinned)
    return Fitted(model, loaded, stored)


def _class_of(checkpoint: CheckpointFolder) -> Any:
    """Return `AutoAdapterModel`, or the class of a static head."""
    static = None
    if checkpoint.format == "native" and checkpoint.head is not None:
        static = checkpoint.head.get(STATIC)
    return AutoAdapterModel if static is None else task_class(str(static))
