"""The harness that runs the peer's tests: what it imports, records, explains and counts."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peer import facts, programs, rules, shim, suite, table, tiny
from transformers import BertConfig

import adapterzoo
from adapterzoo import AutoAdapterModel, LoRAConfig

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


@pytest.mark.sweep
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


@pytest.fixture
def watched() -> tuple[facts.Facts, Any]:
    fields = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    config = BertConfig(num_hidden_layers=1, **fields)
    model = AutoAdapterModel.from_config(config)
    model.add_adapter("a", "seq_bn[reduction_factor=2]")
    model.add_classification_head("a")
    model.train_adapter("a")
    return facts.Facts(), model


@pytest.mark.parametrize(
    ("touched", "loss", "error"),
    [
        ("adapters.a", 1.0, None),
        ("adapters.a", float("nan"), "trained: loss nan"),
        ("heads.a", 1.0, "no parameter of an adapter changed"),
        (".a.", 1.0, None),
        ("bert", 1.0, "frozen, but changed"),
    ],
)
def test_what_was_trained(
    watched: tuple[facts.Facts, Any], touched: str, loss: float, error: str | None
) -> None:
    seen, model = watched

    def train() -> Any:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if touched in name:
                    parameter += 1
        return SimpleNamespace(training_loss=loss)

    seen._train(train, SimpleNamespace(model=model))
    failures = [str(failure) for failure in seen.failures]
    assert error is None if not failures else error in failures[0]


def test_what_was_saved_comes_back(watched: tuple[facts.Facts, Any], tmp_path: Path) -> None:
    seen, model = watched
    save = functools.partial(type(model).save_adapter, model)
    seen._save_one(save, model, tmp_path / "a", "a")
    assert not seen.failures
    assert "into a fresh model" in seen.summary()["loaded"]
    seen.expect(("saved", "loaded"))
    assert not seen.failures

    def save_another(folder: Path, name: str) -> None:
        save(folder, name)
        with torch.no_grad():
            next(model.heads["a"].parameters()).add_(1)

    seen._save_one(save_another, model, tmp_path / "b", "a")
    assert "not the same: ['heads.a." in str(seen.failures[0])


def test_scores_of_a_second_run_are_compared(tmp_path: Path) -> None:
    for scores, holds in (([0.5, 0.25], True), ([0.5, 0.26], False), ([0.5], False)):
        first, second = facts.Facts(), facts.Facts()
        first.scores, second.scores = [0.5, 0.25], scores
        first.compare_scores(tmp_path / "scores", again=False)
        second.compare_scores(tmp_path / "scores", again=True)
        assert bool(second.failures) is not holds


def test_a_fact_that_is_missing_is_a_failure() -> None:
    seen = facts.Facts()
    seen.expect(("trained", "saved"))
    assert str(seen.failures[0]) == "not trained, not saved"


def test_programs_are_in_the_table(tmp_path: Path) -> None:
    lines = [
        {"id": "scripts::glue", "outcome": "passed", "failures": [],
         "facts": {"trained": "loss 1", "loaded": "by a second run: the same 2 scores"}},
        {"id": "scripts::udp", "outcome": "failed", "failures": [failure("ValueError: 1")],
         "facts": {}},
    ]  # fmt: skip
    file = tmp_path / "strict" / "scripts.jsonl"
    file.parent.mkdir()
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    page = table.render(tmp_path)
    assert "scripts: 1 of 2 run to their end" in page
    assert "| glue | yes | yes | – | – | by a second run |  |" in page
    assert "| udp | no | – | – | – | – | bug: ValueError: 1 |" in page


def test_a_family_that_the_peer_does_not_test_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"test_on_unknown\.py in"):
        suite.files(tmp_path, ["unknown"])


def test_the_page_is_that_of_the_table() -> None:
    page = (Path(__file__).parent / "peer" / "results.md").read_text(encoding="utf-8")
    assert page.startswith(table.HEAD)
