"""The Cayley transform against its formula, the laws of rotations, and numerical gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from adapterzoo.kernels.cayley import cayley_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# 1: nothing to rotate; 2: one plane; 3, 5: odd, one axis stays; 32: above a lane; 65: off by one
SIZES = (1, 2, 3, 4, 5, 8, 32, 65)


def random(*shape: int, size: float = 1.0, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64) * size


def formula(R: Tensor) -> Tensor:
    """(I − S) (I + S)⁻¹ as it is written, in float64."""
    R = R.double()
    S = (R - R.transpose(-1, -2)) / 2
    eye = torch.eye(R.shape[-1], dtype=torch.float64)
    return (eye - S) @ torch.inverse(eye + S)


@pytest.mark.parametrize("b", SIZES)
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_it_is_the_formula(b: int, size: float) -> None:
    R = random(3, 2, b, b, size=size)
    torch.testing.assert_close(cayley_reference(R), formula(R), rtol=0, atol=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.1, -1.0, 20.0])
def test_two_features_turn_by_twice_the_arc_tangent(t: float) -> None:
    R = torch.tensor([[0.0, -t], [t, 0.0]], dtype=torch.float64)
    angle = -2 * math.atan(t)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
        dtype=torch.float64,
    )
    torch.testing.assert_close(cayley_reference(R), turn, rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(
    b=st.integers(1, 33),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    # at b = 33 0.2 turns by some 120 degrees, 5.0 by almost 180
    size=st.one_of(st.floats(0.0, 0.2), st.floats(0.2, 5.0)),
)
def test_rows_are_orthonormal_to_a_millionth(b: int, blocks: int, seed: int, size: float) -> None:
    R = random(blocks, b, b, size=size, seed=seed)
    eye = torch.eye(b, dtype=torch.float64)
    far = 1 if size <= 0.2 else 20
    for dtype, bound in ((torch.float32, 1e-6 * far), (torch.float64, 1e-14 * far)):
        Q = cayley_reference(R.to(dtype)).double()
        assert (Q @ Q.mT - eye).abs().max() <= bound
        assert (Q.mT @ Q - eye).abs().max() <= bound
        assert (torch.linalg.det(Q) - 1).abs().max() <= 100 * bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", SIZES)
def test_symmetric_matrices_give_exactly_the_identity(b: int, dtype: torch.dtype) -> None:
    R = random(4, b, b)
    for symmetric in (torch.zeros(4, b, b), R + R.mT):
        Q = cayley_reference(symmetric.to(dtype))
        assert Q.dtype is dtype
        assert torch.equal(Q, torch.eye(b, dtype=dtype).expand(4, b, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    R = random(64, 8, 8).to(dtype)
    exact = formula(R)
    error = (cayley_reference(R).double() - exact).abs().max()
    assert error <= torch.finfo(dtype).eps * 0.51


def test_autocast_changes_no_bit() -> None:
    R = random(6, 8, 8).float()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cayley_reference(R), cayley_reference(R.clone()))
        cast = cayley_reference(R)
    assert torch.equal(cast, cayley_reference(R))


@pytest.mark.parametrize("b", [2, 3, 6])
def test_gradients_agree_with_differences(b: int) -> None:
    R = random(2, b, b).requires_grad_()
    assert gradcheck(cayley_reference, (R,))
    assert gradgradcheck(cayley_reference, (R,))


def test_the_gradient_is_antisymmetric() -> None:
    R = random(3, 5, 5).requires_grad_()
    (cayley_reference(R) * random(3, 5, 5, seed=1)).sum().backward()
    assert R.grad is not None
    assert R.grad.abs().max() > 0.1
    torch.testing.assert_close(R.grad, -R.grad.mT, rtol=0, atol=1e-15)


def test_nan_comes_out_as_nan() -> None:
    R = random(3, 4, 4)
    R[1, 0, 1] = math.nan
    Q = cayley_reference(R)
    assert Q[1].isnan().any()
    torch.testing.assert_close(Q[[0, 2]], formula(R[[0, 2]]))


def test_strided_and_empty_batches() -> None:
    R = random(4, 4, 3).permute(2, 0, 1)
    torch.testing.assert_close(cayley_reference(R), formula(R), rtol=0, atol=1e-13)
    wide = random(1, 4, 4).expand(5, 4, 4)
    torch.testing.assert_close(cayley_reference(wide), formula(wide), rtol=0, atol=1e-13)
    assert cayley_reference(torch.empty(0, 4, 4)).shape == (0, 4, 4)


def test_it_follows_the_device() -> None:
    assert cayley_reference(torch.empty(2, 4, 4, device="meta")).is_meta
