"""The command line; the package says what it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import programs, table

PAGE = Path(__file__).with_name("results.md")


def main() -> None:
    """Run what is asked for, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m peft_examples")
    parser.add_argument("what", nargs="+", choices=(*programs.KINDS, "table"))
    parser.add_argument("--peft", type=Path, help="a checkout of PEFT 0.21")
    parser.add_argument("--names", nargs="+", default=())
    parser.add_argument("--results", type=Path, default=Path("build", "peft_examples"))
    parser.add_argument("--libraries", nargs="+", default=programs.LIBRARIES)
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each program")
    chosen = parser.parse_args()
    if chosen.what == ["table"]:
        PAGE.write_text(table.render(chosen.results), encoding="utf-8")
        return
    if chosen.peft is None:
        parser.error("--peft is the folder of a checkout of PEFT 0.21")
    for kind in chosen.what:
        results = chosen.results / f"{kind}.jsonl"
        programs.run(
            chosen.peft.resolve(), kind, results, chosen.names, chosen.timeout, chosen.libraries
        )


if __name__ == "__main__":
    main()
