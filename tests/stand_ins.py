"""Small models under the names of large ones, where `huggingface_hub` keeps what it has fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from families import VOCABULARY, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, PreTrainedTokenizerFast

GOOD, BAD = "fine great lovely", "dull poor awful"
FILLER = "the film was so a very plot and its end"
_COMMIT = "0123456789abcdef0123456789abcdef01234567"


def add_tokenizer(folder: Path, **tokens: str | None) -> None:
    """A tokenizer of whole words, as many as the tiny models have."""
    words = ["[PAD]", "[UNK]", *f"{GOOD} {BAD} {FILLER}".split()]
    words += [f"w{n}" for n in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = tokens or {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def place_for(cache: Path, name: str, revisions: Iterable[str] = ()) -> Path:
    """The folder of a repository of the Hub in a cache: what lies in it needs no network."""
    repository = cache / f"models--{name.replace('/', '--')}"
    for revision in ("main", *revisions):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(_COMMIT)
    return repository / "snapshots" / _COMMIT


def stand_in(cache: Path, name: str, family: str) -> None:
    """A tiny model of the family with random weights and a tokenizer, under the name."""
    folder = place_for(cache, name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        AutoModel.from_config(tiny_config(family)).save_pretrained(folder)
    add_tokenizer(folder)


def real(cache: Path, name: str, files: Path) -> None:
    """A model whose files are here, under its own name."""
    shutil.copytree(files, place_for(cache, name))
