"""Base models for the commands: with weights, or only their structure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers import AutoConfig

from adapterzoo import formats
from adapterzoo.auto import AutoAdapterModel
from adapterzoo.errors import AdapterZooError, CheckpointError, ConfigError, argument
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.heads import STATIC, head_types
from adapterzoo.model import init
from adapterzoo.model.heads.named import FIELD
from adapterzoo.model.hf.backbone import text_config
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_classes import task_class

from .checkpoints import CheckpointFolder
from .output import note

_MAX_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model with the adapter or head of a checkpoint.

    Attributes:
        model: the model.
        name: of the adapter or head in it.
        stored: the checkpoint, converted to the native form.
    """

    model: Any
    name: str
    stored: Checkpoint


def base_of(checkpoint: CheckpointFolder, model: str | None) -> str:
    """Return the base model: the user's choice, or the one named in the checkpoint.

    Args:
        checkpoint: of an adapter.
        model: the user's choice; None: none.

    Raises:
        ConfigError: there is neither.
    """
    base = model or checkpoint.base
    if base is None:
        raise ConfigError(
            f"{checkpoint.path!r} does not name its base model. Write --model with the folder of "
            f"that model or its name on the Hub."
        )
    return base


def load(cls: Any, base: str, what: str = "base model", **kwargs: Any) -> Any:
    """Load the config, the weights or the tokenizer of a base model.

    Args:
        cls: a class of transformers, or `AutoAdapterModel`.
        base: folder or name on the Hub.
        what: the part that is loaded, for messages.
        **kwargs: arguments of `from_pretrained`.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    with _one_error(base, what):
        # with the default, transformers would ask at the terminal whether to run code
        return cls.from_pretrained(base, trust_remote_code=False, **kwargs)


def tokenizer_of(base: str) -> Any:
    """Load the tokenizer of a base model, and give it a token for padding.

    Args:
        base: folder or name on the Hub.

    Raises:
        CheckpointError: it cannot be loaded, or has no token to pad with.
    """
    tokenizer = load(transformers.AutoTokenizer, base, "tokenizer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise CheckpointError(
            f"the tokenizer of {base!r} has neither a padding token nor an end-of-text token. Add "
            f"one in Python: tokenizer.pad_token = …; tokenizer.save_pretrained(…)."
        )
    return tokenizer


def tokens_of_text(model: Any, tokenizer: Any, wanted: int | None) -> int:
    """Return the maximum number of tokens per text.

    Args:
        model: limits the number.
        tokenizer: limits the number.
        wanted: the user's choice; None: 128, or the limit if that is smaller.

    Raises:
        ConfigError: the choice exceeds the limit.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    known = (tokenizer.model_max_length, positions, *_places_after_padding(model, positions))
    limit = min((n for n in known if isinstance(n, int) and n > 0), default=_MAX_LENGTH)
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"--max-length {wanted} exceeds the {limit} tokens that the model takes. Write "
            f"--max-length {limit} or less."
        )
    return min(_MAX_LENGTH, limit) if wanted is None else wanted


def _places_after_padding(model: Any, positions: int | None) -> Iterator[int]:
    """Yield the lengths that RoBERTa and the like support: positions start after padding."""
    words = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words)
    for table in tables:
        if table.num_embeddings == positions and table.padding_idx is not None:
            yield table.num_embeddings - table.padding_idx - 1


