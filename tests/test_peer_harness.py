"""The harness that runs the peer's tests: what it imports, records, explains and counts."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peer import programs, rules, shim, suite, table, tiny

import adapterzoo
from adapterzoo import LoRAConfig

# what a checkout of the peer looks like to the harness
OF_A_PEER = """
import unittest

import adapters
from adapters import LoRAConfig, NoSuchConfig
from adapters.composition import Stack


class Core(unittest.TestCase):
    config = NoSuchConfig(r=4)

    def test_passes(self):
        self.assertEqual(LoRAConfig(r=4).r, 4)
        self.assertEqual(Stack("a", "b").__class__.__module__.split(".")[0], "adapterzoo")

    def test_misses(self):
        self.assertTrue(self.config == LoRAConfig())

    def test_fails_in_parts(self):
        for number in (1, 2):
            with self.subTest(number=number):
                self.assertEqual(number, 1)

    def test_skips(self):
        self.skipTest("not now")


test_class = Core
"""


@pytest.fixture
def imports() -> Iterator[None]:
    shim.install("strict")
    yield
    shim.uninstall()


@pytest.mark.usefixtures("imports")
def test_names_are_those_of_adapterzoo() -> None:
    peer = importlib.import_module("adapters")
    assert peer.LoRAConfig is LoRAConfig
    assert peer.__version__ == adapterzoo.__version__
    assert importlib.import_module("adapters.composition").Stack is adapterzoo.Stack


@pytest.mark.usefixtures("imports")
def test_a_missing_name_can_be_imported_but_not_used() -> None:
    missing = importlib.import_module("adapters.nowhere").NoSuchConfig
    made = missing(r=4).replace(r=8)
    assert repr(made) == "<missing adapters.nowhere.NoSuchConfig().replace()>"
    for use in (
        lambda: "a" in missing,
        lambda: made == 1,
        lambda: bool(made),
        lambda: isinstance(1, missing),
        lambda: list(missing),
    ):
        with pytest.raises(shim.MissingNameError, match=r"adapters\.nowhere\.NoSuchConfig"):
            use()


def test_the_imports_are_taken_back() -> None:
    shim.install("strict")
    importlib.import_module("adapters")
    shim.uninstall()
    assert "adapters" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("adapters")


def failure(error: str, line: str = "") -> dict[str, str]:
    return {"subtest": "", "when": "call", "error": error, "line": line, "frames": ""}


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (failure("peer.shim.MissingNameError: adapters.X"), "missing"),
        (failure("AttributeError: 'BertModel' object has no attribute 'x'"), "missing"),
        (failure("AssertionError: False is not true", "self.assertTrue(same)"), "bug"),
        (failure("peer.tiny.NotAtHandError: no such model"), "environment"),
    ],
)
def test_a_failure_is_explained(found: dict[str, str], kind: str) -> None:
    assert rules.explain({"id": "t", "failures": [found]}).kind == kind


def test_the_gravest_failure_of_a_test_counts() -> None:
    mild, grave = failure("peer.shim.MissingNameError: adapters.X"), failure("ValueError: 1")
    assert rules.explain({"id": "t", "failures": [grave, mild]}).kind == "bug"
    assert rules.explain({"id": "t", "failures": [mild]}).kind == "missing"


def test_cells_run_without_shell_commands() -> None:
    code = {"cell_type": "code", "source": ["!pip install x\n", "a = 1\n", "  %cd y\n", "b = 2"]}
    text = {"cell_type": "markdown", "source": ["words"]}
    assert list(programs._sources({"cells": [code, text]})) == ["\na = 1\n\nb = 2"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("xlm-roberta-base", "xlm-roberta"),
        ("FacebookAI/roberta-base", "roberta"),
        ("facebook/bart-base", "bart"),
        ("meta-llama/Meta-Llama-3-8B", "llama"),
        ("nobody/knows", None),
    ],
)
def test_a_name_on_the_hub_says_the_type(name: str, kind: str | None) -> None:
    assert tiny.kind_of(name) == kind


def test_every_rule_has_a_kind_and_a_pattern() -> None:
    for rule in rules.RULES:
        assert rule.kind in rules.KINDS
        assert rule.error or rule.line or rule.test, rule


def test_a_run_is_recorded_explained_and_counted(tmp_path: Path) -> None:
    tests = tmp_path / "peer" / "tests" / "test_methods"
    tests.mkdir(parents=True)
    for folder in (tests, tests.parent):
        (folder / "__init__.py").touch()
    (tests / "test_on_toy.py").write_text(OF_A_PEER, encoding="utf-8")
    (tmp_path / "peer" / "conftest.py").touch()
    before = sorted(tmp_path.rglob("*"))
    results = tmp_path / "out" / "strict" / "toy.jsonl"
    files = [str(file) for file in suite.files(tmp_path / "peer", ["toy"])]
    suite.run(tmp_path / "peer", files, "strict", results, None, 60)
    assert (
        sorted((tmp_path / "peer").rglob("*")) == [f for f in before if f != tmp_path / "out"][1:]
    )
    found = {line["id"].rpartition("::")[2]: line for line in table.read(results)}
    assert {name: line["outcome"] for name, line in found.items()} == {
        "test_passes": "passed",
        "test_misses": "failed",
        "test_fails_in_parts": "failed",
        "test_skips": "skipped",
    }
    assert rules.explain(found["test_misses"]).kind == "missing"
    assert rules.explain(found["test_fails_in_parts"]).kind == "bug"
    (part,) = found["test_fails_in_parts"]["failures"]
    assert part["subtest"].endswith("{'number': '2'}")
    assert part["line"] == "self.assertEqual(number, 1)"
    assert found["test_skips"]["why"].endswith("not now")
    page = table.render(tmp_path / "out")
    assert "| strict | toy | 1 | 3 | 33.3 | 0 | 0 | 0 | 1 | 1 | 1 |" in page


def test_a_family_that_the_peer_does_not_test_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"test_on_unknown\.py in"):
        suite.files(tmp_path, ["unknown"])


def test_the_page_is_that_of_the_table() -> None:
    page = (Path(__file__).parent / "peer" / "results.md").read_text(encoding="utf-8")
    assert page.startswith(table.HEAD)
