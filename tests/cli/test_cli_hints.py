"""A hint names what its reader can write: an option for a command, an argument in Python."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.cli import main
from adapterzoo.cli.hints import for_command

PACKAGE = Path(adapterzoo.__file__).parent
COMMANDS = main.list_commands(click.Context(main))
# what these folders raise, a command can show
REACHED = ("checkpoint", "hub")
PYTHON = re.compile(
    r"with_head=|\bformat='|load_as=|\brevision='|token=|cache_dir=|architecture='|save_adapter"
    r"|save_head|from_pretrained|adapterzoo\.init|dtype="
)


def options_of(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return {parameter.name or "" for parameter in command.params}


def shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return "'x'" if isinstance(part, ast.FormattedValue) and part.conversion == ord("r") else "x"


def messages() -> Iterator[str]:
    """Texts of all messages that say what to write, x for each value."""
    for file in (f for folder in REACHED for f in sorted((PACKAGE / folder).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(map(shown, node.values))
                if re.search(r"\b[Ww]rite |\b[Rr]un '|\(pass ", text):
                    yield text


# of commands that no user of the command line can give, and of tables of others' code
NOT_SHOWN = ("peft_model.", "adapters", "list_adapters")


@pytest.mark.parametrize("command", ["convert", "merge", "predict", "verify", "push"])
def test_no_hint_of_checkpoints_or_the_hub_is_in_python(command: str) -> None:
    options = options_of(command)
    left = []
    for message in messages():
        hint = for_command(message, command, options)
        hint = hint[
            max(hint.rfind(word) for word in ("Write ", "write ", "Run ", "run ", "Set ")) :
        ]
        if PYTHON.search(hint) and not any(word in hint for word in NOT_SHOWN):
            left.append(hint)
    assert not left


def test_the_scan_of_messages_bites() -> None:
    found = [*messages()]
    assert len(found) > 50
    assert sum(bool(PYTHON.search(message)) for message in found) > 20


@pytest.mark.parametrize(
    ("message", "command", "expected"),
    [
        ("Write with_head=False.", "convert", "Write --no-head."),
        ("Write with_head=False.", "merge", "Write --no-head."),
        ("Write with_head=False or format='native'.", "convert", "Write --no-head or --to native."),
        ("Write with_head=False, or load it into that class after adapterzoo.init(model).",
         "convert", "Write --no-head."),
        ("Write with_head=False, or load into AutoAdapterModel.from_pretrained(…).", "convert",
         "Write --no-head."),
        ("Write with_head=False.", "verify",
         "Write `adapterzoo convert` with --no-head, and this command with what it made."),
        ("Write revision='main', or a branch", "info", "Write --revision main, or a branch"),
        ("Write token='…' with the right to write it", "push",
         "Set HF_TOKEN to one with the right to write it"),
        ("Check the name; write token='…', or run 'hf auth login'.", "info",
         "Check the name; set HF_TOKEN, or run 'hf auth login'."),
        ("It is a whole model: write AutoAdapterModel.from_pretrained('a/b').", "info",
         "It is a whole model: an adapter's command takes it as --model a/b."),
        ("Write --model with the folder of a transformers model", "merge",
         "Write as BASE the folder of a transformers model"),
        ("Write a folder that save_head made.", "info", "Write the folder of an adapter."),
    ],
)  # fmt: skip
def test_words_of_python_become_those_of_the_command_line(
    message: str, command: str, expected: str
) -> None:
    assert for_command(message, command, options_of(command)) == expected


def test_convert_names_its_own_option_for_a_head_that_the_format_lacks(
    run: Callable[..., Any], base: Path, tmp_path: Path
) -> None:
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("a", "lora")
    model.add_dependency_parsing_head("a", num_labels=2)
    model.save_adapter(tmp_path / "a", "a")
    refused = run("convert", tmp_path / "a", tmp_path / "b", "--to", "peft", code=1).stderr
    assert "Write --no-head." in refused
    assert "with_head" not in refused
    # and the hint helps
    run("convert", tmp_path / "a", tmp_path / "b", "--to", "peft", "--no-head")


def test_each_option_that_a_hint_names_is_there() -> None:
    for command in COMMANDS:
        if "head" in options_of(command):
            assert for_command("with_head=False", command, options_of(command)) == "--no-head"
    assert {"to", "name"} <= options_of("convert")
    assert "architecture" in options_of("merge")
    assert "pooling" in options_of("train")
