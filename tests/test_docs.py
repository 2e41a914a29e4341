"""Every block of code of README.md and of docs/ runs, from top to bottom of its page.

A page has one namespace and a folder of its own. Names of the Hub are answered from a cache that
holds the real all-MiniLM-L6-v2 and, in place of large models, tiny ones of their families. What
talks to the Hub runs in a process beside a Hub on loopback. Blocks in HTML comments, which readers
do not see, make what a page takes for granted; others say what is not run, and why.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import huggingface_hub.constants as hub_settings
import pytest
import torch
from click.testing import CliRunner
from loopback import USERS, loopback
from stand_ins import place_for, real, stand_in
from swept import all_but
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from _data import packaged_model
from adapterzoo import AutoAdapterModel
from adapterzoo.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *DOCS.rglob("*.md"))}
FENCE = re.compile(r"^ *```(\w+)$", re.MULTILINE)
# shown, not run: what a shell, a table or a file looks like
SHOWN = {"bibtex", "console", "csv", "text", "toml"}
# what needs a Hub that can be written to, and searched
ON_THE_HUB = {"docs/hub.md"}
HUB_COMMANDS = {"push", "list"}

# beside these, blocks that another test runs say which: "run by tests/…"
NOT_RUN = {
    ("docs/install.md", "installs from an index"),
}
ELSEWHERE = re.compile(r"run (?:in two processes )?by (tests/\S+)")


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Hub would answer."""
    folder = tmp_path_factory.mktemp("cache")
    real(folder, "sentence-transformers/all-MiniLM-L6-v2", packaged_model())
    for name, family in (
        ("bert-base-uncased", "bert"),
        ("google-bert/bert-base-uncased", "bert"),
        ("gpt2", "gpt2"),
        ("meta-llama/Llama-3.2-1B", "llama"),
    ):
        stand_in(folder, name, family)
    model = AutoAdapterModel.from_pretrained(place_for(folder, "bert-base-uncased"))
    model.add_adapter("reviews", "lora")
    model.save_adapter(place_for(folder, "user/repository"), "reviews")
    return folder


@pytest.fixture(scope="session")
def hub_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process with a token, beside the Hub of tests/hub on loopback."""
    token = "hf_userUserUserUser"
    USERS[token] = "user"
    with loopback(tmp_path_factory.mktemp("home"), token) as (_, client):
        yield client
    del USERS[token]


@pytest.fixture
def read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[str], set[str]]:
    """Runs a page; gives the reasons of what is not run."""
    monkeypatch.setattr(hub_settings, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(hub_settings, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    # inductor takes half a minute to write C++ for the same graphs
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))

    def python_there(example: Example) -> None:
        request.getfixturevalue("hub_client").run(str(example.parsed))

    def shell(example: Example) -> None:
        for command in commands(str(example.parsed)):
            if command[0] in HUB_COMMANDS:
                client = request.getfixturevalue("hub_client")
                client.run(f"import os; os.chdir({str(tmp_path)!r})")
                client.run(ON_COMMAND, arguments=command)
            else:
                call(command)

    def run(page: str) -> set[str]:
        python = PythonCodeBlockParser()
        if page in ON_THE_HUB:
            python = CodeBlockParser(language="python", evaluator=python_there)
        parsers = [python, CodeBlockParser(language="bash", evaluator=shell), SkipParser()]
        document = Sybil(parsers=parsers).parse(PAGES[page])
        # classes of a page can be pickled, as those of a file can
        module = types.ModuleType(f"page_{re.sub(r'[^a-z]', '_', page.lower())}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        document.namespace = vars(module)
        return evaluate(document)

    return run


ON_COMMAND = """
from click.testing import CliRunner
from adapterzoo.cli import main
result = CliRunner().invoke(main, arguments, catch_exceptions=False)
assert result.exit_code == 0, result.stderr
"""


def call(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, f"{arguments}: {result.stdout}\n{result.stderr}"


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of each call of `adapterzoo` in a shell script."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "adapterzoo", f"no command of this library: {line}"
            yield words[1:]


def evaluate(document: Document) -> set[str]:
    skipped = set()
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as reason:
            skipped.add(str(reason))
    return skipped


def blocks(text: str) -> list[str]:
    """Languages of the fenced blocks of a page."""
    return FENCE.findall(text)


WITH_CODE = [p for p, path in PAGES.items() if {"python", "bash"} & set(blocks(path.read_text()))]


# torch says it of every data loader on a machine without a GPU
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator")
@pytest.mark.parametrize("page", all_but(["README.md", "docs/tour.md"], sorted(WITH_CODE)))
def test_a_page_runs_from_top_to_bottom(page, read):
    skipped = read(page)
    elsewhere = {reason for reason in skipped if ELSEWHERE.fullmatch(reason)}
    assert skipped - elsewhere == {reason for where, reason in NOT_RUN if where == page}
    for reason in elsewhere:
        assert (ROOT / reason.rpartition(" ")[2]).exists(), reason


def test_no_block_is_of_a_kind_that_is_not_looked_at():
    kinds = {kind for path in PAGES.values() for kind in blocks(path.read_text())}
    assert kinds <= {"python", "bash", "mermaid"} | SHOWN


def test_a_wrong_line_is_found(read, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    monkeypatch.setitem(PAGES, "page.md", page)
    right = "```python\nfrom adapterzoo import LoRAConfig\n\nconfig = LoRAConfig(r=8)\n```\n"
    page.write_text(right + "```python\nassert config.r == 8\n```\n")
    assert read("page.md") == set()
    page.write_text(right + "\n```python\nassert config.rank == 8\n```\n")
    with pytest.raises(AttributeError, match="rank") as error:
        read("page.md")
    assert (error.traceback[-1].path, error.traceback[-1].lineno + 1) == (page, 8)
    page.write_text("```bash\nadapterzoo info no/where/here\n```\n")
    with pytest.raises(AssertionError, match="no/where/here"):
        read("page.md")
    page.write_text('<!-- skip: next "a GPU" -->\n\n```python\n1 / 0\n```\n')
    assert read("page.md") == {"a GPU"}
