"""The Cayley transform against its formula, the laws of rotations, and numerical gradients."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import kept
from rounded import Rounded, right
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from adapterzoo import contracts
from adapterzoo.kernels import use
from adapterzoo.kernels.cayley import cayley, cayley_reference

KERNELS = [cayley_reference, cayley]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# 1: nothing to rotate; 2: one plane; 3, 5: odd, one axis stays; 32: above a lane; 65: off by one
SIZES = (1, 2, 3, 4, 5, 8, 32, 65)


def random(*shape, size=1.0, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64) * size


def formula(R):
    """(I − S) (I + S)⁻¹ as it is written, in float64."""
    R = R.double()
    S = (R - R.transpose(-1, -2)) / 2
    eye = torch.eye(R.shape[-1], dtype=torch.float64)
    return (eye - S) @ torch.inverse(eye + S)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("b", SIZES)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_it_is_the_formula(kernel, b, size):
    R = random(3, 2, b, b, size=size)
    Q = kernel(R)
    torch.testing.assert_close(Q, formula(R), rtol=0, atol=1e-12)
    assert Q.is_contiguous()


@pytest.mark.parametrize("t", [0.0, 0.1, -1.0, 20.0])
def test_two_features_turn_by_twice_the_arc_tangent(t):
    R = torch.tensor([[0.0, -t], [t, 0.0]], dtype=torch.float64)
    cos, sin = math.cos(-2 * math.atan(t)), math.sin(-2 * math.atan(t))
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    torch.testing.assert_close(cayley_reference(R), turn, rtol=0, atol=1e-14)


def turns(b, degrees, seed=0):
    """An R whose Q turns b // 2 planes in no particular position by one angle."""
    S = torch.zeros(b, b, dtype=torch.float64)
    for i in range(0, b - 1, 2):
        S[i, i + 1] = math.tan(math.radians(degrees) / 2)
        S[i + 1, i] = -S[i, i + 1]
    axes = torch.linalg.qr(random(b, b, seed=seed)).Q
    return axes @ S @ axes.mT