def fitted(
    checkpoint: CheckpointFolder,
    base: str,
    *,
    name: str | None = None,
    writes: str | None = None,
    whole: bool = False,
) -> Fitted:
    """Load a checkpoint into a model of the base model's structure, without weights if possible.

    Weights are read only if a head's output layer is the base model's embedding, or if the
    checkpoint has copies of weights to compare.

    Args:
        checkpoint: of an adapter or a head.
        base: folder or name on the Hub.
        name: new name; None: its own.
        writes: the format in which it will be saved; None: it will not.
        whole: whether to read the weights in any case.

    Raises:
        CheckpointError: it does not fit the model, with every difference, or the base model
            cannot be loaded.
    """
    foreign = {checkpoint.format, writes} - {None, "native"}
    left_out = FIELD in (checkpoint.head or {})
    if not (whole or left_out or (foreign and _is_onto_vocabulary(checkpoint))):
        try:
            return _filled(checkpoint, _structure(checkpoint, base), name)
        except NotImplementedError:
            # torch raises it when a weight on the meta device is read
            pass
    model = init(load(_class_of(checkpoint), base, dtype=checkpoint.dtype)).eval()
    return _filled(checkpoint, model, name)


def load_into(checkpoint: CheckpointFolder, model: Any, name: str, **kwargs: Any) -> None:
    """Load an adapter into a model with weights; print a note if its values are rounded.

    Args:
        checkpoint: of an adapter.
        model: with adapters.
        name: of the adapter in the model.
        **kwargs: arguments of `load_adapter`.

    Raises:
        CheckpointError: it does not fit the model.
    """
    try:
        model.load_adapter(checkpoint.folder, load_as=name, **kwargs)
    except CheckpointError:
        # nothing has been loaded; differences other than dtypes raise again
        model.load_adapter(checkpoint.folder, load_as=name, dtype=model.dtype, **kwargs)
        theirs, own = checkpoint.dtype, model.dtype
        if torch.promote_types(theirs, own) != own:
            note(f"The adapter's {theirs} has been rounded to the base model's {own}.")


def _structure(checkpoint: CheckpointFolder, base: str) -> Any:
    config = load(AutoConfig, base)
    cls = _class_of(checkpoint)
    make = cls.from_config if cls is AutoAdapterModel else cls._from_config
    # other attention implementations do not support the meta device
    with _one_error(base, "base model"), torch.device("meta"):
        model = make(config, dtype=checkpoint.dtype, attn_implementation="eager")
    return init(model).eval()


def _filled(checkpoint: CheckpointFolder, model: Any, name: str | None) -> Fitted:
    stored = formats.read(checkpoint.folder, checkpoint.kind, ModelInfo(model))
    fetched = checkpoint.folder != Path(checkpoint.path)
    if name is None and fetched and stored.metadata.get("name") is None:
        # in the cache, folders have the names of commits
        name = Path(checkpoint.path).name
    if checkpoint.kind == "head":
        return Fitted(model, model.load_head(checkpoint.folder, load_as=name), stored)
    return Fitted(model, model.load_adapter(checkpoint.folder, load_as=name), stored)


def _class_of(checkpoint: CheckpointFolder) -> Any:
    """Return `AutoAdapterModel`, or the class of a static head."""
    static = None
    if checkpoint.format == "native" and checkpoint.head is not None:
        static = checkpoint.head.get(STATIC)
    return AutoAdapterModel if static is None else task_class(str(static))


def _is_onto_vocabulary(checkpoint: CheckpointFolder) -> bool:
    """Return whether the head ends in the base model's embedding, which files copy."""
    head = head_types.get(checkpoint.head_type or "")
    return head is not None and head.scores_vocabulary


@contextlib.contextmanager
def _one_error(base: str, what: str) -> Iterator[None]:
    """Turn errors of transformers about a model into one error of this library."""
    try:
        yield
    # `fitted` handles NotImplementedError
    except (AdapterZooError, NotImplementedError):
        raise
    # an unknown name, a folder without config, an unknown model type, truncated weights, a config
    # of other weights or with values of wrong types
    except (
        safetensors.SafetensorError, ArithmeticError, ImportError, KeyError,
        OSError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 200 else f"{reason[:199]}…"
        raise CheckpointError(
            f"the {what} {base!r} cannot be loaded ({reason}). Write {argument('model', 'MODEL')}, "
            f"the folder of a transformers model or its name on the Hub."
        ) from error
