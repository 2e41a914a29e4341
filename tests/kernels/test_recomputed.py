"""A function that runs again in its backward: bits, gradients, what is kept."""

import pytest
import torch
from measured import compiled_as_eager, kept, with_gradients
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from adapterzoo.kernels import use
from adapterzoo.kernels.cayley import cayley_neumann
from adapterzoo.kernels.ops import recomputed
from adapterzoo.methods.rotation.oft import skew

B = 5


def series(vectors):
    return cayley_neumann(skew(vectors, B), 5)


def run(vectors):
    return recomputed(series, vectors)


def drawn(dtype=torch.float64):
    torch.manual_seed(0)
    return (0.3 * torch.randn(2, 3, B * (B - 1) // 2, dtype=dtype)).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_bits_are_those_of_the_function(dtype):
    vectors = drawn(dtype)
    for own, wanted in zip(
        with_gradients(run, [vectors]), with_gradients(series, [vectors]), strict=True
    ):
        assert torch.equal(own, wanted)
    with torch.no_grad():
        assert torch.equal(run(vectors), series(vectors))


def test_gradients_and_their_gradients():
    gradcheck(run, drawn())
    gradgradcheck(run, drawn())
    # of what x was computed from, too
    gradgradcheck(lambda x: run(x.sin()), drawn())


def test_only_the_input_is_kept():
    vectors = drawn()
    assert not kept(lambda: run(vectors), vectors)
    assert sum(kept(lambda: series(vectors), vectors).values()) > 8 * vectors.nbytes
    # an input that is no parameter counts
    assert sum(kept(lambda: run(vectors + 1), vectors).values()) == vectors.nbytes


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_gives_the_same_gradients(reentrant):
    vectors = drawn()
    wanted = torch.autograd.grad(run(vectors).sin().sum(), vectors)
    checkpoint(lambda v: run(v).sin(), vectors, use_reentrant=reentrant).sum().backward()
    assert torch.equal(vectors.grad, *wanted)


def test_an_input_that_changed_in_place_is_refused():
    vectors = drawn()
    y = run(vectors)
    with torch.no_grad():
        vectors.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_reference_mode_and_transforms_run_the_function_itself():
    vectors = drawn()
    with use("reference"):
        assert "Recomputed" not in run(vectors).grad_fn.name()
    assert "Recomputed" in run(vectors).grad_fn.name()
    each = torch.func.vmap(torch.func.jacrev(run))(vectors)
    wanted = torch.autograd.functional.jacobian(run, vectors[1])
    torch.testing.assert_close(each[1], wanted, rtol=0, atol=1e-12)


def test_compiled_is_eager():
    compiled_as_eager(run, [drawn(torch.float32)], 1e-6)


def test_autocast_rounds_nothing():
    vectors = drawn(torch.float32)
    plain = with_gradients(run, [vectors])
    with torch.autocast("cpu", torch.bfloat16):
        for own, wanted in zip(with_gradients(run, [vectors]), plain, strict=True):
            assert torch.equal(own, wanted)
