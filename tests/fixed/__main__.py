"""The command that compares the tables, and rewrites them with `--write`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import stubs

from . import tables


def main(arguments: Sequence[str]) -> int:
    """Print what differs; return 1 if anything does and is not written."""
    parser = argparse.ArgumentParser(description="Compare the tables of tests/data/fixed_*.json.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(tables.PARTS)}")
    parser.add_argument("--write", action="store_true", help="rewrite what differs")
    chosen = parser.parse_args(arguments)
    unknown = {*chosen.parts} - {*tables.PARTS}
    if unknown:
        parser.error(f"there is no part {min(unknown)!r}. Write some of {', '.join(tables.PARTS)}.")
    count = 0
    for part in chosen.parts or tables.PARTS:
        found = {row: compute() for row, compute in tables.PARTS[part]().items()}
        stored = tables.read(part) if tables.file_of(part).exists() else {}
        for line in tables.differences(stored, found, (part,)):
            sys.stdout.write(f"{line}\n")
            count += 1
        if chosen.write:
            tables.write(part, found)
    if chosen.write and "names" in (chosen.parts or tables.PARTS):
        stubs.write()
    sys.stdout.write(f"{count} differences{' written' if chosen.write else ''}\n")
    return int(count > 0 and not chosen.write)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
