"""A frozen layer and its low-rank update in one node: bits, gradients, what is overwritten."""

import math
from unittest import mock

import pytest
import torch
from measured import Operations, adapted, gradients_stay, kept, near, writable
from rounded import rounding
from torch import nn
from torch.nn.functional import linear

from adapterzoo import Average, kernels
from adapterzoo.kernels import _dropout, frozen
from adapterzoo.kernels.low_rank import expand, fork, shrink

S = 0.7
ROWS, D_IN, D_OUT, RANK = (4, 100), 48, 56, 3


def drawn(layers=1, dtype=torch.float64, biased=True):
    """X, and of each layer the weight, the bias, a and b."""
    torch.manual_seed(0)
    shapes = (D_OUT, D_IN), (D_OUT,), (RANK, D_IN), (D_OUT, RANK)
    made = [[torch.randn(s, dtype=dtype) for s in shapes] for _ in range(layers)]
    for own in made:
        own[1] = own[1] if biased else None
        for factor in own[2:]:
            factor.requires_grad_()
    return torch.randn(*ROWS, D_IN, dtype=dtype, requires_grad=True), made


def outputs(x, layers, p=0.0):
    """What layers that share x return; the part of each is that of its factor."""
    own, t = fork(x, [a for _, _, a, _ in layers], p, training=True)
    parts = t.split(RANK, -1)
    return [
        frozen.product(own, w, bias, part, b, S)
        for (w, bias, _, b), part in zip(layers, parts, strict=True)
    ]


def truth(x, layers, mask=1.0):
    return [linear(x, w, bias) + S * ((x * mask) @ a.T) @ b.T for w, bias, a, b in layers]


def learned(x, layers):
    return [x, *(factor for layer in layers for factor in layer[2:])]


def gradients(ys, wanted, of=torch.clone, **options):
    total = sum((y * of(torch.linspace(-1, 1, y.numel())).view(y.shape)).sum() for y in ys)
    return torch.autograd.grad(total, wanted, **options)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_the_layer_and_its_update(dtype, grad, biased):
    x, ((w, bias, a, b),) = drawn(1, dtype, biased)
    transposed = x.detach().transpose(0, 1).requires_grad_()
    with torch.set_grad_enabled(grad):
        for each in (x, transposed, x[0].repeat(4, 1)):
            own, t = fork(each, [a])
            assert torch.equal(t, shrink(each, a))
            wanted = expand(linear(each, w, bias), t, b, S)
            assert torch.equal(frozen.product(own, w, bias, t, b, S), wanted)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("rank", [4, 15])
