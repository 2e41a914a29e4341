"""UniPELT's gates: padding, caches and new tokens change nothing in the paper's convention.

What a gate does with the tokens that it reads is in the golden files and in the methods' own tests.
"""

import pytest
import torch
from cached import CACHE
from families import has_sdpa, tiny_config
from snapshots import refused, stir
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    MptConfig,
    MptForCausalLM,
)

from adapterzoo import AdapterConfig, BatchSplit, init
from adapterzoo.errors import CheckpointError, StateError

CONFIGS = {
    "lora": "lora[r=4,use_gating=True%s,attn_matrices=['q','k','v']]",
    "lora, mlp": "lora[r=4,use_gating=True%s,intermediate_lora=True,output_lora=True]",
    "bottleneck": "double_seq_bn[reduction_factor=4,use_gating=True%s]",
    "parallel": "par_bn[reduction_factor=4,use_gating=True%s]",
    "prefix": "prefix_tuning[prefix_length=3,flat=True,use_gating=True%s]",
}
OF_ALL = ",convention='adapterhub'"


def made(family, *configs, auto=AutoModel):
    if not has_sdpa(family) and any("prefix" in config for config in configs):
        pytest.skip(f"this version of transformers computes the attention of {family} inline")
    torch.manual_seed(0)
    model = init(auto.from_config(tiny_config(family)).double().eval())
    for name, config in zip("ab", configs, strict=False):
        model.add_adapter(name, config)
        # gates of one half would not be seen
        stir(model, name, ord(name), 0.5)
    model.set_active_adapters("a")
    return model


def padded(side, real=4, tokens=7, rows=2):
    """Token numbers and mask: row 1 has fewer tokens."""
    ids = torch.randint(5, 90, (rows, tokens), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if side == "right":
        mask[1, real:] = 0
    else:
        mask[1, :-real] = 0
    return ids, mask


@torch.no_grad()
def hidden(model, **inputs):
    return model(**inputs)[0]


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_padded_row_is_the_row_alone(name, family, side):
    ids, mask = padded(side)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions_of(mask)}
    real = mask[1].bool()
    differences = {}
    for convention in ("", OF_ALL):
        model = made(family, CONFIGS[name] % convention)
        whole = hidden(model, **inputs)[1, real]
        alone = hidden(model, input_ids=ids[1:, real])[0]
        differences[convention] = (whole - alone).abs().max().item()
    assert differences[""] < 1e-10
    # so that the line above can fail
    assert differences[OF_ALL] > 1e-4


