"""The bottleneck's kernel against float64: values, gradients, what it saves, who sees through."""

import itertools

import bottleneck_cases
import pytest
import torch
from measured import (
    Operations,
    compiled_as_eager,
    kept,
    loss,
    near,
    only_needed_gradients,
    writable,
)
from rounded import Rounded, as_near, right

from adapterzoo import kernels
from adapterzoo.activations import ACTIVATIONS
from adapterzoo.kernels import bottleneck as ops
from adapterzoo.kernels import bottleneck_triton as shipped
from adapterzoo.kernels.bottleneck import bottleneck, bottleneck_reference

S = 0.7
NAMES = bottleneck_cases.NAMES
SHAPES = [
    ((), 5, 1),  # one row without a batch
    ((0,), 33, 5),  # no rows
    ((17,), 33, 3),  # primes
    ((2, 3, 5), 64, 64),  # several dimensions, as wide as the model
    ((4, 50), 130, 8),  # above the size where the path changes
]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
LARGE = ((5, 60), 64, 6)


def drawn(batch, d_model, width, outer=torch.float64, inner=torch.float64):
    """`to`, x, down, its bias, up and its bias; h is of the size of 1."""
    source = torch.Generator().manual_seed(0)
    shapes = ((*batch, d_model),) * 2 + ((width, d_model), (width,), (d_model, width), (d_model,))
    values = [torch.randn(s, generator=source, dtype=torch.float64) for s in shapes]
    values[2] /= d_model**0.5
    return [v.to(outer if i < 2 else inner) for i, v in enumerate(values)]


def operator(to, x, *params, activation="gelu"):
    """The operator itself, whatever the size."""
    return ops._bottleneck(to, None if x is to else x, *params, S, activation, True)[0]


@torch.enable_grad()
def truth(values, activation="gelu", same=False):
    """The output and all gradients of its `loss`, in float64; with `same`, x is `to`."""
    wide = [v.detach().double().requires_grad_() for v in values]
    to, x, down, down_bias, up, up_bias = [wide[0], *wide[:1], *wide[2:]] if same else wide
    u = ACTIVATIONS[activation](x @ down.T + down_bias)
    out = to + S * (u @ up.T + up_bias)
    grads = torch.autograd.grad(loss(out), [to, *([] if same else [x]), *wide[2:]])
    return [out.detach(), *grads]


def rounded(values, dy, activation, same=False):
    """The output and all gradients, from that of the output, and what rounding allows of them."""
    to, x, *params = values
    between = params[0].dtype
    of = bottleneck_cases.truth(to, None if same else x, params, dy, activation, None, between)
    return [of[1], *([] if same else [Rounded(dy)]), *of[2]]


def gradient_of_loss(out):
    return torch.autograd.grad(loss(out.requires_grad_()), out)[0]


