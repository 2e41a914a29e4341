"""DoRA's norm and composition against float64, on shapes and values that are hostile to them."""

import pytest
import torch
from measured import Operations
from rounded import Rounded, right

from adapterzoo.kernels import dora, use
from adapterzoo.kernels.dora import direction_reference, row_norm, row_norm_reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def factors(d_out, d_in, rank, *experts, dtype=torch.float32):
    source = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*experts, *shape, generator=source, dtype=torch.float64).to(dtype)

    return drawn(d_out, d_in), drawn(rank, d_in), drawn(d_out, rank)


def rounded_norm(w, a, b, s):
    whole = Rounded(w) + Rounded(b) @ Rounded(a) * s
    norm, error = (torch.linalg.vector_norm(v, dim=-1) for v in (whole.value, whole.error))
    # the root halves what the sum of squares loses
    return Rounded(norm, error + (w.shape[-1] / 2 + 4) * whole.unit * norm)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),  # nothing to reduce
        (5, 7, 3),  # primes: no vector fits
        (63, 1025, 8),  # one beside powers of two
        (1025, 63, 64),  # a rank above d_in
        (16, 8, 4, 3),  # experts
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [1, 100, 1 << 22])
def test_norms_are_those_of_float64(shape, dtype, tile):
    d_out, d_in, rank, *experts = shape
    w, a, b = factors(d_out, d_in, rank, *experts, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    got = row_norm_reference(w, a, b, 0.7, tile)
    assert got.dtype is wide
    assert got.shape == (*experts, d_out)
    right("norm", got, rounded_norm(w, a, b, 0.7), wide)


@pytest.mark.parametrize("layout", ["transposed", "rows", "strided", "expanded"])
def test_the_layout_of_the_weight_does_not_matter(layout):
    w, a, b = factors(24, 40, 4)
    shown = {
        "transposed": w.T.contiguous().T,
        "rows": torch.cat([w + 9, w, w - 9])[24:48],
        "strided": torch.stack([w, w + 9], -1)[..., 0],
        "expanded": w[:1].expand(24, 40),
    }[layout]
    got = row_norm_reference(shown, a, b, 2.0, 100)
    right("norm", got, rounded_norm(shown, a, b, 2.0), torch.float32)


@pytest.mark.parametrize("tile", [100, 1 << 22])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_b_of_zeros_gives_the_bits_of_the_plain_norm(tile, transposed):
    w, a, b = factors(33, 70, 4)
    w = w.T.contiguous().T if transposed else w
    got = row_norm_reference(w, a, torch.zeros_like(b), 3.0, tile)
    assert torch.equal(got, row_norm_reference(w, torch.randn_like(a), b * 0, 1.0, tile))
    assert torch.equal(direction_reference(w, a, torch.zeros_like(b), 3.0), w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 7, 5), (2050, 2051)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_norm_of_a_weight_has_the_bits_of_an_update_of_zeros(shape, dtype, transposed):
    w = torch.randn(shape, dtype=torch.float64).to(dtype)
    w = w.mT if transposed else w
    a, b = w.new_zeros((*w.shape[:-2], 1, w.shape[-1])), w.new_zeros((*w.shape[:-1], 1))
    norm = dora.weight_norm(w)
    assert torch.equal(norm, row_norm(w, a, b, 1.0))
    torch.testing.assert_close(norm.double(), w.double().norm(dim=-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("left", [1e-2, 1e-4, 0.0])
def test_a_sum_that_cancels_keeps_its_digits(left):
    # W ≈ −s B A, where the factored form ‖W‖² + 2s W·BA + … has nothing but rounding left
    w, a, b = factors(16, 64, 4)
    s = 0.5
    w = (-s * (b.double() @ a.double()) + left * w.double()).float()
    # each element of the sum is right to some ulps of the two that cancel
    right("norm", row_norm_reference(w, a, b, s), rounded_norm(w, a, b, s), torch.float32)


def test_a_cpu_takes_the_definition():
    for values in (factors(16, 64, 4), factors(16, 8, 4, 3)):
        for mode in ("auto", "reference"):
            with use(mode):
                assert torch.equal(row_norm(*values, 0.7), row_norm_reference(*values, 0.7))
    w, a, b = factors(16, 64, 4)
    assert row_norm(w, a.requires_grad_(), b, 0.7).requires_grad


def test_autocast_does_not_reach_the_norm():
    w, a, b = factors(16, 64, 4)
    expected = row_norm_reference(w, a, b, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(row_norm_reference(w, a, b, 0.5), expected)


def test_no_more_than_a_tile_of_the_sum_exists():
    w, a, b = factors(256, 64, 4)
    with torch.no_grad(), Operations() as seen:
        row_norm_reference(w, a, b, 0.5, tile=1024)
    assert 256 <= seen.largest <= 1024


def test_gradients_of_the_norm_are_those_of_differences():
    w, a, b = (t.requires_grad_() for t in factors(6, 5, 2, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda *t: row_norm_reference(*t, 0.7, 10), (w, a, b))


def test_a_row_of_zeros_has_norm_and_gradient_zero():
    w, a, b = factors(3, 8, 2)
    w[1], b[1] = 0, 0
    a.requires_grad_()
    b.requires_grad_()
    norm = row_norm_reference(w, a, b, 0.7)
    assert norm[1] == 0
    norm.sum().backward()
    assert b.grad is not None
    assert torch.equal(b.grad[1], torch.zeros(2))
    assert bool(a.grad.isfinite().all())