@pytest.mark.parametrize("b", [2, 3, 8, 32, 65])
@pytest.mark.parametrize("degrees", [1.0, 90.0, 150.0, 170.0, 179.0, 179.9, 179.999])
def test_float32_is_orthogonal_to_a_millionth_at_every_angle(b, degrees):
    R = torch.stack([turns(b, degrees, seed).float() for seed in range(3)])
    Q = cayley_reference(R).double()
    assert (Q @ Q.mT - torch.eye(b)).abs().max() <= 2e-7
    # what a solve loses is eps times the condition number of I + S
    condition = 1 / math.cos(math.radians(degrees) / 2)
    # of what R was rounded to, the formula in float64 is the truth; rounded once
    near = 64 * torch.finfo(torch.float64).eps * condition
    torch.testing.assert_close(Q, formula(R), rtol=2**-24, atol=near)
    # without float64 it is what a solve in float32 can give
    with mock.patch.dict(contracts._HAVE_FLOAT64, cpu=False):
        rough = cayley_reference(R).double()
    error = (rough @ rough.mT - torch.eye(b)).abs().max()
    assert error <= 16 * torch.finfo(torch.float32).eps * condition


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    b=st.integers(1, 33),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    # at b = 33 0.2 turns by some 120 degrees, 5.0 by almost 180
    size=st.one_of(st.floats(0.0, 0.2), st.floats(0.2, 5.0)),
)
def test_rows_are_orthonormal_to_a_millionth(b, blocks, seed, size):
    R = random(blocks, b, b, size=size, seed=seed)
    eye = torch.eye(b, dtype=torch.float64)
    far = 1 if size <= 0.2 else 20
    for dtype, bound in ((torch.float32, 1e-6), (torch.float64, 1e-14 * far)):
        Q = cayley_reference(R.to(dtype)).double()
        assert (Q @ Q.mT - eye).abs().max() <= bound
        assert (Q.mT @ Q - eye).abs().max() <= bound
        assert (torch.linalg.det(Q) - 1).abs().max() <= 100 * bound


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", SIZES)
def test_symmetric_matrices_give_exactly_the_identity(kernel, b, dtype):
    R = random(4, b, b)
    for symmetric in (torch.zeros(4, b, b), R + R.mT):
        Q = kernel(symmetric.to(dtype))
        assert Q.dtype is dtype
        assert torch.equal(Q, torch.eye(b, dtype=dtype).expand(4, b, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype):
    R = random(64, 8, 8).to(dtype)
    exact = formula(R)
    error = (cayley_reference(R).double() - exact).abs().max()
    assert error <= torch.finfo(dtype).eps * 0.51


def test_autocast_changes_no_bit():
    R = random(6, 8, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        cast = cayley_reference(R)
    assert torch.equal(cast, cayley_reference(R))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("b", [1, 2, 3, 6])
def test_gradients_agree_with_differences(kernel, b):
    R = random(2, b, b).requires_grad_()
    assert gradcheck(kernel, (R,))
    assert gradgradcheck(kernel, (R,))


def gradient(run, R):
    R = R.detach().clone().requires_grad_()
    Q = run(R)
    (Q * random(*R.shape, seed=1).to(Q.dtype)).sum().backward()
    assert R.grad is not None
    return R.grad


@pytest.mark.parametrize("degrees", [0.0, 10.0, 170.0, 179.9])
@pytest.mark.parametrize("autocast", [False, True])
def test_float32_gradients_are_those_of_float64(degrees, autocast):
    R = torch.stack([turns(8, degrees, seed) for seed in range(3)]).float()

    # also in a backward under autocast
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own = gradient(cayley, R)
    assert own.dtype is torch.float32
    # Q is kept in float32, and so is all that follows
    twice = (Rounded(formula(R)).to(torch.float32) + Rounded(torch.eye(8))).mT
    whole = twice @ Rounded(random(*R.shape, seed=1)).to(torch.float32) @ twice * 0.25
    error = (whole + whole.mT).error
    right("gradient", own, Rounded(gradient(formula, R.double()), error), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_rounded_once(dtype):
    R = (random(5, 8, 8) / 4).to(dtype)
    own, truth = gradient(cayley, R), gradient(formula, R.double())
    assert own.dtype is dtype
    # Q is kept in the dtype of R, and what comes in is rounded to it
    torch.testing.assert_close(own.double(), truth, rtol=0, atol=16 * torch.finfo(dtype).eps)


def test_nothing_but_the_rotations_is_kept():
    R = random(3, 5, 5).float().requires_grad_()
    found: list[Tensor] = []
    saved = kept(lambda: found.append(cayley(R)) or found[0])
    assert list(saved) == [found[0].untyped_storage().data_ptr()]
    assert len(kept(lambda: cayley_reference(R))) > 1


def test_the_operator_passes_opcheck_and_compiles():
    R = random(3, 5, 5).requires_grad_()
    op = torch.ops.adapterzoo.cayley.default
    torch.library.opcheck(op, (R,))
    torch.library.opcheck(op, (R.detach().float(),))
    torch._dynamo.reset()
    compiled = torch.compile(cayley, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(R), cayley(R), rtol=0, atol=0)
    torch.testing.assert_close(gradient(compiled, R), gradient(cayley, R), rtol=0, atol=1e-15)
    torch._dynamo.reset()


def test_reference_mode_is_the_definition_by_autograd():
    R = random(3, 5, 5).requires_grad_()
    with use("reference"):
        node = cayley(R).grad_fn
    assert node is not None
    assert "Cayley" not in node.name()
    assert "Cayley" in cayley(R).grad_fn.name()


def test_the_gradient_is_antisymmetric():
    grad = gradient(cayley, random(3, 5, 5))
    assert grad.abs().max() > 0.1
    torch.testing.assert_close(grad, -grad.mT, rtol=0, atol=1e-15)


def test_nan_comes_out_as_nan():
    R = random(3, 4, 4)
    R[1, 0, 1] = math.nan
    Q = cayley_reference(R)
    assert Q[1].isnan().any()
    torch.testing.assert_close(Q[[0, 2]], formula(R[[0, 2]]))


def test_strided_and_empty_batches():
    R = random(4, 4, 3).permute(2, 0, 1)
    torch.testing.assert_close(cayley_reference(R), formula(R), rtol=0, atol=1e-13)
    wide = random(1, 4, 4).expand(5, 4, 4)
    torch.testing.assert_close(cayley_reference(wide), formula(wide), rtol=0, atol=1e-13)
    assert cayley_reference(torch.empty(0, 4, 4)).shape == (0, 4, 4)
