"""How many kernels an adapted layer launches: as many as its sites and inputs say, and no more."""

import contextlib
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from families import tiny_config
from test_launch import MODULES, kernels_of
from transformers import AutoModel

from adapterzoo import init, kernels
from adapterzoo.configs import AdapterConfig
from adapterzoo.kernels import _launch

# of one layer: query, key, value, output, gate, up and down; those of one input share its kernel
SITES, INPUTS = 7, 4
COUNTS = {
    "lora": (
        {"shrink": INPUTS, "expand": SITES},
        {"expand_backward": SITES, "shrink_backward": INPUTS},
    ),
    "dora": (
        {"shrink": INPUTS, "compose": SITES},
        {"compose_backward": SITES, "shrink_backward": INPUTS},
    ),
    # and in training one kernel for all rotations of an input
    "boft": (
        {"rotate": SITES, "compose": SITES},
        {"rotate_backward": SITES, "compose_backward": SITES, "cayley_fold_backward": INPUTS},
    ),
}
# in training alone: the norms, for which a aᵀ is made by the kernel of x aᵀ; the rotations
NORMS = {"dora": {"row_norm": SITES, "shrink": SITES}, "boft": {"cayley_fold": INPUTS}}
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
        stack.enter_context(mock.patch.object(_launch, "INTERPRETED", True))
        stack.enter_context(kernels.use("triton"))
        yield found


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_launches_once_for_each_site_or_input(log, method):
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
    assert log == backward
    # while a gradient waits for its step nothing is kept
    model.zero_grad()
    model.eval()
    with torch.no_grad():
        model(inputs_embeds=embeds, use_cache=False)
        log.clear()
        model(inputs_embeds=embeds, use_cache=False)
    assert log == forward
