"""One process of a data-parallel run on the CPU; `test_ddp.py` starts them.

For each method: the gradients of the first step against those of one process on the whole batch,
then 20 steps, half of them with another adapter, after which all ranks must hold the same bits.
The same for tasks, of which each process has only some.
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from families import tiny_config, tiny_inputs
from ranks import BESIDE, METHODS
from snapshots import of_adapter
from torch.nn.parallel import DistributedDataParallel

from adapterzoo import AutoAdapterModel, MultiTask
from adapterzoo.heads import StaticConfig

STEPS = 10
TASKS = (
    dict.fromkeys("abc", "mtl_lora[r=4,n_up_projection=2]"),
    {"a": "lora", "b": "seq_bn", "c": "dora"},
    {"a": "ia3", "b": "prefix_tuning", "c": "oft"},
)


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


def trains_a_static_head(rank, world):
    whole = batch(4 * world)
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in whole.items()}
    models = []
    for _ in range(2):
        model = build("lora")
        config = StaticConfig(model_class="BertForSequenceClassification", num_labels=3)
        model.add_prediction_head_from_config("a", config, overwrite_ok=True)
        torch.manual_seed(1)
        torch.nn.init.normal_(model.double().heads["a"].classifier.weight)
        models.append((model, train(model, "a")))
    (alone, expected), (model, trained) = models
    alone(**whole).loss.backward()
    parallel = DistributedDataParallel(model)
    parallel(**mine).loss.backward()
    for key, parameter in expected.items():
        torch.testing.assert_close(trained[key].grad, parameter.grad, rtol=0, atol=1e-12)


def of_tasks(configs):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name, config in configs.items():
        model.add_adapter(name, config)
    if len({*configs.values()}) == 1:
        model.share_parameters([*configs])
    model.add_classification_head("h", num_labels=3)
    model.double()
    trained = train(model, MultiTask(*configs))
    model.active_head = "h"
    return model, trained


def trains_tasks(rank, world):
    everything = batch(4 * world)
    ids = torch.tensor([[0, 1, 1, 0], [2, 1, 2, 1]] * (world // 2)).flatten()
    mine = {k: v[4 * rank : 4 * rank + 4] for k, v in {**everything, "task_ids": ids}.items()}
    for configs in TASKS:
        (alone, expected), (model, trained) = of_tasks(configs), of_tasks(configs)
        alone(**everything, task_ids=ids).loss.backward()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            parallel(**mine).loss.backward()
            for key, parameter in expected.items() if step == 0 else ():
                torch.testing.assert_close(trained[key].grad, parameter.grad, rtol=0, atol=1e-12)
            optimizer.step()
        model.verify_replicas()
    print("tasks")  # noqa: T201  the test reads it


def main(rank, world, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    whole = batch(4 * world)
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in whole.items()}
    for method in (*METHODS, BESIDE):
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
    trains_a_static_head(rank, world)
    trains_tasks(rank, world)
    # see examples/distributed.py: no DDP module may own the group when Python ends
    del parallel
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
