"""Entry sites: what stands in front of the first block, and leaves no trace when it goes."""

import copy
import pickle
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from families import tiny_config, tiny_inputs
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoConfig,
    AutoModel,
    ResNetConfig,
    ResNetModel,
    XLMConfig,
    XLMModel,
)

from adapterzoo import AdapterConfig, BatchSplit, Stack, init
from adapterzoo.anatomy import find
from adapterzoo.config import Placement, architectures
from adapterzoo.contracts import Adapter
from adapterzoo.inject.adapted import adapters_of

PLACES = {
    "bert": "encoder.layer.0",
    "gpt2": "h.0",
    "llama": "layers.0",
    "t5": "encoder.block.0",
    "bart": "encoder.layers.0",
    "vit": "layers.0",
}


class Shift(Adapter):
    """y = x + v."""

    def __init__(self, width, device, dtype):
        super().__init__()
        self.v = nn.Parameter(torch.randn(width, device=device, dtype=dtype))

    def forward(self, x, base):
        return base(x) + self.v


@dataclass(frozen=True, kw_only=True)
class ShiftConfig(AdapterConfig):
    """Config of a shift of what the first block is given."""

    architecture: ClassVar[str] = "shift"

    def placements(self, anatomy):
        return [Placement(anatomy.entry, self, "shift")]

    def build(self, site, device, dtype):
        return Shift(site.d_out, device, dtype)


@pytest.fixture
def shift():
    architectures.register("shift")(ShiftConfig)
    return ShiftConfig()


def model_of(family):
    torch.manual_seed(0)
    return init(AutoModel.from_config(tiny_config(family)).double().eval())


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


def inputs_of(family):
    inputs = tiny_inputs(family, batch=2)
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


@pytest.mark.parametrize("family", PLACES)
def test_the_first_block_gets_what_the_adapter_makes(family, shift):
    model, inputs = model_of(family), inputs_of(family)
    block = model.get_submodule(PLACES[family])
    seen = []
    with block.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        run(model, inputs)
    model.add_adapter("a", shift, set_active=True)
    found = run(model, inputs)
    v = adapters_of(model.get_submodule(f"{PLACES[family]}.entry"))["a"].v
    model.set_active_adapters(None)
    with block.register_forward_pre_hook(lambda _, args: (args[0] + v, *args[1:])):
        expected = run(model, inputs)
    assert len(seen) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("family", PLACES)
def test_nothing_is_left_of_an_entry(family, shift):
    model, inputs = model_of(family), inputs_of(family)
    modules = [(path, type(m)) for path, m in model.named_modules()]
    keys, plain = list(model.state_dict()), run(model, inputs)
    for name in ("a", "b"):
        model.add_adapter(name, shift)
    assert torch.equal(run(model, inputs), plain)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 1]))
    mixed = run(model, inputs)
    for row, name in enumerate(("a", "b")):
        model.set_active_adapters(name)
        torch.testing.assert_close(run(model, inputs)[row], mixed[row])
    model.set_active_adapters(Stack("a", "b"))
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert torch.equal(run(copied, inputs), run(model, inputs))
    for name in ("a", "b"):
        model.delete_adapter(name)
    assert [(path, type(m)) for path, m in model.named_modules()] == modules
    assert list(model.state_dict()) == keys
    assert torch.equal(run(model, inputs), plain)


def test_embeddings_given_by_the_caller_pass_the_entry(shift):
    model, inputs = model_of("llama"), inputs_of("llama")
    model.add_adapter("a", shift, set_active=True)
    embedded = model.embed_tokens(inputs["input_ids"])
    given = {**inputs, "inputs_embeds": embedded}
    del given["input_ids"]
    torch.testing.assert_close(run(model, given), run(model, inputs), rtol=0, atol=0)


def test_an_overwritten_adapter_is_replaced_at_the_entry(shift):
    model = model_of("bert")
    model.add_adapter("a", shift, set_active=True)
    before = adapters_of(model.encoder.layer[0].entry)["a"]
    model.add_adapter("a", shift, overwrite_ok=True)
    assert adapters_of(model.encoder.layer[0].entry)["a"] is not before


ALBERT = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 20}
WITHOUT = {
    "several times": lambda: AlbertModel(AlbertConfig(**ALBERT, num_hidden_layers=2)),
    "are in lists": lambda: XLMModel(XLMConfig(vocab_size=20, emb_dim=16, n_layers=2, n_heads=2)),
    "no blocks": lambda: ResNetModel(ResNetConfig(hidden_sizes=[8], depths=[1])),
}


@pytest.mark.parametrize("reason", WITHOUT)
def test_a_model_without_an_entry_says_why(reason):
    with torch.device("meta"):
        anatomy = find(WITHOUT[reason]())
    assert anatomy.entry is None
    assert reason in anatomy.no_entry


def test_the_entry_is_that_of_the_stack_which_the_embeddings_feed():
    """GIT and CLVP have towers of images and of speech before that of tokens."""
    for model_type, path in (("git", "encoder.layer.0.entry"), ("clip", "text_model")):
        with torch.device("meta"):
            anatomy = find(AutoModel.from_config(AutoConfig.for_model(model_type)))
        assert anatomy.entry.path.startswith(path)
        assert len(anatomy.stacks) == 2
