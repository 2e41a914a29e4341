"""A tiny model with a tokenizer, rows that it can learn, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from families import tiny_config
from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
from loopback import loopback
from stand_ins import BAD, FILLER, GOOD, add_tokenizer
from transformers import BertModel
from transformers.utils import logging

from adapterzoo.cli import main


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT."""
    folder = tmp_path_factory.mktemp("base")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = BertModel(tiny_config("bert"))
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def rows() -> list[tuple[str, str]]:
    """Texts with one word that tells the label."""
    filler, found = FILLER.split(), []
    for n in range(48):
        good = n % 2 == 0
        word = (GOOD if good else BAD).split()[n // 2 % 3]
        about = [filler[(n * 3 + k) % len(filler)] for k in range(2 + n % 4)]
        found.append((" ".join([*about, word]), "fresh" if good else "rotten"))
    return found


@pytest.fixture(scope="session")
def table(rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows as a CSV file."""
    file = tmp_path_factory.mktemp("rows") / "rows.csv"
    file.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    return file


@pytest.fixture
def run() -> Iterator[Callable[..., Result]]:
    """Runs the command line in this process."""
    verbosity = logging.get_verbosity()
    quiet = are_progress_bars_disabled()
    yield call
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar()
    if not quiet:
        enable_progress_bars()


def call(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, f"{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="session")
def trained(base: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `train --json` says of an adapter with a head that transformers has too."""
    folder = tmp_path_factory.mktemp("runs") / "reviews"
    result = call(
        "train", "--model", base, "--train", table, "--eval", table, "--output", folder,
        "--method", "lora[r=4,alpha=8]", "--epochs", 12, "--lr", 5e-3, "--batch-size", 8,
        "--pooling", "pooler", "--seed", 1, "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.stderr == ""
    return {**json.loads(result.stdout), "folder": folder}


@pytest.fixture(scope="session")
def hub_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The Hub of tests/hub on loopback, and a process that reaches it with a stored token."""
    with loopback(tmp_path_factory.mktemp("home")) as pair:
        yield pair
