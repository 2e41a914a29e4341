"""The operations on tensors: against PEFT's functions, against formulas, and by their laws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapterzoo import Average
from adapterzoo.averaging import (
    STRATEGIES,
    largest,
    random,
    signed_roots,
    split,
    weighted,
)
from adapterzoo.errors import ConfigError, UnknownNameError
from adapterzoo.model.averaging import combination

WEIGHTS = [0.75, -1.5, 2.0]


def tensors(count=3, shape=(5, 7), seed=0):
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(count)]


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# --- against PEFT ---


# --- by hand ---


def test_pruning_at_random_keeps_the_mean_and_its_generator_rules():
    ones = torch.ones(100_000, dtype=torch.float64)
    kept = random(ones, 0.25, torch.Generator().manual_seed(0))
    assert set(kept.tolist()) == {0.0, 4.0}
    # four deviations
    assert abs(kept.mean() - 1) < 4 * (0.75 / 0.25 / 100_000) ** 0.5
    before = torch.get_rng_state()
    again = random(ones, 0.25, torch.Generator().manual_seed(0))
    assert torch.equal(again, kept)
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(random(ones, 0.25, torch.Generator().manual_seed(1)), kept)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 6, 4)])
@pytest.mark.parametrize("rank", [1, 3, 4, 9])
def test_a_split_is_the_nearest_of_its_rank(shape, rank):
    (change,) = tensors(1, shape)
    a, b = split(change, rank)
    assert a.shape == (*shape[:-2], rank, shape[-1])
    assert b.shape == (*shape[:-2], shape[-2], rank)
    u, s, v = torch.linalg.svd(change, full_matrices=False)
    s[..., rank:] = 0
    equal(b @ a, u @ torch.diag_embed(s) @ v)
    equal(split(change, rank, full_matrices=True)[1] @ a, b @ a)


@pytest.mark.parametrize("q", [0.0, 0.5, 0.9, 1.0])
def test_a_clamp_cuts_at_the_quantile_of_both_factors(q):
    (change,) = tensors(1)
    a, b = split(change, 3)
    high = torch.quantile(torch.cat([a.flatten(), b.flatten()]), q)
    clamped = split(change, 3, clamp=q)
    equal(clamped[0], a.clamp(-high, high))
    equal(clamped[1], b.clamp(-high, high))


def test_signed_roots_have_the_weights_as_products():
    signed, roots = signed_roots(WEIGHTS)
    assert [s * r for s, r in zip(signed, roots, strict=True)] == pytest.approx(WEIGHTS, rel=1e-15)
    assert all(root >= 0 for root in roots)


# --- laws ---

_WEIGHT = st.floats(-4, 4).filter(lambda w: w == 0 or abs(w) > 1e-3)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(_WEIGHT, min_size=1, max_size=4), st.randoms(), st.sampled_from(sorted(STRATEGIES)))
def test_the_order_of_adapters_means_nothing(weights, shuffler, name):
    strategy = combination(name, **options(name, density=1.0))
    own = tensors(len(weights))
    order = list(range(len(weights)))
    shuffler.shuffle(order)
    found = strategy.mix([own[i] for i in order], [weights[i] for i in order])
    torch.testing.assert_close(found, strategy.mix(own, weights), rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.floats(0.05, 1.0))
def test_pruned_entries_are_the_smallest(density):
    (tensor,) = tensors(1)
    kept = largest(tensor, density)
    assert torch.equal(kept[kept != 0], tensor[kept != 0])
    assert int((kept != 0).sum()) == int(density * tensor.numel())
    if (kept == 0).any():
        assert kept[kept != 0].abs().min() >= tensor[kept == 0].abs().max()


def options(name, density=0.5):
    strategy = STRATEGIES[name]
    given = {"density": density} if strategy.prunes else {}
    return given | ({"svd_rank": 2} if strategy.needs_rank else {})


# --- what a user gives ---


def test_weights_are_those_of_a_list_or_a_dict():
    assert weighted(["a", "b"], None, True) == (("a", "b"), (0.5, 0.5))
    # as in adapters: equal ones have the sum 1 in any case
    assert weighted(["a", "b"], None, False) == (("a", "b"), (0.5, 0.5))
    assert weighted(["a", "b"], [3, 1], True) == (("a", "b"), (0.75, 0.25))
    assert weighted(["a", "b"], [3, -1], False) == (("a", "b"), (3.0, -1.0))
    assert weighted({"a": 3, "b": 1}, None, True) == (("a", "b"), (0.75, 0.25))
    of_numpy = np.array([3, 1], dtype=np.float32)
    assert weighted(["a", "b"], of_numpy, True) == (("a", "b"), (0.75, 0.25))


@pytest.mark.parametrize(
    ("names", "weights", "says"),
    [
        ([], None, r"\[\] is not a list.*Write \['a', 'b'\]"),
        ("ab", None, r"'ab' is not a list.*Write \['a', 'b'\]"),
        (5, None, r"5 is not a list"),
        (Average("a", "b"), None, r"Average\('a', 'b'.*\) is not a list"),
        (["a", "b"], [1.0], r"not a list of 2 finite numbers.*Write weights=\[1.0, 1.0\]"),
        (["a"], [float("nan")], r"\[nan\] is not a list of 1 finite.*Write weights=\[1.0\]"),
        (["a"], ["1"], r"\['1'\] is not a list of 1 finite"),
        (["a", "b"], 0.5, r"weights=0.5 is not a list"),
        (["a", "b"], {0.25, 0.75}, r"not a list of 2 finite numbers"),
        (["a", "b"], {"b": 1.0, "a": 2.0}, r"not a list of 2 finite numbers"),
        (["a", "b"], [1.0, -1.0], r"\[1.0, -1.0\]: they sum to 0 and.*normalize_weights=False"),
        (["a", "b"], [1e308, 1e308], r"they sum to inf and.*normalize_weights=False"),
        ({"a": 1.0}, [1.0], r"Leave weights out"),
    ],
)
def test_weights_that_are_none(names, weights, says):
    with pytest.raises(ConfigError, match=says):
        weighted(names, weights, True)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("ties", {}, "density=None.*above 0, up to 1. Write density=0.5"),
        ("ties", {"density": 0.0}, "density=0.0"),
        ("dare_linear", {"density": 1.5}, "density=1.5"),
        ("svd", {"density": 0.5}, "density=0.5 is unused by 'svd'. Write density=None"),
        ("cat", {"svd_rank": 4}, "svd_rank=4 is unused by 'cat'"),
        ("linear", {"svd_clamp": 0.5}, "svd_clamp=0.5 is unused by 'linear'"),
        ("ties", {"density": 0.5, "seed": 1}, "seed=1 is unused by 'ties'"),
        ("lora_delta_w_svd", {}, "lora_delta_w_svd.*svd_rank=None.*Write svd_rank=8"),
        ("svd", {"svd_rank": 0}, "whole number from 1 to 65536. Write svd_rank=1"),
        ("svd", {"svd_rank": 2.0}, "svd_rank=2.0"),
        ("svd", {"svd_clamp": 2.0}, "a number from 0.0 to 1.0. Write svd_clamp=1.0"),
        ("svd", {"svd_driver": "gauss"}, "svd_driver='gauss'.*Write svd_driver='gesvd'"),
        ("dare_ties", {"density": 0.5, "seed": 0.5}, "seed=0.5.*Write seed=0"),
        ("ties", {"density": 0.5, "majority_sign_method": "mean"},
         "one of 'total', 'frequency'. Write majority_sign_method='total'"),
        ("linear", {"majority_sign_method": "frequency"},
         "'frequency' is unused by 'linear'. Write majority_sign_method='total'"),
        ("svd", {"svd_full_matrices": "no"}, "one of False, True. Write svd_full_matrices=False"),
        ("cat", {"svd_full_matrices": True},
         "svd_full_matrices=True is unused by 'cat'. Write svd_full_matrices=False"),
    ],
)  # fmt: skip
def test_options_that_are_none(name, given, says):
    with pytest.raises(ConfigError, match=says):
        combination(name, **given)


def test_an_unknown_strategy_has_its_neighbours():
    with pytest.raises(UnknownNameError, match="Did you mean 'ties'"):
        combination("tie")
    with pytest.raises(UnknownNameError, match="Known combination strategies: 'cat'"):
        combination(["linear"])
