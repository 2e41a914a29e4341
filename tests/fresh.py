"""Runs pieces of code, each in a process of its own that has imported nothing of adapterzoo yet.

A process that imports torch and transformers takes seconds, so one does, and forks for each piece.
Reads a list of pieces as JSON; writes a list of [exit status, what was printed].
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

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
    done = subprocess.run(
        [sys.executable, __file__, *["bare"] * bare],
        input=json.dumps(pieces),
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        check=True,
    )
    return [(status, output) for status, output in json.loads(done.stdout)]


def forked(piece: str) -> tuple[int, str]:
    """The exit status and the output of one piece."""
    with tempfile.TemporaryFile("w+") as file:
        if (child := os.fork()) == 0:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            status = 1
            try:
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
        file.seek(0)
        return status, file.read()


def main() -> None:
    """Read the pieces, run them and write what came of them."""
    is_bare = bool(sys.argv[1:])
    for name in ("adapterzoo.cli",) if is_bare else OTHERS:
        importlib.import_module(name)
    unwanted = OTHERS[1:] if is_bare else ("adapterzoo",)
    found = [name for name in sys.modules if name.partition(".")[0] in unwanted]
    if found:
        raise SystemExit(f"not fresh: {found}")
    sys.stdout.write(json.dumps([forked(piece) for piece in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
