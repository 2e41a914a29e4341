"""Pooling against loops over single sequences in float64."""

import pytest
import torch

from adapterzoo.heads import pool

HIDDEN = torch.randn(5, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
# padding right, left, on both sides; none; everything
MASK = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [1] * 6, [0] * 6])


def _rows(pooling, mask):
    for x, m in zip(HIDDEN, mask, strict=True):
        real = x[m.bool()]
        if pooling == "cls" or (pooling != "mean" and len(real) == 0):
            yield x[0]
        elif pooling == "mean":
            yield real.sum(0) / max(len(real), 1)
        else:
            yield real[-1]


@pytest.mark.parametrize("pooling", ["cls", "mean", "last", "eos"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32])
def test_each_row_by_itself(pooling, dtype):
    expected = torch.stack(list(_rows(pooling, MASK)))
    torch.testing.assert_close(pool(HIDDEN, MASK.to(dtype), pooling), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("pooling", "expected"), [
    ("cls", HIDDEN[:, 0]), ("mean", HIDDEN.mean(1)), ("last", HIDDEN[:, -1]),
])  # fmt: skip
def test_without_a_mask_all_tokens_are_real(pooling, expected):
    assert torch.equal(pool(HIDDEN, None, pooling), expected)


def test_what_the_model_pooled_is_kept():
    pooled = HIDDEN[:, 0]
    assert pool(pooled, MASK, "pooler") is pooled


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_padding_may_hold_anything(pooling):
    dirty = HIDDEN.clone()
    dirty[0, 3:] = float("nan")
    dirty[1, :2] = float("inf")
    expected = pool(HIDDEN, MASK, pooling)
    got = pool(dirty, MASK, pooling)
    rows = [0, 2, 3, 4] if pooling == "cls" else [0, 1, 2, 3, 4]
    assert torch.equal(got[rows], expected[rows])


def test_the_mean_of_many_half_precision_tokens_does_not_overflow():
    hidden = torch.full((1, 600, 2), 300.0, dtype=torch.float16)
    got = pool(hidden, torch.ones(1, 600), "mean")
    assert torch.equal(got, torch.full((1, 2), 300.0, dtype=torch.float16))


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 1, 3)])
def test_no_sequence_and_one_token(pooling, shape):
    hidden = torch.ones(shape)
    assert torch.equal(pool(hidden, torch.ones(shape[:2]), pooling), torch.ones(shape[0], 3))
