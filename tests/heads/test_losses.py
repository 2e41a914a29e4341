"""Losses against their formulas in float64, and what labels may not be."""

import math

import pytest
import torch

from adapterzoo.errors import ConfigError
from adapterzoo.heads import (
    Backbone,
    CausalLMConfig,
    ClassificationConfig,
    DependencyParsingConfig,
    ImageClassificationConfig,
    MaskedLMConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
    QuestionAnsweringConfig,
    TaggingConfig,
)

BACKBONE = Backbone(hidden_size=8, vocab_size=11)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _nll(logits, labels):
    """The sum of −log softmax at the labels that count, and how many do; one by one."""
    total, count = 0.0, 0
    for row, label in zip(logits.double().flatten(0, -2), labels.flatten(), strict=True):
        if label >= 0:
            exps = [math.exp(v) for v in row.tolist()]
            total -= math.log(exps[label] / sum(exps))
            count += 1
    return total, max(count, 1)


def _check(loss, expected, logits):
    assert loss.shape == ()
    assert loss.dtype == (torch.float64 if logits.dtype is torch.float64 else torch.float32)
    tight = 1e-12 if logits.dtype is torch.float64 else 1e-6
    expected = torch.tensor(float(expected), dtype=torch.float64)
    torch.testing.assert_close(loss.double(), expected, rtol=tight, atol=tight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", [[2, 0, -100, 1], [-100] * 4, [0, 0, 0, 0]])
def test_classes(dtype, labels):
    head = ClassificationConfig(num_labels=3).build(BACKBONE)
    logits = _normal(4, 3).to(dtype).requires_grad_()
    labels = torch.tensor(labels)
    total, count = _nll(logits, labels)
    loss = head.loss(logits, labels)
    _check(loss, total / count, logits)
    _check(head.loss(logits, labels.unsqueeze(1), count=10), total / 10, logits)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert torch.equal(logits.grad.abs().sum(1) > 0, labels >= 0)


@pytest.mark.parametrize("config", [ClassificationConfig, ImageClassificationConfig])
@pytest.mark.parametrize("labels", [[1.5, -100.0, 0.0], [1, 2, 3], [[1.0], [2.0], [3.0]]])
def test_one_label_is_a_number(config, labels):
    head = config(num_labels=1).build(BACKBONE)
    logits = _normal(3, 1)
    labels = torch.tensor(labels)
    expected = sum((a - b) ** 2 for a, b in zip(logits.flatten(), labels.flatten(), strict=True))
    _check(head.loss(logits, labels), (expected / 3).item(), logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.long, torch.float32, torch.bool])
