"""Embeddings in files, as `adapters` writes them: `embedding.pt`, and a tokenizer beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.formats import files
from adapterzoo.model.heads import embeddings
from adapterzoo.model.sharding import refuse_if_sharded
from adapterzoo.model.state import AdaptedModel

from . import vocabularies

_TABLE, _TOKENIZER = "embedding.pt", "tokenizer"
# what transformers raises for files of a tokenizer that it cannot read
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError)


def save(
    model: AdaptedModel, folder: str | os.PathLike[str], name: str, tokenizer: Any = None
) -> None:
    """Save embeddings to a folder, with the tokenizer of their vocabulary.

    Raises:
        CheckpointError: the folder cannot be written.
        ConfigError: the tokenizer has tokens without a row.
    """
    refuse_if_sharded(model, "Write it before fully_shard(model).")
    weight = embeddings.find(model, name).weight
    folder = Path(folder)
    if tokenizer is not None:
        vocabularies.check_tokenizer(tokenizer, len(weight))
        with tempfile.TemporaryDirectory() as temporary:
            tokenizer.save_pretrained(temporary)
            contents = {p.name: p.read_bytes() for p in Path(temporary).iterdir() if p.is_file()}
        inner = folder / _TOKENIZER
        stale = [p.name for p in inner.iterdir() if p.is_file()] if inner.is_dir() else []
        files.write_all(inner, contents, stale)
    files.write_all(folder, {_TABLE: files.pickle_bytes(weight)})


def load(model: AdaptedModel, folder: str | os.PathLike[str], name: str) -> Any:
    """Load embeddings and activate them; return the tokenizer beside them, None without one.

    Raises:
        CheckpointError: there is no table, or it does not fit the model or the tokenizer.
    """
    folder = Path(folder)
    layer = embeddings.free_place(model, name)
    weight = files.read_tensor(folder / _TABLE)
    if weight.dim() != 2 or weight.shape[1] != layer.embedding_dim or not len(weight):
        raise CheckpointError(
            f"{str(folder / _TABLE)!r} holds {list(weight.shape)}, and embeddings of this "
            f"{type(model).__name__} are [tokens, {layer.embedding_dim}]. Load those of a model of "
            f"this width."
        )
    tokenizer = _tokenizer(folder / _TOKENIZER)
    if tokenizer is not None:
        try:
            vocabularies.check_tokenizer(tokenizer, len(weight))
        except ConfigError as error:
            raise CheckpointError(str(error)) from error
    padding = vocabularies.padding_of(model, tokenizer, len(weight))
    table = nn.Parameter(weight.to(layer.weight.device, layer.weight.dtype), False)
    embeddings.enter(model, name, embeddings.Waiting(table, padding))
    if tokenizer is not None:
        vocabularies.warn_of_positions(model, tokenizer)
    return tokenizer


def _tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        return None
    # importing tokenizers takes time, and most models need none
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"the tokenizer in {str(folder)!r} cannot be read ({reason}). Delete that folder "
            f"to load the embeddings alone."
        ) from error
