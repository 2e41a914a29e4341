"""The command line; `tests.peer.of_peft` says what it runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.peer import suite

from . import models, report


def run(given: argparse.Namespace, results: Path) -> None:
    """Write one line to `results` for each test of the files."""
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peer.of_peft.plugin", "--rootdir=."]
    command += ["-p", "no:cacheprovider", "-p", "no:warnings", "-o", "addopts=", "--tb=short"]
    command += ["--continue-on-collection-errors"]
    if given.select:
        command += ["-k", given.select]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", str(given.timeout)]
    settings = {
        "PEER_ON": given.on, "PEER_HERE": "1" if given.here else "",
        "PEER_EVERY": str(given.every), "PEER_RESULTS": str(results.resolve()),
        "HF_HOME": str(given.home.resolve()),
    }  # fmt: skip
    # what the tests write lies beside their files
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "tests").symlink_to(given.peft.resolve() / "tests")
        files = [f"tests/{name}" for name in given.files] or ["tests"]
        variables = {**suite.environment("strict"), **settings}
        subprocess.run([*command, *files], cwd=scratch, env=variables, check=False)


def counts(results: Path) -> str:
    """The outcomes of a run by file, as lines of text."""
    found: dict[str, Counter[str]] = {}
    for line in results.read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        found.setdefault(test["id"].partition("::")[0], Counter())[test["outcome"]] += 1
    return "\n".join(f"{name}: {dict(each)}" for name, each in sorted(found.items()))


def main() -> None:
    """Fill the cache of models, or run the tests."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer.of_peft")
    parser.add_argument("what", choices=("models", "run", "report"))
    parser.add_argument("--home", type=Path, help="folder of the cache of the Hub")
    parser.add_argument("--peft", type=Path, help="a folder with PEFT's tests")
    parser.add_argument("--on", choices=("adapterzoo", "peft"), default="adapterzoo")
    parser.add_argument("--files", nargs="+", default=(), help="names of test files")
    parser.add_argument("--every", type=int, default=1, help="run one in n tests")
    parser.add_argument("--here", action="store_true", help="leave out methods that only PEFT has")
    parser.add_argument("--results", type=Path, default=Path("build", "peer_peft"))
    parser.add_argument("-k", dest="select", help="an expression of pytest")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each test")
    given = parser.parse_args()
    if given.what == "report":
        runs = (given.results / f"{on}.jsonl" for on in ("peft", "adapterzoo"))
        sys.stdout.write(report.table(*runs))
    elif given.home is None:
        parser.error("--home is the folder of the cache of the Hub")
    elif given.what == "models":
        os.environ["HF_HOME"], os.environ["HF_HUB_OFFLINE"] = str(given.home), "1"
        sys.stdout.writelines(f"{line}\n" for line in models.fill(given.home))
    elif given.peft is None:
        parser.error("--peft is the folder with PEFT's tests")
    else:
        results = given.results / f"{given.on}.jsonl"
        run(given, results)
        sys.stdout.write(f"{counts(results)}\n")


if __name__ == "__main__":
    main()
