"""Output layers of their own over models that tie theirs: mT5, T5 1.1, and files of other bases."""

from __future__ import annotations

import copy

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import of_adapter
from transformers import GPT2LMHeadModel, MT5Config, MT5ForConditionalGeneration

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError, ConfigError

_IDS = {
    "input_ids": torch.tensor([[4, 5, 6], [7, 8, 9]]),
    "labels": torch.tensor([[7, 8, 9], [4, 4, 1]]),
}


@pytest.fixture
def checkpoint(tmp_path):
    """An mT5 whose output layer is another than its embedding, as the published ones."""
    config = MT5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_decoder_layers=1,
        num_heads=2, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MT5ForConditionalGeneration(config).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn(50, 16) * 0.1)
    del model.all_tied_weights_keys["lm_head.weight"]
    model.save_pretrained(tmp_path / "mt5")
    return model, tmp_path / "mt5"


@torch.no_grad()
def test_a_checkpoint_keeps_its_own_output_layer_and_its_embedding(checkpoint, tmp_path):
    plain, folder = checkpoint
    expected = plain(**_IDS).logits
    model = AutoAdapterModel.from_pretrained(folder).eval()
    assert torch.equal(model.get_input_embeddings().weight, plain.shared.weight)
    assert torch.equal(model.get_output_embeddings().weight, plain.lm_head.weight)
    assert torch.equal(model(**_IDS).logits, expected)
    assert torch.equal(copy.deepcopy(model)(**_IDS).logits, expected)
    model.save_pretrained(tmp_path / "whole")
    again = AutoAdapterModel.from_pretrained(tmp_path / "whole").eval()
    assert torch.equal(again(**_IDS).logits, expected)
    back = model.unload()
    assert type(back) is MT5ForConditionalGeneration
    assert torch.equal(back(**_IDS).logits, expected)


@pytest.mark.parametrize("form", ["native", "adapterhub"])
@torch.no_grad()
def test_such_a_head_goes_with_its_adapter(form, checkpoint, tmp_path):
    plain, folder = checkpoint
    model = AutoAdapterModel.from_pretrained(folder).eval()
    model.add_adapter("task", "lora[init_weights='bert']")
    model.set_active_adapters("task")
    expected = model(**_IDS).logits
    model.save_adapter(tmp_path / "task", "task", format=form)
    other = AutoAdapterModel.from_pretrained(folder).eval()
    other.delete_head("default")
    other.load_adapter(tmp_path / "task", set_active=True)
    assert torch.equal(other(**_IDS).logits, expected)
    assert torch.equal(other.get_input_embeddings().weight, plain.shared.weight)


@torch.no_grad()
def test_a_head_of_another_base_brings_its_layer(tmp_path):
    author = AutoAdapterModel.from_config(tiny_config("gpt2")).eval()
    author.add_causal_lm_head("task", layers=1)
    author.add_adapter("task", "lora")
    # the author's embedding is the output layer there
    author.save_adapter(tmp_path / "task", "task", format="adapterhub")
    base = copy.deepcopy(author)
    base.delete_adapter("task")
    base.delete_head("task")
    weight = base.get_input_embeddings().weight
    weight.add_(1)
    before = weight.clone()
    base.load_adapter(tmp_path / "task", set_active=True)
    head = base.get_head("task")
    assert head.config.tie_word_embeddings is False
    assert torch.equal(head.output_embeddings.weight, author.get_input_embeddings().weight)
    assert torch.equal(base.get_input_embeddings().weight, before)
    assert base.all_tied_weights_keys == {}
    # adapters would write the layer into the embedding of a GPT-2
    with pytest.raises(CheckpointError, match=r"ties the output layer(.|\n)*format='native'"):
        base.save_adapter(tmp_path / "back", "task", format="adapterhub")
    base.save_adapter(tmp_path / "native", "task")
    assert "head//0.weight" in load_file(tmp_path / "native" / "adapter.safetensors")
    again = copy.deepcopy(base)
    again.load_adapter(tmp_path / "native", load_as="again", set_active=True)
    inputs = tiny_inputs("gpt2")
    base.set_active_adapters("task")
    assert torch.equal(again(**inputs).logits, base(**inputs).logits)


@torch.no_grad()
def test_a_head_of_its_own_in_the_format_of_peft(tmp_path):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("gpt2")).eval()
    config = {"head_type": "causal_lm", "tie_word_embeddings": False}
    model.add_prediction_head_from_config("task", config)
    # of q and v, parts of one layer, the file holds one update, which is rounded in another order
    model.add_adapter("task", "lora[init_weights='bert',attn_matrices=['o']]")
    model.set_active_adapters("task")
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    expected = model(**tiny_inputs("gpt2")).logits
    model.save_adapter(tmp_path, "task", format="peft")
    base = GPT2LMHeadModel(model.config).eval()
    base.transformer.load_state_dict(
        {k: v for k, v in model.base_model.state_dict().items() if not of_adapter(k)}
    )
    from peft import PeftModel

    with pytest.warns(UserWarning, match="tied layer is part of the adapter"):
        theirs = PeftModel.from_pretrained(base, tmp_path).eval()
    got = theirs(**tiny_inputs("gpt2")).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    other = copy.deepcopy(model)
    other.delete_head("task")
    other.load_adapter(tmp_path, load_as="again", set_active=True)
    assert torch.equal(other(**tiny_inputs("gpt2")).logits, expected)


def test_what_the_field_may_say():
    with pytest.raises(ConfigError, match=r"tie_word_embeddings='no'.*Write"):
        AutoAdapterModel.from_config(tiny_config("bert")).add_prediction_head_from_config(
            "a", {"head_type": "masked_lm", "tie_word_embeddings": "no"}
        )
