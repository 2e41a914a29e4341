"""Runs the test files of the peer in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def files(peer: Path, families: Sequence[str]) -> list[Path]:
    """The test files of families, relative to the peer's folder: `bert` is test_on_bert.py."""
    found: list[Path] = []
    for family in families:
        named = Path("tests", "test_methods", f"test_on_{family}")
        if (peer / named).is_dir():
            found += sorted(path.relative_to(peer) for path in (peer / named).glob("test_*.py"))
        elif (peer / named.with_suffix(".py")).exists():
            found.append(named.with_suffix(".py"))
        else:
            raise SystemExit(f"--families {family}: no {named}.py in {peer}")
    return found


def environment(mode: str) -> dict[str, str]:
    """Variables for a process that runs code of the peer: offline, and adapterzoo first."""
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PEER_MODE": mode,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TOKENIZERS_PARALLELISM": "false",
    }


def run(
    peer: Path, tests: Sequence[str], mode: str, results: Path, select: str | None, seconds: int
) -> None:
    """Write one line to `results` for each test of files; a test ends after `seconds`."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peer.plugin", "-p", "no:cacheprovider"]
    command += ["-p", "no:warnings", "-o", "addopts=", "--tb=short", "--rootdir=."]
    if select:
        command += ["-k", select]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(seconds)]
    variables = {**environment(mode), "PEER_RESULTS": str(results.resolve())}
    # trainers of the tests write to ./examples, so they run beside the peer's files
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("tests", "conftest.py"):
            Path(scratch, name).symlink_to(peer.resolve() / name)
        subprocess.run([*command, *tests], cwd=scratch, env=variables, check=False)
