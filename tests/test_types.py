"""What type checkers, `dir` and messages say of the public names."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import stubs
import transformers

import adapterzoo
from adapterzoo.peft_arguments import COMMON, classes_of_peft

ROOT = Path(__file__).parents[1]
PROJECT = Path(__file__).parent / "data" / "user_project"
_ERROR = re.compile(r"^(\w+\.py):(\d+): error: (.*)$", re.MULTILINE)
# transformers' names of models and untyped methods stand in a stub
PINNED = re.search(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What `mypy --strict` finds in a user's project, by file and line."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(PROJECT, folder, dirs_exist_ok=True)
    # as an installed package: found on the path of Python, with its py.typed
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("MYPYPATH", None)
    files = sorted(path.name for path in folder.glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *files],
        capture_output=True, text=True, check=False, cwd=folder, env=environment,
    )  # fmt: skip
    assert "error" in done.stdout, done.stderr
    found: dict[str, dict[int, str]] = defaultdict(lambda: defaultdict(str))
    for file, line, text in _ERROR.findall(done.stdout):
        found[file][int(line)] += f"{text}\n"
    return found


@pytest.mark.sweep
class TestProject:
    """A user's project under `mypy --strict`."""

    def test_documented_code_has_no_errors(self, errors):
        assert {*errors} == {"mistakes.py"}

    def test_each_mistake_is_found_and_nothing_else(self, errors):
        lines = (PROJECT / "mistakes.py").read_text("utf-8").splitlines()
        expected = {n: line.partition("  # E: ")[2] for n, line in enumerate(lines, 1)}
        expected = {n: text for n, text in expected.items() if text}
        assert len(expected) > 50
        found = errors["mistakes.py"]
        assert {n: text for n, text in expected.items() if text not in found.get(n, "")} == {}
        assert found.keys() == expected.keys()


@pytest.mark.parametrize("path", stubs.STUBS, ids=lambda path: path.parent.name)
def test_stubs_are_those_of_the_running_library(path):
    if PINNED is None or transformers.__version__ != PINNED[1]:
        pytest.skip("the stubs have the names of the pinned transformers")
    assert path.read_text("utf-8") == stubs.formatted(stubs.STUBS[path]())


@pytest.mark.parametrize("name", sorted(n for n in adapterzoo.__all__ if n.endswith("Config")))
def test_the_declared_constructor_takes_what_the_running_one_takes(name):
    """Read with `inspect` from the class, and with `ast` from the stub."""
    cls = getattr(adapterzoo, name)
    declared = stubs.declared(stubs.ROOT / "__init__.pyi", name)
    if declared is None:
        # it is the class itself
        assert issubclass(cls, stubs.ConfigUnion) or not dataclasses.fields(cls)
        return
    own = {*inspect.signature(cls).parameters}
    arguments = classes_of_peft.get(cls)
    of_peft = {*COMMON, *arguments.fields} if arguments else set()
    assert own | of_peft <= {*declared}
    # the rest are fields by which adapters and PEFT choose the class
    for field in {*declared} - own - of_peft:
        assert any(field in {*v.identifying} for v in stubs.variants.values()) or (
            arguments is not None and field in arguments.fixed
        )


@pytest.mark.parametrize("name", sorted(stubs.config_classes()))
def test_the_declared_constructor_of_peft_has_the_fields_in_their_order(name):
    cls = getattr(adapterzoo.peft, name)
    found = stubs.declared(stubs.ROOT / "peft" / "__init__.pyi", name)
    assert found == [*inspect.signature(cls).parameters]


# --- the namespace ---

MODULES = (
    "composition", "errors", "heads", "kernels", "peft", "serving", "testing",
)  # fmt: skip


def test_dir_shows_the_documented_names():
    shown = {*dir(adapterzoo)}
    of_adapters = {name for names in adapterzoo._OF_ADAPTERS.values() for name in names}
    modules = {name for name in shown if inspect.ismodule(getattr(adapterzoo, name))}
    assert shown == {*adapterzoo.__all__, *of_adapters, *modules, "__version__"}
    assert {*MODULES} <= modules
    for name in shown:
        assert getattr(adapterzoo, name) is not None
    documented = "".join(p.read_text("utf-8") for p in (ROOT / "docs").rglob("*.md"))
    assert [name for name in adapterzoo.__all__ if name not in documented] == []
    assert [name for name in of_adapters if name not in documented] == []


@pytest.mark.parametrize("name", MODULES)
def test_dir_of_a_module_shows_its_public_names(name):
    module = importlib.import_module(f"adapterzoo.{name}")
    shown = {*dir(module)}
    assert {*module.__all__} <= shown
    assert shown.isdisjoint({"Any", "TYPE_CHECKING", "annotations", "importlib", "sys"})
    assert [n for n in shown if n.startswith("_") and n != "__version__"] == []
    assert all(getattr(module, n) is not None for n in shown)


def test_dir_of_a_fresh_interpreter_is_the_same():
    code = "import adapterzoo; print(*dir(adapterzoo)); print(adapterzoo.peft.LoraConfig.__name__)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    shown, config = done.stdout.splitlines()
    assert shown.split() == dir(adapterzoo)
    assert config == "LoraConfig"


@pytest.mark.parametrize(
    ("name", "advised", "ending"),
    [
        ("LoraConfig", ("LoRAConfig", "adapterzoo.peft.LoraConfig"), " for PEFT's signature"),
        ("get_peft_model", ("adapterzoo.peft.get_peft_model",), " for PEFT's signature"),
        ("AdapterTrainr", ("AdapterTrainer",), ""),
        ("autoadaptermodel_", ("AutoAdapterModel",), ""),
        ("no_such_name_at_all", ("one of dir(adapterzoo)",), ""),
    ],
)
def test_a_name_that_is_not_there_gets_the_close_ones(name, advised, ending):
    message = f"adapterzoo has no {name!r}. Write {', or '.join(advised)}{ending}."
    with pytest.raises(AttributeError) as read:
        getattr(adapterzoo, name)
    with pytest.raises(ImportError) as imported:
        exec(f"from adapterzoo import {name}")
    assert str(read.value) == str(imported.value) == message
    assert not hasattr(adapterzoo, name)
    known = {"adapterzoo": adapterzoo, **{n: getattr(adapterzoo, n) for n in adapterzoo.__all__}}
    for advice in advised:
        assert eval(advice.removeprefix("one of "), known)


def test_modules_below_are_imported_as_before():
    for statement in ("from adapterzoo import runtime", "from adapterzoo.peft import optimizers"):
        subprocess.run([sys.executable, "-W", "ignore", "-c", statement], check=True, cwd=ROOT)
