"""The low-rank update against float64: values, gradients, what it saves, and who sees through."""

import math

import low_rank_cases
import numpy as np
import pytest
import torch
from measured import (
    Operations,
    autocast_as,
    compiled_as_eager,
    kept,
    loss,
    near,
    only_needed_gradients,
    writable,
)
from rounded import rounding

from adapterzoo import kernels
from adapterzoo.kernels import low_rank
from adapterzoo.kernels.low_rank import expand, low_rank_reference, shrink

S = 0.7
SHAPES = [
    ((), 1, 1, 1),  # one row without a batch
    ((0,), 33, 5, 3),  # no rows
    ((17,), 33, 100, 3),  # primes
    ((2, 3, 5), 64, 24, 24),  # several dimensions, rank as wide as the output
    ((4, 50), 100, 130, 8),  # above the size where the path changes
]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def drawn(batch, d_in, d_out, rank, outer=torch.float64, factor=torch.float64):
    """y, x, a and b."""
    source = torch.Generator().manual_seed(0)
    shapes = ((*batch, d_out), (*batch, d_in), (rank, d_in), (d_out, rank))
    dtypes = (outer, outer, factor, factor)
    return [
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


@torch.enable_grad()
def truth(y, x, a, b, mask=1.0):
    """The output and all gradients of its `loss`, in float64."""
    wide = [v.detach().double().requires_grad_() for v in (y, x, a, b)]
    out = wide[0] + S * (wide[1] * mask) @ wide[2].T @ wide[3].T
    return [out.detach(), *torch.autograd.grad(loss(out), wide)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", TOLERANCE)
@pytest.mark.parametrize("outer", TOLERANCE)
def test_values_and_gradients_are_those_of_float64(shape, outer, factor):
    values = [v.requires_grad_() for v in drawn(*shape, outer, factor)]
    out = low_rank.low_rank(*values, S)
    got = [out, *torch.autograd.grad(loss(out), values)]
    expected, sizes = truth(*values), truth(*(v.abs() for v in values))
    batch, *widths = shape
    tolerance = rounding(math.prod(batch) + sum(widths), outer, factor)
    for value, wanted, size, like in zip(got, expected, sizes, values[:1] + values, strict=True):
        assert value.dtype is like.dtype
        near(value, wanted, tolerance, size)
    with torch.no_grad():
        two = expand(values[0], shrink(*values[1:3]), values[3], S)
        for out in (low_rank.low_rank(*values, S), two):
            near(out, expected[0], tolerance, sizes[0])


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("factor", [torch.float32, torch.float64])
def test_the_layout_does_not_matter(layout, factor):
    y, x, a, b = drawn((6, 7), 32, 700, 5, torch.float32, factor)
    y, x = {
        "transposed": (y.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT),
        "strided": (torch.stack([y, y], -1)[..., 0], torch.stack([x, x], -1)[..., 0]),
        "expanded": (y[:1].expand_as(y), x[:, :1].expand_as(x)),
    }[layout]
    values = [v.requires_grad_() for v in (y, x, a, b)]
    out = low_rank.low_rank(*values, S)
    # a gradient of one number for all, too
    grads = torch.autograd.grad(out.sum(), values, retain_graph=True)
    wide = [v.detach().double().requires_grad_() for v in values]
    expected = wide[0] + S * wide[1] @ wide[2].T @ wide[3].T
    big = [v.detach().abs().requires_grad_() for v in wide]
    sizes = big[0] + S * big[1] @ big[2].T @ big[3].T
    limit = rounding(42 + 32 + 700 + 5, torch.float32)
    near(out, expected, limit, sizes)
    wanted = torch.autograd.grad(expected.sum(), wide)
    for got, want, size in zip(grads, wanted, torch.autograd.grad(sizes.sum(), big), strict=True):
        near(got, want, limit, size)


@pytest.mark.parametrize(
    ("outer", "factor"),
    [
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("rows", [3, 300])  # 300: more than a tile of Triton
def test_the_output_is_not_rounded_to_the_dtype_of_the_factors(outer, factor, rows):
    y, x, a, b = drawn((rows,), 12, 64, 4, outer, factor)
    if outer is torch.bfloat16:
        # more than float16 holds
        y = y * 1e6
    assert torch.equal(low_rank.low_rank(y, x, a, torch.zeros_like(b), S), y)
    assert torch.equal(expand(y, torch.zeros(rows, 4, dtype=factor), b, S), y)


@pytest.mark.parametrize("shape", [((2, 3), 3, 4, 2), ((6, 500), 1, 6, 1)], ids=["small", "large"])
def test_gradients_and_their_gradients_are_those_of_differences(shape):
    values = [v.requires_grad_() for v in drawn(*shape)]
    assert torch.autograd.gradcheck(lambda *v: low_rank.low_rank(*v, S), values, fast_mode=True)
    # through the operators, which the mixed dtypes and dropout take
    noise = low_rank.dropout_bits(values[1], 0.4)

    def through(y, x, a, b):
        return low_rank._expand(y, low_rank._shrink(x, a, 0.4, noise), b, S)

    assert torch.autograd.gradcheck(through, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(through, values, fast_mode=True)


def test_only_what_needs_a_gradient_gets_one():
    values = drawn((2, 3), 5, 4, 2)
    noise = low_rank.dropout_bits(values[1], 0.4)
    mask = low_rank.dropout_mask(noise, values[1].shape, 0.4).double() * low_rank.dropout_scale(0.4)

    def run(y, x, a, b):
        return low_rank._expand(y, low_rank._shrink(x, a, 0.4, noise), b, S)

    only_needed_gradients(run, values, truth(*values, mask)[1:])


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9, 1e-4])
def test_as_many_features_drop_as_were_asked(p):
    torch.manual_seed(0)
    x = torch.empty(1000, 1001)
    mask = low_rank.dropout_mask(low_rank.dropout_bits(x, p), x.shape, p)
    assert mask.shape == x.shape
    assert set(mask.unique().tolist()) <= {0, 1}
    dropped = 1 - mask.double()
    # five deviations of a fair draw
    for part, n in ((dropped, 1_001_000), (dropped[:, ::8], 126_000), (dropped[::9], 112_112)):
        assert abs(part.mean().item() - p) < 5 * math.sqrt(p / n) + 1e-5
    # neighbours do not know of one another
    both = (dropped[:, 1:] * dropped[:, :-1]).mean().item()
    assert abs(both - p * p) < 5 * math.sqrt(p * p / 1e6) + 1e-5
    assert low_rank.dropout_scale(p) == pytest.approx(1 / (1 - p), rel=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (5,), (3, 7, 45), (0, 5), (303, 1000)])
def test_a_mask_is_what_numpy_unpacks(shape):
    noise = low_rank.dropout_bits(torch.empty(shape), 0.3)
    places = np.unpackbits(noise.numpy(), bitorder="little").reshape(-1, 8).T.copy()  # [8, bytes]
    mask = low_rank.dropout_mask(noise, shape, 0.3)
    assert torch.equal(mask.flatten(), torch.from_numpy(places).flatten()[: mask.numel()])


@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 45), (0, 5), (300, 64)])
def test_the_mask_of_a_seed_is_that_of_the_triton_kernels(shape):
    seed = torch.tensor([(123 << 32) + 77])
    assert torch.equal(
        low_rank.dropout_mask(seed, shape, 0.3).double(), low_rank_cases.kept(shape, 0.3, seed)
    )


