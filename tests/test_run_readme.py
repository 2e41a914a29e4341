"""The check of the README, `make readme`, fails where what the README shows fails."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from run_readme import ROOT, run, shown


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


def test_what_the_trainer_needs_is_declared() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    declared = {Requirement(text).name for text in document["project"]["dependencies"]}
    assert "accelerate" in declared
