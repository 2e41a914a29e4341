"""`task_ids` where a call is compiled, recomputed or divided over devices: MTL-LoRA and others."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from graphs import Counting
from pretend_gpus import replicas_on_cpu
from snapshots import stir

from adapterzoo import ADAPTER_CONFIG_MAP, AdapterSetup, AutoAdapterModel, MultiTask

IDS = [2, 0, 1, 0]
METHODS = {
    "mtl_lora": dict.fromkeys("abc", "mtl_lora[r=4,alpha=8,n_up_projection=2]"),
    "others": {"a": "lora[r=4]", "b": "seq_bn", "c": "dora[r=4]"},
}
EACH = pytest.mark.parametrize("configs", METHODS.values(), ids=METHODS)


def made(configs, layers=2):
    """Tasks a, b and c, trained; those of MTL-LoRA share A and B."""
    torch.manual_seed(0)
    config = tiny_config("bert")
    config.num_hidden_layers = layers
    model = AutoAdapterModel.from_config(config).double().eval()
    for name, config in configs.items():
        model.add_adapter(name, config)
    if "mtl_lora" in configs["a"]:
        model.share_parameters([*configs])
    for seed, name in enumerate(configs):
        stir(model, name, seed, std=0.3)
    model.add_tagging_head("tags", num_labels=3)
    model.train_adapter(MultiTask(*configs))
    model.active_head = "tags"
    return model.eval()


def batch():
    inputs = tiny_inputs("bert", batch=len(IDS))
    # of equal rows the mean of means is the mean
    inputs["attention_mask"][:] = 1
    return {**inputs, "labels": torch.ones_like(inputs["input_ids"])}


def gradients(model, run, **inputs):
    model.zero_grad()
    loss = run(**batch(), **inputs).loss
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained.values())
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in trained.items()}}


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.long
@EACH
def test_a_call_with_tasks_compiles(configs):
    torch._dynamo.reset()
    model, backend = made(configs, layers=1), Counting()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(2):
        # the last has no row of a task
        for ids in (IDS, [0, 1, 2, 2], [0, 0, 2, 2]):
            expected = gradients(model, model, task_ids=ids)
            same(gradients(model, compiled, task_ids=ids), expected)
    assert backend.graphs == 3
    torch._dynamo.reset()


def test_tasks_in_a_tensor_are_read_outside_the_graph():
    torch._dynamo.reset()
    model = made(METHODS["mtl_lora"], layers=1)
    expected = gradients(model, model, task_ids=torch.tensor(IDS))
    compiled = torch.compile(model, backend=Counting())
    same(gradients(model, compiled, task_ids=torch.tensor(IDS)), expected)
    torch._dynamo.reset()


@EACH
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_are_recomputed_with_their_tasks(configs, reentrant):
    model = made(configs)
    expected = gradients(model, model, task_ids=IDS)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    same(gradients(model, model, task_ids=IDS), expected)
    assert not model._active.call.captures
    assert not model._active.call.reads


@EACH
def test_each_replica_has_the_tasks_of_its_rows(configs):
    """DataParallel divides a tensor, and repeats a list."""
    model = made(configs)
    expected = gradients(model, model, task_ids=torch.tensor(IDS))

    def parallel(**inputs):
        replicas = replicas_on_cpu(model)
        parts = [{k: t[2 * i : 2 * i + 2] for k, t in inputs.items()} for i in range(2)]
        outs = [replica(**part) for replica, part in zip(replicas, parts, strict=True)]
        return type(outs[0])(loss=torch.stack([out.loss for out in outs]).mean())

    same(gradients(model, parallel, task_ids=torch.tensor(IDS)), expected)
    with AdapterSetup(MultiTask(*configs), head_setup="tags"):
        same(gradients(model, parallel, task_ids=torch.tensor(IDS)), expected)


@pytest.mark.parametrize(
    ("method", "head"), [*((name, "tags") for name in sorted(ADAPTER_CONFIG_MAP)), ("lora", None)]
)
def test_adapters_and_heads_without_rows_get_gradients_of_zero(method, head):
    """DistributedDataParallel waits for all parameters that are trained."""
    # its default rank is more than the model's width
    model = made({"a": "lora[r=4]", "b": "miss[r=4]" if method == "miss" else method}, layers=1)
    for name in "ab" if head is None else ():
        model.add_tagging_head(name, num_labels=3)
    expected = {}
    for setup in (MultiTask("a", "b"), "a"):
        model.train_adapter(setup)
        if head is not None:
            model.active_head = head
        model.eval()
        tasks = {} if setup == "a" else {"task_ids": [0] * len(IDS)}
        expected[str(setup)] = gradients(model, model, **tasks)
    found, alone = expected.values()
    idle = {name: found.pop(name) for name in found.keys() - alone.keys()}
    assert any(name.startswith("heads.b.") for name in idle) == (head is None)
    assert any(not name.startswith("heads.") for name in idle)
    assert not any(gradient.any() for gradient in idle.values())
    same(found, alone)
