"""The frameworks' own example scripts, run on PEFT and by `python -m adapterzoo.peft`.

Both runs begin with the same values of adapters, and drop nothing: what is drawn at random, initial
values and masks of dropout, are other numbers here than in PEFT.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from huggingface_hub import ModelCard
from peft_scripts import CHECKOUTS, SCRIPTS, STEPS, STOP, TIMES
from safetensors.torch import load_file
from test_peft_install import PROGRAM, launched

pytestmark = pytest.mark.sweep(whole=True)
START = ["-m", "adapterzoo.peft"]
WRAPPER = str(PROGRAM.with_name("peft_scripts.py"))
# of what a run leaves, these are not compared: scripts, times, and states of generators
OTHERS = {"printed.txt", "training_args.bin", "rng_state.pth", "random_states_0.pkl"}


class Runs:
    """Runs of scripts on PEFT and here, each once; the scripts of a package share a process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done = folder, set()

    def of(self, name: str) -> list[Path]:
        """What the script left on PEFT, and here."""
        script = SCRIPTS[name]
        if script.path() is None:
            pytest.skip(f"there is no {script.package}, or no {script.file}: set {CHECKOUTS}")
        folders = [self.folder / "peft", self.folder / "here"]
        if script.package not in self.done:
            self.done.add(script.package)
            names = [n for n, s in SCRIPTS.items() if s.package == script.package and s.path()]
            for folder, start in zip(folders, ([], START), strict=True):
                folder.mkdir(exist_ok=True)
                launched([*start, WRAPPER], folder, "", self.folder / "world", folder, *names)
        return [folder / name for folder in folders]

    def resumed(self, name: str, kind: str, start: list[str]) -> Path:
        """What a script left that went on, without a wrapper, from a step of a run."""
        self.of(name)
        folder = self.folder / f"{kind} resumed {' '.join(start)}"
        shutil.copytree(self.folder / kind / name, folder / name)
        shutil.rmtree(folder / name / "out" / f"checkpoint-{STEPS}")
        script = SCRIPTS[name]
        arguments = script.arguments.replace("WORLD", str(self.folder / "world")).split()
        arguments += ["--resume_from_checkpoint", f"out/checkpoint-{STOP}"]
        launched([*start, str(script.path())], folder / name, "", *arguments)
        return folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


def files_in(folder: Path) -> list[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return sorted(str(file) for file in files if file.name not in OTHERS)


def log_of(file: Path) -> dict[str, Any]:
    """The state of a trainer without what depends on the time."""
    state = json.loads(file.read_text())
    rows = state["log_history"]
    times = [k for row in rows for k in row if k.endswith(TIMES)]
    return state | {"log_history": [{k: row[k] for k in row.keys() - times} for row in rows]}


def config_of(file: Path) -> dict[str, Any]:
    """A config as PEFT reads it; fields that do nothing are None, {} or False."""
    found = peft.PeftConfig.from_pretrained(file.parent).to_dict()
    # PEFT names heads that the model does not have
    heads = {*(found["modules_to_save"] or ())} - {"classifier", "score"}
    return {k: v or None for k, v in found.items()} | {"modules_to_save": heads}


def optimizer_of(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def same(found: Any, expected: Any, where: str) -> None:
    """Compare what JSON files or optimizers have; numbers up to what float32 rounds."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            same(found[key], value, f"{where}, {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            same(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, float | torch.Tensor):
        close = torch.testing.assert_close
        close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text: f"{where}: {text}")
    else:
        assert found == expected, where


def same_runs(here: Path, there: Path) -> None:
    """Compare all files of two runs."""
    assert files_in(here) == files_in(there)
    for name in files_in(there):
        ours, theirs = here / name, there / name
        if ours.name == "trainer_state.json":
            same(log_of(ours), log_of(theirs), name)
        elif ours.name == "adapter_config.json":
            assert config_of(ours) == config_of(theirs)
        elif ours.name == "README.md":
            a, b = (ModelCard.load(file).data for file in (ours, theirs))
            # PEFT replaces the tags of trainers, and names the pipeline of one task only
            assert {*a.tags} >= {*b.tags}
            assert (a.base_model, a.library_name) == (b.base_model, b.library_name)
            assert b.pipeline_tag in (None, a.pipeline_tag)
        elif ours.suffix in (".pt", ".bin"):
            same(optimizer_of(ours), optimizer_of(theirs), name)
        elif ours.suffix == ".safetensors" and not is_whole(ours):
            same(load_file(ours), load_file(theirs), name)
        elif ours.name == "losses.json":
            same(json.loads(ours.read_text()), json.loads(theirs.read_text()), name)


def is_whole(file: Path) -> bool:
    """Whether it has the whole model, which has other keys in PEFT, as accelerate saves it."""
    return file.name == "model.safetensors"


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_the_same_as_on_peft(name, runs):
    there, here = runs.of(name)
    losses = json.loads((here / "losses.json").read_text())
    assert len(losses) >= STEPS
    same_runs(here, there)


@pytest.mark.parametrize(
    ("begun", "start"), [("peft", START), ("here", START), ("here", [])],
    ids=["begun on PEFT", "begun here", "begun here, ended on PEFT"],
)  # fmt: skip
def test_a_stopped_script_goes_on_in_either_library(begun, start, runs):
    expected, _ = runs.of("sft")
    found = runs.resumed("sft", begun, start)
    state = Path("out", f"checkpoint-{STEPS}", "trainer_state.json")
    losses = [
        [row["loss"] for row in log_of(run / state)["log_history"] if "loss" in row]
        for run in (found, expected)
    ]
    assert len(losses[1]) == STEPS
    same(*losses, "losses")
    same(*(load_file(run / "out" / "adapter_model.safetensors") for run in (found, expected)), "")


def test_each_difference_is_found(tmp_path):
    with pytest.raises(AssertionError, match="loss"):
        same([{"loss": 1.0}], [{"loss": 1.001}], "log")
    with pytest.raises(AssertionError, match="a, lora_A"):
        same({"lora_A": torch.zeros(2)}, {"lora_A": torch.full((2,), 1e-4)}, "a")
    for folder, names in (("a", "xy"), ("b", "x")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    with pytest.raises(AssertionError):
        same_runs(tmp_path / "a", tmp_path / "b")
