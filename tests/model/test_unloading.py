"""Plain models of transformers again: their class, their files, their outputs."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from families import tiny_config
from peft_world import logits, ours, plain
from snapshots import changes, output, refused, same_bits, snapshot, stir

import adapterzoo
from adapterzoo import AdapterModelMixin, AdapterSetup, Average, Fuse, LoRAConfig, Stack
from adapterzoo.auto import AutoAdapterModel
from adapterzoo.errors import (
    CheckpointError,
    CompositionError,
    ConfigError,
    StateError,
    UnknownNameError,
)
from adapterzoo.inject.adapted import Adapted
from adapterzoo.model.heads.named import own_tensors
from adapterzoo.model.hf.task_classes import head_tensors

ALL = LoRAConfig(target_modules="all-linear", lora_bias=True)
CASES = {
    "bert-lora": ("bert", ALL), "bert-union": ("bert", "lora|boft"), "gpt2-lora": ("gpt2", ALL),
    "gpt2-boft": ("gpt2", "boft"), "llama-dora": ("llama", "dora"),
    "t5-lora": ("t5", ALL.replace(lora_bias=False)),
}  # fmt: skip


def close(found, expected):
    """In float64, if transformers can: then no rounding of a processor comes near the tolerance."""
    near = 1e-10 if found.dtype is torch.float64 else 1e-5
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def reloaded(model, folder):
    """The model as transformers alone loads it from its files, which name nothing of ours."""
    model.save_pretrained(folder)
    assert "adapter" not in (folder / "config.json").read_text()
    assert "prediction_heads" not in (folder / "config.json").read_text()
    # transformers may put values elsewhere in memory, so that a product of one row rounds otherwise
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    kept = model.state_dict()
    assert all(same_bits(tensor, kept[key]) for key, tensor in loaded.state_dict().items())
    return loaded.eval()


# --- models that `init` made ---


@pytest.mark.parametrize("case", CASES)
def test_merge_and_unload_gives_the_own_class_back(case, tmp_path):
    family, config = CASES[case]
    model, cls = ours(family).double(), type(plain(family))
    for seed, name in enumerate("ab"):
        model.add_adapter(name, config)
        stir(model, name, seed, 0.3)
    model.set_active_adapters("a")
    unmerged = logits(model, family)
    keys = list(plain(family).state_dict())
    found = model.merge_and_unload()
    assert found is model
    assert type(found) is cls
    assert list(found.state_dict()) == keys
    assert not any(isinstance(module, Adapted) for module in found.modules())
    assert json.dumps(found.config.to_dict())
    assert {"_adapter_state", "_active"}.isdisjoint(vars(found))
    merged = logits(found, family)
    close(merged, unmerged)
    assert (merged - logits(plain(family).double(), family)).abs().max() > 1e-2
    close(logits(reloaded(found, tmp_path), family), merged)


def test_unload_gives_the_weights_back_bit_for_bit(tmp_path):
    model, reference = ours("bert"), plain("bert")
    model.add_adapter("a", "seq_bn")
    model.add_adapter("b", "lora")
    model.add_adapter("c", "seq_bn")
    model.add_adapter("d", "dora|par_bn")
    stir(model, "b")
    model.add_adapter_fusion(["a", "c"])
    model.merge_adapter("b")
    found = model.unload()
    assert found is model
    assert type(found) is type(reference)
    assert all(same_bits(found.state_dict()[k], t) for k, t in reference.state_dict().items())
    assert list(found.state_dict()) == list(reference.state_dict())
    reloaded(found, tmp_path)
    # a setup looks at all models with adapters: this one is none any more
    other = ours("bert")
    other.add_adapter("b", "lora")
    with AdapterSetup("b"):
        logits(found, "bert", None)
    # and may become one again
    adapterzoo.init(found).add_adapter("b", "lora")


def test_names_say_what_is_merged():
    expected = {}
    for names in (["a"], ["b"], ["a", "b"], ["b", "a"]):
        model = ours("bert").double()
        for seed, name in enumerate("ab"):
            model.add_adapter(name, "lora")
            stir(model, name, seed, 0.3)
        model.set_active_adapters(Stack(*names))
        expected["".join(names)] = logits(model, "bert")
        for one in (copy.deepcopy(model), model):
            one.set_active_adapters(Stack(*names) if one is model else None)
            found = one.merge_and_unload(None if one is model else names)
            close(logits(found, "bert"), expected["".join(names)])
    close(expected["ab"], expected["ba"])
    assert (expected["a"] - expected["b"]).abs().max() > 1e-3


def test_what_is_merged_already_stays_so():
    model = ours("bert").double()
    for seed, name in enumerate("abc"):
        model.add_adapter(name, "lora")
        stir(model, name, seed, 0.3)
    model.set_active_adapters(Stack("a", "b"))
    expected = logits(model, "bert")
    model.set_active_adapters(None)
    model.merge_adapter("a")
    for names in (["a", "b"], "b"):
        close(logits(copy.deepcopy(model).merge_and_unload(names), "bert"), expected)
    assert type(model.merge_and_unload()) is type(plain("bert"))


def test_merging_several_is_merging_one_after_the_other(tiny):
    """All in one call, or none: what the second cannot do undoes the first."""
    model = tiny().double()
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "dora")
        stir(model, name, seed)
    one_by_one = copy.deepcopy(model)
    for name in "ab":
        one_by_one.merge_adapter(name)
    close(output(model.merge_and_unload(["a", "b"])), output(one_by_one))
    *_, (_, module) = model.adapter_modules("b")
    with torch.no_grad():
        module.lora_B.fill_(float("nan"))
    with refused(model, StateError, "is not finite", "Look for NaN"):
        model.merge_and_unload(["a", "b"])


# what is active, what is asked for, and what the error says
REFUSALS = [
    (None, None, StateError, ["no adapter is active", "Write merge_and_unload(['a'])"]),
    (Average("a", "b"), None, StateError, ["is not a stack", "combine_strategy='cat'"]),
    (Stack("a", "n"), None, StateError, ["a NormBottleneck adapter is not a change", "Keep it"]),
    (None, Average("a", "b"), StateError, ["is not a stack", "combine_strategy='cat'"]),
    (None, 3, CompositionError, ["got a int", "Stack('a', 'b')"]),
    (None, ["aa"], UnknownNameError, ["'aa'", "Did you mean 'a'"]),
    (None, ["a", "nan"], StateError, ["is not finite", "Look for NaN"]),
    (None, ["a", "gate"], StateError, ["use_gating=True", "Keep it active"]),
]


@pytest.mark.parametrize(("setup", "names", "error", "says"), REFUSALS)
def test_a_failing_call_leaves_the_model_as_it_was(setup, names, error, says):
    model = ours("bert")
    for seed, name in enumerate(["a", "b", "nan"]):
        model.add_adapter(name, "lora")
        stir(model, name, seed)
    model.add_adapter("n", "seq_bn")
    model.add_adapter("gate", "lora[use_gating=True]")
    *_, (_, module) = model.adapter_modules("nan")
    with torch.no_grad():
        module.lora_B[0, 0] = float("nan")
    model.set_active_adapters(setup)
    with refused(model, error, *says):
        model.merge_and_unload(names)


def test_what_weights_cannot_say_is_refused(tiny):
    model = ours("bert")
    for name in "ab":
        model.add_adapter(name, "lora")
        stir(model, name)
    model.set_active_adapters("a", skip_layers=[0])
    with refused(model, StateError, "the blocks [0]", "Write set_active_adapters("):
        model.merge_and_unload()
    model.set_active_adapters(None)
    with AdapterSetup("b"), refused(model, StateError, "AdapterSetup", "Leave the"):
        model.merge_and_unload(["a"])
    with AdapterSetup("b"), refused(model, StateError, "AdapterSetup", "Leave the"):
        model.unload()
    model = tiny()
    for name in "ab":
        model.add_adapter(name, "seq_bn")
    model.add_adapter_fusion(["a", "b"])
    model.set_active_adapters(Fuse("a", "b"))
    with refused(model, StateError, "is not a stack", "average_adapter"):
        model.merge_and_unload()


def test_weights_that_came_merged_from_a_file_stay_merged(tmp_path):
    model = ours("bert").double()
    model.add_adapter("a", "lora")
    stir(model, "a")
    model.merge_adapter("a")
    expected = logits(model, "bert")
    model.save_pretrained(tmp_path)
    loaded = adapterzoo.load_model(tmp_path, type(plain("bert"))).eval()
    with refused(loaded, StateError, "the originals are not known", "Load the base model"):
        loaded.unload()
    close(logits(loaded.merge_and_unload(), "bert"), expected)


def test_a_class_with_adapters_of_its_own_has_no_plain_one():
    class Own(AdapterModelMixin, transformers.BertModel):
        def __init__(self, config):
            super().__init__(config)
            self._start_adapters()

    model = Own(tiny_config("bert")).eval()
    model.add_adapter("a", "lora", set_active=True)
    with refused(model, StateError, "Own is a class of yours", "merge_adapter('a')"):
        model.merge_and_unload()


# --- models with named heads ---

ONE = {"layers": 1}
HEADS = {
    "bert-classes": ("bert", "classification", {**ONE, "num_labels": 3, "use_pooler": True},
                     "BertForSequenceClassification"),
    "bert-tags": ("bert", "tagging", {**ONE, "num_labels": 5}, "BertForTokenClassification"),
    "bert-answers": ("bert", "qa", ONE, "BertForQuestionAnswering"),
    "roberta-classes": ("roberta", "classification", {"num_labels": 4},
                        "RobertaForSequenceClassification"),
    "distilbert-tags": ("distilbert", "tagging", ONE, "DistilBertForTokenClassification"),
    "t5-words": ("t5", "seq2seq_lm", {}, "T5ForConditionalGeneration"),
}  # fmt: skip


def with_head(family, kind, options):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config(family)).double().eval()
    model.add_adapter("a", "lora")
    stir(model, "a", std=0.3)
    getattr(model, f"add_{kind}_head")("a", **options)
    with torch.no_grad():
        for parameter in own_tensors(model, model.heads["a"]).values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_active_adapters("a")
    return model


@pytest.mark.parametrize("case", HEADS)
def test_the_active_head_becomes_that_of_a_task_class(case, tmp_path):
    family, kind, options, name = HEADS[case]
    model = with_head(family, kind, options)
    before, expected = snapshot(model), output(model)
    found = model.merge_and_unload()
    # a new model; this one is what it was
    assert not changes(before, snapshot(model))
    assert type(found) is getattr(transformers, name)
    assert not found.training
    merged = output(found)
    close(merged, expected)
    loaded = reloaded(found, tmp_path)
    close(output(loaded), merged)
    if "num_labels" in options:
        assert loaded.config.num_labels == options["num_labels"]
    shared = {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in found.parameters()}
    assert not shared


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gemma3_text", "bart"])
def test_a_static_head_that_became_a_named_one_goes_back(family, tmp_path):
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if family == "bart":
        auto = transformers.AutoModelForSeq2SeqLM
    # transformers has no experts in float64
    dtype = torch.float32 if family == "mixtral" else torch.float64
    static = auto.from_config(tiny_config(family)).to(dtype).eval()
    static.save_pretrained(tmp_path / "base")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base").eval()
    model.add_adapter("a", "lora[attn_matrices=['q','k','v']]")
    stir(model, "a", std=0.3)
    model.set_active_adapters("a")
    expected = output(model)
    found = model.merge_and_unload()
    assert type(found) is type(static)
    close(output(found), expected)
    close(output(reloaded(found, tmp_path / "merged")), expected)
    assert found.generation_config.to_dict() == model.generation_config.to_dict()
    again = type(static).from_pretrained(tmp_path / "base").eval()
    close(output(model.unload()), output(again))


def test_without_a_head_it_is_the_base_model(tiny, tmp_path):
    model = tiny().double()
    model.add_adapter("a", "boft")
    stir(model, "a")
    model.add_classification_head("h")
    model.active_head = None
    model.set_active_adapters("a")
    expected = output(model)
    found = model.merge_and_unload()
    assert type(found) is transformers.BertModel
    close(output(found), expected)
    close(output(reloaded(found, tmp_path)), expected)
    model.merge_adapter("a")
    close(output(model.unload()), output(tiny().double()))


def test_a_base_model_with_a_part_under_the_name_of_its_prefix():
    config = transformers.DINOv3ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        image_size=16, patch_size=8,
    )  # fmt: skip
    plain = transformers.DINOv3ViTModel(config).double().eval()
    assert [*head_tensors(plain)] == []
    model = AutoAdapterModel.from_config(config).double().eval()
    model.load_state_dict(plain.state_dict())
    model.add_adapter("a", ALL.replace(lora_bias=False))
    stir(model, "a")
    model.set_active_adapters("a")
    pixels = {"pixel_values": torch.randn(2, 3, 16, 16).double()}
    expected = model(**pixels).last_hidden_state
    found = model.merge_and_unload()
    assert type(found) is transformers.DINOv3ViTModel
    # transformers computes parts of it in float32
    torch.testing.assert_close(found(**pixels).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    own = plain.state_dict()
    assert all(same_bits(t, own[key]) for key, t in model.unload().state_dict().items())


def test_a_class_may_be_asked_for(tiny, tmp_path):
    model = with_head("bert", "masked_lm", {})
    with refused(model, CheckpointError, "'masked_lm'", "architecture='…'"):
        model.merge_and_unload()
    found = model.merge_and_unload(architecture="BertForMaskedLM")
    assert type(found) is transformers.BertForMaskedLM
    close(output(found), output(model))
    close(output(reloaded(found, tmp_path)), output(found))
    with refused(model, CheckpointError, "cannot be that of a BertForSequenceClassification", "="):
        model.merge_and_unload(architecture="BertForSequenceClassification")
    with refused(model, ConfigError, "no model 'BertForAll'", "'BertForSequenceClassification'"):
        model.merge_and_unload(architecture="BertForAll")
    model.active_head = None
    with refused(model, StateError, "no head is active", "model.active_head = '…'"):
        model.merge_and_unload(architecture="BertForMaskedLM")


def test_heads_without_a_class_are_refused(tiny):
    model = with_head("bert", "classification", {})
    with refused(model, CheckpointError, "layers: 2 here, 1 there", "model.active_head = None"):
        model.merge_and_unload()
    model.add_tagging_head("t")
    model.active_head = ["a", "t"]
    with pytest.raises(StateError, match=r"'a', 't' are active.*model\.active_head = 'a'"):
        model.merge_and_unload()


# --- weights that several layers share ---

TABLES = {
    "lora": ("llama", LoRAConfig(target_modules=["embed_tokens", "q_proj"])),
    "lora of gpt2": ("gpt2", LoRAConfig(target_modules=["wte"])),
    "lora in one stack": ("bart", LoRAConfig(target_modules=["encoder.embed_tokens", "fc1"])),
    "dora": ("llama", "dora[target_modules=['embed_tokens']]"),
    "ia3": ("llama", "ia3[target_modules=['embed_tokens'],feedforward_modules=[]]"),
    "a copy of the output layer": (
        "llama", LoRAConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])),
}  # fmt: skip
TIED = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel",
        "bart": "BartForConditionalGeneration", "t5": "T5ForConditionalGeneration"}  # fmt: skip


def tied(family):
    config = tiny_config(family)
    config.tie_word_embeddings = True
    torch.manual_seed(2)
    model = getattr(transformers, TIED[family])(config).eval()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return adapterzoo.init(model)


@pytest.mark.parametrize("case", TABLES)
def test_at_a_shared_table_each_layer_gets_its_own_weight(case, tmp_path):
    family, config = TABLES[case]
    model = tied(family)
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    for path, layer in model.named_modules():
        if path.endswith("lm_head") and "lm_head" in str(config):
            for name, parameter in layer.named_parameters():
                if ".a." in f".{name}":
                    torch.nn.init.normal_(parameter)
    right = output(model)
    with refused(model, StateError, "merging would change", "Keep the adapter active"):
        model.merge_adapter("a")
    merged = model.merge_and_unload(["a"])
    close(output(merged), right)
    assert not merged.config.tie_word_embeddings
    own = [id(p) for m in merged.modules() for p in m._parameters.values() if p is not None]
    assert len(own) == len({*own})
    close(output(reloaded(merged, tmp_path)), right)


@pytest.mark.parametrize("case", [case for case in TABLES if "output layer" not in case])
def test_so_does_each_layer_of_a_model_with_named_heads(case, tmp_path):
    family, config = TABLES[case]
    plain_class = getattr(transformers, TIED[family])
    tied(family).save_pretrained(tmp_path / "base")
    model = AutoAdapterModel.from_pretrained(tmp_path / "base").eval()
    model.add_adapter("a", config, set_active=True)
    stir(model, "a")
    right = output(model)
    merged = model.merge_and_unload(["a"])
    assert type(merged) is plain_class
    close(output(merged.eval()), right)
    close(output(reloaded(merged, tmp_path / "merged")), right)
    assert same_bits(output(model), right)


def test_a_class_that_computes_otherwise_without_the_tie_keeps_it():
    model = tied("t5")
    model.add_adapter(
        "a", LoRAConfig(target_modules=["encoder.embed_tokens", "q"]), set_active=True
    )
    stir(model, "a")
    with refused(model, StateError, "tie_word_embeddings=False", "Keep the adapter active"):
        model.merge_and_unload(["a"])


def test_so_does_one_whose_forward_is_decorated():
    config = transformers.SwitchTransformersConfig(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=4, num_experts=2, decoder_start_token_id=0,
    )  # fmt: skip
    model = adapterzoo.init(transformers.SwitchTransformersForConditionalGeneration(config))
    model.add_adapter("a", LoRAConfig(target_modules=["encoder.embed_tokens"]), set_active=True)
    with pytest.raises(StateError, match="tie_word_embeddings=False"):
        model.merge_and_unload(["a"])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_error_ties_the_layers_again():
    model = tied("llama")
    model.add_adapter("a", LoRAConfig(target_modules=["embed_tokens"]), set_active=True)
    stir(model, "a")
    dict(model.adapter_modules("a"))["embed_tokens"].lora_B.data.fill_(float("nan"))
    with pytest.raises(StateError, match="is not finite"):
        model.merge_and_unload(["a"])
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.tie_word_embeddings
    assert model.all_tied_weights_keys
