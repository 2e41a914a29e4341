"""How many kernels an adapted layer launches: as many as its sites say, and no more."""

import contextlib
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from families import tiny_config
from test_launch import MODULES, kernels_of
from transformers import AutoModel

from adapterzoo import BatchSplit, init, kernels
from adapterzoo.config import AdapterConfig
from adapterzoo.kernels import ops

# of one layer: query, key, value, output, gate, up and down
SITES = 7
COUNTS = {
    "lora": ({"shrink": SITES, "compose": SITES}, {"compose_backward": SITES, "finish": SITES}),
    "dora": ({"shrink": SITES, "compose": SITES}, {"compose_backward": SITES, "finish": SITES}),
    "boft": (
        {"rotate": SITES, "compose": SITES},
        {
            "rotate": SITES,
            "compose_backward": SITES,
            "finish": SITES,
            "cayley_fold_backward": SITES,
        },
    ),
}
# of the backward with dropout: the gradient of x, and that of A from x
DROPPED = {"compose": SITES, "outer": SITES}
DROPS = {"lora + dropout": DROPPED, "dora + dropout": DROPPED}
# of weights alone: the norms, for which a aᵀ is made by the kernel of x aᵀ; the rotations
NORMS = {"dora": {"row_norm": SITES, "shrink": SITES}, "boft": {"cayley_fold": SITES}}
METHODS = {
    "lora": "lora[r=4]",
    "lora + dropout": "lora[r=4,dropout=0.1]",
    "dora": "dora[r=4]",
    "dora + dropout": "dora[r=4,dropout=0.1]",
    "boft": "boft[boft_block_size=4]",
    "boft, two factors": "boft[boft_block_size=4,boft_n_butterfly_factor=2]",
}


class Counted:
    """In place of a kernel: counts, and computes nothing."""

    def __init__(self, kernel, log):
        self.fn, self.arg_names = kernel.fn, kernel.arg_names
        self._log = log

    def __getitem__(self, grid):
        name = self.fn.__name__.removesuffix("_kernel")
        return lambda *operands, **constants: self._log.update([name])


@pytest.fixture
def log():
    """Launches, as if Triton interpreted them on this CPU."""
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for module, name in kernels_of(*MODULES):
            counted = Counted(getattr(module, name), found)
            stack.enter_context(mock.patch.object(module, name, counted))
        stack.enter_context(mock.patch.object(ops, "INTERPRETED", True))
        stack.enter_context(kernels.use("triton"))
        yield found


def mixed(method, batch=("a", "b", None)):
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    model = init(AutoModel.from_config(config))
    for name in filter(None, batch):
        model.add_adapter(
            name, replace(AdapterConfig.load(METHODS[method]), target_modules=r".*_proj")
        )
    model.active_adapters = BatchSplit(*batch, batch_sizes=[1] * len(batch))
    return model


@pytest.mark.parametrize("method", ["lora", "lora + dropout", "dora"])
def test_a_mixed_batch_launches_as_often_as_one_adapter(log, method):
    """In a forward without gradients that keeps norms; nothing is stacked again."""
    model = mixed(method).eval()
    embeds = torch.randn(3, 7, 32)
    with torch.no_grad(), model.cached_adapters():
        model(inputs_embeds=embeds, use_cache=False)
        log.clear()
        model(inputs_embeds=embeds, use_cache=False)
    assert log == {"shrink": SITES, "compose": SITES}
    model.train()
    log.clear()
    out = model(inputs_embeds=embeds.requires_grad_(), use_cache=False)[0]
    counts = {name: log[name] for name in ("shrink", "compose")}
    # a aᵀ of each adapter's norms is a product of its own
    norms = 2 * SITES if method == "dora" else 0
    assert counts == {"shrink": SITES + norms, "compose": SITES}
    log.clear()
    out.sum().backward()
    # gradients of x and of the factors of each
    assert log["shrink"] + log["compose"] + log["outer"] <= 5 * SITES


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("train", [False, True])
def test_the_decisions_of_a_gpu_change_no_result_of_a_mixed_batch(monkeypatch, method, train):
    """Torch operations compute here, with the decisions of a GPU."""
    torch.manual_seed(0)
    model = mixed(method).double().train(train)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    embeds = torch.randn(3, 7, 32, dtype=torch.float64)
    found = []
    for on_gpu in (False, True):
        with contextlib.ExitStack() as stack:
            if on_gpu:
                stack.enter_context(mock.patch.object(ops, "INTERPRETED", True))
                stack.enter_context(kernels.use("triton"))
                monkeypatch.setattr(kernels.ops, "takes_triton", lambda *args, **single: False)
            for _ in range(2):
                model.zero_grad()
                with torch.set_grad_enabled(train):
                    out = model(inputs_embeds=embeds, use_cache=False)[0]
            if train:
                out.square().sum().backward()
            grads = [p.grad for n, p in model.named_parameters() if "loras" in n]
            found.append([out.detach(), *(g for g in grads if g is not None)])
    assert len(found[0]) == len(found[1]) > train * 14
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(other, plain, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_launches_once_for_each_site(log, method):
    config = tiny_config("llama")
    config.num_hidden_layers = 1
    model = init(AutoModel.from_config(config))
    adapter = replace(AdapterConfig.load(METHODS[method]), target_modules=r".*_proj")
    model.add_adapter("a", adapter)
    model.train_adapter("a")
    model.train()
    log.clear()
    name = method.partition(" ")[0].rstrip(",")
    forward, backward = COUNTS[name]
    embeds = torch.randn(2, 7, 32, requires_grad=True)
    out = model(inputs_embeds=embeds, use_cache=False)[0]
    norms = Counter(NORMS.get(name, {}))
    assert log == Counter(forward) + norms
    log.clear()
    out.sum().backward()
    assert log == Counter(backward) + Counter(DROPS.get(method, {}))
    # while a gradient waits for its step nothing is kept
    model.zero_grad()
    model.eval()
    log.clear()
    with torch.no_grad():
        model(inputs_embeds=embeds, use_cache=False)
        assert log == Counter(forward) + norms
        with model.cached_adapters():
            model(inputs_embeds=embeds, use_cache=False)
            log.clear()
            model(inputs_embeds=embeds, use_cache=False)
    assert log == forward
