"""Rotated features times a frozen weight in one node: bits, gradients, what is kept."""

import math

import pytest
import torch
from measured import Operations, adapted, kept, near, only_needed_gradients
from rounded import rounding
from test_butterfly import dense
from torch import nn
from torch.nn.functional import linear

from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import rotated_weight
from adapterzoo.kernels.butterfly import folded
from adapterzoo.kernels.cayley import cayley_reference

ROWS, D_IN, D_OUT = (4, 30), 48, 56


def drawn(dtype=torch.float64, biased=True, m=2, least=0.5, rows=ROWS):
    """X, the weight, the bias, R and a gain whose smallest value is given."""
    torch.manual_seed(0)
    x = torch.randn(*rows, D_IN, dtype=dtype, requires_grad=True)
    w, bias = torch.randn(D_OUT, D_IN, dtype=dtype), torch.randn(D_OUT, dtype=dtype)
    R = torch.randn(m, D_IN // 4, 4, 4, dtype=dtype, requires_grad=True)
    gain = torch.rand(D_OUT, dtype=dtype) + least
    gain[3] = -least
    return x, w, bias if biased else None, R, gain.requires_grad_()


def product(x, w, bias, R, gain):
    Q = folded(cayley_reference(R))
    assert rotated_weight.takes(x, w, Q)
    return rotated_weight.product(x, w, bias, Q[0], gain)


def truth(x, w, bias, Q, gain):
    """The formula with a dense rotation; `Q` `[m, blocks, b, b]`."""
    y = linear(x @ dense(Q), w) * gain
    return y if bias is None else y + bias


def exact(x, w, bias, R, gain):
    """Value and gradients of the sum of squares in float64."""
    x, R, gain = (v.detach().double().requires_grad_() for v in (x, R, gain))
    S = (R - R.mT) / 2
    eye = torch.eye(R.shape[-1], dtype=torch.float64)
    Q = (eye - S) @ torch.inverse(eye + S)
    y = truth(x, w.double(), None if bias is None else bias.double(), Q, gain)
    return y, torch.autograd.grad(y.square().sum(), (x, R, gain))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("m", [1, 2, 3])
# the output tells the value before a gain of 0.5, and not before one of 1e-30
@pytest.mark.parametrize("least", [0.5, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_the_formula(dtype, least, m, biased):
    given = drawn(dtype, biased, m, least)
    y = product(*given)
    expected, wanted = exact(*given)
    limit = rounding(D_IN + D_OUT + math.prod(ROWS), dtype)
    near(y, expected.detach(), limit)
    found = torch.autograd.grad(y.square().sum(), (given[0], *given[3:]))
    for own, of in zip(found, wanted, strict=True):
        near(own, of, limit)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("least", [0.5, 1e-30])
def test_gradients_of_gradients(least, biased):
    x, w, bias, R, gain = drawn(torch.float64, biased, 2, least)
    run = lambda x, R, gain: product(x, w, bias, R, gain)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, R, gain), fast_mode=True)
    if least == 0.5:
        assert torch.autograd.gradgradcheck(run, (x, R, gain), fast_mode=True)


def test_only_what_is_needed_gets_a_gradient():
    x, w, bias, R, gain = drawn()
    run = lambda x, R, gain: product(x, w, bias, R, gain)  # noqa: E731
    values = [v.detach().requires_grad_() for v in (x, R, gain)]
    wanted = torch.autograd.grad(run(*values).double().square().sum() / 256, values)
    only_needed_gradients(run, values, wanted)


def test_no_features_are_rotated():
    x, w, bias, R, gain = drawn(torch.float32, rows=(4, 300))
    blocks = folded(cayley_reference(R))[0].detach().requires_grad_()
    with Operations() as seen:
        rotated_weight.product(x, w, bias, blocks, gain).backward(torch.ones(4, 300, D_OUT))
    # W, again in the backward, x with its gradient by chunks, and the blocks
    assert seen.names.count("bmm") == 4
    # one pass over the output, for the gain
    assert seen.names.count("mul") == seen.names.count("lerp") == 0
    assert seen.largest == x.shape[:-1].numel() * D_OUT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("m", [1, 2])
def test_no_rotation_and_gain_one_change_no_bit(dtype, m):
    x, w, bias, R, gain = drawn(dtype, m=m)
    bias = 1000 * bias
    still = torch.zeros_like(R).requires_grad_(), torch.ones_like(gain).requires_grad_()
    transposed = x.detach().transpose(0, 1)
    for each in (x, transposed, x[0].repeat(4, 1)):
        y = product(each, w, bias, *still)
        assert torch.equal(y, linear(each, w, bias))
        with torch.no_grad():
            assert torch.equal(product(each, w, bias, R, gain), product(each, w, bias, R, gain))
    with torch.no_grad():
        quiet = product(x, w, bias, R, gain)
    assert torch.equal(product(x, w, bias, R, gain), quiet)


def test_x_and_the_output_are_all_that_is_large():
    x, w, bias, R, gain = drawn(torch.float32, rows=(4, 300))
    y = []
    saved = kept(lambda: y.append(product(x, w, bias, R, gain)) or y[0], w, bias, R, gain)
    large = {place for place, size in saved.items() if size > R.nbytes * 8}
    assert large == {x.untyped_storage().data_ptr(), y[0].untyped_storage().data_ptr()}


def test_writing_into_the_output_in_place_is_refused():
    x, w, bias, R, gain = drawn(torch.float32)
    y = product(x, w, bias, R, gain)
    y.mul_(2)
    with pytest.raises(
        KernelError, match=r"^rotated_weight: .* in place, write adapterzoo\.kernels\.use"
    ):
        y.sum().backward()


def test_what_it_leaves_to_others():
    x, w, _, R, _ = drawn(torch.float32)
    x = x.detach()
    Q = folded(cayley_reference(R)).detach()
    assert rotated_weight.takes(x, w, Q)
    # another device, which the registered operators serve
    assert not rotated_weight.takes(x.to("meta"), w.to("meta"), Q.to("meta"))
    # few rows, other strides, several factors or experts, half precision
    assert not rotated_weight.takes(x[0, :3], w, Q)
    assert not rotated_weight.takes(x, w.T.contiguous().T, Q)
    assert not rotated_weight.takes(x, w, Q.expand(2, *Q.shape[1:]))
    assert not rotated_weight.takes(x, w, Q.unsqueeze(0))
    assert not rotated_weight.takes(x.bfloat16(), w.bfloat16(), Q)
    with kernels.use("reference"):
        assert not rotated_weight.takes(x, w, Q)
    with torch.autocast("cpu", torch.bfloat16):
        assert not rotated_weight.takes(x, w, Q)


def test_a_layer_with_an_adapter_computes_it_so():
    model, query = adapted("boft[boft_n_butterfly_factor=2]")
    model.requires_grad_(False)
    model.set_active_adapters("a")
    x = torch.randn(16, 64, query.in_features)
    with Operations() as seen, torch.no_grad():
        found = query(x)
    # an operation as large as x is the product alone
    assert seen.largest == found.numel()
    assert "mul" not in seen.names[seen.names.index("addmm") :]
    with kernels.use("reference"), torch.no_grad():
        near(found, query(x).double(), 1e-5)
    assert isinstance(query, nn.Linear)
