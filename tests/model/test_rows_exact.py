"""A mixed batch that generates is its rows alone."""

from __future__ import annotations

import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import stir
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from adapterzoo import AdapterSetup, Stack, init

CONFIGS = {"lora": "lora", "more": "lora[r=4,alpha=16]", "dora": "dora", "boft": "boft",
           "bn": "double_seq_bn", "par": "par_bn", "gated": "lora[use_gating=True]"}  # fmt: skip
# the last row has padding, on the left in decoders
NAMES = ["more", None, "boft", "dora", "bn", Stack("par", "dora"), "gated", "lora"]
HOW = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def with_adapters(family, dtype):
    torch.manual_seed(0)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = init(auto.from_config(tiny_config(family)).to(dtype).eval())
    for i, (name, config) in enumerate(CONFIGS.items()):
        model.add_adapter(name, config)
        stir(model, name, seed=i, std=0.3)
    inputs = tiny_inputs(family, batch=len(NAMES))
    inputs.pop("decoder_input_ids", None)
    if family != "t5":
        inputs["attention_mask"] = inputs["attention_mask"].flip(-1)
    assert (inputs["attention_mask"] == 0).any()
    return model, inputs


def generated(model, inputs, **how):
    """Tokens and the logits of each step `[rows, steps, vocabulary]`, not rounded."""
    steps = []
    # generate itself gives logits in float32
    handle = model.get_output_embeddings().register_forward_hook(
        lambda module, args, out: steps.append(out[:, -1].clone())
    )
    tokens = model.generate(**inputs, **HOW, **how)
    handle.remove()
    return tokens, torch.stack(steps, 1)


def row(inputs, i):
    return {key: value[i : i + 1] for key, value in inputs.items()}


@pytest.mark.parametrize("how", [{}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_a_row_of_a_mixed_batch_is_the_row_alone(family, how):
    """Prefill and decoding with a cache, all methods in one batch, rows without adapter too."""
    model, inputs = with_adapters(family, torch.float64)
    how = {**how, "max_new_tokens": 3}
    count = how.get("num_beams", 1)
    tokens, logits = generated(model, inputs, adapter_names=NAMES, **how)
    plain, _ = generated(model, inputs, **how)
    for i, name in enumerate(NAMES):
        with AdapterSetup(name):
            expected = generated(model, row(inputs, i), **how)
        rows = slice(i * count, (i + 1) * count)
        assert torch.equal(tokens[rows], expected[0])
        # products sum a batch in another order than a row
        torch.testing.assert_close(logits[rows], expected[1], rtol=0, atol=1e-12)
    assert not torch.equal(tokens, plain)


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_float32_is_as_near_to_float64_as_the_row_alone(family):
    """With the products that everybody has, which sum a batch in another order than a row."""
    model, inputs = with_adapters(family, torch.float32)
    chosen = {"adapter_names": NAMES, "max_new_tokens": 8}
    truth, exact = generated(with_adapters(family, torch.float64)[0], inputs, **chosen)
    # the tokens can be compared where no rounding decides between the two best
    best = exact.topk(2, dim=-1).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-4
    tokens, logits = generated(model, inputs, **chosen)
    assert torch.equal(tokens, truth)
    error, usual = 0.0, 0.0
    for i, name in enumerate(NAMES):
        with AdapterSetup(name):
            alone = generated(model, row(inputs, i), max_new_tokens=8)
        assert torch.equal(alone[0], truth[i : i + 1])
        error = max(error, (logits[i] - exact[i]).abs().max().item())
        usual = max(usual, (alone[1][0] - exact[i]).abs().max().item())
    assert error <= 2 * usual + 8 * torch.finfo(torch.float32).eps * exact.abs().max().item()
