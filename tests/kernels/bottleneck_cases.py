"""The bottleneck in the interpreter; `interpreted.py` runs it."""

import torch
from hostile import LAYOUTS, arranged, drawn, edged, far
from low_rank_cases import rows_of
from rounded import Rounded, right

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
# of `to` and x, and of the matrices
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float32 matrices": (torch.float16, torch.float32),
    "float16 matrices": (torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16, float32 matrices": (torch.bfloat16, torch.float32),
}
# a name for each formula
NAMES = [name for name in ACTIVATIONS if bottleneck.formula(name) in bottleneck.DERIVATIVES]
ONE_OF_EACH = {bottleneck.formula(name): name for name in NAMES}.values()


def matrices(d_model, width, dtype, make=edged):
    """The down projection, its bias, the up projection, its bias."""
    down_bias, up_bias = (make(1, n, dtype)[0] for n in (width, d_model))
    return make(width, d_model, dtype), down_bias, make(d_model, width, dtype), up_bias


def truth(to, x, params, dy, activation, h=None, between=torch.float32):
    """Return h, the output, and the gradients of x and of params.

    Args:
        to: what the bottleneck is added to.
        x: its input; None: `to`.
        params: see `matrices`.
        dy: the gradient of the output.
        activation: its name.
        h: the one that was kept; None: the one that follows from x.
        between: the dtype of products before they are scaled or added.
    """
    wide, phi = params[0].dtype, ACTIVATIONS[activation]
    down, down_bias, up, up_bias = map(Rounded, params)
    read = Rounded((to if x is None else x).to(wide))
    # torch rounds a number that it multiplies halves by
    scaling = Rounded(torch.tensor(S, dtype=torch.float64)).to(between)
    of_update = (Rounded(dy).to(wide) * scaling).to(between)
    own = read @ down.mT + down_bias
    given = own.to(wide) if h is None else Rounded(h)
    u = given.through(phi).to(wide)
    update = (u @ up.mT + up_bias).to(between)
    dh = ((of_update @ up).to(wide) * given.through(slope(phi), wide)).to(wide)
    dx = (dh @ down).to(between)
    flat, inner = of_update.arranged(rows_of), dh.arranged(rows_of)
    of_up = flat.mT @ u.arranged(rows_of)
    grads = inner.mT @ read.arranged(rows_of), inner.sum(0), of_up, flat.sum(0).to(between)
    out = Rounded(to) + (update * scaling).to(between)
    return own, out, (dx + Rounded(dy) if x is None else dx, *grads)


def slope(phi):
    return lambda h: torch.autograd.grad(phi(h).sum(), h, create_graph=True)[0]


def against_float64(to, x, dy, params, activation="gelu", alone=False):
    """Both kernels, on the operands of a training step; `alone`: each gradient by itself too."""
    wide = params[0].dtype
    out, h = bottleneck_triton.bottleneck(to, x, *params, S, activation, True)
    own, expected, grads = truth(to, x, params, dy, activation, h)
    right("h", h, own, wide)
    right("out", out, expected, to.dtype)
    lone, none = bottleneck_triton.bottleneck(to, x, *params, S, activation, False)
    assert torch.equal(lone, out)
    assert none.numel() == 0
    read, adds = (to, True) if x is None else (x, False)
    given = (params[0], params[2], S, activation, adds)
    found = bottleneck_triton.bottleneck_backward(dy, read, h, *given)
    names, dtypes = ("dx", "ddown", "ddown_bias", "dup", "dup_bias"), (to.dtype, *[wide] * 4)
    for name, got, want, dtype in zip(names, found, grads, dtypes, strict=True):
        right(name, got, want, dtype)
    for i in range(5 if alone else 0):
        needs = [i == j for j in range(5)]
        shown = read if needs[1] else read.new_empty(0)
        one = bottleneck_triton.bottleneck_backward(dy, shown, h, *given, *needs)
        assert [v.numel() > 0 for v in one] == needs
        assert torch.equal(one[i], found[i])


def shaped(shape, dtypes):
    rows, d_model, width = SHAPES[shape]
    outer, inner = DTYPES[dtypes]
    # h of the size of 1, where activations are not straight
    to, x, dy = (edged(rows, d_model, outer).div_(d_model**0.5) for _ in range(3))
    params = matrices(d_model, width, inner)
    alone = shape == "one beside the tile"
    against_float64(to, x, dy, params, alone=alone)
    against_float64(to, None, dy, params, alone=alone)


def layout(name):
    to, x, dy = (arranged(name, 18, 40) for _ in range(3))

    def make(rows, columns, dtype):
        # a batch has two matrices
        return arranged(name, rows, columns).reshape(-1, columns)[:rows]

    params = matrices(40, 3, torch.float32, make)
    against_float64(to, x, dy, params)
    against_float64(to, None, dy, params)


def far_rows():
    rows = far(10, 20)
    against_float64(rows, rows, rows, matrices(20, 3, torch.float16))


def activation(name):
    for dtype in (torch.float32, torch.float16):
        to, x, dy = (drawn(9, 20, dtype=dtype) for _ in range(3))
        params = matrices(20, 7, dtype)
        # from where φ is nearly straight to where it has ended
        params[0].mul_(torch.logspace(-3, 0.6, 7)[:, None])
        params[1].mul_(0.1)
        against_float64(to, x, dy, params, name)


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
        to, x, *params = own = [drawn(*s, dtype=torch.float32).requires_grad_() for s in shapes]
        with kernels.use("triton"):
            out = bottleneck.bottleneck(to, to if same else x, *params, S, "silu")
            out.square().sum().backward()
        dy = 2 * out.detach()
        _, expected, grads = truth(to, None if same else x, params, dy, "silu")
        right("out", out.detach(), expected, torch.float32)
        learned = own[:1] + params if same else own
        grads = grads if same else (Rounded(dy), *grads)
        for i, (got, want) in enumerate(zip(learned, grads, strict=True)):
            right(f"gradient {i}", got.grad, want, torch.float32)


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
    against_float64(to, x, dy, matrices(20, 300, torch.float32))
    for name in ACTIVATIONS.keys() - set(NAMES):
        against_float64(to, None, dy, matrices(20, 7, torch.float32), name)


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
