"""The command line: plan, record, kill, report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bugs import Bug, draw, locate, plant, rewrite

HERE = Path(__file__).resolve().parent
LIST = HERE / "mutants.json"
HITS = """\
import os

import torch

_seen = set()
_file = os.open({path!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_write = os.write


def hit(bug):
    # a compiler sees a constant here
    if torch.compiler.is_compiling():
        return
    pair = bug, os.environ.get("PYTEST_CURRENT_TEST", "")
    if pair not in _seen:
        try:
            _write(_file, ("%d %s\\n" % pair).encode())
            _seen.add(pair)
        except OSError:  # a test in which every disk is full
            pass
"""


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A copy of what git tracks or would, with the plugin."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder, "tree")
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(command, cwd=root, text=True).split("\0"):
            if (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name)
        # golden files that some tests look for beside the checkout
        if (beside := root.parent / "shared").exists():
            Path(folder, beside.name).symlink_to(beside.resolve())
        shutil.copy(HERE / "plugin.py", tree / "mutation_plugin.py")
        yield tree


def pytest(tree: Path, tests: list[str], options: str, limit: float) -> tuple[int, list[Any]]:
    """Run tests in a tree: pytest's status, -1 after a time-out, and what has run."""
    log, listed = tree.parent / "log.jsonl", tree.parent / "tests.txt"
    log.write_text("")
    listed.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "mutation_plugin", *shlex.split(options), *([f"@{listed}"] if tests else [])]
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "", "MUTATION_LOG": str(log)}
    own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env={**os.environ, **own}, stdout=sys.stderr, start_new_session=True
    )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = -1
    finally:
        # whatever the tests have started ends with them
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, [json.loads(line) for line in log.read_text().splitlines()]


def bad(entries: list[Any]) -> list[str]:
    """The tests that failed, and the files that could not be collected."""
    return list(dict.fromkeys(e["test"] for e in entries if e["outcome"] == "failed"))


def record(root: Path, out: Path, bugs: list[Bug], options: str) -> None:
    """Run the suite once, less what is recorded, and note which test reaches which bug."""
    hits, timed = out / "hits.txt", out / "durations.json"
    done = read(timed) if timed.exists() else {}
    with copied(root) as tree:
        (tree.parent / "done.txt").write_text("\n".join(done), encoding="utf-8")
        (tree / "mutation_hits.py").write_text(HITS.format(path=str(hits)))
        places = defaultdict(list)
        for bug in bugs:
            if (found := locate(tree, bug)) is not None:
                form = "_hit({}); " if found[1].kind == "statement" else "(_hit({}) or ({{}}))"
                form = form.format(bug["number"])
                change = (
                    (lambda t, f=form: f.format(t)) if "{" in form else (lambda t, f=form: f + t)
                )
                places[found[0]].append((found[1], change))
        for path, changes in places.items():
            rewrite(path, changes)
            head, future, rest = path.read_text().partition(
                "from __future__ import annotations\n\n"
            )
            path.write_text(f"{head}{future}from mutation_hits import hit as _hit; {rest}")
        entries = pytest(tree, [], options, 6 * 3600)[1]
    # a test that was cut off has not ended
    ended = {e["test"] for e in entries if e["when"] == "teardown"}
    seconds: Counter[str] = Counter(done)
    for entry in entries:
        seconds[entry["test"]] += entry["seconds"] if entry["test"] in ended else 0.0
    seconds = Counter(
        {t: round(s, 4) for t, s in sorted(seconds.items()) if t in ended | set(done)}
    )
    write(timed, seconds)
    reach: dict[str, set[str]] = {str(bug["number"]): set() for bug in bugs}
    for line in hits.read_text().splitlines():
        number, _, phase = line.partition(" ")
        test = phase.rpartition(" (")[0]
        below = test.removesuffix("*")
        reach[number] |= (
            {test} & set(seconds) if below == test else {t for t in seconds if t.startswith(below)}
        )
    write(out / "reach.json", {number: sorted(tests) for number, tests in reach.items()})
    file = out / "broken.json"
    failed = list(dict.fromkeys([*(read(file) if file.exists() else []), *bad(entries)]))
    with copied(root) as tree:
        broken = bad(pytest(tree, failed, "", 3600)[1]) if failed else []
    write(file, broken)
    print(f"{len(seconds)} tests, {len(failed)} failed, {len(broken)} of them without the recorder")