def test_bits_of_a_small_output_are_those_of_the_layer_and_its_update(rank, grad):
    torch.manual_seed(0)
    # x is large, y is not
    x, w = torch.randn(130, 768), torch.randn(97, 768)
    a, b = torch.randn(rank, 768), torch.randn(97, rank, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        own, t = fork(x, [a])
        wanted = expand(linear(x, w), shrink(x, a), b, S)
        assert torch.equal(frozen.product(own, w, None, t, b, S), wanted)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64(dtype, p, layers):
    x, made = drawn(layers, dtype)
    torch.manual_seed(1)
    got = gradients(outputs(x, made, p), learned(x, made))
    torch.manual_seed(1)
    mask = 1.0
    if p:
        mask = _dropout.mask(_dropout.bits(x, p), x.shape, p).double() * _dropout.kept_scale(p)
    wide = [[None if v is None else v.detach().double() for v in layer] for layer in made]
    for layer in wide:
        for factor in layer[2:]:
            factor.requires_grad_()
    wide_x = x.detach().double().requires_grad_()
    expected = gradients(truth(wide_x, wide, mask), learned(wide_x, wide))
    sizes = [[None if v is None else v.abs() for v in layer] for layer in wide]
    sizes = gradients(truth(wide_x.abs(), sizes, mask), learned(wide_x, wide), torch.abs)
    limit = rounding(layers * (D_OUT + RANK) + D_IN + math.prod(ROWS), dtype)
    for value, wanted, size in zip(got, expected, sizes, strict=True):
        near(value, wanted, limit, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_slices_of_dropout_change_no_gradient(dtype):
    x, made = drawn(2, dtype)
    found = []
    for rows in (1000, 128, 7):
        torch.manual_seed(1)
        with mock.patch.object(_dropout, "_CACHED", 1), mock.patch.object(_dropout, "_ROWS", rows):
            ys = outputs(x, made, 0.3)
            found.append([*ys, *gradients(ys, learned(x, made))])
    for whole, *parts in zip(*found, strict=True):
        for part in parts:
            near(part, whole.double(), rounding(2 * (D_OUT + RANK) + math.prod(ROWS), dtype))


def test_gradients_of_gradients():
    x, made = drawn()
    own, t = outputs, made[0]

    def run(x, a, b):
        return own(x, [(t[0], t[1], a, b)])[0]

    assert torch.autograd.gradcheck(run, (x, *t[2:]), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *t[2:]), fast_mode=True)


def test_no_gradient_that_another_holds_is_overwritten():
    """All ways to see one: twice, hooks, a second use of x, and of y, and y itself as the loss."""
    x, made = drawn(2)
    gradients_stay(x, learned(x, made), lambda x: outputs(x, made), truth(x, made))


def test_only_what_is_used_and_needed_gets_a_gradient():
    x, made = drawn(2)
    # t alone, and the layers alone
    own, t = fork(x, [a for _, _, a, _ in made])
    alone = torch.autograd.grad(t.sum(), x, retain_graph=True)[0]
    near(alone, sum(a.sum(0) for _, _, a, _ in made).expand_as(x), 1e-12)
    ys = [frozen.product(own, w, bias, t[..., :RANK].detach(), b, S) for w, bias, _, b in made]
    plain = torch.autograd.grad(sum(y.sum() for y in ys), x)[0]
    near(plain, sum(w.sum(0) for w, *_ in made).expand_as(x), 1e-12)
    # without a gradient of x no product with the weight is made
    still = x.detach()
    ys = outputs(still, made)
    with Operations() as seen:
        found = gradients(ys, learned(x, made)[1:])
    assert all(g is not None for g in found)
    assert seen.names.count("mm") == 1


@pytest.mark.parametrize("layers", [1, 3])
def test_the_gradient_of_x_is_written_by_the_layers_and_changed_in_place(layers):
    x, made = drawn(layers, torch.float32)
    inner = x * 1.0
    ys = outputs(inner, made)
    with Operations() as seen:
        gradients(ys, learned(inner, made))
    # beside dt and db: of each layer the product for x, and one for all a
    assert seen.names.count("mm") == layers + 1
    assert seen.names.count("addmm_") == 1


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_x_and_t_are_all_that_is_saved(p):
    x, made = drawn(2, torch.float32)
    given = [v for layer in made for v in layer]
    saved = kept(lambda: sum(outputs(x, made, p)), *given)
    n = x[..., 0].numel()
    assert sum(saved.values()) <= x.nbytes + 2 * n * RANK * 4 + (x.numel() // 8 + 8 if p else 0)


def test_a_model_may_write_into_the_output_in_place():
    x, made = drawn(1, torch.float32)
    writable(lambda: outputs(x, made)[0], tuple(made[0][2:]))


def test_what_is_not_a_frozen_product_is_left_alone():
    x, ((w, bias, _, _),) = drawn(1, torch.float32)
    x = x.detach()
    assert frozen.takes(x, w, bias)
    assert frozen.takes(x, nn.Parameter(w, requires_grad=False), None)
    assert not frozen.takes(x, nn.Parameter(w), None)
    assert not frozen.takes(x, w, nn.Parameter(bias))
    assert not frozen.takes(x, w.bfloat16(), None)
    with torch.no_grad():
        assert frozen.takes(x, nn.Parameter(w), nn.Parameter(bias))
    with kernels.use("reference"):
        assert not frozen.takes(x, w, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert not frozen.takes(x, w, bias)
    assert not torch.func.vmap(lambda x: x * frozen.takes(x, w, bias))(x).any()


def frozen_query(config, *names):
    """A frozen model with random adapters at its queries, the first of these, and an input."""
    model, query = adapted(config, *names)
    model.requires_grad_(False)
    return model, query, torch.randn(16, 64, query.in_features)


def test_a_forward_in_place_of_torch_s_is_called():
    model, query, x = frozen_query("lora")
    wanted = 2 * linear(x, query.weight, query.bias)
    model.set_active_adapters("a")
    change = query(x) - wanted / 2
    plain = nn.Linear.forward
    with mock.patch.object(nn.Linear, "forward", lambda layer, x: 2 * plain(layer, x)):
        near(query(x) - wanted, change.double(), 1e-5)


def test_adapters_of_an_average_share_the_output_of_the_layer():
    model, query, x = frozen_query("lora", "a", "b", "c")
    model.set_active_adapters(Average("a", "b", "c"))
    with Operations() as seen, torch.no_grad():
        query(x)
    assert seen.names.count("addmm") == 1


@pytest.mark.parametrize("config", ["lora", "dora", "dvora", "boft"])
def test_evaluation_is_the_same_whether_or_not_the_layer_is_frozen(config):
    model, query, x = frozen_query(config)
    model.eval().set_active_adapters("a")
    with torch.no_grad():
        frozen_bits = query(x)
        query.requires_grad_()
        assert torch.equal(query(x), frozen_bits)
