"""`adapterzoo.peft.install()`: frameworks that import PEFT run on this library instead."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapterzoo.peft_arguments import PEFT_VERSION

PROGRAM = Path(__file__).with_name("peft_host.py")
HOSTS = ("accelerate", "transformers", "trl")
FRAMEWORKS = ("transformers", "accelerate", "sentence_transformers", "diffusers")
# what hosts import for features that do not exist here, or for methods that are other ones here
LACKING = [
    "peft.utils.other.fsdp_auto_wrap_policy",
    "peft.utils.transformers_weight_conversion.build_peft_weight_mapping",
]
HIDING = """
import sys
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "peft" else super().find_spec(name, path, target)

    @classmethod
    def find_distributions(cls, *context):
        return (found for found in super().find_distributions(*context) if found.name != "peft")

sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
"""
REFUSING = """
from importlib.machinery import SourceFileLoader

run = SourceFileLoader.exec_module

def exec_module(loader, module):
    if module.__name__.partition(".")[0] == "peft":
        raise AssertionError(f"{module.__name__} of PEFT is executed")
    run(loader, module)

SourceFileLoader.exec_module = exec_module
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
]


def launched(start: list[str], folder: Path, hiding: str, *arguments: Any) -> str:
    """Run a program in a fresh process, and return what it printed."""
    (folder / "sitecustomize.py").write_text(hiding)
    tests = PROGRAM.parents[1]
    paths = [folder, tests.parent, tests, tests / "integrations", PROGRAM.parent]
    paths += dict.fromkeys(origin(name).parents[1] for name in FRAMEWORKS if is_there(name))
    done = subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def origin(name: str) -> Path:
    return Path(importlib.util.find_spec(name).origin)


def ran(start: list[str], folder: Path, hiding: str = "") -> tuple[dict[str, Any], str]:
    """What the program found in a fresh process, and what it printed."""
    hosts = [origin(name).parent for name in {*HOSTS, *FRAMEWORKS} if is_there(name)]
    names = [name for columns in documented() for name in (*columns[0], *columns[1])]
    printed = launched(start, folder, hiding, folder / "found.json", *hosts, *names)
    found = json.loads((folder / "found.json").read_text())
    assert found["packages"]["arguments"] == [str(folder / "found.json")]
    is_module = "peft_host" in start
    assert found["packages"]["folder"] == str(folder if is_module else PROGRAM.parent)
    return found, printed


def documented() -> list[tuple[list[str], list[str]]]:
    """What frameworks import that are not installed: names that are here, and those of PEFT alone.

    docs/integrations.md lists them.
    """
    page = PROGRAM.parents[2] / "docs" / "integrations.md"
    rows = re.findall(r"(?m)^\| (?:LLaMA-Factory|Axolotl) \| (`.*) \|(.*)\|$", page.read_text())
    assert len(rows) == 2
    return [tuple([f"peft.{n}" for n in re.findall(r"`(.*?)`", cell)] for cell in r) for r in rows]


@pytest.fixture(scope="module")
def of_peft(tmp_path_factory):
    """On PEFT itself."""
    return ran([str(PROGRAM)], tmp_path_factory.mktemp("peft"))[0]


@pytest.fixture(scope="module", params=["with PEFT", "without PEFT"])
def here(request, tmp_path_factory):
    """On adapterzoo: what was found, what was printed, and whether PEFT is hidden."""
    folder = tmp_path_factory.mktemp("here")
    start = ["-m", "adapterzoo.peft"]
    if request.param == "with PEFT":
        return *ran([*start, str(PROGRAM)], folder), False
    return *ran([*start, "-m", "peft_host"], folder, HIDING), True


def test_hosts_find_the_package_and_its_version(here):
    found = here[0]["packages"]
    assert found["is found"]
    assert found["versions"] == [PEFT_VERSION] * 2
    assert found["is available"] == [True, True]


def test_names_are_ours_in_whichever_module(here):
    assert set(here[0]["names"].values()) == {"adapterzoo"}


def test_a_missing_name_is_pefts_once_said_or_an_error_that_helps(here):
    found, printed, is_hidden = here
    others = found["others"]
    if is_hidden:
        assert "Write get_peft_model, or" in others["from peft import get_peft_modle"]
        assert all("has no 'VBLoRAConfig'" in text for line, text in others.items() if "VB" in line)
        assert others["peft.VBLoRAConfig"].startswith("AttributeError")
        assert others["from peft import VBLoRAConfig"].startswith("ImportError")
    else:
        assert others.pop("from peft import get_peft_modle").startswith("ImportError")
        assert set(others.values()) == {"found"}
    assert printed.count("come from PEFT") == (not is_hidden)


def test_hosts_know_models_with_adapters_and_add_them(here, of_peft):
    found = here[0]["models"]
    assert found == {
        "with": [True, True], "without": [False, False], "changes": True, "returns": True,
        "pickled": [],
    }  # fmt: skip
    assert {**of_peft["models"], "pickled": []} == found
    assert of_peft["models"]["pickled"]


def test_what_hosts_import_is_there(here, of_peft):
    assert of_peft["missing"] == []
    of_peft_alone = {name for _, lacking in documented() for name in lacking}
    assert here[0]["missing"] == (sorted({*LACKING, *of_peft_alone}) if here[2] else [])


@pytest.mark.parametrize("trainer", ["SFTTrainer", "DPOTrainer"])
def test_trl_trains_as_with_peft(trainer, here, of_peft):
    losses, files = here[0][trainer]
    expected, expected_files = of_peft[trainer]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    assert files == expected_files


def test_a_late_call_leaves_what_was_imported(of_peft):
    assert of_peft["installed late"] == {
        "a view": "adapterzoo.peft", "before": "peft", "their model": True, "their layer": True,
        "own code": [True, True], "what is missing": True, "their method": ["peft", True],
    }  # fmt: skip


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory):
    """What the frameworks did on PEFT itself, and here: with PEFT, of which nothing runs; without.

    The values of adapters are those that PEFT's run has written.
    """
    shared, names = tmp_path_factory.mktemp("values"), list(filter(is_there, FRAMEWORKS))
    start, found = [str(PROGRAM.with_name("peft_frameworks.py"))], []
    here = ["-m", "adapterzoo.peft", *start]
    for call, hiding in ((start, ""), (here, REFUSING), (here, HIDING)):
        folder = tmp_path_factory.mktemp("run")
        launched(call, folder, hiding, folder / "found.json", shared, *names)
        found.append(json.loads((folder / "found.json").read_text()))
    return found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_frameworks_use_adapters_as_with_peft(name, frameworks):
    if not is_there(name):
        pytest.skip(f"{name} is not installed")
    expected, *here = (found[name] for found in frameworks)
    for found in here:
        assert found["facts"] == expected["facts"]
        assert found["outputs"].keys() == expected["outputs"].keys()
        for step, output in expected["outputs"].items():
            ours, theirs = torch.tensor(found["outputs"][step]), torch.tensor(output)
            close = torch.testing.assert_close
            close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, step=step: f"{step}: {text}")
