"""Cayley transforms and their fold in the interpreter; `interpreted.py` runs it."""

import math

import torch
from hostile import both_gradients, drawn, near
from rounded import Rounded, right, rounding

from adapterzoo import kernels
from adapterzoo.kernels import butterfly, cayley, cayley_fold_triton
from adapterzoo.kernels.cayley import cayley_reference

SHAPES = {
    # lead, m, blocks, b
    "as small as it gets": ((), 1, 1, 2),
    "the default": ((), 1, 8, 4),
    "a tile and a bit": ((2,), 1, 9, 4),
    "odd blocks": ((3,), 1, 7, 3),
    "one of one feature": ((), 1, 5, 1),
    "a prime above the tile": ((), 1, 3, 17),
    "one block is a tile": ((), 1, 2, 32),
    "not the tile": ((), 1, 2, 24),
    "the widest": ((), 1, 2, 64),
    "two factors": ((2,), 2, 8, 4),
    "two narrow factors": ((), 2, 18, 2),
    "b is no power of two": ((2, 1), 2, 6, 6),
    "three factors": ((), 3, 12, 4),
    "four factors": ((), 4, 16, 2),
    "a chunk of half the tile": ((), 3, 8, 6),
    "too wide a product": ((), 4, 8, 8),
    "too wide": ((), 1, 2, 65),
}


def rotations(R, dropped):
    Q = cayley_reference(R)
    return Q if dropped is None else butterfly.without(Q, dropped)


def truth_of(R, dropped):
    """The chunks of the dense rotation, in float64."""
    return butterfly.fold(rotations(R, dropped), 1)


def against_float64(R, dropped, far=1.0):
    wide = R.double().requires_grad_()
    truth = truth_of(wide, dropped)
    whole, Q = cayley_fold_triton.cayley_fold(R, dropped)
    exact, m, b = rotations(R.double(), dropped), R.shape[-4], R.shape[-1]
    # the factors are rounded once, and so are their products
    limit = rounding(m + (m - 1) * b, torch.float32) * butterfly.fold(exact.abs(), 1).max()
    right("whole", whole, Rounded(truth, limit), torch.float32)
    if m > 1:
        near("Q", Q, exact, 2.0**-24, torch.float32)
    elif Q.numel():
        raise ValueError("Q is there twice")
    dy = drawn(*truth.shape, dtype=torch.float32)
    truth.backward(dy.double())
    factors = Q if m > 1 else whole.unsqueeze(-4)
    got = cayley_fold_triton.cayley_fold_backward(dy, whole, factors, dropped)
    near("dR", got, wide.grad, far * 2e-6, torch.float32)


def shaped(shape, drops):
    lead, m, blocks, b = SHAPES[shape]
    R = drawn(*lead, m, blocks, b, b, dtype=torch.float32)
    dropped = torch.rand(*lead, m, blocks) < 0.4 if drops else None
    against_float64(R, dropped)


def layouts():
    """Between NaN, shared by all blocks, and turned."""
    whole = torch.full((2, 2, 8, 6, 6), float("nan"))
    against_float64(
        whole[:, :, ::2, 1:-1, 1:-1].copy_(drawn(2, 2, 4, 4, 4, dtype=whole.dtype)), None
    )
    against_float64(drawn(1, 1, 5, 5, dtype=torch.float32).expand(1, 9, 5, 5), None)
    against_float64(drawn(2, 4, 4, 4, dtype=torch.float32).mT, None)


def turns(b, degrees, others):
    """One plane by an angle and the others by another, in no particular position."""
    S = torch.zeros(b, b, dtype=torch.float64)
    for i in range(0, b - 1, 2):
        S[i, i + 1] = math.tan(math.radians(others if i else degrees) / 2)
        S[i + 1, i] = -S[i, i + 1]
    axes = torch.linalg.qr(drawn(b, b, dtype=torch.float64)).Q
    return (axes @ S @ axes.mT).float()


def at_every_angle():
    """Q Qᵀ = I to a millionth, and Q as near to the formula as one rounding."""
    for b in (2, 4, 7, 32):
        for degrees in (1.0, 90.0, 150.0, 179.0, 179.9, 179.999):
            for others in (5.0, degrees):
                R = torch.stack([turns(b, degrees, others) for _ in range(3)]).unsqueeze(0)
                Q, _ = cayley_fold_triton.cayley_fold(R, None)
                error = (Q.double() @ Q.double().mT - torch.eye(b)).abs().max().item()
                if not error <= 1e-6:
                    raise ValueError(f"{b}, {degrees}: Q Qᵀ is wrong by {error:.1e}")
                truth = cayley_reference(R.double()).squeeze(0)
                near(f"{b}, {degrees}", Q, truth, 1e-6, torch.float32)


def identities():
    """Symmetric matrices give exactly I."""
    for m, blocks, b in ((1, 9, 4), (3, 8, 4), (1, 2, 40)):
        R = drawn(m, blocks, b, b, dtype=torch.float32)
        whole, _ = cayley_fold_triton.cayley_fold(R + R.mT, None)
        width = b << (m - 1)
        assert torch.equal(whole, torch.eye(width).expand_as(whole))


def module():
    """Through the operator: gradients, second gradients, autocast, what is kept."""
    for m in (1, 2):
        R = drawn(2, m, 8, 4, 4, dtype=torch.float32)
        dropped = torch.rand(2, m, 8) < 0.3
        for mask in (None, dropped):
            found = []
            for run, x in (
                (lambda x, k=mask: cayley.cayley_fold(x, k).squeeze(-4), R.clone()),
                (lambda x, k=mask: truth_of(x, k), R.double()),
            ):
                x.requires_grad_()
                with kernels.use("triton"):
                    with torch.autocast("cpu", torch.bfloat16):
                        out = run(x)
                    # the sum of squares of a rotation does not depend on it
                    weight = torch.linspace(0.5, 2.0, out.numel(), dtype=torch.float64)
                    out = out * weight.view_as(out).to(out.dtype)
                    out = out + out.square()
                    found.append((out.detach(), *both_gradients(out, (x,))))
            for got, want in zip(*found, strict=True):
                near("second", got, want, 2e-5, torch.float32)


def cases():
    for shape in SHAPES:
        for drops in (False, True):
            yield f"{shape}{', dropped' * drops}", lambda s=shape, d=drops: shaped(s, d)
    yield "layouts", layouts
    yield "at every angle", at_every_angle
    yield "identities", identities
    yield "through the operator", module
