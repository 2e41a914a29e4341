"""Heads as functions: layers, dtypes, files, and the biaffine parser against loops."""

import copy
import json
import math
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn

from adapterzoo.errors import ConfigError, UnknownNameError
from adapterzoo.heads import (
    Backbone,
    CausalLMConfig,
    ClassificationConfig,
    DependencyParsingConfig,
    HeadConfig,
    MaskedLMConfig,
    QuestionAnsweringConfig,
    TaggingConfig,
    head_types,
    labels_from,
)

# a static head needs a model of transformers: `test_static.py`
TYPES = sorted(head_types.keys() - {"static"})
BACKBONE = Backbone(hidden_size=8, vocab_size=11, embedding_size=4, dropout=0.5)
SEQ2SEQ = Backbone(hidden_size=8, vocab_size=11, encoder_decoder=True)


def _backbone(name, **changes):
    values = {f: getattr(SEQ2SEQ if name == "seq2seq_lm" else BACKBONE, f) for f in (
        "hidden_size", "vocab_size", "embedding_size", "dropout", "encoder_decoder"
    )}  # fmt: skip
    return Backbone(**values | changes)


def _run(head, hidden):
    extra = {}
    if isinstance(head.config, DependencyParsingConfig):
        extra["word_starts"] = torch.tensor([[1, 2, 4, 0]] * len(hidden))
    out = head(hidden, torch.ones(hidden.shape[:2]), **extra)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_head_is_born_in_its_dtype_and_answers_in_it(name, dtype):
    head = head_types[name]().build(_backbone(name, dtype=dtype)).eval()
    assert {p.dtype for p in head.parameters()} == {dtype}
    outputs = _run(head, torch.randn(4, 5, 8).to(dtype))
    assert {o.dtype for o in outputs} == {dtype}
    assert all(torch.isfinite(o).all() for o in outputs)
    again = _run(pickle.loads(pickle.dumps(copy.deepcopy(head))), torch.ones(4, 5, 8).to(dtype))
    expected = _run(head, torch.ones(4, 5, 8).to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("name", TYPES)
def test_every_head_is_born_on_its_device(name):
    head = head_types[name]().build(_backbone(name, device=torch.device("meta")))
    assert {t.device.type for t in head.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", TYPES)
def test_every_config_comes_back_from_its_dict(name):
    config = head_types[name]()
    written = json.loads(json.dumps(config.to_dict()))
    assert HeadConfig.from_dict(written) == config
    # AdapterHub knows none of these
    assert not set(written) & {"pooling", "logit_scale", "hidden_scale", "added_bias"}
    assert config["head_type"] == config.get("head_type") == name


def test_layers_stand_where_adapterhub_has_them():
    head = ClassificationConfig(num_labels=3, layers=3).build(BACKBONE)
    assert [type(m).__name__ for m in head.children()] == [
        "Dropout", "Linear", "Activation", "Dropout", "Linear", "Activation", "Dropout", "Linear",
    ]  # fmt: skip
    assert [m.p for m in head.children() if isinstance(m, nn.Dropout)] == [0.5] * 3
    head = MaskedLMConfig().build(BACKBONE)
    assert {k: tuple(v.shape) for k, v in head.state_dict().items()} == {
        "0.weight": (4, 8), "0.bias": (4,), "2.weight": (4,), "2.bias": (4,),
        "3.weight": (11, 4), "3.bias": (11,),
    }  # fmt: skip


def test_the_formula_of_two_layers():
    head = ClassificationConfig(pooling="mean", dropout_prob=0.0).build(
        Backbone(hidden_size=8, dtype=torch.float64)
    )
    hidden = torch.randn(3, 4, 8, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    for row, m, got in zip(hidden, mask, head(hidden, mask), strict=True):
        x = sum(t for t, keep in zip(row, m, strict=True) if keep) / m.sum()
        w1, b1, w2, b2 = head.parameters()
        expected = w2 @ torch.tanh(w1 @ x + b1) + b2
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


def test_scales_and_caps_of_language_models():
    config = CausalLMConfig(
        hidden_scale=0.5, logit_scale=3.0, logit_divisor=7.0, logit_softcap=2.0, added_bias=True
    )
    head = config.build(Backbone(hidden_size=8, vocab_size=11, dtype=torch.float64))
    head.final_logits_bias.normal_()
    x = torch.randn(2, 8, dtype=torch.float64)
    logits = (x @ head.output_embeddings.weight.T * 0.5 + head.final_logits_bias) * 3 / 7
    torch.testing.assert_close(head(x), 2 * torch.tanh(logits / 2), rtol=0, atol=1e-14)


def test_the_models_scale_holds_unless_the_head_says_another():
    scaled = Backbone(hidden_size=8, vocab_size=11, encoder_decoder=True, lm_scale=0.25)
    assert head_types["seq2seq_lm"]().build(scaled).hidden_scale == 0.25
    assert head_types["seq2seq_lm"](hidden_scale=1.0).build(scaled).hidden_scale == 1.0


def test_tying_shares_the_parameter_only_where_it_fits():
    head = MaskedLMConfig().build(BACKBONE)
    embedding = nn.Embedding(11, 4)
    assert head.tie(embedding.weight)
    assert head.output_embeddings.weight is embedding.weight
    assert not head.tie(nn.Embedding(12, 4).weight)
    assert head.output_embeddings.weight is embedding.weight


def _parse_by_loops(head, hidden, starts):
    """Scores of arcs and relations, word by word."""
    words = [[x[a:b].mean(0) for a, b in pairwise(s)] for x, s in zip(hidden, starts, strict=True)]
    tokens, labels = hidden.shape[1], head.config.num_labels
    arcs = hidden.new_zeros(len(hidden), tokens, tokens + 1)
    rels = hidden.new_zeros(len(hidden), tokens, tokens + 1, labels)
    one, zero = hidden.new_ones(1), hidden.new_zeros(hidden.shape[-1])
    (u,), v = head.biaffine_arcs.weight, head.biaffine_rels.weight
    for b, found in enumerate(words):
        padded = found + [zero] * (tokens - len(found))
        for i, x in enumerate(padded):
            x = torch.cat([x, one])
            for j, y in enumerate([hidden[b, 0], *padded]):
                arcs[b, i, j] = x @ u @ y
                for k in range(labels):
                    rels[b, i, j, k] = x @ v[k] @ torch.cat([y, one])
    return rels, arcs


@pytest.mark.parametrize("pad", [0, -1])
def test_the_parser_is_its_formula(pad):
    head = DependencyParsingConfig(num_labels=3).build(Backbone(hidden_size=4)).double()
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    hidden = torch.randn(2, 6, 4, dtype=torch.float64)
    starts = torch.tensor([[1, 2, 4, 5, pad], [1, 3, pad, pad, pad]])
    rels, arcs = head(hidden, None, starts)
    expected = _parse_by_loops(head, hidden, [[1, 2, 4, 5], [1, 3]])
    torch.testing.assert_close((rels, arcs), expected, rtol=0, atol=1e-12)

    heads = torch.tensor([[0, 1, 2, -1, -1, -1], [0, -100, -1, -1, -1, -1]])
    kinds = torch.tensor([[2, 0, 1, -1, -1, -1], [1, -1, -1, -1, -1, -1]])
    arc_loss = rel_loss = 0.0
    for b, i in [(0, 0), (0, 1), (0, 2), (1, 0)]:
        j, k = heads[b, i], kinds[b, i]
        arc_loss -= arcs[b, i].log_softmax(-1)[j] / 4
        rel_loss -= rels[b, i, j].log_softmax(-1)[k] / 4
    loss = head.loss((rels, arcs), torch.stack([heads, kinds], dim=1))
    torch.testing.assert_close(loss, arc_loss + rel_loss, rtol=0, atol=1e-12)


def test_a_word_without_tokens_is_zero_and_missing_starts_are_named():
    head = DependencyParsingConfig().build(Backbone(hidden_size=4))
    nn.init.ones_(head.biaffine_arcs.weight)
    hidden = torch.ones(1, 5, 4)
    _, arcs = head(hidden, None, torch.tensor([[1, 3, 3, 4]]))
    assert arcs[0, :3].tolist() == [
        [20, 20, 0, 20, 0, 0],
        [4, 4, 0, 4, 0, 0],
        [20, 20, 0, 20, 0, 0],
    ]
    with pytest.raises(ConfigError, match="word_starts is missing"):
        head(hidden)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClassificationConfig(num_labels=0), "num_labels=0.*from 1 .* Write num_labels=1"),
        (lambda: ClassificationConfig(num_labels=10**9), "Write num_labels=10000000"),
        (lambda: ClassificationConfig(num_labels=True), "num_labels=True"),
        (lambda: ClassificationConfig(layers=-1), "layers=-1.*Write layers=1"),
        (lambda: ClassificationConfig(pooling="max"), "pooling='max'.*Write pooling='auto'"),
        (lambda: ClassificationConfig(use_pooler=True, pooling="mean"), "use_pooler=False"),
        (lambda: ClassificationConfig(dropout_prob=1.0), "dropout_prob=1.0.*Write dropout_prob="),
        (lambda: TaggingConfig(activation_function="thanh"), "'thanh'.*Did you mean 'tanh'"),
        (lambda: TaggingConfig(label2id={"a": 0, "b": 2}), "'b': 2.*with 2 labels.*Write id2label"),
        (lambda: TaggingConfig(label2id={"a": 0, "b": 0}), "at most once"),
        (lambda: labels_from({0: "a", 1: "a"}), "different names"),
        (lambda: labels_from("ab"), "Write id2label="),
        (lambda: QuestionAnsweringConfig(num_labels=3), "Write num_labels=2"),
        (lambda: CausalLMConfig(logit_softcap=0.0), "logit_softcap=0.0.*Write logit_softcap=None"),
        (lambda: CausalLMConfig(logit_scale="2"), "logit_scale='2'.*Write logit_scale=None"),
        (lambda: CausalLMConfig(logit_divisor=math.inf), "logit_divisor=inf.*a number above 0"),
        (
            lambda: CausalLMConfig(embedding_size="8"),
            "embedding_size='8'.*Write embedding_size=None",
        ),
        (lambda: MaskedLMConfig(embedding_size=10**9), "Write embedding_size=65536"),
        (lambda: MaskedLMConfig(vocab_size=-1), "Write vocab_size=1"),
        (lambda: TaggingConfig().replace(lables=2), "'lables'.*'num_labels'.*Write one of these"),
        (lambda: TaggingConfig.from_dict({"head_type": "causal_lm"}), "Write HeadConfig.from_dict"),
        (lambda: HeadConfig.from_dict({"head_type": "tagging", "lables": 2}), "'lables'.*layers"),
        (lambda: MaskedLMConfig().build(Backbone(hidden_size=4)), "Write vocab_size="),
        (lambda: head_types["seq2seq_lm"]().build(BACKBONE), "Write add_causal_lm_head"),
    ],
)
def test_values_that_are_not_legal_say_what_to_write(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_unknown_head_type_shows_the_near_one():
    with pytest.raises(UnknownNameError, match="Did you mean 'tagging'"):
        HeadConfig.from_dict({"head_type": "taging"})


def _near(one, other, *dtypes):
    # a head is a few layers: some roundings of the coarsest dtype
    near = 16 * max(torch.finfo(dtype).eps for dtype in dtypes)
    return (one.double() - other.double()).abs().max() <= near * max(1.0, other.abs().max())


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
def test_every_head_answers_under_autocast(name, to):
    # torch refuses a norm or a sum of one half under autocast to the other
    for dtype in (torch.float32, torch.float64, to):
        head = head_types[name]().build(_backbone(name, dtype=dtype)).eval()
        hidden = torch.randn(4, 5, 8).to(dtype)
        exact = _run(copy.deepcopy(head).double(), hidden.double())
        with torch.autocast("cpu", to):
            outputs = _run(head, hidden)
        for output, expected in zip(outputs, exact, strict=True):
            assert output.dtype in (to, dtype)
            assert _near(output, expected, to)
        sum(output.float().sum() for output in outputs).backward()
        grads = [p.grad for p in head.parameters() if p.grad is not None]
        assert grads
        assert all(g.dtype is dtype and bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_head(name, other):
    dtype = torch.float32 if other is torch.float16 else torch.float16
    hidden = torch.randn(4, 5, 8).to(dtype)
    found = []
    default = torch.get_default_dtype()
    for chosen in (default, other):
        torch.set_default_dtype(chosen)
        try:
            torch.manual_seed(0)
            head = head_types[name]().build(_backbone(name, dtype=dtype)).eval()
            found.append([*head.parameters(), *_run(head, hidden)])
        finally:
            torch.set_default_dtype(default)
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(*found, strict=True))
