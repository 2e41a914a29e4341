"""PEFT's prefix tuning: its files give its own outputs here, and it loads ours and agrees."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from cached import CACHE
from families import tiny_config, tiny_inputs
from packaging.version import Version
from peft_world import QUIET, TENSORS, change, for_peft, logits, ours, plain, reloaded
from safetensors.torch import load_file, save_file
from snapshots import snapshot, stir

import adapterzoo
from adapterzoo import PrefixTuningConfig
from adapterzoo.errors import CheckpointError

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

TASKS = {
    "bert": "SEQ_CLS",
    "roberta": "SEQ_CLS",
    "gpt2": "CAUSAL_LM",
    "llama": "CAUSAL_LM",
    "gpt_neox": "CAUSAL_LM",
    "phi3": "CAUSAL_LM",
    "bloom": "CAUSAL_LM",
    "t5": "SEQ_2_SEQ_LM",
    "mt5": "SEQ_2_SEQ_LM",
}


def trained(family, folder, **fields):
    """Save a prefix of PEFT with random values; the logits with it."""
    config = peft.PrefixTuningConfig(task_type=TASKS[family], num_virtual_tokens=3, **fields)
    model = peft.get_peft_model(for_peft(plain(family)), config)
    source = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=source) * 0.1)
    model.save_pretrained(folder)
    return logits(model, family)


def close(found, expected, atol=1e-10):
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("projection", [False, True], ids=["flat", "projection"])
@pytest.mark.parametrize("family", TASKS)
def test_a_prefix_of_peft_loads_and_goes_back(family, projection, tmp_path):
    fields = {"prefix_projection": True, "encoder_hidden_size": 20} if projection else {}
    expected = trained(family, tmp_path / "theirs", **fields)
    model = ours(family)
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    assert (expected - logits(plain(family), family)).abs().max() > 1e-2
    # the product of a projection is rounded to float32 in the file, BLOOM's softmax in every model
    near = 1e-5 if projection or family == "bloom" else 1e-10
    close(logits(model, family), expected, near)
    model.save_adapter(tmp_path / "back", "a", format="peft")
    close(reloaded(family, tmp_path / "back"), logits(model, family), near)
    model.save_adapter(tmp_path / "own", "a")
    other = ours(family)
    other.load_adapter(tmp_path / "own", set_active=True)
    close(logits(other, family), logits(model, family))


@pytest.mark.skipif(
    CACHE == "cache" and Version(peft.__version__) < Version("0.22"),
    reason="PEFT 0.21 loses the prefix: transformers 5.24 has a cache of its own, by another name",
)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "t5"])
@pytest.mark.parametrize("beams", [1, 2])
def test_peft_generates_the_same_tokens(family, beams, tmp_path):
    trained(family, tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain(family), tmp_path).double().eval()
    model = ours(family).double()
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    inputs = {k: v for k, v in tiny_inputs(family).items() if not k.startswith("decoder")}
    if family != "t5":
        # padded on the left, as a generation wants it
        inputs = {k: v.flip(1) for k, v in inputs.items()}
    asked = {**inputs, "max_new_tokens": 9, "do_sample": False, "num_beams": beams}
    asked |= {"pad_token_id": 0, "eos_token_id": None}
    expected = theirs.generate(**asked)
    assert torch.equal(model.generate(**asked), expected)
    assert not torch.equal(plain(family).double().generate(**asked), expected)


EXPORTS = {
    ("bert", "shifted"): PrefixTuningConfig(
        prefix_length=3, bottleneck_size=5, non_linearity="relu", positions="shifted"
    ),
    ("llama", "shifted"): PrefixTuningConfig(prefix_length=4, flat=True, positions="shifted"),
    ("gpt2", "shifted"): PrefixTuningConfig(prefix_length=4, positions="shifted"),
}


@pytest.mark.parametrize("case", EXPORTS, ids=" ".join)
def test_peft_loads_ours_and_agrees(case, tmp_path):
    model = ours(case[0])
    model.add_adapter("a", EXPORTS[case])
    stir(model, "a")
    model.set_active_adapters("a")
    model.save_adapter(tmp_path, "a", format="peft")
    # the product of an MLP is rounded to float32
    close(reloaded(case[0], tmp_path), logits(model, case[0]), 1e-5)


def test_a_decoder_beside_an_encoder_trains_the_prefix_that_peft_trains(tmp_path):
    """PEFT doubles its list of pairs, so that layers i and i + N / 2 share keys and values."""
    config = peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=4)
    theirs = peft.get_peft_model(plain("t5").double(), config).double().eval()
    theirs.save_pretrained(tmp_path)
    inputs = tiny_inputs("t5")
    inputs["labels"] = inputs["decoder_input_ids"]
    expected = theirs(**inputs).loss
    expected.backward()
    model = ours("t5").double()
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    model.train_adapter("a")
    loss = model.eval()(**inputs).loss
    loss.backward()
    close(loss, expected)
    table = model.base_model.prefix_tunings["a"]["tied_self_prefix"].table
    close(table.grad, theirs.prompt_encoder["default"].embedding.weight.grad)
    assert table.grad.abs().max() > 1e-4


def test_layers_that_peft_would_tie_are_not_written(tmp_path):
    model = ours("t5")
    config = PrefixTuningConfig(
        prefix_length=4, flat=True, encoder_prefix=False, cross_prefix=False
    )
    model.add_adapter("a", config)
    with pytest.raises(CheckpointError, match=r"share keys and values.*convention='peft'"):
        model.save_adapter(tmp_path / "t5", "a", format="peft")
    assert not (tmp_path / "t5").exists()


UNSAYABLE = {
    "gates": ("gpt2", {"use_gating": True}, "use_gating=True"),
    "adapters' own": ("gpt2", {"convention": "adapterhub"}, "convention='adapterhub'"),
    "positions that stay": ("gpt2", {"positions": "kept"}, "positions='shifted'"),
    "the encoder": ("t5", {"cross_prefix": False}, "encoder_prefix=False, cross_prefix=False"),
    "cross-attention": ("t5", {"encoder_prefix": False}, "encoder_prefix=False"),
    "some blocks": ("gpt2", {"leave_out": [1]}, "leave_out=[1]"),
}


@pytest.mark.parametrize("kind", UNSAYABLE)
def test_what_peft_cannot_say_is_refused_before_anything_is_written(kind, tmp_path):
    family, fields, word = UNSAYABLE[kind]
    model = ours(family)
    fields = {"prefix_length": 3, "flat": True, "positions": "shifted"} | fields
    model.add_adapter("a", PrefixTuningConfig(**fields))
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.save_adapter(tmp_path / "peft", "a", format="peft")
    for part in ("save_adapter(", word, "format='native'"):
        assert part in str(raised.value)
    assert not (tmp_path / "peft").exists()
    assert snapshot(model) == before


def test_a_task_that_peft_does_not_know_is_refused(tmp_path):
    """PEFT would load the file, and leave the prefix out."""
    model = ours("bert")
    model.add_adapter("a", PrefixTuningConfig(prefix_length=3, flat=True, positions="shifted"))
    with pytest.raises(CheckpointError, match=r"only with its head.*with_head=True"):
        model.save_adapter(tmp_path / "peft", "a", format="peft", with_head=False)
    assert not (tmp_path / "peft").exists()


DAMAGED = {
    "too narrow": (
        {},
        {"prompt_embeddings": (3, 64)},
        "prompt_embeddings [3, 64]",
        "[tokens, 128]",
    ),
    "flat": ({}, {"prompt_embeddings": (384,)}, "prompt_embeddings [384]", "[tokens, 128]"),
    "tokens": ({"num_virtual_tokens": 4}, {}, "num_virtual_tokens=4, here 3", "copy both files"),
    "heads": ({"num_attention_heads": 2}, {}, "num_attention_heads=2, here 4", "trained on"),
    "layers": ({"num_layers": 3}, {}, "num_layers=3, here 2", "trained on"),
    "two stacks": ({"num_transformer_submodules": 2}, {}, "submodules=2, here 1", "trained on"),
    "tokens as text": ({"num_virtual_tokens": "3"}, {}, "num_virtual_tokens='3'", "whole number"),
    "no prefix": ({}, {"prompt_embeddings": None}, "prompt_embeddings [0, 0]", "copy both files"),
    "a layer": ({}, {"base_model.h.0.attn.c_attn.lora_A.weight": (2, 2)}, "c_attn.lora_A"),
    "a base weight": ({}, {"base_model.transformer.wpe.weight": (64, 32)}, "wpe", "differ"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_files_that_do_not_fit_are_refused(kind, tmp_path):
    fields, shapes, *words = DAMAGED[kind]
    trained("gpt2", tmp_path)
    change(tmp_path, **fields)
    tensors = load_file(tmp_path / TENSORS)
    for key, shape in shapes.items():
        tensors.pop(key, None)
        tensors |= (
            {key: torch.ones(*shape)} if shape else {"base_model.lm_head.bias": torch.ones(3)}
        )
    save_file(tensors, tmp_path / TENSORS)
    model = ours("gpt2")
    before = snapshot(model)
    with pytest.raises(CheckpointError) as raised:
        model.load_adapter(tmp_path, load_as="a")
    for word in words:
        assert word in str(raised.value)
    assert snapshot(model) == before


def test_a_lora_with_a_prompt_in_its_file_is_refused(tmp_path):
    trained("gpt2", tmp_path)
    change(tmp_path, peft_type="LORA")
    with pytest.raises(CheckpointError, match=r"prompt_embeddings   in the file only"):
        ours("gpt2").load_adapter(tmp_path, load_as="a")


@pytest.mark.parametrize("family", ["bart", "opt"])
def test_a_table_that_counts_its_tokens_by_itself(tmp_path, family):
    """Tokens follow the prefix, in one call and step by step through a cache."""
    auto, task = {
        "bart": (transformers.BartForConditionalGeneration, "SEQ_2_SEQ_LM"),
        "opt": (transformers.OPTForCausalLM, "CAUSAL_LM"),
    }[family]
    sizes = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "ffn_dim": 32,
             "num_attention_heads": 2, "vocab_size": 99, "max_position_embeddings": 64}  # fmt: skip
    config = transformers.OPTConfig(**sizes) if family == "opt" else tiny_config(family)
    plain = auto(config).eval()
    config = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=3)
    theirs = peft.get_peft_model(copy.deepcopy(plain), config).eval()
    theirs.save_pretrained(tmp_path)
    inputs = tiny_inputs("gpt2" if family == "opt" else family)
    with torch.no_grad():
        expected = theirs(**inputs).logits
    model = adapterzoo.init(plain)
    model.load_adapter(tmp_path, load_as="a", set_active=True)
    with torch.no_grad():
        found = model(**inputs).logits.double()
        # what stands at padding means nothing; BART's decoder has none
        seen = inputs["attention_mask"].bool() if family == "opt" else ...
        close(found[seen], expected[seen], 1e-6)
        ids = inputs["input_ids"][:, :5]
        fixed = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        generated = model.generate(input_ids=ids, **fixed)
        again = model.generate(input_ids=ids, **fixed, use_cache=False)
    assert torch.equal(generated, again)