def ordered(tests: set[str], seconds: dict[str, float]) -> list[str]:
    """The fastest test of each function first, then the second fastest of each, and so on."""
    rank: Counter[str] = Counter()
    keys = {}
    for test in sorted(tests, key=lambda t: (seconds[t], t)):
        function = test.partition("[")[0]
        keys[test] = rank[function], seconds[test]
        rank[function] += 1
    return sorted(keys, key=keys.__getitem__)


def killed(tree: Path, tests: list[str], seconds: dict[str, float], cap: float) -> dict[str, Any]:
    """Run tests until one fails: 60 of them, then a minute's at a time, up to a total."""
    spent, start = 0.0, 0
    while start < len(tests) and (start == 0 or spent < cap):
        stop, total = start, 0.0
        while stop < len(tests) and (total < 60 if start else stop < 60):
            total += seconds[tests[stop]]
            stop += 1
        status, entries = pytest(tree, tests[start:stop], "-x", 120 + 5 * total)
        if status == 4:
            # the bug changed what the tests are called, which nobody would see
            functions = sorted({test.partition("[")[0] for test in tests[start:stop]})
            status, entries = pytest(tree, functions, "-x", 120 + 5 * total)
        if status != 0:
            by = [*bad(entries), "time-out" if status < 0 else f"status {status}"]
            return {"caught": True, "by": by[0]}
        spent, start = spent + total, stop
    return {"caught": False, "ran": start, "of": len(tests)}


def kill(root: Path, out: Path, bugs: list[Bug], cap: float, again: list[int]) -> None:
    """Plant each bug, and run the tests that reach it, then the others of the same files."""
    seconds, reach = read(out / "durations.json"), read(out / "reach.json")
    file = out / "results.json"
    results = read(file) if file.exists() else {}
    usable = set(seconds) - set(read(out / "broken.json"))
    for bug in bugs:
        name, began = str(bug["number"]), time.monotonic()
        if bug["number"] not in again if again else name in results:
            continue
        reaching = usable & set(reach[name])
        files = {test.partition("::")[0] for test in reaching}
        others = {t for t in usable - reaching if t.partition("::")[0] in files}
        tests = ordered(reaching, seconds) + ordered(others, seconds)
        with copied(root) as tree:
            there = plant(tree, bug)
            results[name] = killed(tree, tests, seconds, cap) if there else {"caught": None}
        results[name] |= {"reached by": len(reaching), "seconds": round(time.monotonic() - began)}
        write(file, results)
        print(name, results[name], flush=True)


def report(out: Path, bugs: list[Bug]) -> None:
    """Print what was caught, by package and by operator, and all that was not."""
    results = read(out / "results.json")
    state = {True: "caught", False: "survived", None: "not in the code or not run"}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for bug in bugs:
        result = results.get(str(bug["number"]), {"caught": None})
        for group in ("all", bug["file"].split("/")[1], bug["operator"]):
            counts[group][state[result["caught"]]] += 1
        if not result["caught"]:
            print(bug["number"], state[result["caught"]], bug["file"], bug["function"], result)
            print(f"  - {bug['original']}\n  + {bug['mutated']}\n  {bug.get('note', '')}")
    for group, counted in counts.items():
        print(f"{group:20}", ", ".join(f"{n} {what}" for what, n in sorted(counted.items())))


parser = argparse.ArgumentParser(prog="python -m tests.mutation")
parser.add_argument("command", choices=["plan", "record", "kill", "report"])
parser.add_argument("numbers", nargs="*", type=int, help="bugs to run again")
parser.add_argument("--root", type=Path, default=HERE.parents[1], help="checkout to test")
parser.add_argument("--out", type=Path, help="folder of the results")
parser.add_argument("--seed", type=int, default=1, help="of the list of bugs")
parser.add_argument("--cap", type=float, default=240.0, help="seconds of tests for one bug")
parser.add_argument("--pytest", default="-n 2 --dist worksteal", help="options of the recording")
args = parser.parse_intermixed_args()
root, out = args.root.resolve(), (args.out or args.root / "build" / "mutants").resolve()
out.mkdir(parents=True, exist_ok=True)
if args.command == "plan":
    write(LIST, draw(root, args.seed, 15))
elif args.command == "record":
    record(root, out, read(LIST), args.pytest)
elif args.command == "kill":
    kill(root, out, read(LIST), args.cap, args.numbers)
else:
    report(out, read(LIST))
