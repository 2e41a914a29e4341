"""Several adapters of one method in one call, each on its rows, against each adapter alone."""

import pytest
import torch
from rounded import as_near, rounding
from stack_calls import running
from torch import Tensor, nn

from adapterzoo.anatomy import Site
from adapterzoo.config import AdapterConfig
from adapterzoo.contracts import Adapter, can_batch
from adapterzoo.errors import StateError
from adapterzoo.inject.layers import LayerCall
from adapterzoo.kernels.grouped import Groups
from adapterzoo.methods._parts import Gate

CPU = torch.device("cpu")
D = 32
SIGMOID = "seq_bn[non_linearity='sigmoid',reduction_factor=%d]"
# two adapters of each: what may differ between them, differs
PAIRS = {
    "lora": ("lora[r=4]", "lora[r=3,alpha=5]"),
    "lora bias": ("lora[r=4,lora_bias=True]", "lora[r=3,alpha=5,lora_bias=True]"),
    "lora gate": ("lora[r=4,use_gating=True]", "lora[r=3,alpha=5,use_gating=True]"),
    "lora both": ("lora[r=4,use_gating=True,lora_bias=True]",) * 2,
    "dora": ("dora[r=4]", "dora[r=3,alpha=5]"),
    "boft": ("boft",) * 2,
    "boft of 2": ("boft[boft_n_butterfly_factor=2]",) * 2,
    "boft of 3": ("boft[boft_n_butterfly_factor=3,boft_block_size=8]",) * 2,
    # too wide to be folded into one factor
    "boft, wide": ("boft[boft_n_butterfly_factor=2,boft_block_size=256]",) * 2,
    "oft": ("oft[oft_block_size=4]",) * 2,
    "oft exactly": ("oft[oft_block_size=8,use_cayley_neumann=False,block_share=True]",) * 2,
    "miss": ("miss[r=5]",) * 2,
    "miss in all forms": ("miss[r=4,init_weights='mini',mini_r=2]", "miss[r=4]"),
    "loha": ("loha[r=2]", "loha[r=3,alpha=5]"),
    "lokr": ("lokr[r=2]", "lokr[r=2,alpha=5]"),
    "lokr, both": ("lokr[r=1,decompose_both=True]", "lokr[r=1,decompose_both=True,alpha=5]"),
    "seq_bn": ("seq_bn[reduction_factor=4]", "seq_bn[reduction_factor=2]"),
    # the width that pads the narrower one is not silent: sigmoid of 0 is 1/2
    "sigmoid": (SIGMOID % 4, SIGMOID % 2),
    "par_bn": ("par_bn", "par_bn[scaling=0.5,reduction_factor=4]"),
    "adapter_plus": ("adapter_plus[reduction_factor=4,stochastic_depth=0]",
                     "adapter_plus[reduction_factor=2,stochastic_depth=0]"),
    "norms": ("par_bn[ln_before=True,ln_after=True]",
              "par_bn[ln_before=True,ln_after=True,scaling=2]"),
    "compacter": ("compacter[shared_phm_rule=False,reduction_factor=4]",) * 2,
    "compacter, whole": (
        "compacter[shared_phm_rule=False,factorized_phm_W=False,phm_bias=False]",) * 2,
    "gate": ("par_bn[use_gating=True,scaling='learned']",) * 2,
}  # fmt: skip
# a site of each of the four kinds of bottlenecks, and the sums that are not just h + f
for _kind, _fields in {
    "norm": "original_ln_before=True",
    "norm, post_add": "original_ln_before=True,residual_before_ln='post_add'",
    "norm, no residual": "original_ln_before=True,residual_before_ln=False",
    "norm, its own": "original_ln_before=True,ln_after=True,adapter_residual_before_ln=True",
    "stream": "original_ln_before=True",
    "stream, not added again": "original_ln_before=True,residual_before_ln=False",
    "stream, plain": "original_ln_before=True,original_ln_after=False,residual_before_ln=False",
    "stream, its own": "original_ln_before=True,original_ln_after=False,residual_before_ln=False,"
    "ln_after=True,adapter_residual_before_ln=True",
}.items():
    PAIRS[_kind] = (
        f"seq_bn[{_fields},reduction_factor=4]",
        f"seq_bn[{_fields},reduction_factor=2]",
    )
BATCHES = {"sorted": [0, 0, 1, 1], "mixed": [1, None, 0, 1, 1, None], "none of one": [1, None, 1],
           "one row": [0], "none": [None, None], "empty": []}  # fmt: skip


def host(layer, residual):
    """A layer with a residual stream, of one batch."""
    return LayerCall(layer, layer.forward, residual=residual, context=running())


