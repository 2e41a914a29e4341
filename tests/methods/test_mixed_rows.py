"""Several adapters of one method in one call, each on its rows, against each adapter alone."""

import pytest
import torch
from rounded import as_near, rounding
from stack_calls import running
from torch import nn

from adapterzoo.anatomy import Site
from adapterzoo.composition.compile import on_rows
from adapterzoo.config import AdapterConfig
from adapterzoo.contracts import Adapter, can_batch
from adapterzoo.inject.layers import LayerCall
from adapterzoo.kernels.grouped import Groups

CPU = torch.device("cpu")
D = 32
# two adapters of each: what may differ between them, differs
PAIRS = {
    "lora": ("lora[r=4]", "lora[r=3,alpha=5]"), "dora": ("dora[r=4]", "dora[r=3,alpha=5]"),
    "ia3": ("ia3", "ia3[alpha=3]"), "oft": ("oft[r=0,oft_block_size=8]",) * 2,
    "boft": ("boft[boft_n_butterfly_factor=2]",) * 2,
    "bottleneck": ("seq_bn[reduction_factor=4]", "seq_bn[reduction_factor=8,scaling=2]"),
    "bottleneck with a learned scaling": (
        "adapter_plus[stochastic_depth=0.0]",
        "adapter_plus[stochastic_depth=0.0,reduction_factor=8]",
    ),
    "bottleneck at a norm": ("double_seq_bn[ln_before=True]", "double_seq_bn[ln_before=True]"),
}  # fmt: skip
BATCHES = {"sorted": [0, 0, 1, 1], "mixed": [1, None, 0, 1, 1, None], "none of one": [1, None, 1],
           "one row": [0], "none": [None, None], "empty": []}  # fmt: skip


def host(layer, residual):
    """A layer with a residual stream, of one batch."""
    return LayerCall(layer, layer.forward, residual=residual, context=running())


def built(name, dtype=torch.float64):
    """The adapters of a pair with values of their own, and a layer for them."""
    layer = nn.Linear(D, D)
    site = Site(path="block.output", role="output", layer=0, stack="block", kind="linear", d_in=D,
                d_out=D)  # fmt: skip
    adapters = []
    for text in PAIRS[name]:
        adapter = AdapterConfig.load(text).build(site, CPU, dtype)
        with torch.no_grad():
            for parameter in adapter.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
        adapters.append(adapter)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return adapters, layer.to(dtype).requires_grad_(False)


def tensors(rows, like, shape=(5,)):
    """An input and a residual stream."""
    weight = like.weight
    return tuple(torch.randn(rows, *shape, weight.shape[-1], dtype=weight.dtype) for _ in "xr")


def one_by_one(adapters, index, x, layer, residual):
    found = []
    for r, i in enumerate(index):
        row, base = x[r : r + 1], host(layer, residual[r : r + 1])
        found.append(base(row) if i is None else adapters[i](row, base))
    return torch.cat(found) if found else layer(x)


def mixed(adapters, index, x, base):
    assert can_batch(adapters)
    return on_rows(adapters, Groups.of(index), x, base)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", PAIRS)
def test_rows_and_gradients_are_those_of_each_adapter_alone(name, batch):
    adapters, layer = built(name)
    index = BATCHES[batch]
    x, residual = tensors(len(index), layer)
    weight = torch.randn_like(x)
    parameters = [p for adapter in adapters for p in adapter.parameters()]

    def gradients(run):
        inputs = [t.clone().requires_grad_() for t in (x, residual)]
        out = run(*inputs)
        given = torch.autograd.grad(
            (out * weight).sum(), [*inputs, *parameters], allow_unused=True, materialize_grads=True
        )
        return out, given

    out, found = gradients(lambda x, r: mixed(adapters, index, x, host(layer, r)))
    alone, expected = gradients(lambda x, r: one_by_one(adapters, index, x, layer, r))
    torch.testing.assert_close(out, alone, rtol=0, atol=1e-12)
    for seen, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(seen, whole, rtol=1e-12, atol=1e-11)
    plain = layer(x)
    for r, i in enumerate(index):
        assert torch.equal(out[r], plain[r]) == (i is None)


@pytest.mark.parametrize("shape", [(), (1,), (3, 2)])
@pytest.mark.parametrize("name", PAIRS)
def test_rows_have_any_number_of_token_dimensions(name, shape):
    adapters, layer = built(name)
    index = BATCHES["mixed"]
    x, residual = tensors(len(index), layer, shape)
    with torch.no_grad():
        out = mixed(adapters, index, x, host(layer, residual))
        expected = one_by_one(adapters, index, x, layer, residual)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_rows_are_as_exact_as_each_adapter_alone_in_every_dtype(name, dtype):
    adapters, layer = built(name, dtype)
    index = BATCHES["mixed"] * 3
    x, residual = tensors(len(index), layer, (16,))
    with torch.no_grad():
        out = mixed(adapters, index, x, host(layer, residual))
        alone = one_by_one(adapters, index, x, layer, residual)
        plain = layer(x)
        wide = [adapter.double() for adapter in adapters]
        exact = one_by_one(wide, index, x.double(), layer.double(), residual.double())
    assert out.dtype is dtype
    # four products of the layer's width follow each other, at most
    sums = rounding(4 * x.shape[-1], torch.float32) * exact.abs().max()
    as_near(out, alone, exact, sums)
    for r, i in enumerate(index):
        assert torch.equal(out[r], plain[r]) == (i is None)


