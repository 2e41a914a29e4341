"""What a name, a folder or a file tells is told before torch and transformers are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import adapterzoo

ROOT = Path(adapterzoo.__file__).parents[1]
HEAVY = ("torch", "transformers")
SCRIPT = f"""
import json, sys
from click.testing import CliRunner
from adapterzoo.cli import main
result = CliRunner().invoke(main, sys.argv[1:])
loaded = sorted({{*{HEAVY!r}, "huggingface_hub"}} & {{*sys.modules}})
print(json.dumps([result.exit_code, result.stderr, loaded]))
"""


def outcome(folder: Path, *arguments: object, **environment: str) -> tuple[int, str, set[str]]:
    """Exit code, message, and which heavy libraries a fresh process has imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)],
        capture_output=True, text=True, check=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "0", **environment},
    )  # fmt: skip
    code, message, loaded = json.loads(done.stdout)
    return code, message, set(loaded)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with rows, an empty folder, and files where folders should be."""
    (tmp_path / "rows.csv").write_text("text,label\nfine,a\ndull,b\n")
    (tmp_path / "new.csv").write_text("text,label\nfine,a\ndull,c\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter.safetensors").write_bytes(b"")
    return tmp_path


TRAIN = ("train", "--model", "bert-base-uncased", "--output", "out")
NO_FOLDER = "there is no such folder"
EMPTY = "'empty' holds no adapter and no head"
NO_BASE = "the base model './base' cannot be loaded (there is no such folder"
CASES = {
    "train: no rows": ((*TRAIN, "--train", "nope.csv"), "'nope.csv' cannot be read"),
    "train: no rows to test on": (
        (*TRAIN, "--train", "rows.csv", "--eval", "nope.csv"), "'nope.csv' cannot be read"
    ),
    "train: an unknown label": (
        (*TRAIN, "--train", "rows.csv", "--eval", "new.csv"), "has the labels 'c'"
    ),
    "train: no base": (
        ("train", "--model", "./base", "--train", "rows.csv", "--output", "out"), NO_BASE
    ),
    "train: a file for a folder": (
        ("train", "--model", "m", "--train", "rows.csv", "--output", "rows.csv"),
        "--output 'rows.csv': 'rows.csv' is not a folder that can be written",
    ),
    "predict: no folder": (("predict", "nope", "--text", "a"), NO_FOLDER),
    "predict: no base": (("predict", "adapter", "--text", "a", "--model", "./base"), NO_BASE),
    "info: no folder": (("info", "nope"), NO_FOLDER),
    "info: an empty folder": (("info", "empty"), EMPTY),
    "info: no base": (("info", "adapter", "--model", "./base"), NO_BASE),
    "verify: no folder": (("verify", "nope"), NO_FOLDER),
    "verify: an empty folder": (("verify", "empty", "--json"), EMPTY),
    "convert: no folder": (("convert", "nope", "out", "--to", "peft"), NO_FOLDER),
    "convert: no base": (
        ("convert", "adapter", "out", "--to", "peft", "--model", "./base"), NO_BASE
    ),
    "convert: a file for a folder": (
        ("convert", "adapter", "rows.csv", "--to", "peft"), "is not a folder that can be written"
    ),
    "merge: a folder that is there": (("merge", "m", "adapter", "full"), "'full' exists already"),
    "merge: no base": (("merge", "./base", "adapter", "out"), NO_BASE),
    "merge: no folder": (("merge", "m", "nope", "out"), NO_FOLDER),
    "push: no folder": (("push", "nope", "me/a"), "there is no folder 'nope'"),
    "push: an empty folder": (
        ("push", "empty", "me/a"), "its files: none. Write the folder of an adapter.\n"
    ),
    "push: no name of the Hub": (
        ("push", "adapter", "me--you/a"), "'me--you/a' is not a legal name"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_told_before_the_heavy_imports(here: Path, case: str) -> None:
    arguments, expected = CASES[case]
    code, message, loaded = outcome(here, *arguments)
    assert (code, expected in message) == (1, True), message
    assert loaded == set()


def test_pushing_offline_is_refused_before_the_heavy_imports(here: Path) -> None:
    code, message, loaded = outcome(here, "push", "adapter", "me/a", HF_HUB_OFFLINE="1")
    assert (code, "HF_HUB_OFFLINE=1" in message) == (1, True), message
    # it knows what the variable means
    assert loaded <= {"huggingface_hub"}


def test_searching_offline_needs_no_torch(here: Path) -> None:
    code, message, loaded = outcome(here, "list", HF_HUB_OFFLINE="1")
    assert (code, "nothing can be asked of the Hub" in message) == (1, True), message
    assert not loaded & {*HEAVY}


@pytest.mark.parametrize(
    ("options", "expected"),
    [(("--method", "lore"), "there is no config string 'lore'"), (("--name", "../up"), "'../up'")],
)
def test_a_method_and_a_name_are_told_before_transformers(
    here: Path, options: tuple[str, str], expected: str
) -> None:
    code, message, loaded = outcome(here, *TRAIN, "--train", "rows.csv", *options)
    assert (code, expected in message) == (1, True), message
    assert "transformers" not in loaded


def test_an_unknown_pooling_is_a_usage_error(here: Path) -> None:
    code, message, loaded = outcome(here, *TRAIN, "--train", "rows.csv", "--pooling", "best")
    assert (code, "'best'" in message, loaded) == (2, True, set())


def test_the_check_of_imports_bites(here: Path) -> None:
    assert outcome(here, "info", "adapter")[2] >= {"torch"}