def built(name, dtype=torch.float64):
    """The adapters of a pair with values of their own, and a layer for them."""
    kind = name.split(",")[0]
    width = 512 if "wide" in name else D
    layer = nn.LayerNorm(width) if kind == "norm" else nn.Linear(width, width)
    role = kind if kind == "norm" else "output"
    of_kind = {"norm": "norm", "stream": "output"}.get(kind, "linear")
    site = Site(path=f"block.{role}", role=role, layer=0, stack="block", kind=of_kind, d_in=width,
                d_out=width)  # fmt: skip
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
    return type(adapters[0]).forward_batched(adapters, Groups.of(index), x, base)


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
@pytest.mark.parametrize("name", ["lora both", "boft of 2", "gate", "norms", "norm", "stream"])
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
    ["lora[dropout=0.5,lora_bias=True]", "boft[boft_dropout=0.5]", "seq_bn[dropout=0.5]",
     "adapter_plus[stochastic_depth=0.5,reduction_factor=4]"],
)  # fmt: skip
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
        if "adapter_plus" in text:
            # a row is dropped as a whole, or else divided by what is kept
            change, all_kept = dropped - layer(x), (whole - layer(x)) / 0.5
            kept = change.flatten(1).any(1)
            assert 0 < kept.sum() < rows.sum()
            torch.testing.assert_close(change[kept], all_kept[kept], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "pair",
    [("lora", "lora[use_gating=True]"), ("lora", "lora[lora_bias=True]"),
     ("lora", "lora[dropout=0.1]"), ("boft", "boft[boft_block_size=8]"),
     ("boft", "boft[boft_dropout=0.1]"), ("boft", "boft[dtype='float32']"),
     ("oft[r=8,oft_block_size=0]", "oft[r=4,oft_block_size=0]"),
     ("oft", "oft[num_cayley_neumann_terms=6]"), ("oft", "oft[module_dropout=0.1]"),
     ("miss[r=4]", "miss[r=5]"), ("miss[r=4]", "miss[r=4,miss_dropout=0.1]"),
     ("seq_bn", "par_bn"), ("seq_bn", "seq_bn[non_linearity='gelu']"),
     ("seq_bn", "seq_bn[dropout=0.1]"), ("seq_bn", "seq_bn[ln_before=True]"),
     ("seq_bn", "seq_bn[ln_after=True]"), ("seq_bn", "seq_bn[use_gating=True]"),
     ("seq_bn", "seq_bn[scaling='learned']"), ("seq_bn", "seq_bn[scaling='channel']"),
     ("seq_bn", "seq_bn[dtype='float32']"), ("seq_bn", "adapter_plus[stochastic_depth=0.1]"),
     ("seq_bn", "seq_bn[residual_before_ln=False]")],
)  # fmt: skip
def test_what_no_one_call_can_do_acts_on_its_rows_by_itself(pair, monkeypatch):
    monkeypatch.setitem(PAIRS, "unlike", pair)
    adapters, _ = built("unlike")
    assert not can_batch(adapters)
    assert all(can_batch([adapter]) for adapter in adapters)


def test_gates_are_heard_once_for_their_rows():
    adapters, layer = built("gate")
    index = [1, None, 0, 1]
    x, residual = tensors(4, layer)
    heard: dict[int, Tensor] = {}
    for i, adapter in enumerate(adapters):
        for module in adapter.modules():
            if isinstance(module, Gate):
                module.decided.register_forward_hook(
                    lambda m, args, out, i=i: heard.update({i: out})
                )
    mixed(adapters, index, x, host(layer, residual))
    assert [heard[i].flatten().shape for i in (0, 1)] == [(1,), (2,)]
    torch.testing.assert_close(
        heard[1], adapters[1].gate(residual[[0, 3]], host(layer, None)), rtol=0, atol=1e-12
    )


def test_a_method_that_mixes_and_says_not_how_is_told_what_to_write():
    class Half(Adapter):
        def forward(self, x, base):
            return base(x)

        @classmethod
        def supports_batching(cls, adapters):
            return True

    assert not can_batch([Half(), Half()])
    with pytest.raises(StateError) as caught:
        Half.forward_batched([Half()], None, torch.ones(1, 1), None)
    assert str(caught.value).startswith("Half.forward_batched: ")
    assert "def forward_batched(cls, adapters, groups, x, base)" in str(caught.value)


WEIGHT_ADAPTERS = [
    name for name in PAIRS if name.startswith(("lora", "dora", "boft", "oft", "miss"))
]
EXTREMES = {"inf": float("inf"), "nan": float("nan"), "so large that y is inf": 1e308}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("name", WEIGHT_ADAPTERS)
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
@pytest.mark.parametrize("name", WEIGHT_ADAPTERS)
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
