"""`train_adapter(…, train_embeddings=True)`: whose these embeddings are, and where they go."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from families import tiny_config, tiny_inputs
from safetensors.torch import load_file
from snapshots import of_adapter, refused
from transformers import (
    BertForSequenceClassification,
    GPT2LMHeadModel,
    T5ForConditionalGeneration,
)

import adapterzoo
from adapterzoo import AutoAdapterModel, Stack
from adapterzoo.errors import CheckpointError, CompositionError, StateError
from adapterzoo.model.heads.copies import table_of, tables_of, ties

FAMILIES = ["bert", "gpt2", "llama", "t5", "bart", "gemma2", "albert"]
HEADS = {
    "gpt2": "add_causal_lm_head", "llama": "add_causal_lm_head", "gemma2": "add_causal_lm_head",
    "t5": "add_seq2seq_lm_head", "bart": "add_seq2seq_lm_head",
}  # fmt: skip


def _model(family, seed=0):
    config = tiny_config(family)
    for name in list(vars(config)):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    torch.manual_seed(seed)
    return AutoAdapterModel.from_config(config)


def _trained(family, name="a"):
    """A model with two adapters, one of them trained with the embeddings for a step."""
    model = _model(family)
    base = {k: t.detach().clone() for k, t in model.state_dict().items()}
    model.add_adapter(name, "lora")
    model.add_adapter("other", "lora")
    getattr(model, HEADS.get(family, "add_masked_lm_head"))(name)
    model.train_adapter(name, train_embeddings=True)
    step(model)
    model.eval()
    return model, base


def step(model):
    inputs = tiny_inputs(model.config.model_type)
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    # plain gradient descent leaves the rows of tokens that do not occur as they are
    trained = [p for p in model.parameters() if p.requires_grad]
    model(**inputs, labels=labels).loss.backward()
    torch.optim.SGD(trained, lr=0.5).step()
    model.zero_grad()


@torch.no_grad()
def _hidden(model, setup):
    model.set_active_adapters(setup)
    return model.base_model(**tiny_inputs(model.config.model_type))[0]


@torch.no_grad()
def _logits(model, setup="a"):
    model.set_active_adapters(setup)
    model.active_head = "a"
    return model(**tiny_inputs(model.config.model_type)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_model_keeps_its_embeddings(family):
    model, base = _trained(family)
    for key, tensor in base.items():
        assert torch.equal(model.state_dict()[key], tensor), key
    fresh = _model(family).eval()
    inputs = tiny_inputs(family)
    with torch.no_grad():
        plain = fresh.base_model(**inputs)[0]
    assert torch.equal(_hidden(model, None), plain)
    other = copy.deepcopy(model)
    other.delete_adapter("a")
    assert torch.equal(_hidden(other, "other"), _hidden(model, "other"))
    trained = _hidden(model, "a")
    assert not torch.equal(trained, plain)
    # which rows a step changes: those of the tokens that occur, and a tied output layer all
    table = table_of(model, "a")
    assert not torch.equal(table, model.get_input_embeddings().weight)
    names = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any(n.endswith(".modules_to_save.a.table.weight") for n in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_is_saved_and_loaded_bit_for_bit(family, tmp_path):
    model, _ = _trained(family)
    expected, hidden = _logits(model), _hidden(model, "a")
    model.save_adapter(tmp_path / "a", "a")
    again = _model(family).eval()
    again.add_adapter("other", "lora")
    before = _hidden(again, None)
    again.load_adapter(tmp_path / "a")
    assert torch.equal(_hidden(again, None), before)
    assert torch.equal(_hidden(again, "a"), hidden)
    assert torch.equal(_logits(again), expected)
    assert again.adapter_fingerprint("a") == model.adapter_fingerprint("a")
    # under another name, and once more
    again.load_adapter(tmp_path / "a", load_as="b")
    again.save_adapter(tmp_path / "b", "b")
    last = _model(family).eval()
    last.load_adapter(tmp_path / "b", load_as="a")
    assert torch.equal(_logits(last), expected)


def test_few_rows_make_a_small_file(tmp_path):
    model = _model("bert")
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    with torch.no_grad():
        table_of(model, "a")[[3, 50]] += 1
        # the sign of a zero is a bit too
        model.get_input_embeddings().weight[7, 0] = 0.0
        table_of(model, "a")[7] = model.get_input_embeddings().weight[7]
        table_of(model, "a")[7, 0] = -0.0
    model.save_adapter(tmp_path / "a", "a")
    stored = load_file(tmp_path / "a" / "adapter.safetensors")
    path = "embeddings.word_embeddings"
    assert stored[f"{path}/rows"].tolist() == [3, 7, 50]
    assert torch.equal(stored[f"{path}/values"], table_of(model, "a")[[3, 7, 50]])
    assert f"{path}/table.weight" not in stored
    again = copy.deepcopy(model)
    again.delete_adapter("a")
    again.load_adapter(tmp_path / "a")
    assert torch.equal(*(table_of(m, "a").view(torch.int32) for m in (again, model)))
    # rows that the file leaves out must be those that it was trained with
    with torch.no_grad():
        again.get_input_embeddings().weight[20] += 1
    with refused(again, CheckpointError, "3 trained rows", "Load that model"):
        again.load_adapter(tmp_path / "a", load_as="b")
    with torch.no_grad():
        table_of(model, "a").add_(1)
    model.save_adapter(tmp_path / "a", "a")
    assert f"{path}/table.weight" in load_file(tmp_path / "a" / "adapter.safetensors")


@pytest.mark.parametrize("family", ["gpt2", "t5", "llama"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save_pretrained"])
def test_the_whole_model_keeps_them(family, way, tmp_path):
    model, _ = _trained(family)
    plain, hidden, expected = _hidden(model, None), _hidden(model, "a"), _logits(model)
    if way == "deepcopy":
        again = copy.deepcopy(model)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        model.save_pretrained(tmp_path)
        again = AutoAdapterModel.from_pretrained(tmp_path).eval()
    assert torch.equal(_logits(again), expected)
    assert torch.equal(_hidden(again, "a"), hidden)
    assert torch.equal(_hidden(again, None), plain)
    assert table_of(again, "a") is not table_of(model, "a")
    assert ties(again) == ties(model)
    paths = tables_of(again, "a")
    tables = {id(again._backbone.get_submodule(p).modules_to_save["a"].table.weight) for p in paths}
    assert len(tables) == 1
    head = again.get_head("a").output_embeddings.weight
    assert (head is table_of(again, "a")) == (family != "llama")


@pytest.mark.parametrize("family", ["bert", "t5"])
@torch.no_grad()
def test_a_model_of_a_task_class(family, tmp_path):
    cls = BertForSequenceClassification if family == "bert" else T5ForConditionalGeneration

    def start():
        torch.manual_seed(0)
        return adapterzoo.init(cls(tiny_config(family)).eval())

    model = start()
    inputs = tiny_inputs(family)
    # a base model without gradients may sum in another order
    plain = model.requires_grad_(False)(**inputs).logits
    model.add_adapter("a", "lora")
    model.train_adapter("a", train_embeddings=True)
    table_of(model, "a").add_(0.1)
    expected = model.eval()(**inputs).logits
    assert not torch.equal(expected, plain)
    model.save_adapter(tmp_path / "a", "a")
    again = start().requires_grad_(False)
    again.load_adapter(tmp_path / "a", set_active=True)
    assert torch.equal(again(**inputs).logits, expected)
    model.save_pretrained(tmp_path / "whole")
    whole = adapterzoo.load_model(tmp_path / "whole", cls)
    assert torch.equal(whole.eval()(**inputs).logits, expected)
    keys = set(model.all_tied_weights_keys)
    model.unload()
    assert keys - set(model.all_tied_weights_keys) == {k for k in keys if of_adapter(k)}
    assert torch.equal(model(**inputs).logits, plain)
    assert not any(of_adapter(key) for key in model.state_dict())


def test_a_deleted_adapter_takes_its_table_along():
    model, _ = _trained("gpt2")
    head = model.get_head("a")
    assert head.output_embeddings.weight is table_of(model, "a")
    model.delete_adapter("a")
    assert head.output_embeddings.weight is model.get_input_embeddings().weight
    assert set(model.all_tied_weights_keys.values()) == {"transformer.wte.weight"}
    assert not any(".table" in key for key in model.state_dict())


def test_a_head_that_is_saved_alone_has_the_layer_that_it_shares(tmp_path):
    model, _ = _trained("gpt2")
    model.save_head(tmp_path, "a")
    again = _model("gpt2").eval()
    again.load_head(tmp_path)
    with torch.no_grad():
        hidden = torch.randn(1, 2, model.config.hidden_size)
        assert torch.equal(again.get_head("a")(hidden), model.get_head("a")(hidden))
    assert again.get_head("a").config.tie_word_embeddings is False


def test_embeddings_that_are_trained_later_leave_the_rest_of_the_adapter():
    """An adapter gets its table after its copy of a static head and what it shares."""
    model = adapterzoo.init(BertForSequenceClassification(tiny_config("bert"))).eval()
    for name in "ab":
        model.add_adapter(name, "mtl_lora")
    model.share_parameters(["a", "b"])
    model.train_adapter("a")
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.5)
    model.eval()
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        before = model(**inputs).logits
    model.train_adapter("a", train_embeddings=True)
    assert list(model.adapters_config) == ["a", "b"]
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, before)
    model.unshare_parameters(["a", "b"])


def test_each_row_looks_up_in_its_own_table():
    model, _ = _trained("bert")
    inputs = tiny_inputs("bert")
    with torch.no_grad():
        alone = {name: _hidden(model, name) for name in (None, "a", "other")}
        names = ["a", None, "other", "a"][: inputs["input_ids"].shape[0]]
        model.delete_head("a")
        got = model(**inputs, adapter_names=names)[0]
    for i, name in enumerate(names):
        torch.testing.assert_close(got[i], alone[name][i], rtol=0, atol=1e-6)


def test_a_stack_adds_what_each_changes():
    model, _ = _trained("bert")
    model.train_adapter("other", train_embeddings=True)
    with torch.no_grad():
        table_of(model, "other").add_(0.5)
    layer = model.get_input_embeddings()
    ids = tiny_inputs("bert")["input_ids"]
    found = {}
    for setup in (None, "a", "other", Stack("a", "other")):
        model.set_active_adapters(setup)
        found[str(setup)] = layer(ids).detach()
    both = found["a"] + found["other"] - found["None"]
    torch.testing.assert_close(found[str(Stack("a", "other"))], both)


def test_training_without_them_later_leaves_them_as_they_are():
    model, _ = _trained("bert")
    model.train_adapter("a")
    assert not table_of(model, "a").requires_grad
    before = table_of(model, "a").detach().clone()
    step(model)
    assert torch.equal(table_of(model, "a"), before)


def test_merging():
    model, _ = _trained("bert")
    # the masked language model's output is the table of the adapter, which merging leaves alone
    model.delete_head("a")
    expected, plain = _hidden(model, "a"), _hidden(model, None)
    model.merge_adapter("a")
    torch.testing.assert_close(_hidden(model, None), expected, rtol=0, atol=1e-5)
    model.reset_adapter()
    assert torch.equal(_hidden(model, None), plain)


def test_what_cannot_have_them(tiny, tmp_path):
    model = tiny("vit")
    model.add_adapter("a", "lora")
    with refused(model, StateError, "table of tokens", "train_embeddings"):
        model.train_adapter("a", train_embeddings=True)
    model = _model("bert")
    model.add_adapter("a", "lora[target_modules=['word_embeddings']]")
    with refused(model, StateError, "'a' already adapts 'embeddings.word_embeddings'", "Leave"):
        model.train_adapter("a", train_embeddings=True)
    model.add_adapter("p", "prompt_tuning[prompt_length=2]")
    with refused(model, StateError, "'p' already adapts", "in a Stack with 'p'"):
        model.train_adapter("p", train_embeddings=True)
    model, _ = _trained("bert")
    for form in ("peft", "adapterhub"):
        with refused(model, CheckpointError, "trained embeddings", "format='native'"):
            model.save_adapter(tmp_path / form, "a", with_head=False, format=form)
        assert not (tmp_path / form).exists()
    with refused(model, CompositionError, "trained embeddings", "Average("):
        model.average_adapter("c", ["a", "other"])
    model.save_adapter(tmp_path / "a", "a")
    other = adapterzoo.init(GPT2LMHeadModel(tiny_config("gpt2")))
    with refused(other, CheckpointError, "trained embeddings at", "Load the model that"):
        other.load_adapter(tmp_path / "a", with_head=False)
