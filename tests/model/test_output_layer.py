"""Adapters at the layer onto the vocabulary, which lies beside the base model."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from families import tiny_config, tiny_inputs
from peft_world import QUIET, TENSORS, built, logits, stand_in
from safetensors.torch import load_file
from snapshots import refused, stir

import adapterzoo
import adapterzoo.peft
from adapterzoo import AdapterConfig, LoRAConfig
from adapterzoo.composition import Stack
from adapterzoo.errors import CompositionError, ConfigError, SiteError, StateError

pytestmark = [
    *(pytest.mark.filterwarnings(line) for line in QUIET),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True."),
]

# class → family, and the layer; BERT's has a bias, and its base model is not called "model"
CLASSES = {
    "LlamaForCausalLM": ("llama", "lm_head"),
    "GPT2LMHeadModel": ("gpt2", "lm_head"),
    "GPTNeoXForCausalLM": ("gpt_neox", "lm_head"),
    "BertForMaskedLM": ("bert", "decoder"),
    "BartForConditionalGeneration": ("bart", "lm_head"),
    "WhisperForConditionalGeneration": ("whisper", "proj_out"),
    "T5ForConditionalGeneration": ("t5", "lm_head"),
}
METHODS = {
    "LoraConfig": {"r": 3, "lora_alpha": 5},
    "dora": {"r": 3, "use_dora": True},
    "LoHaConfig": {"r": 2},
    "LoKrConfig": {"r": 2},
    "OFTConfig": {"r": 0, "oft_block_size": 8},
    "BOFTConfig": {"boft_block_size": 8},
    "VeraConfig": {"r": 3},
    "IA3Config": {},
    "MissConfig": {"r": 3},
}


def made(architecture: str, tied: bool = False):
    """A tiny model of a class, of the same weights each time."""
    family, _ = CLASSES[architecture]
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    return built(architecture, config)


def of_peft(architecture: str, kind: str, tied: bool, folder, **fields):
    """PEFT's model with an adapter of random values at the output layer, saved to a folder."""
    name = CLASSES[architecture][1]
    config = getattr(peft, "LoraConfig" if kind == "dora" else kind)
    given = {**METHODS[kind], "target_modules": [name], **fields}
    if kind == "IA3Config":
        given["feedforward_modules"] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(made(architecture, tied), config(**given)).eval()
    draws = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, tensor in peft.get_peft_model_state_dict(
            model, save_embedding_layers=False
        ).items():
            tensor.copy_(torch.randn(tensor.shape, generator=draws) / 5)
            assert CLASSES[architecture][1] in key or "vera" in key
    model.save_pretrained(folder, save_embedding_layers=False)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [*((each, "LoraConfig") for each in CLASSES), *(("LlamaForCausalLM", k) for k in METHODS)],
)
def test_the_files_and_logits_are_those_of_peft(architecture, kind, tied, tmp_path, monkeypatch):
    stand_in(monkeypatch)
    family, _ = CLASSES[architecture]
    theirs = of_peft(architecture, kind, tied, tmp_path / "theirs")
    expected, plain = logits(theirs, family), logits(made(architecture, tied), family)
    assert (expected - plain).abs().max() > 1e-2
    mine = adapterzoo.peft.PeftModel.from_pretrained(made(architecture, tied), tmp_path / "theirs")
    near = {"rtol": 0, "atol": 1e-5 if kind in ("OFTConfig", "BOFTConfig") else 1e-9}
    torch.testing.assert_close(logits(mine.eval(), family), expected, **near)

    mine.save_pretrained(tmp_path / "mine", save_embedding_layers=False)
    keys = [{*load_file(tmp_path / each / TENSORS)} for each in ("mine", "theirs")]
    assert keys[0] == keys[1]
    again = peft.PeftModel.from_pretrained(made(architecture, tied), tmp_path / "mine").eval()
    torch.testing.assert_close(logits(again, family), expected, **near)

    model = adapterzoo.init(made(architecture, tied))
    model.load_adapter(tmp_path / "theirs", load_as="a", set_active=True)
    model.save_adapter(tmp_path / "native", "a")
    model = adapterzoo.init(made(architecture, tied))
    model.load_adapter(tmp_path / "native", load_as="b", set_active=True)
    torch.testing.assert_close(logits(model.eval(), family), expected, **near)


def test_names_mean_the_layers_of_pefts():
    """In expressions and patterns too; "all-linear" leaves the output layer out."""
    for fields in (
        {"target_modules": r"lm_head|model\.layers\.0\..*q_proj"},
        {"target_modules": ["lm_head", "q_proj"], "rank_pattern": {"lm_head": 2, "q_proj": 3}},
        {"target_modules": ["lm_head", "q_proj"], "exclude_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear"},
    ):
        shapes = []
        for lib in (peft, adapterzoo.peft):
            model = lib.get_peft_model(made("LlamaForCausalLM"), lib.LoraConfig(**fields))
            state = lib.get_peft_model_state_dict(model, save_embedding_layers=False)
            shapes.append({key: tensor.shape for key, tensor in state.items()})
        assert shapes[0] == shapes[1], fields


