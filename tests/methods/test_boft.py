"""BOFT against dense matrices, against PEFT's own layers, and in company of other adapters."""

import copy
import itertools

import pytest
import torch
from families import tiny_config, tiny_inputs
from peft_world import BlockDiagonal
from rounded import as_near, rounding
from snapshots import refused
from torch import Tensor, nn
from torch.autograd import gradcheck
from transformers import AutoModel

from adapterzoo import BOFTConfig, ConfigUnion, LoRAConfig, Stack, init
from adapterzoo.anatomy import Site
from adapterzoo.errors import ConfigError
from adapterzoo.inject.adapted import base_of
from adapterzoo.kernels.cayley import cayley
from adapterzoo.methods.rotation.rotating import dropped
from adapterzoo.testing import report

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def site(d_in=32, d_out=24, **fields):
    return Site(
        **{"path": "block.0.query", "role": "query", "layer": 0, "stack": "block",
           "kind": "linear", "d_in": d_in, "d_out": d_out} | fields
    )  # fmt: skip


def built(d_in=32, d_out=24, of=torch.float64, **fields):
    """An adapter of its own, with other values than the first."""
    config = BOFTConfig(init_weights=False, init_weights_seed=3, **fields)
    adapter = config.build(site(d_in, d_out), CPU, of)
    with torch.no_grad():
        adapter.boft_R.mul_(3.0)
    return adapter


def linear(d_in=32, d_out=24, dtype=torch.float64, bias=True):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made = nn.Linear(d_in, d_out, bias=bias)
        if bias:
            nn.init.normal_(made.bias)
    return made.to(dtype).requires_grad_(False)


def hidden(*shape, dtype=torch.float64, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)


