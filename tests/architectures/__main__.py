"""The command that writes the pages."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from . import survey, table


def main(arguments: Sequence[str]) -> int:
    """Write the pages; return 1 if a row has turned red or the survey found something wrong."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    parser = argparse.ArgumentParser(
        description="Write docs/architecture-table.md and docs/architectures.md anew."
    )
    parser.add_argument("page", nargs="?", type=Path)
    parser.add_argument(
        "--types",
        nargs="+",
        help="run these model types only; print their cells as JSON if there is no page",
    )
    parser.add_argument(
        "--stale",
        action="store_true",
        help="run the model types for which a new method is chosen in the column 'another'",
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    chosen = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    if chosen.types and chosen.page is None:
        for row in table.of_types(chosen.types):
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        return 0
    known: dict[str, table.Cells] = {}
    if chosen.page is not None and chosen.page.exists():
        known = table.read(chosen.page.read_text(encoding="utf-8"))
    some = table.stale(known) if chosen.stale else chosen.types
    every = sorted(MODEL_MAPPING_NAMES)
    # the shorter part first: if it fails, nothing is lost
    lines = list(survey.survey())
    found = table.sweep(every if some is None else some, chosen.workers)
    if some is not None:
        found = known | found
    if chosen.page is not None:
        version, more = transformers.__version__, table.more(found)
        chosen.page.write_text(survey.render(lines, version, more), encoding="utf-8")
        short = chosen.page.with_name("architectures.md")
        short.write_text(survey.finding(lines, version, more), encoding="utf-8")
    wrong = [f"{x.model_type}: {x.wrong}" for x in lines if x.wrong]
    wrong += [
        f"{name}: {row['why not']}"
        for name, row in found.items()
        if table.RED in row.values() and row != known.get(name)
    ]
    sys.stderr.write("\n".join(wrong) + "\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
