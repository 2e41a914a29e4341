"""One process of a data-parallel run on the CPU; `test_ddp.py` starts them.

For each method: the gradients of the first step against those of one process on the whole batch,
then 20 steps, half of them with another adapter, after which all ranks must hold the same bits.
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from families import tiny_config, tiny_inputs
from ranks import METHODS
from snapshots import of_adapter
from torch.nn.parallel import DistributedDataParallel

from adapterzoo import AutoAdapterModel

STEPS = 10


def build(method):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name in ("a", "b"):
        model.add_adapter(name, method)
        model.add_classification_head(name, num_labels=3)
    # dropout draws other numbers in each process; the whole batch is summed in another order
    return model.double().eval()


def batch(rows):
    inputs = tiny_inputs("bert", batch=rows)
    inputs["attention_mask"][:] = 1
    return {**inputs, "labels": torch.arange(rows) % 3}


def train(model, name):
    model.train_adapter(name)
    model.eval()
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def main(rank, world, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    whole = batch(4 * world)
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in whole.items()}
    for method in METHODS:
        alone = build(method)
        expected = train(alone, "a")
        alone(**whole).loss.backward()

        model = build(method)
        for i, name in enumerate(("a", "b")):
            trained = train(model, name)
            parallel = DistributedDataParallel(model, find_unused_parameters=False)
            optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
            for step in range(STEPS):
                optimizer.zero_grad()
                parallel(**mine).loss.backward()
                if i == step == 0:
                    for key, parameter in expected.items():
                        found = trained[key].grad
                        torch.testing.assert_close(found, parameter.grad, rtol=0, atol=1e-12)
                optimizer.step()
            model.verify_replicas()
        before = dict(build(method).named_parameters())
        moved = {k for k, p in model.named_parameters() if not torch.equal(p, before[k])}
        wanted = {k for k in before if of_adapter(k) or k.startswith("heads.")}
        heads = {k.split(".")[1] for k in moved if k.startswith("heads.")}
        if not moved <= wanted or heads != {"a", "b"}:
            raise RuntimeError(f"{method}: moved {sorted(moved - wanted)[:3]}")
        print(method)  # noqa: T201  the test reads it
    # see examples/distributed.py: no DDP module may own the group when Python ends
    del parallel
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
