"""Language modelling heads when the vocabulary gets another size: all of them fit it, and files."""

import pytest
import torch
from families import tiny_config, tiny_inputs

from adapterzoo import AutoAdapterModel


def _model(family="bert", tied=False):
    config = tiny_config(family)
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).eval()
    for name in ("first", "second", "idle"):
        model.add_masked_lm_head(name)
        with torch.no_grad():
            model.heads[name].output_embeddings.bias.normal_()
    model.active_head = ["first", "second"]
    return model


def _scores(model):
    inputs = tiny_inputs(model.config.model_type)
    return {name: model(**inputs, head=name).logits for name in model.heads}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [5, -5])
def test_every_head_gets_the_rows_of_the_table(tied, change, tmp_path):
    model = _model(tied=tied)
    outputs = {name: head.output_embeddings for name, head in model.heads.items()}
    old = {n: (layer.weight.clone(), layer.bias.clone()) for n, layer in outputs.items()}
    rows = model.config.vocab_size
    kept = min(rows, rows + change)
    table = model.resize_token_embeddings(rows + change).weight
    for name, head in model.heads.items():
        layer = head.output_embeddings
        assert layer.weight.shape[0] == layer.bias.shape[0] == layer.out_features == rows + change
        assert (layer.weight is table) == tied
        weight, bias = old[name]
        assert torch.equal(layer.weight[:kept], weight[:kept])
        assert torch.equal(layer.bias[:kept], bias[:kept])
        if change > 0 and not tied:
            assert torch.equal(layer.weight[kept:], weight.mean(0).expand(change, -1))
        if change > 0:
            assert torch.equal(layer.bias[kept:], bias.mean().expand(change))
    assert len(model.all_tied_weights_keys) == (len(model.heads) if tied else 0)
    assert model.active_head == ["first", "second"]
    model.save_pretrained(tmp_path / "whole")
    again = AutoAdapterModel.from_pretrained(tmp_path / "whole").eval()
    before, after = _scores(model), _scores(again)
    assert all(torch.equal(after[name], logits) for name, logits in before.items())
    model.save_head(tmp_path / "head", "idle")
    again.load_head(tmp_path / "head", load_as="loaded")
    assert torch.equal(_scores(again)["loaded"], before["idle"])


def test_whether_a_head_is_trained_stays():
    model = _model()
    model.add_adapter("first", "lora")
    model.train_adapter("first")
    model.resize_token_embeddings(model.config.vocab_size + 1)
    trained = {n: {p.requires_grad for p in h.parameters()} for n, h in model.heads.items()}
    assert trained == {"first": {True, False}, "second": {False}, "idle": {False}}
    assert not model.heads["first"].output_embeddings.weight.requires_grad


def test_new_rows_are_drawn_where_they_shall_not_be_the_mean():
    model = _model()
    rows, std = model.config.vocab_size, model.config.initializer_range
    model.resize_token_embeddings(rows + 400, mean_resizing=False)
    layer = model.heads["idle"].output_embeddings
    assert torch.equal(layer.bias[rows:], torch.zeros(400))
    assert 0.9 * std < layer.weight[rows:].std() < 1.1 * std
    assert layer.weight[rows:].unique(dim=0).shape[0] == 400


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_with_a_vocabulary_of_its_own_keeps_it(tied, tmp_path):
    model = _model(tied=tied)
    rows = model.config.vocab_size
    config = {"head_type": "causal_lm", "vocab_size": rows, "bias": True}
    model.add_prediction_head_from_config("own", config)
    before = model.heads["own"].output_embeddings.weight.detach().clone()
    model.resize_token_embeddings(rows + 5)
    layer = model.heads["own"].output_embeddings
    assert torch.equal(layer.weight, before)
    assert layer.out_features == rows
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path).eval()
    before, after = _scores(model), _scores(again)
    assert all(torch.equal(after[name], logits) for name, logits in before.items())


def test_the_constant_that_is_added_grows_by_zeros():
    model = _model("bart")
    rows = model.config.vocab_size
    config = {"head_type": "seq2seq_lm", "added_bias": True}
    model.add_prediction_head_from_config("added", config, set_active=False)
    constant = model.heads["added"].final_logits_bias
    constant.normal_()
    model.resize_token_embeddings(rows + 3)
    expected = torch.cat([constant, torch.zeros(1, 3)], dim=1)  # [1, rows + 3]
    assert torch.equal(model.heads["added"].final_logits_bias, expected)


def test_nothing_asked_changes_nothing():
    model = _model()
    layers = {n: h.output_embeddings.weight for n, h in model.heads.items()}
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert all(model.heads[n].output_embeddings.weight is w for n, w in layers.items())
