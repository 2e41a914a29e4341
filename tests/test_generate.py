"""`generate` with named heads and adapters: token-identical to the static model, cache or not."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import stir
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from adapterzoo import AutoAdapterModel, init

DECODERS = (
    "gpt2", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3",
    "mixtral", "qwen3_moe",
)  # fmt: skip
ENCODER_DECODERS = ("t5", "mt5", "bart", "mbart", "whisper")
ATTENTION = 'lora[attn_matrices=["q","k","v","o"]]'


def static_model(family):
    torch.manual_seed(0)
    if family in DECODERS:
        auto = AutoModelForCausalLM
    else:
        auto = AutoModelForSpeechSeq2Seq if family == "whisper" else AutoModelForSeq2SeqLM
    return auto.from_config(tiny_config(family)).eval().requires_grad_(False)


def of_dtype(dtype, inputs):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def prompt(family, dtype=torch.float32):
    inputs = of_dtype(dtype, tiny_inputs(family))
    inputs.pop("decoder_input_ids", None)
    if family in DECODERS:
        # decoders are padded at the left
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    return inputs


def tokens(model, inputs, **kwargs):
    return model.generate(**inputs, max_new_tokens=8, do_sample=False, **kwargs)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
def test_the_head_of_a_static_checkpoint_generates_as_the_static_model(family, tmp_path):
    # in float64: where a head rounds otherwise than theirs, the likeliest token stays
    made = static_model(family)
    made.save_pretrained(tmp_path)
    static = type(made).from_pretrained(tmp_path, dtype=torch.float64)
    model = AutoAdapterModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert model.active_head == "default"
    # of those in transformers, the implementation that knows float64
    for each in (static, model):
        each.config._experts_implementation = "eager"
    inputs = prompt(family, torch.float64)
    for kwargs in ({}, {"use_cache": False}, {"num_beams": 2}):
        assert torch.equal(tokens(model, inputs, **kwargs), tokens(static, inputs, **kwargs))
    forward = of_dtype(torch.float64, tiny_inputs(family))
    with torch.no_grad():
        ours, theirs = model(**forward).logits, static(**forward).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", [*DECODERS, *ENCODER_DECODERS])
@pytest.mark.parametrize("config", [ATTENTION, "double_seq_bn", "par_bn"])
def test_an_adapter_generates_the_same_with_and_without_cache(family, config):
    # in float64: that a cache sums in another order does not change the likeliest token
    static = static_model(family).double()
    # of those in transformers, the implementation that knows float64
    static.config._experts_implementation = "eager"
    model, inputs = init(static), prompt(family, torch.float64)
    plain = tokens(model, inputs)
    model.add_adapter("a", config)
    stir(model, "a", std=0.3)
    assert torch.equal(tokens(model, inputs), plain)
    model.set_active_adapters("a")
    cached = tokens(model, inputs)
    assert torch.equal(cached, tokens(model, inputs, use_cache=False))
    model.set_active_adapters(None)
    assert torch.equal(tokens(model, inputs), plain)


def test_the_adapter_reaches_generation():
    model = init(static_model("llama"))
    inputs = prompt("llama")
    plain = tokens(model, inputs)
    model.add_adapter("a", ATTENTION, set_active=True)
    stir(model, "a", std=0.3)
    assert not torch.equal(tokens(model, inputs), plain)


def test_a_static_cache_has_a_mask_for_each_kind_of_layer():
    config = tiny_config("gemma3_text")
    config.layer_types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).double().eval()
    model.add_causal_lm_head("h")
    model.active_head = "h"
    inputs = prompt("gemma3_text")
    plain = tokens(model, inputs, use_cache=False)
    assert torch.equal(tokens(model, inputs, cache_implementation="static"), plain)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama"])
@pytest.mark.parametrize(
    "method",
    [
        "lora[r=2,trainable_token_indices=[3,4]]",
        {"architecture": "trainable_tokens", "token_indices": [3, 4]},
        "lora[r=2,target_modules=['EMBEDDING']]", "lora[r=2,modules_to_save=['EMBEDDING']]",
        "prefix_tuning",
    ],
)  # fmt: skip
def test_adapters_at_the_embedding_generate_under_a_named_head(method, family, tied):
    torch.manual_seed(0)
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    model = AutoAdapterModel.from_config(config).eval()
    table = next(
        p for p, m in model.base_model.named_modules() if isinstance(m, torch.nn.Embedding)
    )
    if isinstance(method, str):
        method = method.replace("EMBEDDING", table.rpartition(".")[2])
    model.add_adapter("a", method)
    stir(model, "a")
    model.add_causal_lm_head("lm")
    model.active_head = "lm"
    ids = torch.tensor([[5, 3, 7, 4]] * 2)
    how = {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False,
        "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    model.set_active_adapters("a")
    expected = ids
    with torch.no_grad():
        for _ in range(3):
            last = model(expected).logits[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, last], 1)
    assert torch.equal(model.generate(ids, **how), expected)
    model.set_active_adapters(None)
    assert torch.equal(model.generate(ids, adapter_names=["a", "a"], **how), expected)
