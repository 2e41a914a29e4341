"""`resize_token_embeddings` with adapters: what is trained stays, or nothing changes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from snapshots import refused

import adapterzoo
from adapterzoo import LoRAConfig
from adapterzoo.errors import StateError

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "decoder_start_token_id": 0, "pad_token_id": 1, "embedding_size": 16,
    "intra_bottleneck_size": 16,
}  # fmt: skip
# the class, its table and its output layer
MODELS = {
    "llama": ("LlamaForCausalLM", "embed_tokens", "lm_head"),
    "gpt2": ("GPT2LMHeadModel", "wte", "lm_head"),
    "bert": ("BertForMaskedLM", "word_embeddings", "decoder"),
    # has another layer as wide as the vocabulary
    "mobilebert": ("MobileBertForMaskedLM", "word_embeddings", "decoder"),
    "t5": ("T5ForConditionalGeneration", "embed_tokens", "lm_head"),
    "bart": ("BartForConditionalGeneration", "embed_tokens", "lm_head"),
}
IDS = torch.tensor([[5, 6, 7, 2]])
OLD, NEW = 101, 107


def built(family, tied=None):
    config = transformers.AutoConfig.for_model(family)
    own = {k: v for k, v in SMALL.items() if hasattr(config, k)}
    tie = {} if tied is None else {"tie_word_embeddings": tied}
    config = transformers.AutoConfig.for_model(family, vocab_size=OLD, **own, **tie)
    torch.manual_seed(0)
    model = adapterzoo.init(getattr(transformers, MODELS[family][0])(config))
    return model.double().eval()


def trained(model, config, **kwargs):
    model.add_adapter("a", config)
    model.train_adapter("a", **kwargs)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def logits(model, ids=IDS):
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=ids, **decoder)[0]


def configs(family):
    _, table, output = MODELS[family]
    yield "head", "lora[r=2]", {}
    yield "output", LoRAConfig(r=2, modules_to_save=[output]), {}
    yield "rows", LoRAConfig(r=2, trainable_token_indices=[3, 5]), {}
    yield "prompt", "prompt_tuning[prompt_length=3]", {}
    if family not in ("t5", "bart"):
        yield "table", LoRAConfig(r=2, modules_to_save=[table]), {}
        yield "both", LoRAConfig(r=2, modules_to_save=[table, output]), {}


CASES = [
    pytest.param(family, None, config, kwargs, id=f"{family}-{name}")
    for family in MODELS
    for name, config, kwargs in configs(family)
]
CASES += [
    pytest.param(family, family != "llama", config, kwargs, id=f"{family}-other-tie-{name}")
    for family in ("llama", "gpt2", "bart", "t5")
    for name, config, kwargs in configs(family)
    if name in ("output", "both", "rows")
]


@pytest.mark.parametrize(("family", "tied", "config", "kwargs"), CASES)
def test_what_is_trained_stays(family, tied, config, kwargs, tmp_path):
    model = trained(built(family, tied), config, **kwargs)
    model.add_adapter("other", "lora[r=2]")
    before = logits(model)
    model.set_active_adapters(None)
    plain = logits(model)
    model.set_active_adapters("a")
    # the outputs of a prompt have room for its tokens
    assert before.shape != plain.shape or (before - plain).abs().max() > 1e-6
    model.resize_token_embeddings(NEW)
    after = logits(model)
    assert after.shape[-1] == NEW
    torch.testing.assert_close(after[..., :OLD], before, rtol=0, atol=1e-12)
    # new tokens, files and the way back
    fresh = logits(model, torch.tensor([[NEW - 1, 5, 6]]))
    assert fresh.isfinite().all()
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b", set_active=True)
    assert torch.equal(logits(model), after)
    model.set_active_adapters("other")
    torch.testing.assert_close(logits(model)[..., :OLD], plain, rtol=0, atol=1e-12)
    model.delete_adapter("a")
    model.delete_adapter("b")
    model.resize_token_embeddings(OLD)
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", ["output", "rows", "prompt"])
def test_adapters_are_added_after_resizing(family, name):
    """As over a model that was made with the new size."""
    config = next(config for each, config, _ in configs(family) if each == name)
    model = built(family)
    model.resize_token_embeddings(NEW)
    plain = getattr(transformers, MODELS[family][0])
    fresh = adapterzoo.init(plain(model.config)).double().eval()
    fresh.load_state_dict(model.state_dict())
    for each in (model, fresh):
        torch.manual_seed(0)
        trained(each, config)
    ids = torch.tensor([[5, 6, NEW - 1, 2]])
    assert [*model.state_dict()] == [*fresh.state_dict()]
    assert torch.equal(logits(model, ids), logits(fresh, ids))


def test_a_resized_copy_trains():
    model = trained(built("llama", False), LoRAConfig(r=2, modules_to_save=["lm_head"]))
    model.resize_token_embeddings(NEW)
    ids = torch.tensor([[NEW - 1, 5, 6]])
    model.train()(input_ids=ids, labels=ids).loss.backward()
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    (copy,) = [p for n, p in own.items() if "lm_head" in n]
    assert copy.shape == (NEW, 32)
    assert copy.grad.abs().sum() > 0
    assert model.lm_head.weight.grad is None


@pytest.mark.parametrize(
    ("family", "config", "kwargs"),
    [
        ("llama", LoRAConfig(r=2, target_modules=["embed_tokens"]), {}),
        ("llama", "lora[r=2]", {"train_embeddings": True}),
        # the table's other modules, not the one that transformers asks for
        ("t5", LoRAConfig(r=2, target_modules=["embed_tokens"]), {}),
        ("bart", LoRAConfig(r=2, target_modules=["embed_tokens"]), {}),
    ],
)
def test_an_adapter_of_the_size_of_the_table_is_refused(family, config, kwargs):
    model = trained(built(family), config, **kwargs)
    before = logits(model)
    with refused(model, StateError, "resize_token_embeddings(107)", "'a' have the size"):
        model.resize_token_embeddings(NEW)
    assert torch.equal(logits(model), before)


def test_rows_of_tokens_are_not_cut_off():
    model = trained(built("llama"), LoRAConfig(r=2, trainable_token_indices=[3, 100]))
    with refused(model, StateError, "'a' has a row of the token 100", "new_num_tokens=101"):
        model.resize_token_embeddings(50)
    model.resize_token_embeddings(101)


def test_a_merged_output_layer_is_refused():
    model = trained(built("llama", False), LoRAConfig(r=2, modules_to_save=["lm_head"]))
    model.merge_adapter("a")
    with refused(model, StateError, "'a' is merged", "reset_adapter()"):
        model.resize_token_embeddings(NEW)
    model.reset_adapter()
    model.resize_token_embeddings(NEW)


@pytest.mark.parametrize("config", [
    "lora", "prompt_tuning[prompt_length=2]", "prompt_tuning[prompt_length=2,joins='embeddings']",
    "prefix_tuning[prefix_length=3,flat=True,positions='shifted']", "seq_bn_inv",
    LoRAConfig(target_modules=["wpe"]), LoRAConfig(trainable_token_indices=[3]),
])  # fmt: skip
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_what_is_known_of_the_model_changes_only_in_sizes(family, config):
    """Discovery reads a model without adapters, so it is not done again."""
    model = built(family)
    try:
        model.add_adapter("a", config, set_active=True)
    except adapterzoo.errors.SiteError:
        pytest.skip("the family has no such place")
    before = model.anatomy
    model.resize_token_embeddings(NEW)
    known = {"outside": before.outside, "output": before.output}
    after = dataclasses.replace(model.anatomy, **known)
    assert after == before
    sizes = {site.path: (site.d_in, site.d_out) for site in model.anatomy.outside}
    plain = built(family)
    plain.resize_token_embeddings(NEW)
    assert sizes == {site.path: (site.d_in, site.d_out) for site in plain.anatomy.outside}
    assert model.anatomy.output == plain.anatomy.output
