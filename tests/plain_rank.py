"""One process of a data-parallel run on plain modules; `plain_table.py` starts them."""

from __future__ import annotations

import functools
import json
import sys

import plain_table as table
import torch.distributed as dist


def said(base: str, text: str, rank: int) -> str:
    """What comes of a method, or why it is wrong."""
    made: list[table.Case] = []
    why: table.Why = {}
    found = table.judged(lambda: made.append(table.Case(base, text)), why)
    if made:
        found = table.judged(functools.partial(table.in_process, made[0], rank, 2), why)
    return why[()] if found == table.WRONG else found


def main(rank: int, base: str) -> None:
    """Print what comes of each method at a base."""
    found = {text: said(base, text, rank) for where, text in table.rows() if where == base}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    rank, base, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    main(rank, base)
    dist.destroy_process_group()
