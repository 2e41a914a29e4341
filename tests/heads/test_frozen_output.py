"""The matrix of a language modelling head onto the vocabulary: frozen, and not saved untrained."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import refused
from transformers import LlamaForCausalLM

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError


def _untied(family="bert", head="add_masked_lm_head"):
    config = tiny_config(family)
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config)
    model.add_adapter("a", "lora")
    getattr(model, head)("a")
    return model


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_the_layer_onto_the_vocabulary_is_trained_with_the_embeddings_alone(train_embeddings):
    model = _untied()
    head = model.get_head("a")
    model.train_adapter("a", train_embeddings=train_embeddings)
    trained = {name for name, p in head.named_parameters() if p.requires_grad}
    rest = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert trained == (rest | {"3.weight", "3.bias"} if train_embeddings else rest)
    assert head.output_embeddings.weight is not model.get_input_embeddings().weight
    before = {name: p.detach().clone() for name, p in head.named_parameters()}
    inputs = tiny_inputs("bert")
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None and p.grad.any() for p in head.parameters() if p.requires_grad)
    torch.optim.SGD(parameters, lr=0.1).step()
    changed = {n for n, p in head.named_parameters() if not torch.equal(p, before[n])}
    assert changed == trained


@pytest.mark.parametrize("train_embeddings", [False, True])
def test_a_fresh_head_comes_back_bit_for_bit(train_embeddings, tmp_path):
    model = _untied()
    model.train_adapter("a", train_embeddings=train_embeddings)
    model.save_adapter(tmp_path, "a")
    # no checkpoint has the matrix of a fresh head
    assert "head//3.weight" in load_file(tmp_path / "adapter.safetensors")
    again = _untied()
    again.delete_head("a")
    again.load_adapter(tmp_path, load_as="b", set_active=True)
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        assert torch.equal(again.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny_config("llama")
    config.tie_word_embeddings = False
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@torch.no_grad()
def test_the_output_layer_of_the_checkpoint_is_not_saved_again(checkpoint, tmp_path):
    model = AutoAdapterModel.from_pretrained(checkpoint)
    model.add_adapter("a", "lora[init_weights='bert']")
    model.train_adapter("a")
    model.eval()
    assert not any(p.requires_grad for p in model.get_head("default").parameters())
    model.save_adapter(tmp_path / "a", "a")
    stored = load_file(tmp_path / "a" / "adapter.safetensors")
    assert not any(key.startswith("head//") for key in stored)
    model.save_head(tmp_path / "head")
    assert not load_file(tmp_path / "head" / "head.safetensors")
    inputs = tiny_inputs("llama")
    expected = model(**inputs).logits
    again = AutoAdapterModel.from_pretrained(checkpoint).eval()
    again.load_adapter(tmp_path / "a", set_active=True)
    assert again.active_head == "a"
    assert torch.equal(again(**inputs).logits, expected)
    again.load_head(tmp_path / "head", load_as="third")
    assert torch.equal(again(**inputs).logits, expected)
    again.train_adapter("a")
    again.save_adapter(tmp_path / "b", "a")
    stored = load_file(tmp_path / "b" / "adapter.safetensors")
    assert not any(key.startswith("head//") for key in stored)
    # a model without that layer cannot give it
    for name in again.known_heads():
        again.delete_head(name)
    with refused(again, CheckpointError, "output layer", "with_head=False"):
        again.load_adapter(tmp_path / "a", load_as="b")


def test_an_output_layer_that_was_trained_is_saved(checkpoint, tmp_path):
    model = AutoAdapterModel.from_pretrained(checkpoint)
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    with torch.no_grad():
        model.get_output_embeddings().weight[3] += 1
    model.eval().save_adapter(tmp_path / "a", "a")
    assert "head//0.weight" in load_file(tmp_path / "a" / "adapter.safetensors")
    again = AutoAdapterModel.from_pretrained(checkpoint).eval()
    again.load_adapter(tmp_path / "a", set_active=True)
    inputs = tiny_inputs("llama")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_a_fresh_head_starts_with_the_output_layer_of_the_checkpoint(checkpoint):
    model = AutoAdapterModel.from_pretrained(checkpoint)
    model.add_causal_lm_head("a", layers=1)
    weight = model.get_head("a").output_embeddings.weight
    assert torch.equal(weight, model.get_head("default").output_embeddings.weight)
    assert weight is not model.get_head("default").output_embeddings.weight
