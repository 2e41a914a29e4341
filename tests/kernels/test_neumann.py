"""The series of the Cayley transform and its skew-symmetric matrices: gradients, what is kept."""

import pytest
import torch
from measured import compiled_as_eager, kept, with_gradients
from torch.autograd import gradcheck, gradgradcheck

from adapterzoo.kernels import use
from adapterzoo.kernels.cayley import cayley_neumann, cayley_neumann_reference
from adapterzoo.kernels.skew import skew, skew_reference

TERMS = (2, 3, 4, 5, 9)


def drawn(b=5, dtype=torch.float64):
    torch.manual_seed(0)
    vectors = 0.3 * torch.randn(2, 3, b * (b - 1) // 2, dtype=dtype)
    return vectors.requires_grad_()


def both(vectors, terms=5, b=5):
    return cayley_neumann(skew(vectors, b), terms)


def reference(vectors, terms=5, b=5):
    return cayley_neumann_reference(skew_reference(vectors, b), terms)


@pytest.mark.parametrize("terms", TERMS)
def test_it_is_the_sum_of_powers(terms):
    S = torch.randn(2, 4, 4, dtype=torch.float64)
    last = {2: 1, 3: 3}.get(terms, terms - 1)
    powers = [torch.matrix_power(S, n) for n in range(last + 1)]
    wanted = 2 * sum(powers) - powers[0]
    if terms > 2:
        wanted = wanted - powers[-1]
    torch.testing.assert_close(cayley_neumann(S, terms), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("terms", TERMS)
def test_gradients_and_their_gradients(terms):
    # S itself too: it need not be skew-symmetric here
    S = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    gradcheck(lambda S: cayley_neumann(S, terms), S)
    gradgradcheck(lambda S: cayley_neumann(S, terms), S)
    vectors = drawn(3)
    gradcheck(lambda v: both(v, terms, 3), vectors)
    gradgradcheck(lambda v: both(v, terms, 3), vectors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("terms", TERMS)
def test_bits_are_those_of_the_definition(terms, dtype):
    vectors = drawn(dtype=dtype)
    assert torch.equal(both(vectors, terms), reference(vectors, terms))
    with torch.no_grad():
        assert torch.equal(both(vectors, terms), reference(vectors, terms))


def test_only_s_is_kept():
    vectors = drawn()
    S = 2 * 3 * 5 * 5 * 8
    assert sum(kept(lambda: both(vectors), vectors).values()) == S
    assert sum(kept(lambda: reference(vectors), vectors).values()) > 4 * S


def test_reference_mode_and_transforms_take_the_definition():
    vectors = drawn()
    with use("reference"):
        assert "Neumann" not in both(vectors).grad_fn.name()
    assert "Neumann" in both(vectors).grad_fn.name()
    each = torch.func.vmap(torch.func.jacrev(both))(vectors)
    wanted = torch.autograd.functional.jacobian(both, vectors[1])
    torch.testing.assert_close(each[1], wanted, rtol=0, atol=1e-12)


def test_compiled_is_eager():
    compiled_as_eager(both, [drawn(dtype=torch.float32)], 1e-6)


def test_autocast_rounds_nothing():
    vectors = drawn(dtype=torch.float32)
    plain = with_gradients(both, [vectors])
    with torch.autocast("cpu", torch.bfloat16):
        for own, wanted in zip(with_gradients(both, [vectors]), plain, strict=True):
            assert torch.equal(own, wanted)
