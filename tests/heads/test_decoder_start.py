"""The inputs of a decoder begin with the token that the model's own config names."""

from __future__ import annotations

import pytest
import torch
import transformers

from adapterzoo import AutoAdapterModel

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
