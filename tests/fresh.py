"""Runs pieces of code, each in a process of its own that has imported nothing of adapterzoo yet.

A process that imports torch and transformers takes seconds, so one does, and forks for each piece.
Reads lines of JSON, [piece, folder]; writes a line of [exit status, output, errors] for each.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[1]
# what adapterzoo imports of other packages
OTHERS = (
    "click", "torch", "huggingface_hub", "transformers.modeling_utils", "transformers.pipelines",
    "transformers.trainer_seq2seq", "transformers.models.auto.processing_auto",
    "transformers.models.bert.modeling_bert",
)  # fmt: skip


def run(
    pieces: list[str], folder: Path, bare: bool = False, **environment: str
) -> list[tuple[int, str]]:
    """The exit status and the output of each piece, run in the folder one after the other.

    A bare process has imported the command line, and none of the slow packages.
    """
    found = [_reply(piece, folder, bare, environment) for piece in pieces]
    return [(status, errors + printed) for status, printed, errors in found]


def command(*words: object, folder: Path = ROOT, code: int = 0) -> subprocess.CompletedProcess[str]:
    """What `adapterzoo WORDS` prints, run in the folder; it must end with the code."""
    line = ["adapterzoo", *map(str, words)]
    piece = (
        f"import runpy, sys; sys.argv = {line}; runpy.run_module('adapterzoo', None, '__main__')"
    )
    done = subprocess.CompletedProcess(line, *_reply(piece, folder, False, {}))
    assert done.returncode == code, done.stderr
    return done


def _reply(
    piece: str, folder: Path, bare: bool, environment: dict[str, str]
) -> tuple[int, str, str]:
    process = _started(bare, tuple(sorted(environment.items())))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps([piece, str(folder)]) + "\n")
    process.stdin.flush()
    status, printed, errors = json.loads(process.stdout.readline())
    return status, printed, errors


@functools.cache
def _started(bare: bool, environment: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    """The process that imports, for all pieces with this environment."""
    process = subprocess.Popen(
        [sys.executable, __file__, *["bare"] * bare],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict(environment)},
    )
    atexit.register(process.kill)
    return process


def forked(piece: str, folder: str) -> tuple[int, str, str]:
    """The exit status of one piece, run in the folder, what it printed, and its errors."""
    with (
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as errors,
        Path(os.devnull).open() as nothing,
    ):
        if (child := os.fork()) == 0:
            for number, file in enumerate((nothing, printed, errors)):
                os.dup2(file.fileno(), number)
            status = 1
            try:
                os.chdir(folder)
                exec(compile(piece, "<piece>", "exec"), {"__name__": "__main__"})
                status = 0
            except SystemExit as left:
                status = left.code if isinstance(left.code, int) else int(left.code is not None)
            except Exception:  # noqa: BLE001  whatever a piece of code raises
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for file in (printed, errors):
            file.seek(0)
        return status, printed.read(), errors.read()


def main() -> None:
    """Run each piece that is read, and write what came of it."""
    is_bare = bool(sys.argv[1:])
    for name in ("adapterzoo.cli",) if is_bare else OTHERS:
        importlib.import_module(name)
    unwanted = OTHERS[1:] if is_bare else ("adapterzoo",)
    found = [name for name in sys.modules if name.partition(".")[0] in unwanted]
    if found:
        raise SystemExit(f"not fresh: {found}")
    for line in sys.stdin:
        sys.stdout.write(json.dumps(forked(*json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
