"""The low-rank update against float64: values, gradients, what it saves, and who sees through."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import _dropout, low_rank
from adapterzoo.kernels.low_rank import expand, low_rank_reference, shrink

S = 0.7
SHAPES = [
    ((), 1, 1, 1),  # one row without a batch
    ((0,), 33, 5, 3),  # no rows
    ((17,), 33, 100, 3),  # primes
    ((2, 3, 5), 64, 24, 24),  # several dimensions, rank as wide as the output
    ((4, 50), 100, 130, 8),  # above the size where the path changes
]
TOLERANCE = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.bfloat16: 1.6e-2,
    torch.float16: 2e-3,
}


def drawn(batch, d_in, d_out, rank, outer=torch.float64, factor=torch.float64) -> list[Tensor]:
    """y, x, a and b."""
    source = torch.Generator().manual_seed(0)
    shapes = ((*batch, d_out), (*batch, d_in), (rank, d_in), (d_out, rank))
    dtypes = (outer, outer, factor, factor)
    return [
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def loss(out: Tensor) -> Tensor:
    """The sum of squares, small enough for the gradients to be numbers of float16."""
    return out.double().square().sum() / 256


@torch.enable_grad()
def truth(y, x, a, b, mask=1.0) -> list[Tensor]:
    """The output and all gradients of its `loss`, in float64."""
    wide = [v.detach().double().requires_grad_() for v in (y, x, a, b)]
    out = wide[0] + S * (wide[1] * mask) @ wide[2].T @ wide[3].T
    return [out.detach(), *torch.autograd.grad(loss(out), wide)]


def near(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.shape == expected.shape
    if got.numel():
        size = expected.abs().max().item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * max(size, 1e-9))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", TOLERANCE)
@pytest.mark.parametrize("outer", TOLERANCE)
def test_values_and_gradients_are_those_of_float64(shape, outer, factor):
    values = [v.requires_grad_() for v in drawn(*shape, outer, factor)]
    out = low_rank.low_rank(*values, S)
    got = [out, *torch.autograd.grad(loss(out), values)]
    tolerance = max(TOLERANCE[outer], TOLERANCE[factor])
    for value, expected, like in zip(got, truth(*values), values[:1] + values, strict=True):
        assert value.dtype is like.dtype
        near(value, expected, 3 * tolerance)
    with torch.no_grad():
        near(low_rank.low_rank(*values, S), truth(*values)[0], 3 * tolerance)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("factor", [torch.float32, torch.float64])
def test_the_layout_does_not_matter(layout, factor):
    y, x, a, b = drawn((6, 7), 32, 700, 5, torch.float32, factor)
    y, x = {
        "transposed": (y.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT),
        "strided": (torch.stack([y, y], -1)[..., 0], torch.stack([x, x], -1)[..., 0]),
        "expanded": (y[:1].expand_as(y), x[:, :1].expand_as(x)),
    }[layout]
    values = [v.requires_grad_() for v in (y, x, a, b)]
    out = low_rank.low_rank(*values, S)
    assert out.is_contiguous()
    # a gradient of one number for all, too
    grads = torch.autograd.grad(out.sum(), values, retain_graph=True)
    wide = [v.detach().double().requires_grad_() for v in values]
    expected = wide[0] + S * wide[1] @ wide[2].T @ wide[3].T
    near(out, expected, 1e-6)
    for got, wanted in zip(grads, torch.autograd.grad(expected.sum(), wide), strict=True):
        near(got, wanted, 3e-6)


@pytest.mark.parametrize(
    ("outer", "factor"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_a_half_is_not_rounded_to_the_other_half(outer, factor):
    y, x, a, b = drawn((4, 5), 12, 8, 3, outer, factor)
    if outer is torch.bfloat16:
        # more than float16 holds
        y = y * 1e6
    assert torch.equal(low_rank.low_rank(y, x, a, torch.zeros_like(b), S), y)


@pytest.mark.parametrize("batch", [(2, 3), (30, 30)])
def test_gradients_and_their_gradients_are_those_of_differences(batch):
    shape = (batch, 3, 4, 2) if batch == (2, 3) else ((6, 500), 1, 6, 1)
    values = [v.requires_grad_() for v in drawn(*shape)]
    assert torch.autograd.gradcheck(lambda *v: low_rank.low_rank(*v, S), values, fast_mode=True)
    # through the operators, which the mixed dtypes and dropout take
    noise = _dropout.bits(values[1], 0.4)

    def through(y, x, a, b):
        return low_rank._expand(y, low_rank._shrink(x, a, 0.4, noise), b, S)

    assert torch.autograd.gradcheck(through, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(through, values, fast_mode=True)


@pytest.mark.parametrize("needed", range(16))
def test_only_what_needs_a_gradient_gets_one(needed):
    values = drawn((2, 3), 5, 4, 2)
    for i, value in enumerate(values):
        value.requires_grad_(bool(needed >> i & 1))
    noise = _dropout.bits(values[1], 0.4)
    y, x, a, b = values
    out = low_rank._expand(y, low_rank._shrink(x, a, 0.4, noise), b, S)
    asked = [v for v in values if v.requires_grad]
    if asked:
        mask = _dropout.mask(noise, x.shape).double() * _dropout.kept_scale(0.4)
        expected = truth(*values, mask)[1:]
        loss(out).backward()
    for i, value in enumerate(values):
        if needed >> i & 1:
            near(value.grad, expected[i], 1e-13)
        else:
            assert value.grad is None


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9, 1e-4])
def test_as_many_features_drop_as_were_asked(p):
    torch.manual_seed(0)
    x = torch.empty(1000, 1001)
    mask = _dropout.mask(_dropout.bits(x, p), x.shape)
    assert mask.shape == x.shape
    assert set(mask.unique().tolist()) <= {0, 1}
    dropped = 1 - mask.double()
    # five deviations of a fair draw
    for part, n in ((dropped, 1_001_000), (dropped[:, ::8], 126_000), (dropped[::9], 112_112)):
        assert abs(part.mean().item() - p) < 5 * math.sqrt(p / n) + 1e-5
    # neighbours do not know of one another
    both = (dropped[:, 1:] * dropped[:, :-1]).mean().item()
    assert abs(both - p * p) < 5 * math.sqrt(p * p / 1e6) + 1e-5
    assert _dropout.kept_scale(p) == pytest.approx(1 / (1 - p), rel=1e-4)


def test_dropout_of_nothing_and_of_nearly_all():
    x = torch.empty(3, 5)
    assert bool(_dropout.mask(_dropout.bits(x, 1e-9), x.shape).all())
    assert _dropout.kept_scale(1 - 1e-12) == 2.0**16
    assert _dropout.bits(torch.empty(0, 5), 0.3).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_repeated_in_the_backward(dtype):
    values = [v.requires_grad_() for v in drawn((3, 7), 33, 12, 4, dtype, torch.float32)]
    torch.manual_seed(1)
    out = low_rank.low_rank(*values, S, dropout=0.3, training=True)
    got = [out, *torch.autograd.grad(loss(out), values)]
    torch.manual_seed(1)
    x = values[1]
    mask = _dropout.mask(_dropout.bits(x, 0.3), x.shape).double()
    assert 0 < mask.sum() < mask.numel()
    for value, expected in zip(got, truth(*values, mask * _dropout.kept_scale(0.3)), strict=True):
        near(value, expected, 3 * TOLERANCE[dtype])
    still = low_rank.low_rank(*values, S, dropout=0.3, training=False)
    near(still, truth(*values)[0], 3 * TOLERANCE[dtype])


class Saved:
    """Bytes that autograd keeps besides the factors, each storage once."""

    def __init__(self, *factors: Tensor) -> None:
        self._known = {f.untyped_storage().data_ptr() for f in factors}
        self._seen: dict[int, int] = {}

    def bytes_of(self, run) -> int:
        def note(tensor):
            store = tensor.untyped_storage()
            if store.data_ptr() not in self._known:
                self._seen[store.data_ptr()] = store.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            kept = run()
        assert kept.requires_grad
        return sum(self._seen.values())


@pytest.mark.parametrize(
    ("outer", "factor"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_x_and_t_are_all_that_is_saved(outer, factor, p, autocast):
    rows, d_in, d_out, rank = 64, 256, 512, 8
    y, x, a, b = drawn((4, 16), d_in, d_out, rank, outer, factor)
    a.requires_grad_()
    b.requires_grad_()
    x.requires_grad_()

    def run():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return low_rank.low_rank(y, x, a, b, S, p, training=True)

    limit = rows * d_in * x.element_size() + rows * rank * a.element_size()
    limit += rows * d_in // 8 if p else 0
    # autocast keeps its copies of the factors
    limit += 2 * (a.numel() + b.numel()) if autocast and factor is torch.float32 else 0
    # the path by autograd keeps bᵀ in rows
    limit += b.numel() * b.element_size()
    assert 0 < Saved(a, b).bytes_of(run) <= limit


def test_layers_that_share_an_input_save_it_once():
    y, x, a, b = drawn((4, 16), 256, 32, 4, torch.float32, torch.float32)
    pairs = [(a.clone().requires_grad_(), b.clone().requires_grad_()) for _ in range(3)]
    saved = Saved(*(f for pair in pairs for f in pair))

    def run():
        return sum(low_rank.low_rank(y, x, *pair, S, 0.1, training=True) for pair in pairs)

    assert saved.bytes_of(run) <= x.nbytes + 3 * (64 * 4 * 4 + 64 * 256 // 8)


def test_a_frozen_factor_keeps_no_activation():
    y, x, a, b = drawn((4, 16), 256, 32, 4, torch.float32, torch.float32)
    x.requires_grad_()
    assert (
        Saved(a, b).bytes_of(lambda: low_rank.low_rank(y, x, a, b, S, 0.1, True)) <= 64 * 256 // 8
    )


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("noisy", "outer"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_the_operators_pass_opcheck(grad, noisy, outer):
    y, x, a, b = drawn((3, 5), 33, 7, 3, outer, torch.float32)
    noise = _dropout.bits(x, 0.3) if noisy else None
    dt, t = torch.randn(3, 5, 3), torch.randn(3, 5, 3, requires_grad=grad)
    for value in (y, x, a, b):
        value.requires_grad_(grad)
    torch.library.opcheck(low_rank._shrink, (x, a, 0.3, noise))
    torch.library.opcheck(low_rank._expand, (y, t, b, S))
    y, x, a, b, t = (v.detach() for v in (y, x, a, b, t))
    for needs in ((True, True), (False, True), (True, False)):
        for op, values in (
            (low_rank._shrink_backward, (dt, x, a, 0.3, noise)),
            (low_rank._expand_backward, (y, t, b, S)),
        ):
            checks = ("test_schema", "test_faketensor", "test_autograd_registration")
            torch.library.opcheck(op, (*values, *needs), test_utils=checks)


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiled_is_eager(outer, p):
    torch._dynamo.reset()
    values = [v.requires_grad_() for v in drawn((3, 5), 33, 7, 3, outer, torch.float32)]

    def run(y, x, a, b):
        return low_rank.low_rank(y, x, a, b, S, p, training=True)

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(2)
        out = call(*values)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), values)])
    for eager, compiled in zip(*results, strict=True):
        near(compiled, eager.double(), TOLERANCE[outer])
    torch._dynamo.reset()


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_reference(outer, factor):
    values = [v.requires_grad_() for v in drawn((3, 5), 33, 7, 3, outer, factor)]
    results = []
    for run in (low_rank.low_rank, low_rank_reference):
        with torch.autocast("cpu", torch.bfloat16):
            out = run(*values, S)
            # a backward inside the region, which is not recommended, is right too
            grads = torch.autograd.grad(out.float().square().sum(), values)
        results.append([out, *grads])
    for own, reference in zip(*results, strict=True):
        assert own.dtype is reference.dtype
        near(own, reference.double(), 3 * TOLERANCE[torch.bfloat16])
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        near(low_rank.low_rank(*values, S), results[1][0].double(), 3e-2)
        assert shrink(values[1], values[2]).dtype is torch.bfloat16
        # autocast leaves float64 alone
        wide = shrink(values[1], values[2].double())
    assert wide.dtype is torch.float64


def test_reference_mode_is_the_definition():
    values = drawn((3, 5), 33, 7, 3, torch.float32, torch.float32)
    with kernels.use("reference"):
        assert torch.equal(low_rank.low_rank(*values, S), low_rank_reference(*values, S))
        torch.manual_seed(0)
        out = low_rank.low_rank(*values, S, 0.3, training=True)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(values[1], 0.3)
    assert torch.equal(out, low_rank_reference(values[0], dropped, *values[2:], S))


def test_shrink_and_expand_are_the_update():
    y, x, a, b = drawn((3, 5), 33, 7, 3)
    near(shrink(x, a), linear(x, a), 1e-15)
    near(expand(y, shrink(x, a), b, S), truth(y, x, a, b)[0], 1e-14)


@pytest.mark.parametrize("rows", [3, 300])
def test_a_wide_output_is_not_rounded_to_the_dtype_of_narrow_factors(rows):
    y = torch.randn(rows, 64)
    t, b = torch.zeros(rows, 4, dtype=torch.bfloat16), torch.zeros(64, 4, dtype=torch.bfloat16)
    assert torch.equal(expand(y, t, b, S), y)


def test_few_operations_without_gradients():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        called = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            # views cost no memory and little time
            if not func.is_view and "view" not in str(func) and str(func) != "aten.t.default":
                self.called += (str(func),)
            return out

    values = drawn((1, 16), 64, 64, 8, torch.float32, torch.float32)
    with torch.no_grad(), Counting() as seen:
        low_rank.low_rank(*values, S)
    assert seen.called == ("aten.mm.default", "aten.mm.default", "aten.add.Tensor")
    values = drawn((8, 128), 64, 64, 8, torch.float32, torch.float32)
    with torch.no_grad(), Counting() as seen:
        low_rank.low_rank(*values, S)
    assert seen.called == ("aten.mm.default", "aten._to_copy.default", "aten.addmm_.default")


def test_operands_that_do_not_fit_are_named():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x, a = torch.empty(2, 33), torch.empty(3, 32, dtype=torch.float64)
        with pytest.raises(KernelError, match=r"shrink: the shapes of x and a .*'x \[2, 33\]'"):
            shrink(x, a)
        y, t = torch.empty(2, 5), torch.empty(2, 3, device="meta", dtype=torch.float64)
        with pytest.raises(KernelError, match=r"expand: .*'y on cpu', 't on meta'.*\.to\(device\)"):
            expand(y, t, torch.empty(5, 3), S)


@pytest.mark.parametrize("factors", [torch.float32, torch.bfloat16])
def test_a_model_may_write_into_the_output_in_place(factors):
    y = torch.randn(300, 64, dtype=torch.bfloat16)
    x = torch.randn(300, 32, dtype=torch.bfloat16)
    a, b = (torch.randn(*s, dtype=factors, requires_grad=True) for s in ((4, 32), (64, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        plain = low_rank.low_rank(y, x, a, b, 0.5, dropout=0.0)
        wanted = torch.autograd.grad(plain.mul(2).sum(), (a, b))
        out = low_rank.low_rank(y, x, a, b, 0.5, dropout=0.0)
        found = torch.autograd.grad(out.mul_(2).sum(), (a, b))
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)


def test_the_transforms_of_torch_func():
    # above SMALL, with factors wider than the layer
    y, x = torch.zeros(300, 64, dtype=torch.bfloat16), torch.randn(300, 32).bfloat16()
    a, b = torch.randn(4, 32), torch.randn(64, 4)

    def total(a, b):
        return low_rank.low_rank(y, x, a, b, 0.5).float().sum()

    found = torch.func.grad(total, (0, 1))(a, b)
    wanted = torch.autograd.grad(total(a.requires_grad_(), b.requires_grad_()), (a, b))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
