"""One process of the modes that take a process of their own; `devices_table.py` starts them.

It prints one JSON object: column to cells, and a column for each planted bug. Without arguments
it runs the replicas on pretend GPUs, for which torch gets a new device type; with them, it is one
process of a group.
"""

from __future__ import annotations

import gc
import json
import sys
from datetime import timedelta

import device_modes as modes
import device_steps as steps
import torch
import torch.distributed as dist


def unequal(adapter, x, y):
    """A tensor in an attribute, of which each process has another."""
    if dist.get_rank():
        y = y * 1.5
    return y


cache = {}


def kept(adapter, x, y):
    """A tensor in a global, on the device of the first that needed it."""
    return y * cache.setdefault((x.device.type, y.dtype), torch.ones_like(y[0, 0, 0]))


def born(adapter, x, y):
    """A copy of the parameters, made at the first call, that no step reaches."""
    now = sum(parameter.detach().double().sum() for parameter in adapter.parameters())
    return y * (1 + 16 * (adapter.__dict__.setdefault("copy", now) - now)).to(y.dtype)


def main(rank=None, world=1, rendezvous=""):
    columns = {}
    if rank is None:
        torch.utils.backend_registration._setup_privateuseone_for_python_backend(rename="pretend")
        torch.pretend.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
        runs = {"fake replica": (modes.replica, kept)}
        given = {}
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=2),
        )
        runs = {"DDP": (modes.ddp, unequal), "FSDP2": (modes.fsdp2, born)}
        given = {"rank": rank, "world": world}
    for column, (mode, bug) in runs.items():
        columns[column] = modes.cells(mode, **given)
        with steps.planted(bug):
            columns[f"planted {column}"] = modes.cells(mode, ["lora"], **given)
    json.dump(columns, sys.stdout)
    if dist.is_initialized():
        # see examples/distributed.py: no DDP module may own the group when Python ends
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(a) for a in sys.argv[1:3]), *sys.argv[3:])
