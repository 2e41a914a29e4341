"""The low-rank update of a mixed batch against float64 and against each row alone."""

import math
import pickle
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hostile import grouped_low_rank_reference
from measured import kept, loss, near
from rounded import rounding

from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import grouped
from adapterzoo.kernels import low_rank as ones
from adapterzoo.kernels.grouped import (
    Groups,
    grouped_expand,
    grouped_low_rank,
    grouped_shrink,
    stacked,
)
from adapterzoo.kernels.low_rank import low_rank

RANKS = (3, 1, 8, 5)
EQUAL = (4, 4, 4, 4)
SCALING = (0.7, 2.0, -0.25, 1.1)
ONE = (0.7,) * 4
# hostile batches: sorted, even, with gaps, without some adapters, and without any
INDICES = {
    "as the stack": [0, 1, 2, 3],
    "in another order": [3, 1, 0, 2],
    "some adapters": [1, 3],
    "pairs": [0, 0, 1, 1, 2, 2, 3, 3],
    "all of one": [2, 2, 2, 2, 2],
    "one without": [0, 3, None, 1],
    "most without": [None, None, 2, None, None, None, 1],
    "none with": [None, -1],
    "many of few": [1] * 11 + [0, 2, None, 0] + [1] * 7,
    "many of one": [1, 0] * 9,
    "no rows": [],
}
TOKENS = {"decoding": (1,), "flat": (), "longer than the rank": (2, 5), "none": (0,)}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def drawn(index, tokens, ranks=RANKS, d_in=11, d_out=7, outer=torch.float64, factor=torch.float64):
    """y, x, and the factors of each adapter."""
    source = torch.Generator().manual_seed(0)
    shapes = [(len(index), *tokens, d_out), (len(index), *tokens, d_in)]
    shapes += [(r, d_in) for r in ranks] + [(d_out, r) for r in ranks]
    dtypes = [outer] * 2 + [factor] * 2 * len(ranks)
    y, x, *factors = (
        torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return y, x, factors[: len(ranks)], factors[len(ranks) :]


def truth(y, x, a, b, scaling, index, mask=None):
    """The output and the gradients of its `loss`, in float64, row after row."""
    y, x, *factors = (v.detach().double().requires_grad_() for v in (y, x, *a, *b))
    a, b = factors[: len(a)], factors[len(a) :]
    dropped = x if mask is None else x * mask
    rows = [
        y[r] if i in (None, -1) else y[r] + scaling[i] * dropped[r] @ a[i].T @ b[i].T
        for r, i in enumerate(index)
    ]
    out = torch.stack(rows) if rows else y * 1.0
    values = [y, x, *factors]
    return [
        out.detach(),
        *torch.autograd.grad(loss(out), values, allow_unused=True, materialize_grads=True),
    ]


def results(out, y, x, a, b):
    return [out, *torch.autograd.grad(loss(out), [y, x, *a, *b])]


def in_stacks(a, b, scaling):
    return SimpleNamespace(a=stacked(a), b=stacked(b), scaling=scaling)


def by_operators(y, x, stack, groups, p=0.0, noise=None):
    """Through the operators, which mixed dtypes, dropout and compilers take."""
    t = grouped._shrink(x, stack.a, p, noise, groups.host)
    scaling = torch.tensor(stack.scaling, dtype=torch.float64)
    return grouped._expand(y, t, stack.b, scaling, groups.host)


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize(("ranks", "scaling"), [(RANKS, SCALING), (EQUAL, ONE)], ids=["own", "one"])
def test_values_and_gradients_are_those_of_each_row(index, tokens, ranks, scaling):
    y, x, a, b = drawn(index, tokens, ranks)
    groups, expected = Groups.of(index), truth(y, x, a, b, scaling, index)
    for run in (
        lambda stack: grouped_low_rank(y, x, a, b, scaling, groups),
        lambda stack: grouped_expand(
            y, grouped_shrink(x, stack.a, groups), stack.b, scaling, groups
        ),
        lambda stack: by_operators(y, x, stack, groups),
    ):
        out = run(in_stacks(a, b, scaling))
        for got, wanted in zip(results(out, y, x, a, b), expected, strict=True):
            near(got, wanted, 1e-13)


@pytest.mark.parametrize("outer", TOLERANCE)
@pytest.mark.parametrize("factor", TOLERANCE)
def test_dtypes_are_those_of_the_definition(outer, factor):
    index = [3, None, 0, 0, 2]
    y, x, a, b = drawn(index, (6,), outer=outer, factor=factor)
    out = grouped_low_rank(y, x, a, b, SCALING, Groups.of(index))
    expected = truth(y, x, a, b, SCALING, index)
    sizes = [v.abs() for v in (y, x, *a, *b)]
    sizes = truth(
        *sizes[:2], sizes[2 : 2 + len(a)], sizes[2 + len(a) :], [abs(s) for s in SCALING], index
    )
    tolerance = rounding(11 + 7 + max(RANKS) + 5 * 6, outer, factor)
    found = zip(results(out, y, x, a, b), expected, sizes, (y, y, x, *a, *b), strict=True)
    for got, wanted, size, like in found:
        assert got.dtype is like.dtype
        near(got, wanted, tolerance, size)
    assert torch.equal(out[1], y[1])


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.parametrize("index", [[None, 0, 1], [2, None, 2, 2, 2, 0, 2, 2, 2, 2, 2, 2], [None]])
@pytest.mark.parametrize("outer", [torch.float32, torch.float16])
@pytest.mark.parametrize("grad", [False, True])
def test_a_row_without_adapter_keeps_its_bits(tokens, index, outer, grad):
    y, x, a, b = drawn(index, tokens, outer=outer, factor=torch.float32)
    y, x = y.detach(), x.detach()
    y[:, ..., ::2] = -0.0
    base = [r for r, i in enumerate(index) if i is None]
    # what a row without adapter reads is nobody's concern
    x[base] = math.inf
    groups, stack = Groups.of(index), in_stacks(a, b, SCALING)
    with torch.set_grad_enabled(grad):
        t = grouped_shrink(x, stack.a, groups)
        for out in (
            grouped_low_rank(y, x, a, b, SCALING, groups),
            grouped_low_rank(y, x, a, b, ONE, groups),
            grouped_expand(y, t, stack.b, SCALING, groups),
            by_operators(y, x, stack, groups),
        ):
            assert torch.equal(out[base].view(torch.uint8), y[base].view(torch.uint8))
            assert bool(out.isfinite().all())
            assert out.data_ptr() != y.data_ptr() or not out.numel()
    assert not t[base].any()


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("index", [[0, 1, 2], [2, None, 2]], ids=str)
def test_the_layout_does_not_matter(layout, index):
    y, x, a, b = drawn(index, (6,))
    y, x = {
        "transposed": (y.transpose(0, 1).contiguous().transpose(0, 1), x.mT.contiguous().mT),
        "strided": (torch.stack([y, y], -1)[..., 0], torch.stack([x, x], -1)[..., 0]),
        "expanded": (y[:1].expand_as(y), x[:, :1].expand_as(x)),
    }[layout]
    out = grouped_low_rank(y, x, a, b, ONE, Groups.of(index))
    for got, expected in zip(results(out, y, x, a, b), truth(y, x, a, b, ONE, index), strict=True):
        near(got, expected, 1e-13)


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_mixed_batch_is_each_row_alone(tokens):
    """Of one dtype, on larger sizes: as `low_rank` computes each row, and as the row alone."""
    index, ranks = [5, 0, None, 3, 3, 7, 1, 2], (8, 16, 1, 64, 8, 32, 8, 5)
    y, x, a, b = drawn(index, (tokens,), ranks, 96, 130)
    s = tuple(0.5 + i for i in range(8))
    out = grouped_low_rank(y, x, a, b, s, Groups.of(index))
    for r, i in enumerate(index):
        alone = grouped_low_rank(y[r : r + 1], x[r : r + 1], a, b, s, Groups.of([i]))
        lone = y[r : r + 1] if i is None else low_rank(y[r : r + 1], x[r : r + 1], a[i], b[i], s[i])
        near(alone, lone.detach(), 1e-14)
        near(out[r : r + 1], lone.detach(), 1e-14)


def test_an_adapter_that_diverged_spoils_no_other_row():
    index = [0, 1, 2, 1]
    for tokens in TOKENS.values():
        y, x, a, b = drawn(index, tokens, EQUAL)
        with torch.no_grad():
            a[1].fill_(math.nan)
            b[1].fill_(math.inf)
        out = grouped_low_rank(y, x, a, b, ONE, Groups.of(index))
        assert bool(out[[0, 2]].isfinite().all())
        assert not out[[1, 3]].isfinite().any()


@pytest.mark.parametrize("index", [[2, None, 0], [1, 1, 0, 0, 2, 2, 3, 3], [1] * 9 + [0]], ids=str)
def test_gradients_and_their_gradients_are_those_of_differences(index):
    groups, ranks = Groups.of(index), (2, 1, 2, 2)
    y, x, a, b = drawn(index, (2,), ranks, 3, 4)
    noise = ones.dropout_bits(x, 0.4)

    def plain(y, x, *factors):
        return grouped_low_rank(y, x, factors[:4], factors[4:], SCALING, groups)

    def through(y, x, *factors):
        stack = in_stacks(factors[:4], factors[4:], SCALING)
        return by_operators(y, x, stack, groups, 0.4, noise)

    for run in (plain, through):
        values = (y, x, *a, *b)
        assert torch.autograd.gradcheck(run, values, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, values, fast_mode=True)


@pytest.mark.parametrize("needed", range(16))
def test_only_what_needs_a_gradient_gets_one(needed):
    index = [2, None, 0]
    y, x, a, b = drawn(index, (2,))
    noise = ones.dropout_bits(x, 0.4)
    mask = ones.dropout_mask(noise, x.shape, 0.4).double() * ones.dropout_scale(0.4)
    expected = truth(y, x, a, b, SCALING, index, mask)[1:]
    values = [y, x, *a, *b]
    for i, value in enumerate(values):
        value.requires_grad_(bool(needed >> min(i, 2 + (i >= 6)) & 1))
    out = by_operators(y, x, in_stacks(a, b, SCALING), Groups.of(index), 0.4, noise)
    if needed:
        loss(out).backward()
    for value, wanted in zip(values, expected, strict=True):
        if value.requires_grad:
            near(value.grad, wanted, 1e-13)
        else:
            assert value.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_is_that_of_one_adapter_and_repeated_in_the_backward(dtype):
    index = [1, None, 3]
    y, x, a, b = drawn(index, (7,), outer=dtype, factor=torch.float32)
    groups = Groups.of(index)
    torch.manual_seed(1)
    out = grouped_low_rank(y, x, a, b, SCALING, groups, dropout=0.3, training=True)
    got = results(out, y, x, a, b)
    torch.manual_seed(1)
    mask = ones.dropout_mask(ones.dropout_bits(x, 0.3), x.shape, 0.3).double()
    assert 0 < mask.sum() < mask.numel()
    expected = truth(y, x, a, b, SCALING, index, mask * ones.dropout_scale(0.3))
    for value, wanted in zip(got, expected, strict=True):
        near(value, wanted, 3 * TOLERANCE[dtype])
    torch.manual_seed(1)
    whole = grouped_low_rank(y, x, a, b, SCALING, Groups.of([1, 1, 1]), 0.3, training=True)
    torch.manual_seed(1)
    one = low_rank(y, x, a[1], b[1], SCALING[1], 0.3, training=True)
    near(whole, one.detach().double(), 3 * TOLERANCE[dtype])
    still = grouped_low_rank(y, x, a, b, SCALING, groups, dropout=0.3, training=False)
    near(still, truth(y, x, a, b, SCALING, index)[0], 3 * TOLERANCE[dtype])


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compiled_is_eager_and_serves_every_batch(outer, p):
    torch._dynamo.reset()
    compiled_times = 0

    def count(graph, inputs):
        nonlocal compiled_times
        compiled_times += 1
        return graph

    def run(y, x, a, b, groups):
        return grouped_low_rank(y, x, a, b, SCALING, groups, p, training=True)

    compiled = torch.compile(run, fullgraph=True, backend=count)
    for index in ([2, None, 0], [1, 1, 3], [None, None, None], [3, 2, 1]):
        y, x, a, b = drawn(index, (5,), outer=outer, factor=torch.float32)
        both = []
        for call in (run, compiled):
            torch.manual_seed(2)
            both.append(results(call(y, x, a, b, Groups.of(index)), y, x, a, b))
        for eager, traced in zip(*both, strict=True):
            near(traced, eager.double(), TOLERANCE[outer])
    assert compiled_times == 1
    with pytest.raises(KernelError, match=r"adapters up to 4, .* there are 4 adapters"):
        compiled(y, x, a, b, Groups.of([4, 0, 1]))
    torch._dynamo.reset()


@pytest.mark.parametrize("outer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_the_definition(outer, factor):
    index = [2, None, 0]
    y, x, a, b = drawn(index, (5,), outer=outer, factor=factor)
    both = []
    for run in (grouped_low_rank, grouped_low_rank_reference):
        with torch.autocast("cpu", torch.bfloat16):
            out = run(y, x, a, b, SCALING, Groups.of(index))
        wanted = [y, x, a[0], a[2], b[0], b[2]]
        both.append([out, *torch.autograd.grad(loss(out), wanted)])
    for own, reference in zip(*both, strict=True):
        assert own.dtype is reference.dtype
        near(own, reference.double(), 3 * TOLERANCE[torch.bfloat16])


def test_reference_mode_is_the_definition():
    index = [2, None, 0]
    y, x, a, b = drawn(index, (5,))
    groups, stack = Groups.of(index), in_stacks(a, b, SCALING)
    expected = grouped_low_rank_reference(y, x, a, b, SCALING, groups)
    with kernels.use("reference"):
        found = grouped_low_rank(y, x, a, b, SCALING, groups)
        near(found, expected.detach(), 1e-14)
        t = grouped_shrink(x, stack.a, groups)
        near(grouped_expand(y, t, stack.b, SCALING, groups), expected.detach(), 1e-14)
        torch.manual_seed(0)
        out = grouped_low_rank(y, x, a, b, SCALING, groups, 0.3, training=True)
        none = drawn([], (5,))
        assert grouped_low_rank(*none, SCALING, Groups.of([])).shape == (0, 5, 7)
    near(t, grouped_shrink(x, stack.a, groups).detach(), 1e-14)
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(x, 0.3)
    expected = grouped_low_rank_reference(y, dropped, a, b, SCALING, groups)
    near(out, expected.detach(), 1e-14)


def test_the_transforms_of_torch_func():
    index = [2, None, 0]
    y, x, a, b = drawn(index, (5,))

    def total(x):
        return loss(grouped_low_rank(y, x, a, b, SCALING, Groups.of(index)))

    near(torch.func.grad(total)(x), truth(y, x, a, b, SCALING, index)[2], 1e-13)


@pytest.mark.parametrize("index", [[0, 1, 2, 3], [3, 1, None, 2]])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_x_is_saved_once_and_nothing_large_beside_it(index, p):
    y, x, a, b = drawn(index, (64,), EQUAL, 256, 512, torch.float32, torch.float32)
    y.requires_grad_(False)
    groups = Groups.of(index)
    saved = kept(lambda: grouped_low_rank(y, x, a, b, ONE, groups, p, training=True))
    limit = x.nbytes + 4 * 64 * 4 * 4 + (x.numel() // 8 if p else 0)
    # the stacks, once more by row, and numbers of rows
    factors = 4 * 4 * (256 + 512) * 4
    assert sum(saved.values()) <= limit + 2 * factors + 1024


def test_the_plan_belongs_to_the_batch():
    groups = Groups.of(torch.tensor([1, -1, 0]))
    assert groups.index == (1, -1, 0)
    assert groups.plan(70, 2, torch.device("cpu")) is groups.plan(70, 2, torch.device("cpu"))
    # row 1 first, then adapter 0's row 2 and adapter 1's row 0; each in chunks of 64 and 6
    chunks = [-1, 0, 64, -1, 64, 70, 0, 70, 134, 0, 134, 140, 1, 140, 204, 1, 204, 210]
    assert groups.plan(70, 2, torch.device("cpu")).tolist() == [1, 2, 0, 1, 2, 3, *chunks]
    with torch.inference_mode():
        inferred = Groups.of([1, 0])
        made = inferred.numbers("order", torch.device("cpu"))
    assert not made.is_inference()
    assert not inferred.host.is_inference()
    for copy in (deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert copy.index == groups.index
        assert copy.order == groups.order


def test_the_same_rows_get_the_same_groups():
    first = Groups.of([0, None, 1])
    assert Groups.of(torch.tensor([0, -1, 1])) is first
    numbers = first.numbers("rows", torch.device("cpu"))
    assert first.numbers("rows", torch.device("cpu")) is numbers
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        assert Groups.of([0, None, 1]) is not first


def test_what_a_batch_keeps_is_bounded():
    groups = Groups.of([0, 1, 1, 0])
    for tokens in range(1000):
        groups.plan(tokens, 2, torch.device("cpu"))
    assert len(groups._made) <= 64


def test_a_plan_of_inference_serves_training():
    y, x, a, b = drawn([1, 0], (1,), EQUAL)
    groups = Groups.of([1, 0])
    with torch.inference_mode():
        grouped_low_rank(y, x, a, b, ONE, groups)
    loss(grouped_low_rank(y, x, a, b, ONE, groups)).backward()
    assert a[1].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, -2], r"index\[1\]=-2 is not the number of an adapter.*None or -1.*Groups\.of\(\["),
        ([True], r"index\[0\]=True is not the number"),
        ([0.5], r"index\[0\]=0\.5 is not the number"),
        (torch.zeros(2), r"index\[0\]=0\.0 is not the number"),
        (torch.zeros(2, 1, dtype=torch.int64), r"index\[0\]=\[0\] is not the number"),
    ],
)
def test_an_index_that_is_none_is_refused(index, message):
    with pytest.raises(KernelError, match=message):
        Groups.of(index)


def test_operands_that_do_not_fit_are_named():
    y, x, a, b = drawn([0, 1], (5,))
    with pytest.raises(
        KernelError, match=r"groups are of 3 rows .* x is \[2, 5, 11\].*Write Groups"
    ):
        grouped_low_rank(y, x, a, b, SCALING, Groups.of([0, 1, 2]))
    with pytest.raises(KernelError, match=r"adapters up to 4, .* there are 4 adapters"):
        grouped_low_rank(y, x, a, b, SCALING, Groups.of([0, 4]))
    stack = in_stacks(a, b, SCALING)
    with pytest.raises(KernelError, match=r"adapters up to 4"):
        grouped_shrink(x, stack.a, Groups.of([0, 4]))
    with pytest.raises(KernelError, match=r"groups are of 3 rows"):
        grouped_expand(y, y, stack.b, SCALING, Groups.of([0, 1, 2]))