AT_OUTPUT = LoRAConfig(target_modules=["lm_head", "q_proj"], r=3, init_weights="random")


def trained_one(tied: bool = False):
    model = adapterzoo.init(made("LlamaForCausalLM", tied))
    model.add_adapter("a", AT_OUTPUT, set_active=True)
    return model


def test_its_gradient_and_rows_of_a_batch():
    model = trained_one().double()
    model.add_adapter("b", LoRAConfig(target_modules=["lm_head"], r=2, init_weights="random"))
    model.train_adapter("a")
    inputs = tiny_inputs("llama")
    found = model(**inputs).logits
    found.square().mean().backward()
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in named)
    assert all(".a." in name for name in named)
    mixed = model(**inputs, adapter_names=["b", None]).logits
    model.set_active_adapters("b")
    torch.testing.assert_close(mixed[0], model(**inputs).logits[0])
    model.set_active_adapters(None)
    torch.testing.assert_close(mixed[1], model(**inputs).logits[1])


def test_merging_and_copies():
    inputs = tiny_inputs("llama")
    model = trained_one()
    before = model(**inputs).logits
    weight = model.lm_head.weight.clone()
    other = copy.deepcopy(model)
    model.merge_adapter("a")
    assert not torch.equal(model.lm_head.weight, weight)
    torch.testing.assert_close(model(**inputs).logits, before)
    model.reset_adapter()
    assert torch.equal(model.lm_head.weight, weight)
    model.delete_adapter("a")
    assert type(model.lm_head) is torch.nn.Linear
    torch.testing.assert_close(other(**inputs).logits, before)
    for tied in (False, True):
        with_adapter = trained_one(tied)
        before = with_adapter(**inputs).logits
        plain = with_adapter.merge_and_unload()
        torch.testing.assert_close(plain(**inputs).logits, before)


def test_a_tied_layer_is_not_merged_in_place():
    model = trained_one(tied=True)
    with refused(model, StateError, "'lm_head'", "shared"):
        model.merge_adapter("a")


def test_what_an_adapter_has_for_itself_it_does_not_change_too():
    model = adapterzoo.init(made("LlamaForCausalLM", tied=True))
    rows = AT_OUTPUT.replace(trainable_token_indices=[1, 2])
    with refused(model, ConfigError, "'lm_head'", "target_modules"):
        model.add_adapter("a", rows)
    model.add_adapter("a", AT_OUTPUT)
    model.add_adapter("own", LoRAConfig(modules_to_save=["lm_head"]))
    model.add_adapter("rows", LoRAConfig(trainable_token_indices=[1, 2]))
    for other in ("own", "rows"):
        with refused(model, CompositionError, "'lm_head'", "one of them"):
            model.set_active_adapters(Stack("a", other))
        model.set_active_adapters(other)
        model.set_active_adapters(None)


def test_the_vocabulary_cannot_be_resized_below_it():
    model = trained_one()
    with refused(model, StateError, "'a'", "delete_adapter"):
        model.resize_token_embeddings(120)
    model.delete_adapter("a")
    model.resize_token_embeddings(120)
    model.add_adapter("b", AT_OUTPUT, set_active=True)
    assert model(**tiny_inputs("llama")).logits.shape[-1] == 120


@pytest.mark.parametrize("target", [["dense"], ["query", "predictions.transform.dense"]])
def test_other_layers_of_a_head_have_none(target):
    model = adapterzoo.init(made("BertForMaskedLM"))
    with refused(model, SiteError, "transform.dense", "target_modules="):
        model.add_adapter("a", LoRAConfig(target_modules=target))


def test_models_with_named_heads_have_no_such_layer(tmp_path):
    made("LlamaForCausalLM").save_pretrained(tmp_path)
    model = adapterzoo.AutoAdapterModel.from_pretrained(tmp_path)
    with refused(model, SiteError, "'lm_head'", "'q_proj'"):
        model.add_adapter("a", AT_OUTPUT)


def test_every_method_of_layers_acts_there():
    """Or refuses the layer by name, as it refuses others of this kind."""
    inputs = tiny_inputs("llama")
    acted = []
    for name in ("lora", "dora", "loha", "lokr", "oft", "boft", "vera", "miss[r=8]", "ia3"):
        config = AdapterConfig.load(name)
        model = adapterzoo.init(made("LlamaForCausalLM"))
        before = model(**inputs).logits
        model.add_adapter("a", config.replace(target_modules=["lm_head"]), set_active=True)
        stir(model, "a")
        acted.append(bool((model(**inputs).logits - before).abs().max() > 1e-3))
    assert all(acted)
