"""Butterfly rotations against dense matrices that are built from the words of the paper."""

from unittest import mock

import pytest
import torch
from measured import Operations, kept
from rounded import Rounded, as_near, right, rounding
from torch.autograd import gradcheck, gradgradcheck

from adapterzoo.kernels import butterfly as module
from adapterzoo.kernels.butterfly import butterfly, butterfly_reference, fold, folded, rotated
from adapterzoo.kernels.cayley import cayley_reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# b, blocks, m: the reason for each
SHAPES = [
    (4, 8, 1),  # the default
    (4, 12, 1),  # four neighbours share a wide block
    (4, 6, 1),  # two do
    (4, 7, 1),  # none does: a prime number of blocks
    (2, 1, 1),  # as small as it gets
    (3, 5, 1),  # odd blocks, an odd number of them
    (48, 1, 1),  # one block is the whole
    (17, 3, 1),  # a prime just above the narrowest block
    (4, 8, 2),
    (4, 8, 4),  # the last factor spans everything
    (2, 16, 3),
    (2, 24, 2),  # chunks share a wide block
    (6, 4, 2),  # b is no power of two
    (8, 12, 3),  # three chunks
    (32, 4, 3),
    (4, 128, 8),  # a chunk of 512: too wide to fold
]
KERNELS = [butterfly_reference, butterfly]


def random(*shape, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def rotations(m, blocks, b, seed=1):
    return cayley_reference(random(m, blocks, b, b, seed=seed))


def permutation(i, b, d):
    """P_i: in each group of b · 2ⁱ features the even half-blocks come first, then the odd ones."""
    if i == 0:
        return torch.eye(d, dtype=torch.float64)
    half, group = b // 2, b << i
    order: list[int] = []
    for start in range(0, d, group):
        halves = [range(start + k, start + k + half) for k in range(0, group, half)]
        for chosen in (*halves[0::2], *halves[1::2]):
            order += chosen
    P = torch.zeros(d, d, dtype=torch.float64)
    P[range(d), order] = 1.0
    return P


def dense(Q):
    """Rot = M_{m−1} ⋯ M_0 with M_i = P_i diag(Q_i) P_iᵀ, `[d_in, d_in]`."""
    m, blocks, b, _ = Q.shape
    Rot = torch.eye(blocks * b, dtype=torch.float64)
    for i in range(m):
        P = permutation(i, b, blocks * b)
        Rot = P @ torch.block_diag(*Q[i].double()) @ P.T @ Rot
    return Rot


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("b", "blocks", "m"), SHAPES)
def test_it_multiplies_by_the_dense_matrix(kernel, b, blocks, m):
    x, Q = random(3, 5, b * blocks), rotations(m, blocks, b)
    Rot = dense(Q)
    assert m == 1 or (Rot - dense(Q.flip(0))).abs().max() > 0.1
    torch.testing.assert_close(kernel(x, Q), x @ Rot, rtol=0, atol=1e-12)
    turned = kernel(x, Q, transposed=True)
    torch.testing.assert_close(turned, x @ Rot.T, rtol=0, atol=1e-12)
    torch.testing.assert_close(kernel(turned, Q), x, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("b", "blocks", "m"), SHAPES[:-1])
def test_folding_gives_the_dense_matrix_in_chunks(b, blocks, m):
    Q = rotations(m, blocks, b)
    folded = fold(Q)
    width = folded.shape[-1]
    assert width % (b << (m - 1)) == 0
    assert width <= max(16, b << (m - 1))
    torch.testing.assert_close(torch.block_diag(*folded), dense(Q), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("b", "m"), [(4, 1), (4, 3)])