def test_several_labels(dtype, kind):
    logits = _normal(2, 3).to(dtype)
    labels = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(kind)
    ignored = kind is not torch.bool
    if ignored:
        labels[1, 0] = -100
    terms = [
        -math.log(1 / (1 + math.exp(-z if y else z)))
        for z, y in zip(logits.double().flatten().tolist(), labels.flatten().tolist(), strict=True)
        if y != -100
    ]
    for config in (
        MultilabelClassificationConfig(num_labels=3),
        ImageClassificationConfig(num_labels=3, multilabel=True),
    ):
        loss = config.build(BACKBONE).loss(logits, labels)
        _check(loss, sum(terms) / len(terms), logits)
    head = MultilabelClassificationConfig(num_labels=3).build(BACKBONE)
    none = head.loss(logits.requires_grad_(), torch.full((2, 3), -100))
    none.backward()
    assert none.item() == 0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize(("shift", "tokens"), [(False, 5), (True, 5), (True, 1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_tokens(shift, tokens, dtype):
    head = CausalLMConfig(shift_labels=shift).build(BACKBONE)
    logits = _normal(2, tokens, 11).to(dtype).requires_grad_()
    labels = torch.arange(2 * tokens).view(2, tokens) % 11
    labels[0, -1] = -100
    moved = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
    total, count = _nll(*moved)
    loss = head.loss(logits, labels)
    _check(loss, total / count, logits)
    loss.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("config", [TaggingConfig(num_labels=11), MaskedLMConfig()])
def test_token_heads_do_not_shift(config):
    head = config.build(BACKBONE)
    logits, labels = _normal(2, 3, 11), torch.tensor([[1, -100, 2], [3, 10, 0]])
    total, count = _nll(logits, labels)
    _check(head.loss(logits, labels), total / count, logits)


def test_positions_outside_of_the_text_do_not_count():
    head = QuestionAnsweringConfig().build(BACKBONE)
    start, end = _normal(4, 6), _normal(4, 6).flip(0)
    positions = torch.tensor([[0, 5], [2, 6], [-1, 3], [99, -100]])
    kept = positions.where((positions >= 0) & (positions < 6), -100)
    first, last = (_nll(x, kept[:, i]) for i, x in enumerate((start, end)))
    expected = (first[0] / first[1] + last[0] / last[1]) / 2
    _check(head.loss((start, end), positions), expected, start)
    outside = head.loss((start.requires_grad_(), end), torch.full((4, 2), 6))
    outside.backward()
    assert outside.item() == 0
    assert torch.equal(start.grad, torch.zeros_like(start))


def test_choices():
    head = MultipleChoiceConfig(num_choices=4, layers=1).build(BACKBONE)
    hidden = torch.randn(8, 3, 8)
    logits = head.eval()(hidden)
    linear = head.get_submodule("1")
    torch.testing.assert_close(logits, linear(hidden[:, 0]).view(2, 4))
    labels = torch.tensor([3, -100])
    total, count = _nll(logits.detach(), labels)
    _check(head.loss(logits, labels), total / count, logits)


@pytest.mark.parametrize(
    ("config", "logits", "labels", "message"),
    [
        (ClassificationConfig(num_labels=3), (2, 3), [0, 3], "labels: 3 is not a label.* 0 to 2"),
        (ClassificationConfig(num_labels=3), (2, 3), [0, -1], "labels: -1 is not a label.* 0 to 2"),
        (ClassificationConfig(num_labels=3), (2, 3), [0.0, 1.0], "float32 for 3 classes.*long"),
        (ClassificationConfig(num_labels=3), (2, 3), [0, 1, 2], r"shape \[3\].*Write .*\[2\]"),
        (ClassificationConfig(num_labels=1), (2, 1), [0.0] * 4, r"shape \[4\].*Write .*\[2\]"),
        (TaggingConfig(num_labels=3), (2, 2, 3), [0, 1], r"shape \[2\].*Write .*\[2, 2\]"),
        (MultilabelClassificationConfig(), (1, 2), [[0, 2]], "2.0 is not a label.* 0 to 1"),
        (MultilabelClassificationConfig(), (1, 2), [[0, math.nan]], "nan is not a label"),
        (MultilabelClassificationConfig(), (2, 2), [0, 1], r"Write labels of \[2, 2\]"),
        (CausalLMConfig(), (1, 2, 11), [[0, 11]], "labels: 11 is not a label.* 0 to 10"),
        (MultipleChoiceConfig(), (2, 2), [0, 2], "labels: 2 is not a label.* 0 to 1"),
        (QuestionAnsweringConfig(), (2, 2), [0, 1], "one whole number"),
        (DependencyParsingConfig(), None, [[[2, 9], [0, 0]]], "labels: 9 is not a label.* 0 to 2"),
        (DependencyParsingConfig(), None, [[[2, 1], [0, 7]]], "labels: 7 is not a label.* 0 to 1"),
    ],
)
def test_labels_that_do_not_fit_are_named(config, logits, labels, message):
    head = config.build(BACKBONE)
    given = torch.zeros(logits) if logits else (torch.zeros(1, 2, 3, 2), torch.zeros(1, 2, 3))
    if isinstance(config, QuestionAnsweringConfig):
        given = (given, given)
    with pytest.raises(ConfigError, match=message):
        head.loss(given, torch.tensor(labels))


@pytest.mark.parametrize(
    ("config", "shape", "labels"),
    [
        (ClassificationConfig(), (0, 2), (0,)),
        (MultilabelClassificationConfig(), (0, 2), (0, 2)),
        (TaggingConfig(), (0, 4, 2), (0, 4)),
        (MaskedLMConfig(), (0, 4, 11), (0, 4)),
    ],
)
def test_an_empty_batch_has_the_loss_zero(config, shape, labels):
    head = config.build(BACKBONE)
    assert head.loss(torch.zeros(shape), torch.zeros(labels, dtype=torch.long)).item() == 0
