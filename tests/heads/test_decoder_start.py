"""The inputs of a decoder begin with the token that the model's own config names."""

from __future__ import annotations

import pytest
import torch
import transformers
from snapshots import stir

from adapterzoo import AutoAdapterModel, Parallel
from adapterzoo.errors import ConfigError

_TINY = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50,
    "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
    "decoder_start_token_id": 7, "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
_FAMILIES = {
    "BartConfig": {},
    "M2M100Config": {},
    "BlenderbotConfig": {},
    "WhisperConfig": {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_the_labels_move_behind_the_start_token_of_the_config(family):
    config = getattr(transformers, family)(**_TINY, **_FAMILIES[family])
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).eval()
    model.add_seq2seq_lm_head("task")
    if family == "WhisperConfig":
        inputs = {"input_features": torch.randn(2, 8, 32)}
    else:
        inputs = {"input_ids": torch.tensor([[5, 6, 2], [8, 9, 2]])}
    labels = torch.tensor([[11, 12, 2], [13, 2, -100]])
    decoder_input_ids = torch.tensor([[7, 11, 12], [7, 13, 2]])
    given = model(**inputs, decoder_input_ids=decoder_input_ids, labels=labels)
    made = model(**inputs, labels=labels)
    assert torch.equal(made.logits, given.logits)
    assert torch.equal(made.loss, given.loss)


@pytest.fixture
def two_tasks():
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**_TINY, **_FAMILIES["WhisperConfig"])
    model = AutoAdapterModel.from_config(config).eval().double()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "seq_bn")
        model.add_seq2seq_lm_head(name)
        stir(model, name, seed=seed)
    return model


def alone(model, name, inputs, labels):
    model.set_active_adapters(name)
    model.active_head = name
    return model(**inputs, labels=labels)


@pytest.mark.parametrize("apart", [False, True], ids=["the same labels", "labels by head"])
def test_parallel_adapters_read_their_own_labels(two_tasks, apart):
    model = two_tasks
    inputs = {"input_features": torch.randn(2, 8, 32, dtype=torch.float64)}
    labels = {name: torch.randint(3, 50, (2, 5)) for name in "ab"}
    if not apart:
        labels["b"] = labels["a"]
    expected = [alone(model, name, inputs, labels[name]) for name in "ab"]
    model.set_active_adapters(Parallel("a", "b"))
    model.active_head = ["a", "b"]
    given = model(**inputs, labels=labels if apart else labels["a"])
    for found, one in zip(given, expected, strict=True):
        torch.testing.assert_close(found.logits, one.logits, rtol=0, atol=1e-12)
    total = expected[0].loss + expected[1].loss
    torch.testing.assert_close(given.loss, total, rtol=0, atol=1e-12)


def test_heads_that_share_rows_cannot_have_different_labels(two_tasks):
    model = two_tasks
    inputs = {"input_features": torch.randn(2, 8, 32, dtype=torch.float64)}
    labels = torch.randint(3, 50, (2, 5))
    expected = alone(model, "a", inputs, labels)
    given = model(**inputs, labels={"a": labels})
    torch.testing.assert_close(given.loss, expected.loss, rtol=0, atol=1e-12)
    model.active_head = ["a", "b"]
    with pytest.raises(ConfigError, match="differ for the same rows"):
        model(**inputs, labels={"a": labels, "b": labels + 1})