def test_each_expert_has_its_own_rotation(kernel, b, m):
    x = random(3, 5, 2, 32)
    Q = torch.stack([rotations(m, 32 // b, b, seed=i) for i in range(3)])
    expected = torch.stack([x[i] @ dense(Q[i]) for i in range(3)])
    torch.testing.assert_close(kernel(x, Q), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("m", [1, 3])
def test_any_leading_shape_and_stride(kernel, m):
    Q = rotations(m, 8, 4)
    Rot = dense(Q)
    for batch in ((), (1,), (0,), (2, 0), (1, 1), (2, 1, 3)):
        x = random(*batch, 32)
        torch.testing.assert_close(kernel(x, Q), x @ Rot, rtol=0, atol=1e-12)
    for x in (random(32, 6).T, random(6, 64)[:, ::2], random(1, 32).expand(4, 32)):
        torch.testing.assert_close(kernel(x, Q), x @ Rot, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2])
def test_identities_change_no_value(kernel, dtype, m):
    info = torch.finfo(dtype)
    # the ends of the range, and what is in between
    ends = [info.max, -info.max, info.smallest_normal, -info.smallest_normal, 0.0, 1.0]
    x = torch.cat([torch.tensor(ends * 8, dtype=dtype), random(144).to(dtype)]).view(4, 48)
    Q = cayley_reference(torch.zeros(m, 12, 4, 4))
    y = kernel(x, Q)
    assert y.dtype is dtype
    assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "blocks", "m"), [(4, 8, 1), (4, 8, 4), (8, 12, 3)])
def test_folding_is_as_exact_as_the_definition(b, blocks, m, dtype):
    x, Q = random(64, b * blocks).to(dtype), rotations(m, blocks, b)
    Q = Q if dtype is torch.float64 else Q.float()
    own, exact = butterfly(x, Q), x.double() @ dense(Q.double())
    if dtype.itemsize < 4:
        as_near(own, butterfly_reference(x, Q), exact)
    else:
        sizes = butterfly_reference(x.double().abs(), Q.double().abs())
        right("y", own, Rounded(exact, rounding(2 * (m * b + (b << m - 1)), dtype) * sizes), dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("b", "blocks", "m"), [(4, 4, 1), (3, 3, 1), (4, 4, 2), (2, 8, 3)])
def test_gradients_agree_with_differences(kernel, b, blocks, m):
    x = random(2, b * blocks).requires_grad_()
    R = random(m, blocks, b, b).requires_grad_()

    def rotated(x, R):
        return kernel(x, cayley_reference(R))

    assert gradcheck(rotated, (x, R))
    assert gradcheck(lambda x, R: kernel(x, cayley_reference(R), transposed=True), (x, R))
    assert gradgradcheck(rotated, (x, R), atol=1e-4, fast_mode=True)


def test_factors_are_folded_in_float32_under_autocast():
    Q = rotations(3, 8, 4).float()
    with torch.autocast("cpu", torch.bfloat16):
        folded = fold(Q)
        y = butterfly(random(2, 32).float(), Q)
    assert torch.equal(folded, fold(Q))
    assert y.dtype is torch.bfloat16


@pytest.mark.parametrize(("b", "m"), [(4, 1), (8, 2), (8, 4), (8, 8)])
def test_no_dense_rotation_is_ever_built(b, m):
    d = 1024
    x = random(4, d).float().requires_grad_()
    R = (random(m, d // b, b, b) / 10).float().requires_grad_()
    with Operations() as seen:
        butterfly(x, cayley_reference(R)).sum().backward()
    assert seen.largest <= max(d * d // 8, d * max(16, b << (m - 1)) * (m <= 6))
    with Operations() as planted:
        torch.eye(d)
    assert planted.largest == d * d


@pytest.mark.parametrize("m", [1, 3])
def test_the_backward_keeps_x_and_numbers_of_the_size_of_the_rotation(m):
    rows, d, b = 512, 64, 4
    x, Q = random(rows, d).float().requires_grad_(), rotations(m, d // b, b).float()
    saved = kept(lambda: butterfly(x, Q.requires_grad_()))
    assert saved.pop(x.untyped_storage().data_ptr()) == rows * d * 4
    assert sum(saved.values()) <= 4 * d * 16 * (2 * m + 1)


def operator(x, Q, transposed=False):
    """`turned` as on a GPU: by the operator, which here runs in torch."""
    with mock.patch.object(module.ops, "asks_triton", return_value=True):
        return rotated(x, Q, transposed)


def with_experts():
    Q = torch.stack([rotations(2, 8, 4, seed=i) for i in range(3)])
    return random(3, 5, 2, 32), folded(Q)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m", [1, 2, 8])
def test_the_operator_is_the_definition(m, transposed):
    Q = folded(rotations(m, 128, 4))
    for x, own in ((random(3, 5, 512), Q), with_experts()):
        expected = butterfly_reference(x, own, transposed)
        for run in (rotated, operator):
            torch.testing.assert_close(run(x, own, transposed), expected, rtol=0, atol=1e-13)


def test_gradients_of_the_operator_agree_with_differences():
    x, Q = with_experts()
    x.requires_grad_()
    Q.requires_grad_()

    def run(x, Q):
        return module._rotate(x, Q.squeeze(-4))

    # neighbours are zero in the blocks, and learn all the same
    assert gradcheck(run, (x, Q), fast_mode=True)
    assert gradgradcheck(run, (x, Q), fast_mode=True)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_the_operator_keeps_x_only_for_the_blocks(needed):
    x, Q = random(512, 64).float(), folded(rotations(1, 16, 4).float()).squeeze(-4)
    x.requires_grad_(needed[0])
    Q = Q.detach().requires_grad_(needed[1])
    saved = {place for place, nbytes in kept(lambda: module._rotate(x, Q)).items() if nbytes}
    own = [v.untyped_storage().data_ptr() for v in (Q, x)]
    assert saved == set(own if needed[1] else own[:1])
    module._rotate(x, Q).sum().backward()
    assert [v.grad is not None for v in (x, Q)] == list(needed)


def test_autocast_of_the_operator_is_that_of_the_definition():
    x, Q = random(2, 32).float().requires_grad_(), folded(rotations(1, 8, 4).float())
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = operator(x, Q), butterfly_reference(x, Q)
    assert y.dtype is torch.bfloat16
    assert torch.equal(y, expected)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