def rot(R):
    """Rot = M_{m−1} ⋯ M_0, `[d_in, d_in]` in float64, column by column of its factors."""
    m, blocks, b, _ = R.shape
    S = (R.double() - R.double().mT) / 2
    eye = torch.eye(b, dtype=torch.float64)
    Q = (eye - S) @ torch.inverse(eye + S)
    whole = torch.eye(blocks * b, dtype=torch.float64)
    for i in range(m):
        M = torch.zeros(blocks * b, blocks * b, dtype=torch.float64)
        for k in range(blocks):
            # block k of factor i: one half-block at place k, its other half 2ⁱ half-blocks further
            first = (k >> i) * (b << i) + (k % (1 << i)) * (b // 2)
            halves = [range(first, first + b // 2), range(first + (b // 2 << i), first + (b << i))]
            at = [*range(k * b, k * b + b)] if i == 0 else [*halves[0], *halves[1]][:b]
            M[torch.tensor(at)[:, None], torch.tensor(at)] = Q[i, k]
        whole = M @ whole
    return whole


def expected(adapter, layer, x):
    """The formula s ⊙ (x Rot) Wᵀ + bias with a dense Rot, in float64."""
    y = (x.double() @ rot(adapter.boft_R.detach())) @ layer.weight.double().T
    y = y * adapter.boft_s.detach().double().squeeze(-1)
    return y if layer.bias is None else y + layer.bias.double()


@torch.no_grad()
def stir(model, name, seed=0, size=0.3):
    source = torch.Generator().manual_seed(seed)
    for _, module in model.adapter_modules(name):
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
            parameter.add_((noise * size).to(parameter.dtype))


@torch.no_grad()
def run(model, inputs, setup):
    model.set_active_adapters(setup)
    return model(**inputs).last_hidden_state


# --- the formula ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("b", "m"), [(4, 1), (3, 1), (48, 1), (4, 2), (4, 3), (6, 4), (2, 5)])
def test_it_is_the_formula_with_a_dense_rotation(b, m, bias):
    d_in = 48 if m < 5 else 32
    adapter = built(d_in, boft_block_size=b, boft_n_butterfly_factor=m)
    assert adapter.boft_R.shape == (m, d_in // b, b, b)
    assert adapter.boft_s.shape == (24, 1)
    layer, x = linear(d_in, bias=bias), hidden(2, 5, d_in)
    y = adapter(x, base_of(layer))
    torch.testing.assert_close(y, expected(adapter, layer, x), rtol=0, atol=1e-12)
    assert (y - layer(x)).abs().max() > 0.1


@pytest.mark.parametrize("m", [1, 2, 3])
def test_gradients_agree_with_differences(m):
    adapter = built(16, 5, boft_n_butterfly_factor=m)
    base = base_of(linear(16, 5))

    def layer(x, R, s):
        parameters = {"boft_R": R, "boft_s": s}
        return torch.func.functional_call(adapter, parameters, (x, base))

    values = [p.detach().clone().requires_grad_() for p in adapter.parameters()]
    assert gradcheck(layer, (hidden(3, 16).requires_grad_(), *values))


def merged_weight(adapter, layer):
    return layer.weight @ rot(adapter.boft_R.detach()).T * adapter.boft_s.detach()


@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_merged_weight_is_the_layer(m):
    adapter, layer = built(boft_n_butterfly_factor=m), linear()
    w, b = (
        adapter.merged_weight(layer.weight, base_of(layer)),
        adapter.merged_bias(layer.bias, base_of(layer)),
    )
    torch.testing.assert_close(w.detach(), merged_weight(adapter, layer), rtol=0, atol=1e-12)
    assert torch.equal(b, layer.bias)


def test_a_bias_that_another_adapter_added_is_scaled():
    adapter, layer = built(), linear()
    added = hidden(24, seed=5)
    b = adapter.merged_bias(layer.bias + added, base_of(layer))
    s = adapter.boft_s.detach().squeeze(-1)
    torch.testing.assert_close(b.detach(), layer.bias + s * added, rtol=0, atol=1e-14)
    without = linear(bias=False)
    torch.testing.assert_close(adapter.merged_bias(added, base_of(without)).detach(), s * added)


@pytest.mark.parametrize("m", [1, 3])
def test_experts_have_rotations_of_their_own(m):
    config = BOFTConfig(init_weights=False, init_weights_seed=1, boft_n_butterfly_factor=m)
    adapter = config.build(site(parameter="gate_up_proj", experts=3), CPU, torch.float64)
    assert adapter.boft_R.shape == (3, m, 8, 4, 4)
    w = hidden(3, 24, 32)
    got = adapter.merged_weight(w, base_of(linear())).detach()
    for i in range(3):
        W = w[i] @ rot(adapter.boft_R[i].detach()).T * adapter.boft_s[i].detach()
        torch.testing.assert_close(got[i], W, rtol=0, atol=1e-12)


# --- first values and numbers ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "m"), [(4, 1), (4, 3), (6, 2), (48, 1)])
def test_a_fresh_adapter_changes_no_bit(b, m, dtype):
    config = BOFTConfig(boft_block_size=b, boft_n_butterfly_factor=m)
    adapter, layer = config.build(site(48), CPU, dtype), linear(48, dtype=dtype)
    # large biases: (y − bias) + bias would not be y
    layer.bias.mul_(1000)
    x = hidden(7, 48, dtype=dtype) * 100
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    assert torch.equal(y, layer(x))
    assert torch.equal(adapter.merged_weight(layer.weight, base_of(layer)), layer.weight)


def test_initial_values_other_than_the_identity():
    config = BOFTConfig(init_weights=False, init_weights_seed=1)
    assert not config.starts_as_identity
    assert BOFTConfig().starts_as_identity
    one, again = (config.build(site(512, 512), CPU, torch.float32) for _ in range(2))
    other = config.build(site(512, 512, path="block.1.query"), CPU, torch.float32)
    assert torch.equal(one.boft_R, again.boft_R)
    assert not torch.equal(one.boft_R, other.boft_R)
    for values, mean in ((one.boft_R, 0.0), (one.boft_s, 1.0)):
        assert abs(values.mean() - mean) < 0.02
        assert abs(values.std() - 0.1) < 0.01


@pytest.mark.parametrize(
    ("b", "m", "dtype", "of_adapter", "rate"),
    [
        (8, 2, torch.bfloat16, None, 2e-3),
        # by far more than a quarter turn
        (8, 2, torch.float32, None, 0.01),
        pytest.param(8, 2, torch.bfloat16, "float32", 0.01, marks=pytest.mark.sweep),
        pytest.param(32, 1, torch.float32, None, 2e-3, marks=pytest.mark.sweep),
    ],
)
def test_rotations_stay_orthogonal_over_a_thousand_steps(b, m, dtype, of_adapter, rate):
    config = BOFTConfig(boft_block_size=b, boft_n_butterfly_factor=m, dtype=of_adapter)
    layer, x = linear(64, 64, dtype), hidden(8, 64, dtype=dtype)
    adapter = config.build(site(64, 64), CPU, dtype)
    target = layer(x @ torch.linalg.qr(hidden(64, 64, seed=1))[0].to(dtype))
    optimizer = torch.optim.Adam(adapter.parameters(), lr=rate)
    losses = []
    for _ in range(1000):
        optimizer.zero_grad()
        y = adapter(x, base_of(layer))
        loss = (y - target).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert y.dtype is dtype
    assert losses[-1] < losses[0] / 2
    Q = cayley(adapter.boft_R.float()).detach()
    assert Q.dtype is torch.float32
    Q, eye = Q.double(), torch.eye(b)
    assert (Q - eye).abs().max() > (1.0 if rate == 0.01 else 0.1)
    assert (Q @ Q.mT - eye).abs().max() <= 1e-6
    assert (Q.mT @ Q - eye).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("wide", [False, True])
def test_precision_of_each_dtype(dtype, m, wide):
    adapter = built(64, 48, dtype, boft_n_butterfly_factor=m, dtype="float32" if wide else None)
    layer, x = linear(64, 48, dtype), hidden(32, 64, dtype=dtype)
    assert adapter.boft_R.dtype is (torch.float32 if wide else dtype)
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    exact = expected(adapter, layer, x)
    # what a reference of the same dtype does: rotate, multiply, scale, each rounded
    Rot = rot(adapter.boft_R.detach()).to(dtype)
    s = adapter.boft_s.detach().squeeze(-1).to(dtype)
    same = (x @ Rot) @ layer.weight.T * s + layer.bias
    sizes = (x.double().abs() @ Rot.double().abs()) @ layer.weight.double().abs().T * s.abs()
    as_near(y, same, exact, rounding(2 * 64, torch.float32) * sizes.max())


def test_a_wide_scale_over_a_half_layer_is_not_rounded_before_it_acts():
    config = BOFTConfig(dtype="float32")
    layer, x = linear(32, 24, torch.bfloat16), hidden(256, 32, dtype=torch.bfloat16)
    adapter = config.build(site(), CPU, torch.bfloat16)
    with torch.no_grad():
        adapter.boft_s.fill_(1.003)
    y, exact = adapter(x, base_of(layer)), expected(adapter, layer, x)
    # in bfloat16 1.003 is 1: no row would change
    assert (y != layer(x)).double().mean() > 0.1
    # the layer's own rounding, and one more
    assert (y.double() - exact).abs().max() <= 2**-7 * exact.abs().max()


# --- multiplicative dropout ---


@pytest.mark.parametrize(("m", "p", "count"), [(1, 0.5, 4), (3, 0.3, 2), (2, 0.1, 0), (4, 0.99, 7)])
def test_dropout_replaces_that_many_blocks_of_one_factor(m, p, count, monkeypatch):
    adapter = built(boft_n_butterfly_factor=m, boft_dropout=p)
    layer, x = linear(), hidden(2, 32)
    masks: list[Tensor] = []

    def record(Q, share):
        masks.append(dropped(Q, share))
        return masks[-1]

    monkeypatch.setattr("adapterzoo.methods.rotation.boft.dropped", record)
    whole, hits = copy.deepcopy(adapter), torch.zeros(m, 8)
    torch.manual_seed(0)
    for _ in range(500):
        y = adapter(x, base_of(layer))
        replaced = masks[-1]  # [m, blocks]
        assert replaced.sum() == count
        assert (replaced.sum(1) > 0).sum() == (count > 0)
        hits += replaced
    # nothing is rescaled: it is the formula with these blocks at zero
    with torch.no_grad():
        whole.boft_R[replaced] = 0
    torch.testing.assert_close(y, expected(whole, layer, x), rtol=0, atol=1e-12)
    if count:
        # each factor as often as the others, each block as often as its neighbours
        assert (hits.sum(1) / hits.sum() - 1 / m).abs().max() < 0.1
        assert (hits.sum(0) / hits.sum() * 8 - 1).abs().max() < 0.25


def test_dropout_acts_in_training_only_and_stops_no_gradient():
    adapter = built(boft_n_butterfly_factor=2, boft_dropout=0.5)
    layer, x = linear(), hidden(3, 32)
    exact = expected(adapter, layer, x)
    torch.testing.assert_close(adapter.eval()(x, base_of(layer)), exact, rtol=0, atol=1e-12)
    adapter.train()
    outputs = [adapter(x, base_of(layer)) for _ in range(4)]
    assert all((y - exact).abs().max() > 1e-3 for y in outputs)
    assert any(not torch.equal(outputs[0], y) for y in outputs[1:])
    sum(y.sum() for y in outputs).backward()
    off = adapter.boft_R.grad.abs().amax((-2, -1))
    assert (off > 0).double().mean() > 0.8
    w = adapter.merged_weight(layer.weight, base_of(layer)).detach()
    torch.testing.assert_close(w, merged_weight(adapter, layer), rtol=0, atol=1e-12)


# --- several adapters ---

BOFTS = {
    "boft": BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2),
    "wide": BOFTConfig(boft_block_size=8),
    "lora": LoRAConfig(r=2),
    "biased": LoRAConfig(r=2, lora_bias=True),
}


# gpt2: Conv1D, fused in parts; llama: no bias; t5: two stacks
@pytest.mark.parametrize(
    ("family", "names"),
    [
        *itertools.product(
            ["bert", "gpt2", "llama"],
            [("boft", "lora"), ("lora", "boft"), ("boft", "wide"), ("wide", "lora", "boft")],
        ),
        ("bert", ("biased", "boft")),
        ("bert", ("boft", "biased")),
    ],
)
def test_a_stack_is_what_merging_in_its_order_gives(family, names, tiny):
    model, inputs = tiny(family).double(), tiny_inputs(family)
    for i, name in enumerate(names):
        model.add_adapter(name, BOFTS[name])
        stir(model, name, seed=i)
    stacked = run(model, inputs, Stack(*names))
    turned = run(model, inputs, Stack(*reversed(names)))
    assert (stacked - turned).abs().max() > 1e-4
    model.set_active_adapters(None)
    for name in names:
        model.merge_adapter(name)
    torch.testing.assert_close(run(model, inputs, None), stacked, rtol=0, atol=1e-11)
    model.reset_adapter()
    assert torch.equal(run(model, inputs, Stack(*names)), stacked)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("kinds", [("lora", "boft"), ("boft", "lora"), ("boft", "wide")])
def test_a_union_at_one_layer_is_what_it_merges_to(family, kinds, tiny):
    model, inputs = tiny(family).double(), tiny_inputs(family)
    model.add_adapter("a", ConfigUnion(*(BOFTS[kind] for kind in kinds)))
    stir(model, "a")
    adapted = run(model, inputs, "a")
    model.merge_adapter("a")
    torch.testing.assert_close(run(model, inputs, None), adapted, rtol=0, atol=1e-11)


def test_two_sizes_and_factors_on_one_layer(tiny):
    model = tiny("bert").double()
    model.add_adapter("small", BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=3))
    model.add_adapter("large", BOFTConfig(boft_block_num=2))
    layer = model.base_model.encoder.layer[0].attention.self.query
    plain, x = copy.deepcopy(layer), hidden(3, 32)
    for name, shape in (("small", (3, 8, 4, 4)), ("large", (1, 2, 16, 16))):
        assert layer.adapters[name].boft_R.shape == shape
        stir(model, name)
        plain.adapters[name].load_state_dict(layer.adapters[name].state_dict())
        model.set_active_adapters(name)
        y = expected(plain.adapters[name], plain, x)
        torch.testing.assert_close(layer(x), y, rtol=0, atol=1e-12)


# --- configs and refusals ---


def test_a_block_size_of_four_when_none_is_given():
    assert built(32).boft_R.shape == (1, 8, 4, 4)
    assert built(32, boft_block_num=2).boft_R.shape == (1, 2, 16, 16)
    assert built(32, boft_block_size=8, boft_n_butterfly_factor=3).boft_R.shape == (3, 4, 8, 8)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"boft_block_size": 4, "boft_block_num": 8},
         ["boft_block_size=4, boft_block_num=8", "Write BOFTConfig(boft_block_size=4)."]),
        ({"boft_block_size": -1}, ["boft_block_size=-1", "Write boft_block_size=0."]),
        ({"boft_block_size": 10**9}, ["=1000000000", "Write boft_block_size=65536."]),
        ({"boft_block_num": 2.0}, ["boft_block_num=2.0", "whole number"]),
        ({"boft_n_butterfly_factor": 0}, ["boft_n_butterfly_factor=0", "factor=1."]),
        ({"boft_n_butterfly_factor": 99}, ["boft_n_butterfly_factor=99", "factor=16."]),
        ({"init_weights_seed": 1.5}, ["init_weights_seed=1.5", "a whole number", "=None."]),
        ({"boft_dropout": 1.0}, ["boft_dropout=1.0", "from 0 to below 1"]),
        ({"init_weights": "gaussian"}, ["init_weights='gaussian'", "Write init_weights=True."]),
        ({"dtype": "int8"}, ["dtype='int8'", "'float32'", "Write dtype=None."]),
    ],
)  # fmt: skip
def test_illegal_values_say_what_to_write(fields, parts):
    with pytest.raises(ConfigError) as raised:
        BOFTConfig(**fields)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("d_in", "fields", "parts"),
    [
        (768, {"boft_block_size": 5}, ["boft_block_size=5", "not legal for d_in=768",
                                       "[4, 6]", "Write boft_block_size=6."]),
        (768, {"boft_block_num": 7}, ["boft_block_num=7", "not legal for d_in=768",
                                      "[6, 8]", "Write boft_block_num=8."]),
        (768, {"boft_block_size": 1}, ["=1", "Write boft_block_size=3."]),
        (768, {"boft_block_size": 3, "boft_n_butterfly_factor": 2},
         ["boft_block_size=3", "[2, 4]", "Write boft_block_size=4."]),
        (48, {"boft_block_size": 4, "boft_n_butterfly_factor": 4},
         ["boft_block_size=4", "[2, 6]", "Write boft_block_size=6."]),
        (48, {"boft_block_num": 6, "boft_n_butterfly_factor": 3},
         ["boft_block_num=6", "[4, 8]", "Write boft_block_num=8."]),
        (63, {"boft_n_butterfly_factor": 2},
         ["boft_block_size=4", "not legal for d_in=63", "factor=1"]),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_say_which_do(d_in, fields, parts):
    with pytest.raises(ConfigError) as raised:
        BOFTConfig(**fields).build(site(d_in), CPU, torch.float32)
    for part in [*parts, "at 'block.0.query'"]:
        assert part in str(raised.value)
    hint = str(raised.value).rpartition("Write ")[2].removesuffix(".")
    if "factor=1" not in hint:
        # what it says to write works
        name, value = hint.split("=")
        config = BOFTConfig(**fields | {name: int(value)})
        m, blocks, b = config.build(site(d_in), CPU, torch.float32).boft_R.shape[:3]
        assert blocks * b == d_in
        assert d_in % (b << (m - 1)) == 0


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("bert", {"boft_block_size": 5}, ["d_in=32", "at 'encoder.layer.0.attention", "Write"]),
        ("bert", {"target_modules": ["word_embeddings"]},
         ["token numbers", "exclude_modules=['embeddings.word_embeddings']"]),
        ("mixtral", {"selfattn_lora": False, "output_lora": True, "boft_dropout": 0.5},
         ["boft_dropout=0.5", "Write boft_dropout=0"]),
    ],
)  # fmt: skip
def test_a_refusal_leaves_the_model_alone(family, fields, says, tiny):
    model = tiny(family)
    with refused(model, ConfigError, *says):
        model.add_adapter("a", BOFTConfig(**fields))


