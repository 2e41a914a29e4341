"""The check of the README, `make readme`, fails where what the README shows fails."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from run_readme import BARE, ROOT, run, shown, strange


def test_it_runs_all_blocks_under_use() -> None:
    code = shown((ROOT / "README.md").read_text("utf-8"))
    assert "AdapterTrainer(model" in code
    assert "adapter_names=" in code
    assert "make quickstart" not in code
    with pytest.raises(SystemExit, match="no block"):
        shown("# a\n\n## Use\n\nnothing\n")


def test_what_fails_there_fails_here(tmp_path: Path) -> None:
    # a checkout's package is not what a user has installed
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    assert run(str(environment / "bin" / "python"), "print('fine')\n") != 0


def test_a_wheel_holds_the_package_and_nothing_else() -> None:
    good = [
        "adapterzoo/__init__.py", "adapterzoo/py.typed", "adapterzoo/methods/low_rank/lora.py",
        "adapterzoo/__init__.pyi", "adapterzoo-0.2.0.dist-info/METADATA",
    ]  # fmt: skip
    assert not strange(good)
    for bad in ("tests/test_a.py", "adapterzoo/__pycache__/a.cpython-311.pyc", "adapterzoo/a.so"):
        assert strange([*good, bad]) == [bad]
    assert sorted(strange(good[:1])) == ["adapterzoo/__init__.pyi", "adapterzoo/py.typed"]


def test_a_package_that_is_not_declared_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    # here are those of the tests
    assert run(sys.executable, BARE.partition("\nfor name")[0], "import sys\n") != 0
    assert "not declared, but here" in capfd.readouterr().err


def test_what_the_trainer_needs_is_declared() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = {Requirement(text).name for text in document["project"]["dependencies"]}
    assert "accelerate" in declared
