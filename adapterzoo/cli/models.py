"""Base models for the commands: with weights, or with their structure alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig

from adapterzoo.auto import AutoAdapterModel
from adapterzoo.checkpoint import formats
from adapterzoo.checkpoint.stored import Stored
from adapterzoo.errors import AdapterZooError, CheckpointError, ConfigError
from adapterzoo.heads import head_types
from adapterzoo.hub.asking import StrictDataclassError
from adapterzoo.model import init
from adapterzoo.model.heads.output_layers import FIELD
from adapterzoo.model.hf.backbone import text_config
from adapterzoo.model.hf.info import facts_of
from adapterzoo.model.hf.task_classes import task_class

from .checkpoints import Checkpoint
from .early import no_base
from .output import note

_MAX_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Fitted:
    """A model that holds what a checkpoint holds.

    Attributes:
        model: with the adapter or the head.
        name: of the adapter or the head.
        stored: the checkpoint in this library's words.
    """

    model: Any
    name: str
    stored: Stored


def base_of(checkpoint: Checkpoint, model: str | None) -> str:
    """The base model to take: the user's choice, or the one that the checkpoint names.

    Args:
        checkpoint: of an adapter.
        model: what the user chose.

    Raises:
        ConfigError: neither says one.
    """
    base = model or checkpoint.base
    if base is None:
        raise ConfigError(
            f"{checkpoint.call}: {checkpoint.path!r} does not say for which base model it is. "
            f"Write --model with that model's folder or its name on the Hub."
        )
    return base


def config_of(call: str, base: str) -> PreTrainedConfig:
    """The config of a base model.

    Args:
        call: what the user wrote, for messages.
        base: folder or name on the Hub.

    Raises:
        CheckpointError: it cannot be had.
    """
    with _told(call, base):
        config: PreTrainedConfig = AutoConfig.from_pretrained(base, trust_remote_code=False)
    return config


def with_weights(call: str, base: str, cls: Any = AutoAdapterModel, **kwargs: Any) -> Any:
    """A base model in eval, its static head too.

    Args:
        call: what the user wrote, for messages.
        base: folder or name on the Hub.
        cls: `AutoAdapterModel`, or a class of transformers that then gets adapters.
        **kwargs: of `from_pretrained`.

    Raises:
        CheckpointError: it cannot be had.
    """
    with _told(call, base):
        # left out, transformers would ask at the terminal whether to run a stranger's code
        model = cls.from_pretrained(base, trust_remote_code=False, **kwargs)
    return init(model).eval()


def plain_tokenizer(call: str, base: str) -> Any:
    """The tokenizer of a base model as it is.

    Args:
        call: what the user wrote, for messages.
        base: folder or name on the Hub.

    Raises:
        CheckpointError: it cannot be had.
    """
    with _told(call, base, "tokenizer"):
        return transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)


def tokenizer_of(call: str, base: str) -> Any:
    """The tokenizer of a base model, which can pad.

    Args:
        call: what the user wrote, for messages.
        base: folder or name on the Hub.

    Raises:
        CheckpointError: it has none, or nothing to pad with.
    """
    tokenizer = plain_tokenizer(call, base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise CheckpointError(
            f"{call}: the tokenizer of {base!r} has no token for padding and none for the end of "
            f"a text. Give it one: tokenizer.pad_token = … and tokenizer.save_pretrained(…)."
        )
    return tokenizer


def tokens_of_text(call: str, model: Any, tokenizer: Any, wanted: int | None) -> int:
    """To how many tokens texts are cut.

    Args:
        call: what the user wrote, for messages.
        model: says how many it takes.
        tokenizer: the same.
        wanted: by the user; None: 128 where the model takes so many.

    Raises:
        ConfigError: the model does not take so many.
    """
    positions = getattr(text_config(model.config), "max_position_embeddings", None)
    known = (tokenizer.model_max_length, positions, *_places_after_padding(model, positions))
    limit = min((n for n in known if isinstance(n, int) and n > 0), default=_MAX_LENGTH)
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"{call}: --max-length {wanted} is more than the {limit} tokens that the model takes. "
            f"Write --max-length {limit} or less."
        )
    return min(_MAX_LENGTH, limit) if wanted is None else wanted


def _places_after_padding(model: Any, positions: int | None) -> Iterator[int]:
    """How many tokens RoBERTa and its like take: positions begin after that of the padding."""
    words = model.get_input_embeddings()
    tables = (m for m in model.modules() if isinstance(m, torch.nn.Embedding) and m is not words)
    for table in tables:
        if table.num_embeddings == positions and table.padding_idx is not None:
            yield table.num_embeddings - table.padding_idx - 1


def fitted(
    checkpoint: Checkpoint, base: str, *, name: str | None = None, writes: str | None = None
) -> Fitted:
    """A checkpoint in a model of the base model's structure; without its weights where possible.

    Weights are read where a head's output layer is an embedding of the base model, and where the
    checkpoint holds copies of weights that have to be compared.

    Args:
        checkpoint: of an adapter or a head.
        base: folder or name on the Hub.
        name: to give it; None: its own.
        writes: the format in which the model shall be able to save it; None: it is not saved.

    Raises:
        CheckpointError: it does not fit the model, with every difference, or the base model
            cannot be had.
    """
    foreign = {checkpoint.format, writes} - {None, "native"}
    left_out = FIELD in (checkpoint.head or {})
    if not (left_out or (foreign and _is_onto_vocabulary(checkpoint))):
        try:
            found = _filled(checkpoint, _structure(checkpoint, base), name)
            if writes != "peft" or not _has_part_magnitudes(found.stored):
                return found
        except NotImplementedError:
            # what torch says where a weight is looked at that is not there
            pass
    cls = _class_of(checkpoint)
    whole = with_weights(checkpoint.call, base, cls, dtype=checkpoint.dtype)
    return _filled(checkpoint, whole, name)


def load_into(checkpoint: Checkpoint, model: Any, name: str, **kwargs: Any) -> None:
    """Load an adapter into a model with weights; a note says so where its values are rounded.

    Args:
        checkpoint: of an adapter.
        model: with adapters.
        name: to give it.
        **kwargs: of `load_adapter`.

    Raises:
        CheckpointError: it does not fit the model.
    """
    try:
        model.load_adapter(checkpoint.folder, load_as=name, **kwargs)
    except CheckpointError:
        # nothing has been loaded; what else is wrong is wrong again
        model.load_adapter(checkpoint.folder, load_as=name, dtype=model.dtype, **kwargs)
        theirs, own = checkpoint.dtype, model.dtype
        if torch.promote_types(theirs, own) != own:
            note(f"The adapter's {theirs} has been rounded to {own}, which the base model has.")


def _structure(checkpoint: Checkpoint, base: str) -> Any:
    config = config_of(checkpoint.call, base)
    cls = _class_of(checkpoint)
    make = cls.from_config if cls is AutoAdapterModel else cls._from_config
    # what other kinds of attention need is not there on the meta device
    with _told(checkpoint.call, base), torch.device("meta"):
        model = make(config, dtype=checkpoint.dtype, attn_implementation="eager")
    return init(model).eval()


def _filled(checkpoint: Checkpoint, model: Any, name: str | None) -> Fitted:
    facts = facts_of(model, checkpoint.call)
    stored = formats.read(checkpoint.folder, checkpoint.stem, facts)
    fetched = checkpoint.folder != Path(checkpoint.path)
    if name is None and fetched and stored.document.get("name") is None:
        # the folder in the cache has the name of a commit
        name = Path(checkpoint.path).name
    if checkpoint.stem == "head":
        return Fitted(model, model.load_head(checkpoint.folder, load_as=name), stored)
    return Fitted(model, model.load_adapter(checkpoint.folder, load_as=name), stored)


def _class_of(checkpoint: Checkpoint) -> Any:
    """`AutoAdapterModel`, but the own class of a checkpoint with a static head."""
    static = None
    if checkpoint.format == "native" and checkpoint.head is not None:
        static = checkpoint.head.get("static")
    return AutoAdapterModel if static is None else task_class(str(static))


def _is_onto_vocabulary(checkpoint: Checkpoint) -> bool:
    """Whether the head ends in an embedding of the base model, of which files have a copy."""
    head = head_types.get(checkpoint.head_type or "")
    return head is not None and head.scores_vocabulary


def _has_part_magnitudes(stored: Stored) -> bool:
    """Whether DoRA adapts parts of layers: PEFT's has magnitudes for all rows of one."""
    return any(key.partition("/")[2].endswith(".m") for key in stored.adapter)


@contextlib.contextmanager
def _told(call: str, base: str, what: str = "base model") -> Iterator[None]:
    """Tell what transformers says of a model that cannot be had as one error of this library."""
    try:
        yield
    # `fitted` takes up the second
    except (AdapterZooError, NotImplementedError):
        raise
    # a name that nobody has, a folder without config, a type that this release does not know,
    # weights that are cut off, a config of other weights or with values of other types
    except (
        safetensors.SafetensorError, StrictDataclassError, ArithmeticError, ImportError, KeyError,
        OSError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 200 else f"{reason[:199]}…"
        raise no_base(call, base, reason, what) from error
