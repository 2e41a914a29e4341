"""DoRA's product with a weight that is changed: values and gradients of the formula in float64."""

import itertools
import math
from unittest import mock

import pytest
import torch
from measured import Operations, adapted, gradients_stay, kept, near
from rounded import rounding
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import _dropout, dora, rescaled
from adapterzoo.kernels.low_rank import fork

S = 0.7
ROWS, D_IN, D_OUT, RANK = (4, 100), 48, 56, 3
BIASED = pytest.mark.parametrize("biased", [True, False])


def drawn(layers=1, dtype=torch.float64, biased=True, gain=None):
    """X, and of each layer weight, bias, a, b and m, with a gain of about 1.

    Args:
        layers: how many.
        dtype: of all.
        biased: whether there are biases.
        gain: of three output features.
    """
    torch.manual_seed(0)
    shapes = (D_OUT, D_IN), (D_OUT,), (RANK, D_IN), (D_OUT, RANK)
    made = [[torch.randn(s, dtype=torch.float64) for s in shapes] for _ in range(layers)]
    found = []
    for w, bias, a, b in made:
        # a row without a direction
        w[1], b[1] = 0.0, 0.0
        m = (w + S * b @ a).norm(dim=1) * (1 + 0.1 * torch.randn(D_OUT, dtype=torch.float64))
        if gain is not None:
            m[4:7] *= gain
        learned = [v.to(dtype).requires_grad_() for v in (a, b, m)]
        found.append([w.to(dtype), bias.to(dtype) if biased else None, *learned])
    x = torch.randn(*ROWS, D_IN, dtype=torch.float64).to(dtype).requires_grad_()
    return x, found


def outputs(x, layers, p=0.0):
    """What layers that share x return; the part of each is that of its factor."""
    own, t = fork(x, [a for _, _, a, _, _ in layers], p, training=True)
    parts = t.split(RANK, -1)
    return [
        rescaled.product(own, w, bias, a, b, m, part, S, p > 0)
        for (w, bias, a, b, m), part in zip(layers, parts, strict=True)
    ]


def truth(x, layers, mask=1.0):
    found = []
    for w, bias, a, b, m in layers:
        norm = (w + S * b.detach() @ a.detach()).norm(dim=1)
        gain = torch.where(norm == 0, 1.0, m / norm.masked_fill(norm == 0, 1.0))
        y = gain * (linear(x, w) + S * linear(linear(x * mask, a), b))
        found.append(y if bias is None else y + bias)
    return found


def learned(x, layers):
    return [x, *(factor for layer in layers for factor in layer[2:])]


def gradients(ys, wanted, **options):
    total = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in ys)
    return torch.autograd.grad(total, wanted, **options)


def wide(x, made):
    layers = [[None if v is None else v.detach().double() for v in layer] for layer in made]
    for layer in layers:
        for factor in layer[2:]:
            factor.requires_grad_()
    return x.detach().double().requires_grad_(), layers


@BIASED
@pytest.mark.parametrize("gain", [None, 1e-3, 1e-30, 0.0, -1e-3])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients_are_those_of_float64(dtype, layers, p, gain, biased):
    x, made = drawn(layers, dtype, biased, gain)
    torch.manual_seed(1)
    ys = outputs(x, made, p)
    torch.manual_seed(1)
    mask = 1.0
    if p:
        mask = _dropout.mask(_dropout.bits(x, p), x.shape, p).double() * _dropout.kept_scale(p)
    far = wide(x, made)
    expected = truth(*far, mask)
    limit = rounding(D_IN + RANK + layers * D_OUT + math.prod(ROWS), dtype)
    for y, value in zip(ys, expected, strict=True):
        near(y, value.detach(), limit)
    found = gradients(ys, learned(x, made))
    for got, wanted in zip(found, gradients(expected, learned(*far)), strict=True):
        near(got, wanted, limit)


@BIASED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_known_gain_and_no_gradients_give_the_same_bits(dtype, biased):
    x, ((w, bias, a, b, m),) = drawn(1, dtype, biased)
    with torch.no_grad():
        transposed = x.transpose(0, 1)
        for each in (x, transposed, x[0].repeat(9, 1)):
            gain = dora.row_gain(w, a, b, m, S)
            found = rescaled.merged(each, w, bias, a, b, gain, S)
            with torch.enable_grad():
                own, t = fork(each, [a])
                assert torch.equal(rescaled.product(own, w, bias, a, b, m, t, S, False), found)


