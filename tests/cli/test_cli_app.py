"""The frame: help and its examples, exit codes, what is imported, and `doctor`."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import torch
from packaging.requirements import Requirement

import adapterzoo
from adapterzoo import AutoAdapterModel, LoRAConfig
from adapterzoo.cli import doctor, main
from adapterzoo.cli.app import FORMATS, POOLINGS, SERVERS, NamedCommand
from adapterzoo.config import config_strings
from adapterzoo.errors import ConfigError
from adapterzoo.formats.checkpoint import formats
from adapterzoo.heads import Pooling
from adapterzoo.kernels import use
from adapterzoo.serving.servers import servers

ROOT = Path(adapterzoo.__file__).parents[1]
COMMANDS = main.list_commands(click.Context(main))


def found(name: str) -> NamedCommand:
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, NamedCommand)
    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_parses(run, name):
    said = run(name, "--help").stdout
    assert "  Example:\n" in said
    command = found(name)
    for line in (command.epilog or "").splitlines()[2:]:
        assert f"{line}\n" in said
        program, sub, *rest = shlex.split(line)
        assert (program, sub) == ("adapterzoo", name)
        with command.make_context(sub, rest) as context:
            assert set(context.params) == {p.name for p in command.params} - {"help"}


def test_the_commands_are_these_and_each_says_what_it_does(run):
    expected = [
        "train", "predict", "info", "verify", "report", "convert", "export", "merge", "serve",
        "push", "list", "methods", "doctor",
    ]  # fmt: skip
    assert expected == COMMANDS
    said = run("--help").stdout
    assert all(f"\n  {name} " in said for name in expected)
    # sentences are whole
    assert "..." not in said.partition("Commands:")[2]
    assert run("--version").stdout == f"adapterzoo, version {adapterzoo.__version__}\n"
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert not [name for name in expected if f"adapterzoo {name}" not in page]


def test_what_is_named_twice_is_the_same():
    assert sorted(FORMATS) == sorted(formats)
    assert get_args(Pooling) == POOLINGS
    assert tuple(servers) == SERVERS


TRAIN = ("train", "--model", "none", "--output", "new", "--train")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_starts_in_a_fresh_process(name):
    done = subprocess.run(
        [sys.executable, "-m", "adapterzoo", name, "--help"], capture_output=True, text=True,
        check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert f"adapterzoo {name}" in done.stdout


def test_methods_lists_all_config_strings(run):
    found = json.loads(run("methods", "--json").stdout)
    listed = {name for each in found for name in (each["name"], *each["aliases"])}
    assert listed == {*config_strings} - {"union"}
    rows = {each["name"]: each for each in found}
    # docs/methods.md has these numbers
    assert (rows["lora"]["parameters"], rows["lora"]["merges"]) == (294_912, True)
    assert (rows["seq_bn"]["parameters"], rows["seq_bn"]["merges"]) == (894_528, False)
    # those of docs/serving.md
    assert rows["boft"]["servers"] == dict.fromkeys(SERVERS[:-1], "SVD")
    assert (rows["lora"]["servers"], rows["seq_bn"]["servers"]) == (
        dict.fromkeys(SERVERS[:-1], "exact"), {},
    )  # fmt: skip
    lines = run("methods").stdout.splitlines()
    assert len(lines) == len(found) + 1
    assert next(line for line in lines if line.startswith("houlsby") or "houlsby" in line)


def test_methods_in_a_model(run, base):
    found = json.loads(run("methods", "--model", base, "--json").stdout)
    rows = {each["name"]: each for each in found}
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("a", "lora")
    lora = model.adapter_summary(as_dict=True)[0]["#param"]
    assert (rows["lora"]["parameters"], rows["lora"]["servers"]) == (lora, {"gguf": "exact"})


def test_methods_does_not_count_one_that_only_some_models_take(run):
    """BERT has a layer of this name, Llama has none."""
    config_strings.register("of_bert")(functools.partial(LoRAConfig, target_modules=["query"]))
    config_strings.register("after")(functools.partial(LoRAConfig))
    rows = {each["name"]: each for each in json.loads(run("methods", "--json").stdout)}
    assert "'query'" in rows["of_bert"]["problem"]
    assert rows["after"]["parameters"] == rows["lora"]["parameters"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell, tmp_path):
    def said(kind: str, **more: str) -> str:
        variables = {"_ADAPTERZOO_COMPLETE": f"{shell}_{kind}", **more}
        script = "from adapterzoo.cli import main; main(prog_name='adapterzoo')"
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False,
            cwd=ROOT, env=os.environ | variables,
        ).stdout  # fmt: skip

    if shell != "bash" or shutil.which("bash"):
        assert "_ADAPTERZOO_COMPLETE" in said("source")
    assert "train" in said("complete", COMP_WORDS="adapterzoo tr", COMP_CWORD="1" if shell != "fish"
                           else "tr")  # fmt: skip


def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def wrong() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(doctor, "examine", wrong)
    with pytest.raises(ValueError, match="a bug"):
        main(["doctor"])


def test_the_script_that_is_installed_is_this():
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    value = document["project"]["scripts"]["adapterzoo"]
    assert EntryPoint("adapterzoo", value, "console_scripts").load() is main


def test_a_real_process_refuses_without_a_trace():
    # the file is looked at before torch is imported
    command = [sys.executable, "-m", "adapterzoo", "predict", "runs/a", "--file", "none.csv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("adapterzoo: predict runs/a: ")
    assert len(done.stderr.splitlines()) == 1


NO_FOLDER, EMPTY = "there is no such folder", "'empty' holds no adapter and no head"
REFUSED = {
    "train: an unknown label": (
        (*TRAIN, "rows.csv", "--output", "out", "--eval", "new.csv"), 1, "has the labels 'c'"
    ),
    "train: an unknown pooling": ((*TRAIN, "rows.csv", "--pooling", "best"), 2, "'best'"),
    "predict: no folder": (("predict", "nope", "--text", "a"), 1, NO_FOLDER),
    "info: no folder": (("info", "nope"), 1, NO_FOLDER),
    "info: an empty folder": (("info", "empty"), 1, EMPTY),
    "verify: an empty folder": (("verify", "empty", "--json"), 1, EMPTY),
    "merge: a folder with files": (("merge", "m", "nope", "full"), 1, "'full' exists already"),
    "merge: no folder": (("merge", "m", "nope", "out"), 1, NO_FOLDER),
    "push: an empty folder": (("push", "empty", "me/a"), 1, "'empty' holds no adapter"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_command_refuses(run, tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\nfine,a\ndull,b\n")
    Path("new.csv").write_text("text,label\nfine,a\ndull,c\n")
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("full", "notes.txt").write_text("mine")
    arguments, code, message = REFUSED[case]
    result = run(*arguments, code=code)
    assert message in result.stderr
    assert not Path("out").exists()


# --- doctor ---


def test_doctor_says_what_there_is(run):
    with use("reference"):
        (cpu, *_) = json.loads(run("doctor", "--json").stdout)["devices"]
    assert cpu["kernels"] == "their definitions (mode 'reference')"
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


def test_doctor_finds_what_is_missing_or_old(run, monkeypatch):
    asked = [Requirement("torch>=99"), Requirement("nonesuch>=1"), Requirement("click>=8")]
    monkeypatch.setattr(doctor, "_required", lambda: asked)
    report = json.loads(run("doctor", "--json", code=1).stdout)
    old, missing = report["problems"]
    assert ">=99 is needed" in old
    assert missing == "nonesuch is not installed. Write pip install 'nonesuch>=1'."
    assert "problem: nonesuch" in run("doctor", code=1).stdout


def test_doctor_keeps_the_token_to_itself(run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    said = run("doctor", "--json").stdout
    assert json.loads(said)["hub"]["token"] is True
    assert "hf_secret" not in said


def test_doctor_names_a_peer_that_cannot_be_imported(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    report: dict[str, Any] = json.loads(run("doctor", "--json").stdout)
    assert "peft" in report["peers"]["peft"]
    assert "cannot be imported" in run("doctor").stdout


def test_errors_of_the_library_end_with_1(run, monkeypatch):
    def refuse() -> None:
        raise ConfigError("a = 1 · legal is 2 · write a = 2")

    monkeypatch.setattr(doctor, "examine", refuse)
    result = run("doctor", code=1)
    assert result.stderr == "adapterzoo: doctor: a = 1 · legal is 2 · write a = 2\n"
    assert result.stdout == ""


# what a person may do who is not root, who may do all
_AS_NOBODY = """
import json, os, sys
from pathlib import Path
from click.testing import CliRunner
from adapterzoo.cli import main
from adapterzoo.hub.requests import settings
from adapterzoo.cli import converting, training
if os.geteuid() == 0:
    os.setuid(65534)
said = [settings()]
locked = sys.argv[1]
for options in (
    ["predict", "a", "--text", "b", "--output", f"{locked}/in/it"],
    ["info", f"{locked}/in"],
    ["merge", "m", "a", f"{locked}/in/it"],
):
    result = CliRunner().invoke(main, options)
    said.append([result.exit_code, result.stderr])
print(json.dumps(said))
"""


@pytest.mark.sweep
def test_a_folder_that_may_not_be_entered_is_told(tmp_path):
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
    hub, predict, info, merge = json.loads(done.stdout.splitlines()[-1])
    assert (hub["cache exists"], hub["cache writable"], hub["token"]) == (False, False, False)
    for code, message in (predict, merge):
        assert code == 1
        assert "Permission denied" in message
    assert (info[0], "there is no such folder" in info[1]) == (1, True)
