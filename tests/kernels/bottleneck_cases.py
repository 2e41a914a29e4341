"""The bottleneck in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far, near

from adapterzoo import kernels
from adapterzoo.activations import ACTIVATIONS
from adapterzoo.kernels import bottleneck, bottleneck_triton, compose_triton

S = 0.7
SHAPES = {
    # rows, d_model, width
    "one of each": (1, 1, 1),
    "no rows": (0, 33, 5),
    "one beside the tile": (17, 65, 3),
    "a tile and a bit": (70, 100, 24),
    "several parts": (5, 300, 8),
    "several blocks": (260, 33, 16),
    "width over its tile": (3, 40, 100),
}
# of `to` and x, of the matrices, and how exact the result is
DTYPES = {
    "float32": (torch.float32, torch.float32, 1e-6),
    "float16": (torch.float16, torch.float16, 1.5e-3),
    "float32 matrices": (torch.float16, torch.float32, 1e-3),
    "float16 matrices": (torch.float32, torch.float16, 2e-3),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 1.6e-2),
    "bfloat16, float32 matrices": (torch.bfloat16, torch.float32, 1.6e-2),
}
# a name for each formula
ONE_OF_EACH = {formula: name for name, formula in bottleneck_triton.FUSED.items()}.values()


def matrices(d_model, width, dtype, make=edged):
    """The down projection, its bias, the up projection, its bias."""
    down_bias, up_bias = (make(1, n, dtype)[0] for n in (width, d_model))
    return make(width, d_model, dtype), down_bias, make(d_model, width, dtype), up_bias


def truth(to, x, params, h, activation, dy):
    """In float64 from the h that the kernel keeps: h itself, the result and all gradients."""
    wide = [v.double() for v in (to if x is None else x, *params)]
    flat, rows = (v.double().reshape(-1, v.shape[-1]) for v in (dy, wide[0]))
    own = wide[0] @ wide[1].T + wide[2]
    kept = h.double().requires_grad_()
    u = ACTIVATIONS[activation](kept)
    out = to.double() + S * (u @ wide[3].T + wide[4])
    (dh,) = torch.autograd.grad(u, kept, S * dy.double() @ wide[3])
    dx = dh @ wide[1] + (dy.double() if x is None else 0.0)
    inner, u = (v.detach().reshape(-1, v.shape[-1]) for v in (dh, u))
    return own, out.detach(), (dx, inner.T @ rows, inner.sum(0), S * flat.T @ u, S * flat.sum(0))


def against_float64(to, x, dy, params, tolerance, activation="gelu", alone=False):
    """Both kernels, on the operands of a training step; `alone`: each gradient by itself too."""
    wide = params[0].dtype
    out, h = bottleneck_triton.bottleneck(to, x, *params, S, activation, True)
    own, expected, grads = truth(to, x, params, h, activation, dy)
    near("h", h, own, tolerance, wide)
    near("out", out, expected, tolerance, to.dtype)
    lone, none = bottleneck_triton.bottleneck(to, x, *params, S, activation, False)
    assert torch.equal(lone, out)
    assert none.numel() == 0
    read, adds = (to, True) if x is None else (x, False)
    given = (params[0], params[2], S, activation, adds)
    found = bottleneck_triton.bottleneck_backward(dy, read, h, *given)
    names, dtypes = ("dx", "ddown", "ddown_bias", "dup", "dup_bias"), (to.dtype, *[wide] * 4)
    for name, got, want, dtype in zip(names, found, grads, dtypes, strict=True):
        # what is rounded on the way, dh, is small beside dy
        near(name, got, want, 2 * tolerance, dtype)
    for i in range(5 if alone else 0):
        needs = [i == j for j in range(5)]
        shown = read if needs[1] else read.new_empty(0)
        one = bottleneck_triton.bottleneck_backward(dy, shown, h, *given, *needs)
        assert [v.numel() > 0 for v in one] == needs
        assert torch.equal(one[i], found[i])


def shaped(shape, dtypes):
    rows, d_model, width = SHAPES[shape]
    outer, inner, tolerance = DTYPES[dtypes]
    # h of the size of 1, where activations are not straight
    to, x, dy = (edged(rows, d_model, outer).div_(d_model**0.5) for _ in range(3))
    params = matrices(d_model, width, inner)
    alone = shape == "one beside the tile"
    against_float64(to, x, dy, params, tolerance, alone=alone)
    against_float64(to, None, dy, params, tolerance, alone=alone)


def layout(name):
    to, x, dy = (arranged(name, 18, 40) for _ in range(3))

    def make(rows, columns, dtype):
        # a batch has two matrices
        return arranged(name, rows, columns).reshape(-1, columns)[:rows]

    params = matrices(40, 3, torch.float32, make)
    # not GELU: where all of h is one number far below zero, it cancels
    against_float64(to, x, dy, params, 1e-6, "silu")
    against_float64(to, None, dy, params, 1e-6, "silu")


def far_rows():
    rows = far(10, 20)
    against_float64(rows, rows, rows, matrices(20, 3, torch.float16), 1.5e-3)


def activation(name):
    # derivatives of what ends at 1 are differences from 1
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 1.5e-3)):
        to, x, dy = (drawn(9, 20, dtype=dtype) for _ in range(3))
        params = matrices(20, 7, dtype)
        # from where φ is nearly straight to where it has ended
        params[0].mul_(torch.logspace(-3, 0.6, 7)[:, None])
        params[1].mul_(0.1)
        against_float64(to, x, dy, params, tolerance, name)


def nan_stays():
    to, params = torch.zeros(3, 20), matrices(20, 4, torch.float32)
    x = torch.zeros(3, 20)
    x[1, 2] = float("nan")
    for name in ONE_OF_EACH:
        out, h = bottleneck_triton.bottleneck(to, x, *params, S, name, True)
        assert out.isnan().any(-1).tolist() == [False, True, False], name
        assert h.isnan().any(-1).tolist() == [False, True, False], name


def module():
    """Through the operators: gradients in float32 equal those of the definition in float64."""
    for same in (False, True):
        shapes = ((4, 6, 33), (4, 6, 33), (5, 33), (5,), (33, 5), (33,))
        values = [drawn(*s, dtype=torch.float64) for s in shapes]
        own = [v.float().requires_grad_() for v in values]
        with kernels.use("triton"):
            x = own[0] if same else own[1]
            out = bottleneck.bottleneck(own[0], x, *own[2:], S, "silu")
            out.square().sum().backward()
        wide = [v.requires_grad_() for v in values]
        x = wide[0] if same else wide[1]
        expected = bottleneck.bottleneck_reference(wide[0], x, *wide[2:], S, "silu")
        expected.square().sum().backward()
        near("out", out.detach(), expected.detach(), 1e-6, torch.float32)
        for i, (got, want) in enumerate(zip(own, wide, strict=True)):
            if not (same and i == 1):
                near(f"gradient {i}", got.grad, want.grad, 1e-6, torch.float32)


def identity():
    """An up projection of zeros changes no bit."""
    for dtype in (torch.float32, torch.float16):
        to, x = edged(70, 50, dtype), edged(70, 50, dtype)
        params = [v if i < 2 else torch.zeros_like(v) for i, v in enumerate(matrices(50, 9, dtype))]
        assert torch.equal(bottleneck_triton.bottleneck(to, x, *params, S, "gelu", False)[0], to)


def falls_back():
    """What the kernels do not take is computed all the same."""
    compose_triton._WIDEST_RANK = 32
    to, x, dy = (drawn(5, 20, dtype=torch.float32) for _ in range(3))
    against_float64(to, x, dy, matrices(20, 300, torch.float32), 1e-6)
    for name in ACTIVATIONS.keys() - bottleneck_triton.FUSED.keys():
        against_float64(to, None, dy, matrices(20, 7, torch.float32), 1e-6, name)


def cases():
    # the fused kernel is what is tested here, at every width
    compose_triton._WIDEST_RANK = 1 << 30
    for dtypes in DTYPES:
        for shape in SHAPES if dtypes in ("float32", "float16") else list(SHAPES)[2:4]:
            yield f"{shape}, {dtypes}", lambda s=shape, d=dtypes: shaped(s, d)
    for name in LAYOUTS:
        yield name, lambda n=name: layout(n)
    yield "rows far apart", far_rows
    for name in ONE_OF_EACH:
        yield name, lambda n=name: activation(n)
    yield "nan stays", nan_stays
    yield "through the operators", module
    yield "the identity", identity
    yield "falls back", falls_back