@BIASED
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_fresh_adapter_gives_the_bits_of_the_layer(dtype, p, biased):
    x, ((w, bias, a, b, m),) = drawn(1, dtype, biased)
    with torch.no_grad():
        b.zero_()
        m.copy_(dora.weight_norm(w))
    (y,) = outputs(x, [(w, bias, a, b, m)], p)
    assert torch.equal(y, linear(x, w, bias))
    found = rescaled.merged(x, w, bias, a, b, dora.row_gain(w, a, b, m, S).detach(), S)
    assert torch.equal(found, y)
    (dm,) = torch.autograd.grad(y.sum(), m)
    assert dm[1] == 0


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_gradients_of_fewer_rows_than_features(p):
    x, made = drawn(2)
    x = x.detach()[0, :30].clone().requires_grad_()
    torch.manual_seed(1)
    found = gradients(outputs(x, made, p), learned(x, made))
    torch.manual_seed(1)
    mask = 1.0
    if p:
        mask = _dropout.mask(_dropout.bits(x, p), x.shape, p).double() * _dropout.kept_scale(p)
    wanted = gradients(truth(x, made, mask), learned(x, made))
    for got, value in zip(found, wanted, strict=True):
        near(got, value, 1e-13)


@BIASED
@pytest.mark.parametrize("gain", [None, 1e-3, 0.0])
@pytest.mark.parametrize("drops", [False, True])
def test_gradients_of_gradients(drops, gain, biased):
    x, made = drawn(2, biased=biased, gain=gain)
    torch.manual_seed(1)
    mask = (torch.rand(x.shape) > 0.3).double() if drops else 1.0

    def run(x, *factors):
        layers = [(w, bias, *factors[3 * i : 3 * i + 3]) for i, (w, bias, *_) in enumerate(made)]
        ts = [linear(x * mask, a) for _, _, a, _, _ in layers]
        return sum(
            rescaled.product(x, w, bias, a, b, m, t, S, drops)
            for (w, bias, a, b, m), t in zip(layers, ts, strict=True)
        )

    def by_formula(x, *factors):
        layers = [(w, bias, *factors[3 * i : 3 * i + 3]) for i, (w, bias, *_) in enumerate(made)]
        return sum(truth(x, layers, mask))

    # the norm is a constant of each gradient, so that differences cannot tell
    found = []
    for call in (run, by_formula):
        inputs = learned(x, made)
        first = gradients([call(*inputs).square()], inputs, create_graph=True)
        found.append([*first, *gradients(first, inputs)])
    for got, wanted in zip(*found, strict=True):
        near(got, wanted.detach(), 1e-11)


def test_gradients_twice_and_of_other_uses_of_x():
    x, made = drawn(2)
    gradients_stay(x, learned(x, made), lambda x: outputs(x, made), truth(x, made))


@pytest.mark.parametrize("gain", [None, 1e-3])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_only_what_needs_a_gradient_gets_one(p, gain):
    def run(needs):
        x, ((w, bias, *factors),) = drawn(1, gain=gain)
        leaves = [v.detach().requires_grad_(n) for v, n in zip([x, *factors], needs, strict=True)]
        torch.manual_seed(1)
        (y,) = outputs(leaves[0], [(w, bias, *leaves[1:])], p)
        assert y.requires_grad == any(needs)
        if any(needs):
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
        return y, [leaf.grad for leaf in leaves]

    whole, expected = run([True] * 4)
    for needs in itertools.product((False, True), repeat=4):
        y, found = run(needs)
        assert torch.equal(y, whole)
        for need, got, wanted in zip(needs, found, expected, strict=True):
            assert (got is not None) == need
            assert not need or torch.equal(got, wanted)