@pytest.mark.parametrize(
    "text",
    [
        "lora[dropout=0.5]",
        "dora[dropout=0.5]",
        "seq_bn[dropout=0.5]",
        "seq_bn[stochastic_depth=0.5]",
    ],
)
def test_training_drops_and_evaluation_does_not(text, monkeypatch):
    monkeypatch.setitem(PAIRS, "dropping", (text, text))
    adapters, layer = built("dropping")
    index = BATCHES["mixed"] * 4
    x, residual = tensors(len(index), layer)
    base = host(layer, residual)
    rows = torch.tensor([i is not None for i in index])
    with torch.no_grad():
        for adapter in adapters:
            adapter.eval()
        whole = mixed(adapters, index, x, base)
        expected = one_by_one(adapters, index, x, layer, residual)
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12)
        for adapter in adapters:
            adapter.train()
        dropped = mixed(adapters, index, x, base)
        assert not torch.equal(dropped[rows], whole[rows])
        assert torch.equal(dropped[~rows], whole[~rows])


@pytest.mark.parametrize(
    "pair",
    [("lora", "lora[use_gating=True]"), ("lora", "lora[lora_bias=True]"),
     ("boft", "boft[boft_block_size=8]"), ("lora", "lora[dropout=0.1]"), ("seq_bn", "par_bn"),
     ("seq_bn", "seq_bn[non_linearity='gelu']")],
)  # fmt: skip
def test_what_no_one_call_can_do_acts_on_its_rows_by_itself(pair, monkeypatch):
    monkeypatch.setitem(PAIRS, "unlike", pair)
    adapters, _ = built("unlike")
    assert not can_batch(adapters)


def test_a_method_without_forward_rows_acts_row_by_row():
    class Half(Adapter):
        def forward(self, x, base):
            return base(x)

        @property
        def row_options(self):
            return ()

    assert not can_batch([Half(), Half()])


EXTREMES = {"inf": float("inf"), "nan": float("nan"), "so large that y is inf": 1e308}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", PAIRS)
def test_a_row_without_adapter_keeps_its_bits_whatever_they_are(name, extreme):
    adapters, layer = built(name)
    index = BATCHES["mixed"]
    x, residual = tensors(len(index), layer)
    x[1, 2], x[5, 0, 1] = EXTREMES[extreme], EXTREMES[extreme]
    # y is -0.0 in one feature: the sum with a bias of another sign would lose it
    layer.weight[3], layer.bias[3] = 0.0, -0.0
    layer.weight[4], layer.bias[4] = -0.0, 1.5
    with torch.no_grad():
        out = mixed(adapters, index, x, host(layer, residual))
        plain = layer(x)
    for row in (1, 5):
        assert torch.equal(out[row].view(torch.int64), plain[row].view(torch.int64))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("where", ["x", "gradient"])
@pytest.mark.parametrize("name", PAIRS)
def test_gradients_know_nothing_of_rows_without_adapter(name, where, tokens):
    adapters, layer = built(name)
    index = BATCHES["mixed"]
    x, residual = tensors(len(index), layer, (tokens,))
    given = torch.randn_like(x)
    (x if where == "x" else given)[1, 0] = float("inf")
    (x if where == "x" else given)[5, 0, 1] = float("nan")
    parameters = [p for adapter in adapters for p in adapter.parameters()]
    rows = torch.tensor([i is not None for i in index])

    def gradients(run):
        own = x.clone().requires_grad_()
        out = run(own)
        of_x, *found = torch.autograd.grad(out, [own, *parameters], given)
        return of_x, found

    of_x, found = gradients(lambda x: mixed(adapters, index, x, host(layer, residual)))
    own = [i for i in index if i is not None]
    x, given, whole = x[rows], given[rows], given
    alone, expected = gradients(lambda x: one_by_one(adapters, own, x, layer, residual[rows]))
    for seen, right in zip(found, expected, strict=True):
        torch.testing.assert_close(seen, right, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(of_x[rows], alone, rtol=1e-12, atol=1e-11)
    plain = whole[~rows] @ layer.weight
    torch.testing.assert_close(of_x[~rows], plain, rtol=1e-12, atol=1e-11, equal_nan=True)
