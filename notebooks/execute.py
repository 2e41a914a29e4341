"""Runs notebooks from top to bottom and writes what they print and draw into them.

    make notebooks                                      # all
    make notebooks ARGS="notebooks/01_first_adapter.ipynb"

What changes from run to run without saying anything (times, the kernel's version, what libraries
log on standard error) is left out, so that a diff shows what has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
# seconds for one cell
LIMIT = 1200


def main() -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, help="all if none")
    for path in parser.parse_args().notebooks or sorted(HERE.glob("*.ipynb")):
        print(path.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            notebook = run(path, Path(folder))
        clean(notebook)
        nbformat.write(notebook, path)


def run(path: Path, folder: Path, quick: bool = False) -> Any:
    """The notebook with fresh outputs.

    Args:
        path: of the notebook.
        folder: where it runs, and writes what it writes.
        quick: whether it takes few rows.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=LIMIT,
        startup_timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        # no database of everything that was ever typed
        extra_arguments=["--HistoryManager.enabled=False", "--IPKernelApp.log_level=40"],
    )
    with _environment(folder, quick):
        client.execute()
    return notebook


def clean(notebook: Any) -> None:
    """Keep what a reader sees, and by which code it was made."""
    notebook.metadata = {
        "executed": digest(notebook),
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]


def digest(notebook: Any) -> str:
    """Of all code: outputs of other code are old ones."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()[:16]


@contextmanager
def _environment(folder: Path, quick: bool) -> Iterator[None]:
    """What the kernel is started with."""
    before = dict(os.environ)
    paths = [str(HERE), before.get("PYTHONPATH", "")]
    os.environ |= {
        "IPYTHONDIR": str(folder / ".ipython"),
        "NOTEBOOKS_QUICK": "1" if quick else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