def split(values, same):
    """The tensors that are differentiated, and those that a call takes."""
    return (
        ([values[0], *values[2:]], [values[0], values[0], *values[2:]]) if same else (values,) * 2
    )


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [(d, d) for d in TOLERANCE]
    + [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_values_and_gradients_are_those_of_float64(shape, outer, inner, same):
    values = [v.requires_grad_() for v in drawn(*shape, outer, inner)]
    leaves, given = split(values, same)
    for run in (lambda *v: bottleneck(*v, S, "gelu"), operator):
        out = run(*given)
        found = [out, *torch.autograd.grad(loss(out), leaves)]
        wanted = rounded(values, gradient_of_loss(out.detach()), "gelu", same)
        for got, of, like in zip(found, wanted, [values[0], *leaves], strict=True):
            right("value or gradient", got, of, like.dtype)
    with torch.no_grad():
        right("value", bottleneck(*given, S, "gelu"), wanted[0], outer)


@pytest.mark.parametrize("activation", sorted({*ACTIVATIONS} - {*NAMES}))
def test_other_activations_are_differentiated_by_autograd(activation):
    values = [v.requires_grad_() for v in drawn((9, 7), 32, 11)]
    out = bottleneck(*values, S, activation)
    got = [out, *torch.autograd.grad(loss(out), values)]
    for value, wanted in zip(got, truth(values, activation), strict=True):
        near(value, wanted, 1e-10)


@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_has_the_gradients_of_autograd(activation):
    values = [v.requires_grad_() for v in drawn((9, 7), 32, 11)]
    with torch.no_grad():
        # from where φ is nearly straight to where it has ended, on both sides
        values[2].mul_(torch.logspace(-3, 1.3, 11, dtype=torch.float64)[:, None])
    out = operator(*values, activation=activation)
    got = [out, *torch.autograd.grad(loss(out), values)]
    # the constant of gelu_fast is rounded to ten digits
    for value, wanted in zip(got, truth(values, activation), strict=True):
        near(value, wanted, 1e-10)
    du, h = (torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    derivative = ops.DERIVATIVES[ops.formula(activation)]
    assert torch.autograd.gradcheck(derivative, (du, h), fast_mode=True)
    with torch.no_grad():
        # what is shorter where nobody differentiates again is the same
        plain = derivative(du, h)
    torch.testing.assert_close(plain, derivative(du, h), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("same", [False, True])
def test_as_near_to_float64_as_the_definition(dtype, same):
    values = [v.requires_grad_() for v in drawn((4, 100), 96, 24, dtype, dtype)]
    leaves, given = split(values, same)
    found = []
    for run in (bottleneck, bottleneck_reference):
        out = run(*given, S, "silu")
        found.append([out, *torch.autograd.grad(loss(out), leaves)])
    for own, reference, wanted in zip(*found, truth(values, "silu", same), strict=True):
        as_near(own, reference, wanted)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("same", [False, True])
def test_the_layout_does_not_matter(layout, same):
    values = drawn((6, 7), 700, 5, torch.float32, torch.float32)
    values[:2] = [
        {
            "transposed": v.transpose(0, 1).contiguous().transpose(0, 1),
            "strided": torch.stack([v, v], -1)[..., 0],
            "expanded": v[:1, :1].expand_as(v),
        }[layout]
        for v in values[:2]
    ]
    values[2] = values[2].T.contiguous().T
    leaves, given = split([v.requires_grad_() for v in values], same)
    out = bottleneck(*given, S, "silu")
    assert out.is_contiguous()
    # a gradient of one number for all, too
    found = [out, *torch.autograd.grad(out.sum(), leaves)]
    wanted = rounded(values, torch.ones_like(out), "silu", same)
    for got, of in zip(found, wanted, strict=True):
        right("value or gradient", got, of, torch.float32)


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
@pytest.mark.parametrize("same", [False, True])
def test_gradients_and_their_gradients_are_those_of_differences(activation, same):
    values = [v.requires_grad_() for v in drawn((2, 3), 5, 4)]
    leaves, _ = split(values, same)

    def run(*given):
        given = (given[0], *given) if same else given
        return operator(*given, activation=activation)

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("frozen", [2, 4])
def test_second_derivatives_do_not_need_the_matrices_to_learn(frozen):
    """What depends on x alone is found through h, although x itself is not kept."""
    values = [v.requires_grad_(i == 1) for i, v in enumerate(drawn((3,), 6, 4))]
    values[frozen ^ 6].requires_grad_()
    found = []
    for run in (operator, lambda *v: bottleneck_reference(*v, S, "gelu")):
        (dx,) = torch.autograd.grad(loss(run(*values)), values[1], create_graph=True)
        found.append(torch.autograd.grad(dx.square().sum(), [values[1], values[frozen ^ 6]]))
    for got, wanted in zip(*found, strict=True):
        near(got, wanted, 1e-12)


@pytest.mark.parametrize("same", [False, True])
def test_only_what_needs_a_gradient_gets_one(same):
    values = drawn((2, 3), 5, 4)
    leaves, _ = split(values, same)
    expected = truth(values, same=same)[1:]
    only_needed_gradients(lambda *v: operator(*v[:1] * same, *v), leaves, expected)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_new", "silu"])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_and_h_are_all_that_is_saved(outer, inner, activation, autocast):
    values = [v.requires_grad_() for v in drawn((4, 16), 512, 64, outer, inner)]

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return bottleneck(*values, S, activation)

    h = 64 * 64 * (2 if autocast else inner.itemsize)
    # autocast keeps its copies of the matrices
    copies = 2 * 2 * 64 * 512 if autocast and inner is torch.float32 else 0
    assert sum(kept(run, *values[2:]).values()) == values[1].nbytes + h + copies


def test_a_frozen_down_projection_keeps_no_activation():
    values = drawn(*LARGE, torch.float32, torch.float32)
    values[1].requires_grad_()
    values[4].requires_grad_()
    saved = kept(lambda: bottleneck(*values, S, "gelu"), *values[2:])
    assert sum(saved.values()) == 300 * 6 * 4


@pytest.mark.parametrize("shape", [((3, 5), 33, 7), LARGE], ids=str)
@pytest.mark.parametrize(("same", "outer"), [(False, torch.float32), (True, torch.bfloat16)])
def test_compiled_is_eager(outer, shape, same):
    values = [v.requires_grad_() for v in drawn(*shape, outer, torch.float32)]

    def run(to, *rest):
        return bottleneck(to, *([to] if same else []), *rest, S, "gelu_new")

    compiled_as_eager(run, split(values, same)[0], TOLERANCE[outer])


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [((3, 5), 33, 7), LARGE], ids=str)
def test_autocast_is_that_of_the_reference(outer, inner, shape):
    values = [v.requires_grad_() for v in drawn(*shape, outer, inner)]
    halves = [*values[:2], *(v.bfloat16() for v in values[2:])]
    for run in (bottleneck, bottleneck_reference):
        with torch.autocast("cpu", torch.bfloat16):
            # a backward inside the region, which is not recommended, is right too
            out = run(*values, S, "gelu")
            found = [out, *torch.autograd.grad(loss(out), values)]
        wanted = rounded(halves, gradient_of_loss(out.detach()), "gelu")
        wanted[2:] = [of.to(torch.bfloat16) for of in wanted[2:]]
        for got, of, like in zip(found, wanted, [values[0], *values], strict=True):
            right("value or gradient", got, of, like.dtype)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            right("value", run(*values, S, "gelu"), wanted[0], outer)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_wide_stream_is_not_rounded_to_the_dtype_of_the_products(autocast):
    inner = torch.float32 if autocast else torch.bfloat16
    to, x, *params = drawn(*LARGE, torch.float32, inner)
    # a thousandth of the stream: what is left is the stream to the last bits but ten
    params[2:] = [p / 1024 for p in params[2:]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = bottleneck(to, x, *params, S, "gelu")
    wanted = rounded([to, x, *(p.bfloat16() for p in params)], to, "gelu")[0]
    right("value", out, wanted, torch.float32)
    with pytest.raises(ValueError, match="wrong by"):
        right("rounded stream", out.bfloat16().float(), wanted, torch.float32)


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [((3, 5), 33, 7), LARGE], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_an_up_projection_of_zeros_changes_no_bit(outer, shape, grad):
    values = drawn(*shape, outer, torch.float32)
    values[4:] = [torch.zeros_like(v).requires_grad_(grad) for v in values[4:]]
    assert torch.equal(bottleneck(*values, 4.0, "relu"), values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_has_the_same_bits_with_and_without_gradients(dtype):
    values = drawn(*LARGE, dtype, dtype)
    with torch.no_grad():
        without = bottleneck(*values, S, "gelu")
    assert torch.equal(bottleneck(*(v.requires_grad_() for v in values), S, "gelu"), without)


def test_reference_mode_is_the_definition():
    for shape in (((3, 5), 33, 7), LARGE):
        to, x, *params = drawn(*shape, torch.bfloat16, torch.float32)
        with kernels.use("reference"):
            out = bottleneck(to, x, *params, S, "gelu")
        assert torch.equal(out, bottleneck_reference(to, x.float(), *params, S, "gelu"))


def test_four_operations_without_gradients():
    values = drawn(*LARGE, torch.float32, torch.float32)
    with torch.no_grad(), Operations() as seen:
        bottleneck(*values, S, "relu")
    assert sorted(seen.names) == ["add", "addmm", "addmm_", "relu"]


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
def test_a_model_may_write_into_the_output_in_place(outer):
    values = drawn(*LARGE, outer, torch.float32)
    writable(lambda: bottleneck(*values, S, "relu"), [v.requires_grad_() for v in values[2:]])


def test_the_transforms_of_torch_func():
    to, x, *params = drawn(*LARGE, torch.bfloat16, torch.float32)

    def total(*params):
        # a half is exact in bfloat16, to which the definition rounds its gradient
        return bottleneck(to, x, *params, 0.5, "gelu").float().sum()

    found = torch.func.grad(total, (0, 1, 2, 3))(*params)
    wanted = torch.autograd.grad(total(*(p.requires_grad_() for p in params)), params)
    for got, want in zip(found, wanted, strict=True):
        near(got, want.double(), 1e-5)


def test_a_program_keeps_the_whole_width():
    for dtype, widest in (
        (torch.bfloat16, shipped._WIDEST),
        (torch.float32, shipped._WIDEST_OF_FLOAT32),
    ):
        for rows, width in itertools.product((1, 8192), (1, widest)):
            assert shipped.bottleneck_tile(rows, width, dtype).rank >= width
