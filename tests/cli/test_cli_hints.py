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
from adapterzoo.cli.app import spell
from adapterzoo.errors import argument, in_python

PACKAGE = Path(adapterzoo.__file__).parent
# a command can show the errors of these folders
REACHED = ("formats", "cli", "hub", "model/heads", "model/hf")
PYTHON = re.compile(
    r"with_head=|\bformat='|load_as=|\brevision='|token=|cache_dir=|save_adapter|save_head"
    r"|AutoAdapterModel|adapterzoo\.init|dtype="
)
# arguments of PEFT, and of functions that no command calls
NOT_SHOWN = ("peft_model.",)


def hints(text: str) -> Iterator[str]:
    """What the messages of a file advise, outside calls that spell it for both readers."""
    tree = ast.parse(text)
    spelled = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("argument", "in_python")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and id(node) not in spelled:
            parts = [part for part in node.values if isinstance(part, ast.Constant)]
            message = "x".join(str(part.value) for part in parts)
            found = re.search(r"(?:\b[Ww]rite |\b[Rr]un |\(pass ).*", message, re.DOTALL)
            if found:
                yield found.group()


@pytest.mark.parametrize("folder", REACHED)
def test_no_hint_is_for_readers_of_python_alone(folder: str) -> None:
    left = [
        f"{file.name}: {hint}"
        for file in sorted((PACKAGE / folder).rglob("*.py"))
        for hint in hints(file.read_text("utf-8"))
        if PYTHON.search(hint) and not any(word in hint for word in NOT_SHOWN)
    ]
    assert not left


def test_the_scan_of_hints_bites() -> None:
    text = """
        raise Error(f"{x} is wrong. Write with_head=False or {argument('format', 'native')}.")
    """
    (hint,) = hints(text.strip())
    assert hint == "Write with_head=False or x."
    assert PYTHON.search(hint)
    assert not PYTHON.search(hint.replace("with_head=False", ""))


def context(command: str, **params: str) -> click.Context:
    root = click.Context(main, info_name="adapterzoo")
    found = main.get_command(root, command)
    assert found is not None
    made = click.Context(found, parent=root, info_name=command)
    made.params.update(params)
    return made


@pytest.mark.parametrize(
    ("command", "name", "value", "expected"),
    [
        ("convert", "with_head", False, "--no-head"),
        ("merge", "with_head", False, "--no-head"),
        ("verify", "with_head", False, "`adapterzoo convert --no-head`"),
        ("convert", "format", "native", "--to native"),
        ("convert", "load_as", "b", "--name b"),
        ("info", "revision", "main", "--revision main"),
        ("predict", "model", "MODEL", "--model MODEL"),
        ("merge", "model", "MODEL", "BASE"),
        ("train", "pooling", "cls", "--pooling cls"),
        ("info", "leave_out", [0], "leave_out=[0]"),
    ],
)
def test_an_argument_is_spelled_as_an_option(
    command: str, name: str, value: object, expected: str
) -> None:
    with context(command):
        assert spell(name, value) == expected


def test_a_command_names_itself_by_its_positional_arguments(run: Callable[..., Any]) -> None:
    said = run("convert", "no/a", "b", "--to", "peft", "--no-head", code=1).stderr
    assert said.startswith("adapterzoo: convert no/a b: ")


def test_without_a_command_hints_are_in_python() -> None:
    assert argument("with_head", False) == "with_head=False"
    assert in_python("adapterzoo.init(model)", "nothing") == "adapterzoo.init(model)"


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
