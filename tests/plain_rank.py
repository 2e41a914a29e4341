"""One process of a data-parallel run on plain modules; `plain_table.py` starts them."""

from __future__ import annotations

import functools
import json
import sys

import plain_table as table
import torch.distributed as dist


def main(rank: int, base: str) -> None:
    """Print what comes of each method at a base."""
    found: dict[str, str] = {}
    for where, text in table.rows():
        made: list[table.Case] = []
        if where == base:
            found[text] = table.judged(
                lambda t=text, made=made: made.append(table.Case(base, t)), why := {}
            )
            if made:
                run = functools.partial(table.in_process, made[0], rank, 2)
                found[text] = table.judged(run, why)
                if found[text] == table.WRONG:
                    found[text] = str(why)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    rank, base, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    main(rank, base)
    dist.destroy_process_group()