@pytest.mark.long
@pytest.mark.parametrize("fields", [{"boft_n_butterfly_factor": 3}, {"boft_block_num": 4}])
def test_other_configs_conform_too(fields):
    # 48, the width of the hidden layer, and 32 are both multiples of 4 · 2²
    config = BOFTConfig(intermediate_lora=True, output_lora=True, boft_dropout=0.2, **fields)
    only = ["identity_at_birth", "gradients", "merge_equals_forward", "any_leading_shape",
            "dtype_follows", "gradient_checkpointing", "replicas_work"]  # fmt: skip
    assert not report(config, only=only)


# --- what the backward keeps ---


# --- PEFT itself ---


TARGETS = {"bert": ["query", "value", "output.dense"], "llama": ["q_proj", "down_proj"],
           "t5": ["q", "v", "wo"]}  # fmt: skip


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(("b", "m"), [(4, 1), (8, 1), (4, 2), (8, 3)])
def test_outputs_and_gradients_are_those_of_peft(family, b, m, monkeypatch):
    import peft
    from peft.tuners.boft import layer as peft_layer

    # without this, PEFT compiles its CUDA extension anew at each layer, in vain
    extension = BlockDiagonal if m > 1 else None
    monkeypatch.setattr(peft_layer, "get_fbd_cuda", lambda: extension)
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config(family)).eval()
    ours = init(copy.deepcopy(model))
    fields = {"boft_block_size": b, "boft_n_butterfly_factor": m, "target_modules": TARGETS[family]}
    theirs = peft.get_peft_model(model, peft.BOFTConfig(init_weights=False, **fields))
    ours.add_adapter("a", BOFTConfig(**fields))
    ours.train_adapter("a")
    ours.eval()
    mine = dict(ours.adapter_modules("a"))
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in theirs.named_modules()
        if isinstance(module, peft_layer.BOFTLayer)
    }
    assert set(layers) == set(mine)
    with torch.no_grad():
        for path, layer in layers.items():
            layer.boft_R["default"].mul_(3)
            mine[path].boft_R.copy_(layer.boft_R["default"])
            mine[path].boft_s.copy_(layer.boft_s["default"])
    inputs = tiny_inputs(family)
    outputs = [net.double()(**inputs).last_hidden_state for net in (ours, theirs)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
    weights = hidden(*outputs[0].shape)
    for output in outputs:
        (output * weights).sum().backward()
    for path, layer in layers.items():
        for name in ("boft_R", "boft_s"):
            grad, peer = getattr(mine[path], name).grad, getattr(layer, name)["default"].grad
            scale = max(1.0, peer.abs().max().item())
            assert peer.abs().max() > 1e-4
            torch.testing.assert_close(grad / scale, peer / scale, rtol=0, atol=1e-10)
