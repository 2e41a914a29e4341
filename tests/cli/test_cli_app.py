"""The frame: help and its examples, exit codes, what is imported, and `doctor`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import torch
from click.testing import Result
from packaging.requirements import Requirement

import adapterzoo
from adapterzoo.checkpoint.formats import formats
from adapterzoo.cli import health, main
from adapterzoo.cli.app import ExampleCommand
from adapterzoo.cli.early import FORMATS
from adapterzoo.cli.learning import POOLINGS
from adapterzoo.errors import ConfigError
from adapterzoo.heads import Pooling
from adapterzoo.kernels import use

ROOT = Path(adapterzoo.__file__).parents[1]
COMMANDS = main.list_commands(click.Context(main))


def found(name: str) -> ExampleCommand:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, ExampleCommand)
    return command


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """A real run of `python -m adapterzoo`."""
    return subprocess.run(
        [sys.executable, "-m", "adapterzoo", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_parses(run: Callable[..., Result], name: str) -> None:
    said = run(name, "--help").stdout
    assert "\nExample:\n" in said
    command = found(name)
    for line in command.example.splitlines():
        assert f"  {line}\n" in said
        program, sub, *rest = shlex.split(line)
        assert (program, sub) == ("adapterzoo", name)
        with command.make_context(sub, rest) as context:
            assert set(context.params) == {p.name for p in command.params} - {"help"}


def test_the_check_of_examples_bites() -> None:
    with pytest.raises(click.NoSuchOption):
        found("info").make_context("info", ["a", "--nothing"])


def test_the_commands_are_these_and_each_says_what_it_does(run: Callable[..., Result]) -> None:
    expected = ["train", "predict", "info", "verify", "convert", "merge", "push", "list", "doctor"]
    assert expected == COMMANDS
    said = run("--help").stdout
    assert all(f"\n  {name} " in said for name in expected)
    # sentences are whole
    assert "..." not in said.partition("Commands:")[2]
    assert run("--version").stdout == f"adapterzoo, version {adapterzoo.__version__}\n"


def test_the_documentation_has_each_command() -> None:
    text = (ROOT / "docs" / "cli.md").read_text("utf-8")
    missing = [name for name in COMMANDS if f"adapterzoo {name}" not in text]
    assert not missing


def test_what_is_named_twice_is_the_same() -> None:
    assert sorted(FORMATS) == sorted(formats)
    assert get_args(Pooling) == POOLINGS


def test_an_unknown_command_and_option_are_usage_errors(run: Callable[..., Result]) -> None:
    assert "No such command 'trian'" in run("trian", code=2).stderr
    assert "--rank" in run("info", "a", "--rank", "2", code=2).stderr
    assert "PATH" in run("info", code=2).stderr


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(health, "examine", wrong)
    with pytest.raises(ValueError, match="a bug"):
        main(["doctor"])


def test_importing_the_command_line_is_quick() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "numpy", "peft")
    modules = ["learning", "inspecting", "changing", "publishing", "diagnosing"]
    code = (
        "import sys, adapterzoo.cli\n"
        + "".join(f"import adapterzoo.cli.{name}\n" for name in modules)
        + f"print(*(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout == "\n"


def test_the_script_that_is_installed_is_this() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    value = document["project"]["scripts"]["adapterzoo"]
    assert EntryPoint("adapterzoo", value, "console_scripts").load() is main


def test_a_real_process_prints_help() -> None:
    done = process("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: adapterzoo [OPTIONS] COMMAND")


def test_a_real_process_refuses_without_a_trace(tmp_path: Path) -> None:
    # the file is looked at before torch is imported
    done = process("predict", "runs/a", "--file", tmp_path / "none.csv")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("adapterzoo: predict runs/a: ")
    assert len(done.stderr.splitlines()) == 1


# --- doctor ---


def test_doctor_says_what_there_is(run: Callable[..., Result]) -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["problems"] == []
    versions = report["versions"]
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["adapterzoo"] == adapterzoo.__version__
    assert report["peers"]["peft"] is None
    cpu = report["devices"][0]
    assert cpu["name"] == "cpu"
    assert {"float32", "float64", "bfloat16"} <= set(cpu["dtypes"])
    assert cpu["kernels"] == "torch operations"
    text = run("doctor").stdout
    assert "No problem found." in text
    assert versions["transformers"] in text


def test_doctor_tells_the_mode_of_the_kernels(run: Callable[..., Result]) -> None:
    with use("reference"):
        report = json.loads(run("doctor", "--json").stdout)
    assert report["devices"][0]["kernels"] == "their definitions (mode 'reference')"


def test_doctor_finds_what_is_missing_or_old(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Requirement("torch>=99"), Requirement("nonesuch>=1"), Requirement("click>=8")]
    monkeypatch.setattr(health, "_required", lambda: asked)
    report = json.loads(run("doctor", "--json", code=1).stdout)
    old, missing = report["problems"]
    assert ">=99 is needed" in old
    assert missing == "nonesuch is not installed. Write pip install nonesuch>=1."
    assert "problem: nonesuch" in run("doctor", code=1).stdout


def test_doctor_keeps_the_token_to_itself(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    said = run("doctor", "--json").stdout
    assert json.loads(said)["hub"]["token"] is True
    assert "hf_secret" not in said


def test_doctor_names_a_peer_that_cannot_be_imported(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    report: dict[str, Any] = json.loads(run("doctor", "--json").stdout)
    assert "peft" in report["peers"]["peft"]
    assert "cannot be imported" in run("doctor").stdout


def test_errors_of_the_library_end_with_1(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("doctor: a = 1 · legal is 2 · write a = 2")

    monkeypatch.setattr(health, "examine", refuse)
    result = run("doctor", code=1)
    assert result.stderr == "adapterzoo: doctor: a = 1 · legal is 2 · write a = 2\n"
    assert result.stdout == ""


# what a person may do who is not root, who may do all
_AS_NOBODY = """
import json, os, sys
from pathlib import Path
from click.testing import CliRunner
from adapterzoo.cli import early, main
from adapterzoo.errors import CheckpointError
from adapterzoo.hub.settings import settings
if os.geteuid() == 0:
    os.setuid(65534)
said = [settings()]
locked = sys.argv[1]
for options in (
    ["predict", "a", "--text", "b", "--output", f"{locked}/in/it"],
    ["info", f"{locked}/in"],
    ["train", "--model", "m", "--train", "t.csv", "--output", f"{locked}/in/it"],
):
    result = CliRunner().invoke(main, options)
    said.append([result.exit_code, result.stderr])
try:
    early.check_new("merge", Path(locked, "in/it"))
except CheckpointError as error:
    said.append(str(error))
print(json.dumps(said))
"""


def test_a_folder_that_may_not_be_entered_is_told(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o600)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _AS_NOBODY, locked],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(locked / "in"), "HF_HUB_CACHE": str(locked / "in/it")},
    )
    assert done.returncode == 0, done.stderr
    hub, predict, info, train, merge = json.loads(done.stdout.splitlines()[-1])
    assert (hub["cache exists"], hub["cache writable"], hub["token"]) == (False, False, False)
    for code, message in (predict, train):
        assert code == 1
        assert f"--output {str(locked / 'in/it')!r}" in message
        assert "can be written" in message
    assert (info[0], "there is no such folder" in info[1]) == (1, True)
    assert f"merge: {str(locked / 'in/it')!r} cannot be written (Permission denied)" in merge