def test_dropout_of_nothing_and_of_nearly_all():
    x = torch.empty(3, 5)
    assert bool(low_rank.dropout_mask(low_rank.dropout_bits(x, 1e-9), x.shape, 1e-9).all())
    assert low_rank.dropout_scale(1 - 1e-12) == 2.0**16
    assert low_rank.dropout_bits(torch.empty(0, 5), 0.3).numel() == 0


@pytest.mark.parametrize("shape", [((3, 7), 33), ((3, 101), 1000)], ids=["one", "several slices"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_repeated_in_the_backward(dtype, shape):
    values = [v.requires_grad_() for v in drawn(*shape, 12, 4, dtype, torch.float32)]
    torch.manual_seed(1)
    out = low_rank.low_rank(*values, S, dropout=0.3, training=True)
    got = [out, *torch.autograd.grad(loss(out), values)]
    torch.manual_seed(1)
    x = values[1]
    mask = low_rank.dropout_mask(low_rank.dropout_bits(x, 0.3), x.shape, 0.3).double()
    assert 0 < mask.sum() < mask.numel()
    for value, expected in zip(
        got, truth(*values, mask * low_rank.dropout_scale(0.3)), strict=True
    ):
        near(value, expected, 3 * TOLERANCE[dtype])
    still = low_rank.low_rank(*values, S, dropout=0.3, training=False)
    near(still, truth(*values)[0], 3 * TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("outer", "factor"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_and_t_are_all_that_is_saved(outer, factor, p, autocast):
    rows, d_in, d_out, rank = 64, 256, 512, 8
    y, *learned = drawn((4, 16), d_in, d_out, rank, outer, factor)
    x, a, b = (v.requires_grad_() for v in learned)

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return low_rank.low_rank(y, x, a, b, S, p, training=True)

    limit = x.nbytes + rows * rank * a.element_size() + (rows * d_in // 8 if p else 0)
    # autocast keeps its copies of the factors
    limit += 2 * (a.numel() + b.numel()) if autocast and factor is torch.float32 else 0
    # the path by autograd keeps bᵀ in rows
    assert 0 < sum(kept(run, a, b).values()) <= limit + b.nbytes


def test_layers_that_share_an_input_save_it_once():
    y, x, a, b = drawn((4, 16), 256, 32, 4, torch.float32, torch.float32)
    pairs = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for _ in range(3)]

    def run():
        return sum(low_rank.low_rank(y, x, *pair, S, 0.1, training=True) for pair in pairs)

    saved = sum(kept(run, *(f for pair in pairs for f in pair)).values())
    assert saved <= x.nbytes + 3 * (64 * 4 * 4 + 64 * 256 // 8)


def test_a_frozen_factor_keeps_no_activation():
    y, x, a, b = drawn((4, 16), 256, 32, 4, torch.float32, torch.float32)
    x.requires_grad_()
    saved = kept(lambda: low_rank.low_rank(y, x, a, b, S, 0.1, True), a, b)
    assert sum(saved.values()) <= 64 * 256 // 8


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiled_is_eager(outer, p):
    values = [v.requires_grad_() for v in drawn((3, 5), 33, 7, 3, outer, torch.float32)]

    def run(*values):
        return low_rank.low_rank(*values, S, p, training=True)

    compiled_as_eager(run, values, TOLERANCE[outer])


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_reference(outer, factor):
    values = [v.requires_grad_() for v in drawn((3, 5), 33, 7, 3, outer, factor)]
    own, reference = (lambda *v, f=f: f(*v, S) for f in (low_rank.low_rank, low_rank_reference))
    autocast_as(reference, own, values, 2 * TOLERANCE[torch.bfloat16])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert shrink(values[1], values[2]).dtype is torch.bfloat16
        # autocast leaves float64 alone
        assert shrink(values[1], values[2].double()).dtype is torch.float64


def test_reference_mode_is_the_definition():
    values = drawn((3, 5), 33, 7, 3, torch.float32, torch.float32)
    with kernels.use("reference"):
        assert torch.equal(low_rank.low_rank(*values, S), low_rank_reference(*values, S))
        torch.manual_seed(0)
        out = low_rank.low_rank(*values, S, 0.3, training=True)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(values[1], 0.3)
    assert torch.equal(out, low_rank_reference(values[0], dropped, *values[2:], S))


@pytest.mark.parametrize("batch", [(1, 16), (8, 128)])
def test_few_operations_without_gradients(batch):
    values = drawn(batch, 64, 64, 8, torch.float32, torch.float32)
    with torch.no_grad(), Operations() as seen:
        low_rank.low_rank(*values, S)
    assert seen.names == ["mm", "mm", "add"]


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_a_model_may_write_into_the_output_in_place(factors):
    y, x, a, b = drawn((300,), 32, 64, 4, torch.bfloat16, factors)
    params = a.requires_grad_(), b.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        writable(lambda: low_rank.low_rank(y, x, a, b, 0.5, dropout=0.0), params)


def test_the_transforms_of_torch_func():
    # above SMALL, with factors wider than the layer
    y, x = torch.zeros(300, 64, dtype=torch.bfloat16), torch.randn(300, 32).bfloat16()
    a, b = torch.randn(4, 32), torch.randn(64, 4)

    def total(a, b):
        return low_rank.low_rank(y, x, a, b, 0.5).float().sum()

    found = torch.func.grad(total, (0, 1))(a, b)
    wanted = torch.autograd.grad(total(a.requires_grad_(), b.requires_grad_()), (a, b))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