def test_without_a_gradient_of_x_no_product_with_the_weight_is_made():
    x, made = drawn(1)
    ys = outputs(x.detach(), made)
    with Operations() as seen:
        gradients(ys, learned(x, made)[1:])
    # that of a, beside an operator for those of t and b
    assert seen.names.count("mm") == 1


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_x_y_t_and_the_norms_are_all_that_is_saved(p):
    x, made = drawn(2, torch.float32)
    given = [v for layer in made for v in layer]
    saved = kept(lambda: sum(outputs(x, made, p)), *given)
    n = x[..., 0].numel()
    most = x.nbytes + 2 * (n * (RANK + D_OUT) + D_OUT) * 4 + (x.numel() // 8 + 8 if p else 0)
    assert sum(saved.values()) <= most


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_checkpoint_gives_the_same_gradients(p, reentrant):
    x, made = drawn(2, torch.float32)
    found = []

    def repeated(*args):
        return checkpoint(lambda *args: tuple(outputs(*args)), *args, use_reentrant=reentrant)

    for run in (outputs, repeated):
        torch.manual_seed(1)
        # reentrant ones only know `backward`
        for leaf in learned(x, made):
            leaf.grad = None
        sum(y.square().sum() for y in run(x, made, p)).backward()
        found.append([leaf.grad for leaf in learned(x, made)])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


def test_an_output_that_was_changed_in_place_is_named():
    x, made = drawn(1)
    (y,) = outputs(x, made)
    y.mul_(2.0)
    with pytest.raises(
        KernelError, match=r"^rescaled: .*modified by an inplace.*use\('reference'\)"
    ):
        gradients([y], learned(x, made))


def test_what_changes_no_weight():
    x, ((w, _, a, b, m),) = drawn(1, torch.float32)
    x = x.detach()
    assert rescaled.takes(x, w, a, b, m)
    assert not rescaled.takes(x.bfloat16(), w.bfloat16(), *(v.bfloat16() for v in (a, b, m)))
    assert not rescaled.takes(x, w, a.double(), b, m)
    assert not rescaled.takes(x, w.T.contiguous().T, a, b, m)
    # D_IN · D_OUT / (D_IN + D_OUT) is 25.8
    rows = x.view(-1, D_IN)
    assert rescaled.takes(rows[:26], w, a, b, m)
    assert not rescaled.takes(rows[:25], w, a, b, m)
    with mock.patch.object(rescaled, "TILE", w.numel() - 1):
        assert not rescaled.takes(x, w, a, b, m)
    for mode in ("reference", "auto"):
        with kernels.use(mode):
            assert rescaled.takes(x, w, a, b, m) == (mode == "auto")
    with torch.autocast("cpu", torch.bfloat16):
        assert not rescaled.takes(x, w, a, b, m)


def query(config):
    """A model in training, a layer of it with an adapter, and an input of many rows."""
    model, layer = adapted(config)
    model.train_adapter("a")
    return model.train(), layer, torch.randn(16, 64, layer.in_features)


@pytest.mark.parametrize(
    "config", ["dora", "dora[dropout=0.2]", "dvora[r=4]", "dvora[dropout=0.2]"]
)
def test_methods_use_it(config):
    model, layer, x = query(config)
    calls = []
    for name in ("product", "merged"):
        run = getattr(rescaled, name)
        spy = mock.patch.object(
            rescaled, name, lambda *args, run=run, name=name: calls.append(name) or run(*args)
        )
        with spy:
            layer(x)
            with torch.no_grad():
                model.eval()
                layer(x)
                model.train()
    assert calls == ["product", "merged"]


@pytest.mark.parametrize("learns", [False, True])
def test_after_a_forward_with_gradients_nothing_is_kept(learns):
    model, layer, x = query("dora")
    _, adapter = next(iter(model.adapter_modules("a")))
    model.eval()
    with torch.set_grad_enabled(learns):
        layer(x)
    with torch.no_grad():
        layer(x)
    # an optimizer may write the parameters without a new version
    assert (adapter.kept_gain.value is None) == learns


def test_compiled_is_eager():
    _, layer, x = query("dora")

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x)

    alone = Alone()
    compiled = torch.compile(alone, fullgraph=True, backend="aot_eager")
    found = []
    for run in (alone, compiled):
        inner = x.clone().requires_grad_()
        y = run(inner)
        y.square().sum().backward()
        found.append((y.detach(), inner.grad))
    torch._dynamo.reset()
    for got, wanted in zip(*found, strict=True):
        near(got, wanted.double(), 1e-5)