@pytest.mark.parametrize("name", [*CONFIGS, "unipelt"])
@torch.no_grad()
def test_masks_with_true_at_hidden_tokens_are_not_read(name):
    """MPT's own masks are the opposite of all others; in float64 they make it give NaN."""
    torch.manual_seed(0)
    small = MptConfig(d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, vocab_size=99)
    model = init(MptForCausalLM(small).eval())
    config = CONFIGS[name] % "" if name in CONFIGS else name
    model.add_adapter("a", config, set_active=True)
    stir(model, "a", std=0.5)
    ids, mask = padded("left")
    real = mask[1].bool()
    alone = model(ids[1:, real]).logits[0]
    whole = model(ids, attention_mask=mask).logits[1, real]
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-5)
    of_ones = model(ids[1:, real], attention_mask=torch.ones_like(ids[1:, real])).logits[0]
    torch.testing.assert_close(of_ones, alone, rtol=0, atol=1e-5)
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    given |= {"return_dict_in_generate": True, "output_logits": True}
    both = model.generate(ids, attention_mask=mask, **given).logits
    one = model.generate(ids[1:, real], **given).logits
    for left, right in zip(both, one, strict=True):
        torch.testing.assert_close(left[1], right[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_padding_both_conventions_are_one_formula(name):
    ids, _ = padded("right")
    masked, of_all = (made("bert", CONFIGS[name] % c) for c in ("", OF_ALL))
    of_all.load_state_dict(masked.state_dict())
    torch.testing.assert_close(
        hidden(masked, input_ids=ids), hidden(of_all, input_ids=ids), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_cross_attention_reads_the_mask_of_the_encoder(name):
    """Its keys and values are made of the encoder's states."""
    ids, mask = padded("right", real=3, tokens=9)
    start = torch.randint(5, 90, (2, 4), generator=torch.Generator().manual_seed(4))
    model = made("t5", CONFIGS[name] % "")
    whole = hidden(model, input_ids=ids, attention_mask=mask, decoder_input_ids=start)[1]
    alone = hidden(model, input_ids=ids[1:, :3], decoder_input_ids=start[1:])[0]
    # attention that T5 computes inline has its softmax in float32
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-10 if has_sdpa("t5") else 1e-6)


@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "marian", "bert to bert"])
def test_the_queries_of_cross_attention_read_the_mask_of_the_decoder(family):
    """The encoder's rows are as long as the decoder's, so that its mask would fit as well."""
    ids, mask = padded("right")
    start, own = padded("right", real=5)
    if family == "bert to bert":
        torch.manual_seed(0)
        pair = EncoderDecoderConfig.from_encoder_decoder_configs(*[tiny_config("bert")] * 2)
        model = init(EncoderDecoderModel(pair).double().eval())
        model.add_adapter("a", CONFIGS["prefix"] % "", set_active=True)
        stir(model, "a", std=0.5)
    else:
        model = made(family, CONFIGS["prefix"] % "", auto=AutoModelForSeq2SeqLM)
    with torch.no_grad():
        whole = model(
            input_ids=ids, attention_mask=mask, decoder_input_ids=start, decoder_attention_mask=own
        ).logits[1, :5]
        alone = model(input_ids=ids[1:, :4], decoder_input_ids=start[1:, :5]).logits[0]
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("family", "auto"), [("llama", AutoModelForCausalLM),
                                              ("t5", AutoModelForSeq2SeqLM)])  # fmt: skip
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_keeps_the_gates_of_the_prompt(name, family, auto, beams):
    ids, mask = padded("left")
    texts = [
        made(family, CONFIGS[name] % "", auto=auto).generate(
            ids, attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False,
            num_beams=beams, use_cache=cached,
        )
        for cached in (True, False)
    ]  # fmt: skip
    assert torch.equal(*texts)


def test_a_cache_of_an_earlier_call_does_not_tell_the_prompt():
    ids, _ = padded("right")
    model = made("llama", CONFIGS["lora"] % "", auto=AutoModelForCausalLM)
    first = model(ids, use_cache=True)
    with pytest.raises(StateError, match=r"past_key_values.*model\.generate"):
        model(ids[:, :1], **{CACHE: first[CACHE]})
    both = made("llama", CONFIGS["lora"] % OF_ALL, auto=AutoModelForCausalLM)
    both(ids[:, :1], **{CACHE: both(ids, use_cache=True)[CACHE]})


@pytest.mark.parametrize("name", CONFIGS)
def test_each_row_of_a_mixed_batch_has_its_own_gates(name):
    ids, mask = padded("right", rows=3)
    model = made("bert", CONFIGS[name] % "", CONFIGS[name] % "")
    expected = []
    for row, active in enumerate(["a", "b", None]):
        model.set_active_adapters(active)
        one = {"input_ids": ids[row : row + 1], "attention_mask": mask[row : row + 1]}
        expected.append(hidden(model, **one))
    mixed = hidden(model, input_ids=ids, attention_mask=mask, adapter_names=["a", "b", "__base__"])
    torch.testing.assert_close(mixed, torch.cat(expected), rtol=0, atol=1e-10)
    model.set_active_adapters(BatchSplit("b", "a", batch_sizes=[2, 1]))
    split = hidden(model, input_ids=ids, attention_mask=mask)
    torch.testing.assert_close(split[1:2], expected[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["lora", "seq_bn"])
def test_one_convention_cannot_stand_for_the_other(kind, tmp_path):
    model = made("bert", f"{kind}[use_gating=True]")
    with refused(model, CheckpointError, "reads all tokens", "convention='adapterhub'"):
        model.save_adapter(tmp_path / "a", "a", format="adapterhub")
    with pytest.warns(UserWarning, match=r"convention='adapterhub'.*only with use_gating=True"):
        AdapterConfig.load(f"{kind}[convention='adapterhub']")
