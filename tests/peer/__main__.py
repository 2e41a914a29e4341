"""The command line; `tests.peer` says what it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import programs, suite, table

PAGE = Path(__file__).with_name("results.md")
FAMILIES = ("bert", "gpt2", "llama", "t5", "vit", "bart", "whisper", "clip")


def main() -> None:
    """Run what is asked for, or write the page of counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.peer")
    parser.add_argument(
        "what", nargs="?", choices=("suite", *table.PROGRAMS, "table"), default="suite"
    )
    parser.add_argument("--peer", type=Path, help="a checkout of adapters 1.3")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    parser.add_argument("--names", nargs="+", default=(), help="of scripts, notebooks or pages")
    parser.add_argument("--mode", choices=("strict", "renames"), default="strict")
    parser.add_argument("--results", type=Path, default=Path("build", "peer"))
    parser.add_argument("-k", dest="select", help="an expression of pytest")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each test")
    chosen = parser.parse_args()
    if chosen.what == "table":
        PAGE.write_text(table.render(chosen.results), encoding="utf-8")
        return
    if chosen.peer is None:
        parser.error("--peer is the folder of a checkout of adapters 1.3")
    if chosen.what != "suite":
        results = chosen.results / "strict" / f"{chosen.what}.jsonl"
        programs.run(chosen.peer, chosen.what, results, chosen.names, chosen.timeout)
        return
    for family in chosen.families:
        tests = [str(path) for path in suite.files(chosen.peer, [family])]
        results = chosen.results / chosen.mode / f"{family}.jsonl"
        suite.run(chosen.peer, tests, chosen.mode, results, chosen.select, chosen.timeout)


if __name__ == "__main__":
    main()
