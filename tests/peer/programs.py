"""Runs the peer's example scripts and notebooks, each in a process of its own, on tiny models.

Only the import changes: `adapters` is adapterzoo, in the mode `strict`. A line of results has the
name, the outcome, where and why a program stopped, for the rules to explain, and its `facts`: what
it trained, evaluated, saved and loaded. A script that trains runs twice: the second run loads the
adapter that the first has saved, and must compute the same scores.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import pages
from .facts import Facts
from .scripts import SCRIPTS, Script
from .suite import environment
from .tiny import local_source


def run(peer: Path, what: str, results: Path, names: Iterable[str], seconds: int) -> None:
    """Write a line for each program: `what` is "scripts", "notebooks" or "pages".

    Args:
        peer: a checkout of adapters.
        what: which programs.
        results: the file to write.
        names: of the programs, all if empty.
        seconds: after which a program is ended.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    of_peer = {"notebooks": _notebooks, "pages": pages.names}
    known = list(SCRIPTS) if what == "scripts" else of_peer[what](peer)
    with results.open("w", encoding="utf-8") as file:
        for name in names or known:
            file.write(json.dumps(_run_one(peer.resolve(), what, name, seconds)) + "\n")
            file.flush()


def _notebooks(peer: Path) -> list[str]:
    return sorted(path.stem for path in (peer / "notebooks").glob("*.ipynb"))


def _run_one(peer: Path, what: str, name: str, seconds: int) -> dict[str, Any]:
    start = time.monotonic()
    line: dict[str, Any] = {"id": f"{what}::{name}", "facts": {}}
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "tests").symlink_to(peer / "tests")
        steps = _steps(name) if what == "scripts" else [(name, False)]
        for step in steps:
            outcome = _child(peer, what, step, Path(scratch), seconds)
            facts = outcome.pop("facts")
            if step[0] == name:
                _merge(line["facts"], facts)
            line |= outcome
            if line["failures"]:
                break
    outcome = "failed" if line["failures"] else "passed"
    return {**line, "outcome": outcome, "seconds": round(time.monotonic() - start, 1)}


def _steps(name: str) -> list[tuple[str, bool]]:
    """The runs of a script: names, and whether it is the second run of that script."""
    script = SCRIPTS[name]
    before = [(script.first, False)] if script.first else []
    return [*before, (name, False), *([(name, True)] if script.again else [])]


def _merge(facts: dict[str, str], more: dict[str, str]) -> None:
    for fact, words in more.items():
        facts[fact] = "; ".join(dict.fromkeys(w for w in (facts.get(fact), words) if w))


def _child(
    peer: Path, what: str, step: tuple[str, bool], scratch: Path, seconds: int
) -> dict[str, Any]:
    name, again = step
    # the names of a notebook are those of a bare module __main__, which data sets can pickle
    command = [sys.executable, "-c", "from peer.programs import main; main()"]
    command += [str(peer), what, name, str(scratch)]
    variables = {**environment("strict"), "HF_HOME": str(scratch / "cache")}
    outcome = scratch / "outcome.json"
    outcome.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            [*command, *(["again"] if again else [])], cwd=scratch, env=variables,
            timeout=seconds, check=False, capture_output=True, text=True,
        )  # fmt: skip
        said = done.stderr.strip().split("\n")[-1]
    except subprocess.TimeoutExpired:
        said = f"TimeoutExpired: after {seconds} s"
    if not outcome.exists():
        return {"failures": [_failure(said, "", "")], "facts": {}}
    found: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    return found


def _failure(error: str, line: str, frames: str) -> dict[str, str]:
    return {"subtest": "", "when": "call", "error": error, "line": line, "frames": frames}


# --- in the process of a program ---


def main() -> None:
    """Run one program; the arguments are those that `_child` gives."""
    _main(Path(sys.argv[1]), *sys.argv[2:4], Path(sys.argv[4]), "again" in sys.argv[5:])


def _main(peer: Path, what: str, name: str, scratch: Path, again: bool) -> None:
    from . import offline, removed, shim, tiny

    shim.install("strict")
    fixtures = peer / "tests" / "fixtures"
    hub = tiny.Hub(fixtures / "SiBERT" / "vocab.txt", Path(tempfile.mkdtemp(dir=scratch)))
    offline.install(fixtures)
    removed.install(hub)
    facts = Facts()
    facts.install()
    errors: dict[int, BaseException] = {}
    more: dict[str, Any] = {}
    try:
        if what == "pages":
            more["blocks"], errors = pages.run(peer / "docs" / f"{name}.md")
        elif what == "scripts":
            _script(peer, SCRIPTS[name], hub, scratch, again)
        else:
            _cells(peer / "notebooks" / f"{name}.ipynb")
    except BaseException as error:  # noqa: BLE001  a program may also exit
        if not (isinstance(error, SystemExit) and not error.code):
            errors[0] = error
    if what == "scripts" and not errors:
        facts.compare_scores(scratch / f"{name}.scores", again)
        facts.expect(("evaluated", "loaded") if again else SCRIPTS[name].facts)
    errors |= dict(enumerate(facts.failures, 1000))
    described = [{**_described(e, peer), "subtest": str(n)} for n, e in errors.items()]
    outcome = {"failures": described, "facts": facts.summary(), **more}
    (scratch / "outcome.json").write_text(json.dumps(outcome), encoding="utf-8")


def _script(peer: Path, script: Script, hub: Any, scratch: Path, again: bool) -> None:
    path = peer / "examples" / "pytorch" / script.path
    given = (script.arguments_again if again else script.arguments).format(
        data=peer / "tests/fixtures/samples",
        out=scratch / ("again" if again else "out"),
        adapter=next((f.parent for f in scratch.glob("out/*/adapter*.safetensors")), ""),
    )
    model = ["--model_name_or_path", str(hub.model(script.model))] if script.model else []
    sys.argv = [str(path), *model, *given.split()]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def _cells(path: Path) -> None:
    """Run the code cells of a notebook, without shell commands, in one namespace."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names = vars(sys.modules["__main__"])
    for number, source in enumerate(_sources(notebook)):
        exec(compile(local_source(source), f"{path.stem}, cell {number}", "exec"), names)


def _sources(notebook: dict[str, Any]) -> Iterator[str]:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).split("\n")
            yield "\n".join("" if line.lstrip().startswith(("!", "%")) else line for line in lines)


def _described(error: BaseException, peer: Path) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in frames]
    own = [f for f in frames if f.filename.startswith(str(peer)) or ", cell " in f.filename]
    line = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} {own[-1].line}" if own else ""
    kind = type(error)
    text = f"{kind.__module__}.{kind.__qualname__}: {error}".removeprefix("builtins.")
    return _failure(text[:1200], line, " < ".join(reversed(places))[:600])
