"""One process of a sharded run on the CPU; `test_fsdp.py` starts two.

For each family and method that is named: training with `fully_shard` against one process on the
whole batch, then what is gathered, saved and loaded again.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from families import tiny_config
from ranks import METHODS
from snapshots import of_adapter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import BertForSequenceClassification, BertModel

import adapterzoo
from adapterzoo import AutoAdapterModel, DoRAConfig, MultiTask
from adapterzoo.errors import CheckpointError, StateError
from adapterzoo.heads import StaticConfig

WORLD = 2
STEPS = 3


def build(family, method, dtype=torch.float64):
    """In float64: the gathered gradients of two batches are summed in another order than of one."""
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family))
    for name in ("a", "b"):
        model.add_adapter(name, method)
        model.add_classification_head(name, num_labels=3)
    return model.to(dtype)


def blocks_of(model):
    base = model.base_model
    return base.encoder.layer if model.config.model_type == "bert" else base.layers


def shard(model, **options):
    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rows):
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (rows, 7), generator=source)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 3}


def train(model, name, inputs):
    """Some steps; the whole gradients of the first one."""
    model.train_adapter(name)
    # dropout draws other numbers in each process
    model.eval()
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    # Adam would make large differences of small ones
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    first = None
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        first = first or {key: whole(p.grad).clone() for key, p in trained.items()}
        optimizer.step()
    return first


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(holds, what):
    if not holds:
        raise RuntimeError(what)


def close(actual, expected, what):
    check(list(actual) == list(expected), f"{what}: other names")
    for key, value in expected.items():
        torch.testing.assert_close(
            whole(actual[key]), value, rtol=0, atol=1e-12, msg=lambda m, k=key: f"{what} {k}: {m}"
        )


def same_files(a, b):
    names = sorted(path.name for path in a.iterdir())
    check(names == sorted(path.name for path in b.iterdir()), names)
    for name in names:
        check((a / name).read_bytes() == (b / name).read_bytes(), f"other bytes in {a / name}")


def refused(error_class, call, *says):
    try:
        call()
    except error_class as error:
        check(all(part in str(error) for part in says), str(error))
    else:
        raise RuntimeError(f"not refused: {says}")


def visible(model):
    """What a refused call must leave as it was."""
    tensors = {key: whole(t) for key, t in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    return tensors, (classes, dict(model.adapters_config), model.known_heads(), model.active_head)


def unchanged(before, after, what):
    same = before[1] == after[1] and list(before[0]) == list(after[0])
    check(same and all(torch.equal(t, after[0][k]) for k, t in before[0].items()), what)


def trains_gathers_and_reloads(family, method, rank, folder):
    everything = batch(4 * WORLD)
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in everything.items()}
    alone, model = build(family, method), build(family, method)
    keys = list(model.state_dict())
    model = shard(model)
    check(list(model.state_dict()) == keys, "sharding renames keys")
    check([key for key, _ in model.named_parameters()] == [k for k, _ in alone.named_parameters()],
          "sharding renames parameters")  # fmt: skip
    for name in ("a", "b"):
        close(train(model, name, mine), train(alone, name, everything), "gradient")
        # leaves parameters of the root whole
        with torch.no_grad():
            model(**mine)
    model.verify_replicas()
    close(model.state_dict(), alone.state_dict(), "after training")

    options = StateDictOptions(full_state_dict=True)
    gathered = get_model_state_dict(model, options=options)
    plain = build(family, method)
    if rank == 0:
        check(list(gathered) == keys, "gathering renames keys")
        plain.load_state_dict(gathered)
        model.save_pretrained(folder / "whole", state_dict=gathered)
    for name in ("a", "b"):
        print_of_sharded = model.adapter_fingerprint(name)
        model.save_adapter(folder / "sharded" / name, name)
        model.save_head(folder / "sharded_head" / name, name)
        if rank == 0:
            check(print_of_sharded == plain.adapter_fingerprint(name), "other fingerprint")
            plain.save_adapter(folder / "plain" / name, name)
            plain.save_head(folder / "plain_head" / name, name)
            same_files(folder / "sharded" / name, folder / "plain" / name)
            same_files(folder / "sharded_head" / name, folder / "plain_head" / name)
    fresh = build(family, method)
    fresh.delete_adapter("a")
    fresh.delete_head("a")
    fresh.load_adapter(folder / "sharded" / "a", set_active=True)
    model.set_active_adapters("a")
    fresh.eval()
    with torch.no_grad():
        # gathered values lie elsewhere in memory, so that a product may round otherwise
        logits = {"logits": model(**everything).logits}
        close({"logits": fresh(**everything).logits}, logits, "the reloaded adapter")
        if rank == 0:
            again = AutoAdapterModel.from_pretrained(folder / "whole").eval()
            again.set_active_adapters("a")
            close({"logits": again(**everything).logits}, logits, "the saved model")
    dist.barrier()


def a_head_inverts_what_acts_on_the_embeddings(rank):
    """Parameters of the whole model, used before its first block, in all blocks and in the head."""

    def made():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("llama"))
        # the rule of Compacter is shared too
        shared = "phm_layer=True,reduction_factor=4,phm_init_range=0.5"
        model.add_adapter("a", f"seq_bn_inv[non_linearity='tanh',{shared}]")
        # with a bias its logits are a view, of which FSDP warns
        model.add_prediction_head_from_config("a", {"head_type": "causal_lm", "bias": False})
        return model.double()

    everything = batch(4 * WORLD)
    everything["labels"] = everything["input_ids"]
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in everything.items()}
    alone, model = made(), shard(made())
    close(train(model, "a", mine), train(alone, "a", everything), "gradient")
    close(model.state_dict(), alone.state_dict(), "after training")


def a_static_head_trains(rank):
    """The layers of a task class, which its own forward reads around the base model."""

    def made():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert"))
        model.add_adapter("a", "lora")
        config = StaticConfig(model_class="BertForSequenceClassification", num_labels=3)
        model.add_prediction_head_from_config("a", config)
        return model.double()

    everything = batch(4 * WORLD)
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in everything.items()}
    alone, model = made(), shard(made())
    close(train(model, "a", mine), train(alone, "a", everything), "gradient")
    close(model.state_dict(), alone.state_dict(), "after training")


def tasks_train_what_they_share(rank):
    """Each process has rows of some tasks of MTL-LoRA only."""

    def made():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert"))
        for name in "abc":
            model.add_adapter(name, "mtl_lora[r=4,n_up_projection=2]")
        model.share_parameters(["a", "b", "c"])
        model.add_classification_head("h", num_labels=3)
        return model.double()

    everything = batch(4 * WORLD)
    everything["task_ids"] = torch.tensor([0, 1, 1, 0, 2, 1, 2, 1])
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in everything.items()}
    alone, model = made(), shard(made())
    setup = MultiTask("a", "b", "c")
    close(train(model, setup, mine), train(alone, setup, everything), "gradient")
    close(model.state_dict(), alone.state_dict(), "after training")


def what_is_fixed_is_refused(rank, folder):
    saved = folder.parent / "bert" / "lora" / "sharded" / "a"
    head = folder.parent / "bert" / "lora" / "sharded_head" / "a"
    model = shard(build("bert", "lora"))
    before = visible(model)
    calls = {
        "add_adapter('c')": lambda: model.add_adapter("c", "lora"),
        "delete_adapter('a')": lambda: model.delete_adapter("a"),
        "add_classification_head('c')": lambda: model.add_classification_head("c"),
        "delete_head('a')": lambda: model.delete_head("a"),
        "merge_adapter('a')": lambda: model.merge_adapter("a"),
        "load_adapter(": lambda: model.load_adapter(saved, load_as="c"),
        "load_head(": lambda: model.load_head(head, load_as="c"),
        "push_adapter_to_hub('ann/a')": lambda: model.push_adapter_to_hub("ann/a", "a"),
    }
    hints = {"delete": "Write ", "push_a": "then hub.push(folder, …) in one"}
    for name, call in calls.items():
        # also where a forward has left the parameters whole
        with torch.no_grad():
            model(**batch(2))
        hint = hints.get(name[:6], "before fully_shard(model)")
        refused(StateError, call, name, "sharded over 2 processes", hint)
        unchanged(before, visible(model), name)

    merged = build("bert", "lora")
    merged.merge_adapter("a")
    merged = shard(merged)
    refused(StateError, merged.reset_adapter, "sharded over 2 processes", "Load the base model")

    file = folder / "file"
    if rank == 0:
        folder.mkdir(parents=True)
        file.touch()
    dist.barrier()
    refused(CheckpointError, lambda: model.save_adapter(file / "a", "a"), "is a file, not a folder")
    for kind in ("adapterhub", "peft"):

        def save(kind=kind):
            model.save_adapter(folder / kind, "a", format=kind)

        refused(StateError, save, "sharded over 2 processes", "Write format='native'")
    model.save_adapter(folder / f"of_rank_{rank}", "a")
    check((folder / "of_rank_0" / "adapter.safetensors").is_file(), "returned before it was there")
    check(not (folder / "of_rank_1").exists(), "written by more than one process")


def static_and_tied_heads_are_saved_as_unsharded(rank, folder):
    def static():
        torch.manual_seed(0)
        model = adapterzoo.init(BertForSequenceClassification(tiny_config("bert")))
        model.add_adapter("a", "lora", set_active=True)
        return model.double().eval()

    def tied():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert"))
        model.add_adapter("a", "lora", set_active=True)
        model.add_masked_lm_head("a")
        return model.double().eval()

    def task():
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert"))
        model.add_adapter("a", "lora", set_active=True)
        model.add_prediction_head_from_config("a", StaticConfig(model_class="BertForMaskedLM"))
        return model.double().eval()

    inputs = {key: value for key, value in batch(2).items() if key != "labels"}
    for kind, make in (("static", static), ("tied", tied), ("task", task)):
        plain, model = make(), shard(make())
        with torch.no_grad():
            found, expected = model(**inputs).logits, plain(**inputs).logits
        close({"logits": found}, {"logits": expected}, kind)
        # the forward has left the tied embedding whole
        model.save_adapter(folder / kind / "sharded", "a")
        model.save_head(folder / kind / "sharded_head")
        if rank == 0:
            plain.save_adapter(folder / kind / "plain", "a")
            plain.save_head(folder / kind / "plain_head")
            same_files(folder / kind / "sharded", folder / kind / "plain")
            same_files(folder / kind / "sharded_head", folder / kind / "plain_head")


def replicas_of_shards_are_compared(rank):
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replicate", "shard"))
    model = shard(build("bert", "lora"), mesh=mesh)
    model.verify_replicas()
    path, module = next(model.adapter_modules("a"))
    with torch.no_grad():
        if rank == 1:
            module.lora_A.to_local().view(torch.int64)[0, 0] ^= 1
    refused(StateError, model.verify_replicas, f"a: {path}/lora_A (ranks [1])", "1 of")


def mixed_dtypes(rank):
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in batch(4 * WORLD).items()}

    def half(method):
        torch.manual_seed(0)
        model = AutoAdapterModel.from_config(tiny_config("bert")).bfloat16()
        model.add_adapter("a", method)
        model.add_classification_head("a", num_labels=3)
        model.train_adapter("a")
        return model

    # fully_shard wants what is trained of a block to be of one dtype; magnitudes are float32
    refused(AssertionError, lambda: shard(half("dora"))(**mine), "uniform original parameter dtype")
    model = shard(half(DoRAConfig(dtype="float32")))
    # the failed forward has left nothing behind
    model(**mine).loss.backward()
    kinds = {p.grad.dtype for key, p in model.named_parameters() if of_adapter(key)}
    check(kinds == {torch.float32}, kinds)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for method in METHODS:
        model = build("bert", method, torch.float32)
        model.train_adapter("a")
        model = shard(model, mp_policy=policy)
        logits = model(**mine)
        check(logits.logits.dtype == torch.bfloat16, "computed in another dtype")
        logits.loss.backward()
        grads = [whole(p.grad) for p in model.parameters() if p.requires_grad]
        check({g.dtype for g in grads} == {torch.float32}, "gradients in another dtype")
        check(all(g.isfinite().all() for g in grads), "gradients are not finite")


def what_the_page_shows(rank, folder):
    """Runs each block of Python of docs/distributed.md."""
    if rank == 0:
        torch.manual_seed(0)
        BertModel(tiny_config("bert")).save_pretrained(folder / "base")
    dist.barrier()
    text = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    check(len(blocks) == 6, f"{len(blocks)} blocks")
    mine = {key: value[4 * rank : 4 * rank + 4] for key, value in batch(4 * WORLD).items()}
    names = {"path": folder / "base", "batches": [mine, mine]}
    # each block has a folder of its own; the last one loads what fully_shard's has saved
    for block, name in zip(blocks, ("", "dp", "ddp", "fsdp", "whole", "fsdp"), strict=True):
        names["folder"] = folder / name
        exec(block, names)
        dist.barrier()
    check((folder / "whole" / "model.safetensors").is_file(), "no model saved")
    loaded = names["model"].adapter_fingerprint("reviews")
    fresh = AutoAdapterModel.from_pretrained(folder / "whole")
    check(fresh.adapter_fingerprint("reviews") == loaded, "other bits on the page")


def main(rank, rendezvous, folder, cases):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    for case in cases:
        family, method = case.split("-")
        trains_gathers_and_reloads(family, method, rank, folder / family / method)
        print(case, flush=True)  # noqa: T201  the test reads it
    a_head_inverts_what_acts_on_the_embeddings(rank)
    a_static_head_trains(rank)
    tasks_train_what_they_share(rank)
    what_is_fixed_is_refused(rank, folder / "refused")
    static_and_tied_heads_are_saved_as_unsharded(rank, folder / "heads")
    replicas_of_shards_are_compared(rank)
    mixed_dtypes(rank)
    what_the_page_shows(rank, folder / "page")
    # see examples/distributed.py: no DDP module may own the group when Python ends
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
