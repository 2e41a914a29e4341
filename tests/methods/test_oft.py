"""OFT against dense matrices, and in company of other adapters."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from families import tiny_inputs
from rounded import as_near, rounding
from snapshots import refused, stir
from torch import nn
from torch.autograd import gradcheck

from adapterzoo import BOFTConfig, LoRAConfig, OFTConfig, Stack
from adapterzoo.anatomy import Site
from adapterzoo.errors import ConfigError
from adapterzoo.inject.adapted import base_of
from adapterzoo.kernels.cayley import cayley, cayley_neumann
from adapterzoo.methods.rotation.oft import skew
from adapterzoo.testing import report

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def site(d_in=32, d_out=24, **fields):
    return Site(
        **{"path": "block.0.query", "role": "query", "layer": 0, "stack": "block",
           "kind": "linear", "d_in": d_in, "d_out": d_out} | fields
    )  # fmt: skip


def built(d_in=32, d_out=24, of=torch.float64, at=None, **fields):
    """An adapter of its own, with other values than the first."""
    config = OFTConfig(init_weights=False, init_weights_seed=3, **fields)
    return config.build(at or site(d_in, d_out), CPU, of)


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


def rot(vectors, width, b, terms=5, eps=None):
    """diag(Q) `[width, width]` in float64, number by number; terms = 0 for the inverse itself."""
    whole = torch.zeros(width, width, dtype=torch.float64)
    for k in range(width // b):
        numbers = iter(vectors[k % len(vectors)].double().tolist())
        S = torch.zeros(b, b, dtype=torch.float64)
        for i in range(b):
            for j in range(i + 1, b):
                S[i, j] = next(numbers)
                S[j, i] = -S[i, j]
        if eps is not None and S.norm() > (limit := eps / math.sqrt(len(vectors))):
            S = S / S.norm() * limit
        eye = torch.eye(b, dtype=torch.float64)
        if terms == 0:
            Q = (eye - S) @ torch.inverse(eye + S)
        else:
            last = {2: 1, 3: 3}.get(terms, terms - 1)
            Q = eye + 2 * sum(torch.matrix_power(S, n) for n in range(1, last + 1))
            if terms > 2:
                Q = Q - torch.matrix_power(S, last)
        whole[k * b : (k + 1) * b, k * b : (k + 1) * b] = Q
    return whole


FORMS = {
    "series": ({}, {}),
    "2 terms": ({"num_cayley_neumann_terms": 2}, {"terms": 2}),
    "3 terms": ({"num_cayley_neumann_terms": 3}, {"terms": 3}),
    "4 terms": ({"num_cayley_neumann_terms": 4}, {"terms": 4}),
    "7 terms": ({"num_cayley_neumann_terms": 7}, {"terms": 7}),
    "exact": ({"use_cayley_neumann": False}, {"terms": 0}),
    "constrained": ({"coft": True, "eps": 0.3}, {"eps": 0.3}),
    "hardly constrained": ({"coft": True, "eps": 99.0}, {}),
    "exact, constrained, shared": (
        {"use_cayley_neumann": False, "coft": True, "eps": 0.2, "block_share": True},
        {"terms": 0, "eps": 0.2},
    ),
    "shared": ({"block_share": True}, {}),
}


# --- the formula ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("b", [2, 3, 8, 48])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_formula_with_a_dense_rotation(form, b, bias):
    fields, meant = FORMS[form]
    adapter = built(48, oft_block_size=b, **fields)
    vectors = adapter.oft_R.detach()
    assert vectors.shape == (1 if "shared" in form else 48 // b, b * (b - 1) // 2)
    layer, x = linear(48, bias=bias), hidden(2, 5, 48)
    y = adapter(x, base_of(layer))
    expected = nn.functional.linear(x @ rot(vectors, 48, b, **meant), layer.weight, layer.bias)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-11)
    assert (y - layer(x)).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_the_merged_weight_is_the_layer(form):
    fields, meant = FORMS[form]
    adapter, layer = built(oft_block_size=4, **fields), linear()
    w = adapter.merged_weight(layer.weight, base_of(layer)).detach()
    expected = layer.weight @ rot(adapter.oft_R.detach(), 32, 4, **meant).T
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)
    assert (w - layer.weight).abs().max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_an_embedding_is_rotated_at_its_output(form):
    fields, meant = FORMS[form]
    at = site(11, 32, kind="embedding", role=None)
    adapter = built(at=at, oft_block_size=4, **fields)
    table = nn.Embedding(11, 32).double().requires_grad_(False)
    tokens = torch.tensor([[1, 0, 7], [10, 1, 1]])
    Rot = rot(adapter.oft_R.detach(), 32, 4, **meant)
    y = adapter(tokens, base_of(table))
    torch.testing.assert_close(y, table(tokens) @ Rot, rtol=0, atol=1e-12)
    w = adapter.merged_weight(table.weight.T, base_of(table)).detach()  # [d_out, tokens]
    torch.testing.assert_close(w.T, table.weight @ Rot, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", ["series", "exact", "shared"])
def test_experts_have_rotations_of_their_own(form):
    fields, meant = FORMS[form]
    at = site(parameter="gate_up_proj", experts=3)
    adapter = built(at=at, oft_block_size=4, **fields)
    assert adapter.oft_R.shape == (3, 1 if form == "shared" else 8, 6)
    w = hidden(3, 24, 32)
    got = adapter.merged_weight(w, base_of(linear())).detach()
    for i in range(3):
        W = w[i] @ rot(adapter.oft_R[i].detach(), 32, 4, **meant).T
        torch.testing.assert_close(got[i], W, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [form for form in FORMS if " constrained" not in f" {form}"])
def test_gradients_agree_with_differences(form):
    adapter, base = built(16, 5, oft_block_size=4, **FORMS[form][0]), base_of(linear(16, 5))

    def layer(x, R):
        return torch.func.functional_call(adapter, {"oft_R": R}, (x, base))

    R = adapter.oft_R.detach().clone().requires_grad_()
    assert gradcheck(layer, (hidden(3, 16).requires_grad_(), R))


def test_a_constraint_bounds_each_forward_and_leaves_the_parameters():
    free, bound = built(oft_block_size=4), built(oft_block_size=4, coft=True, eps=0.2)
    layer, x = linear(), hidden(3, 32)
    norms = skew(bound.oft_R, 4).norm(dim=(-2, -1))
    assert (norms > 0.2 / 8**0.5).all()
    before = bound.oft_R.detach().clone()
    with torch.no_grad():
        scale = 0.2 / 8**0.5 / norms
        free.oft_R.copy_(bound.oft_R * scale[:, None])
    outputs = [adapter(x, base_of(layer)) for adapter in (free, bound)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    for y in outputs:
        (y * hidden(3, 24, seed=1)).sum().backward()
    # as if the parameters had been set to what they are bounded to
    torch.testing.assert_close(bound.oft_R.grad, free.oft_R.grad, rtol=0, atol=1e-12)
    assert torch.equal(bound.oft_R, before)
    assert not OFTConfig(coft=True).gradients_are_exact
    assert OFTConfig().gradients_are_exact


# --- the rotations ---


def test_the_series_is_the_inverse_of_the_exact_transform_up_to_what_it_leaves_out():
    S = skew(hidden(3, 28), 8)
    S = S / torch.linalg.matrix_norm(S, 2)[:, None, None] * 0.1  # spectral norm 0.1
    exact = cayley(S).mT
    errors = [(cayley_neumann(S, n) - exact).abs().max().item() for n in (2, 4, 5, 8, 12)]
    assert all(after < before / 5 for before, after in pairwise(errors))
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-10
    eye = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(exact @ exact.mT, eye.expand(3, 8, 8), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_adapter_changes_no_bit(form, dtype):
    adapter = OFTConfig(oft_block_size=4, **FORMS[form][0]).build(site(), CPU, dtype)
    layer, x = linear(dtype=dtype), hidden(7, 32, dtype=dtype) * 100
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    assert torch.equal(y, layer(x))
    assert torch.equal(adapter.merged_weight(layer.weight, base_of(layer)), layer.weight)
    y.float().sum().backward()
    assert adapter.oft_R.grad.isfinite().all()


def test_initial_values_other_than_the_identity():
    config = OFTConfig(init_weights=False, init_weights_seed=1)
    assert not config.starts_as_identity
    assert OFTConfig().starts_as_identity
    one, again = (config.build(site(512, 512), CPU, torch.float32) for _ in range(2))
    other = config.build(site(512, 512, path="block.1.query"), CPU, torch.float32)
    assert torch.equal(one.oft_R, again.oft_R)
    assert not torch.equal(one.oft_R, other.oft_R)
    assert abs(one.oft_R.mean()) < 0.02
    assert abs(one.oft_R.std() - 0.1) < 0.01


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("terms", [0, 5])
def test_precision_of_each_dtype(dtype, wide, terms):
    fields = {"use_cayley_neumann": bool(terms), "dtype": "float32" if wide else None}
    adapter = built(64, 48, dtype, oft_block_size=8, **fields)
    layer, x = linear(64, 48, dtype), hidden(32, 64, dtype=dtype)
    assert adapter.oft_R.dtype is (torch.float32 if wide else dtype)
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    Rot = rot(adapter.oft_R.detach(), 64, 8, terms)
    exact = nn.functional.linear(x.double() @ Rot, layer.weight.double(), layer.bias.double())
    # what a reference of the same dtype does: rotate, multiply, each rounded
    same = (x @ Rot.to(dtype)) @ layer.weight.T + layer.bias
    sizes = (x.double().abs() @ Rot.abs()) @ layer.weight.double().abs().T
    as_near(y, same, exact, rounding(2 * 64, torch.float32) * sizes.max())


# --- dropout ---


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("p", "count"), [(0.5, 4), (0.3, 2), (0.1, 0), (0.99, 7)])
def test_dropout_replaces_that_many_blocks(p, count, shared):
    adapter = built(oft_block_size=4, module_dropout=p, block_share=shared)
    layer, x = linear(32, 32), hidden(2, 32)
    layer.weight.copy_(torch.eye(32))
    layer.bias.zero_()
    whole = x @ rot(adapter.oft_R.detach(), 32, 4)
    hits = torch.zeros(8)
    torch.manual_seed(0)
    for _ in range(500):
        y = adapter(x, base_of(layer)).detach()
        off = ((y - x).abs().view(2, 8, 4).amax((0, 2))) < 1e-12  # [blocks]
        assert off.sum() == count
        expected = torch.where(off.repeat_interleave(4), x, whole)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        hits += off
    if count:
        assert (hits / hits.sum() * 8 - 1).abs().max() < 0.25
    torch.testing.assert_close(adapter.eval()(x, base_of(layer)), whole, rtol=0, atol=1e-12)
    w = adapter.train().merged_weight(layer.weight, base_of(layer)).detach()
    torch.testing.assert_close(w, rot(adapter.oft_R.detach(), 32, 4).T, rtol=0, atol=1e-12)


# --- several adapters ---

BESIDE = {"oft": OFTConfig(oft_block_size=4), "wide": OFTConfig(r=1, oft_block_size=0),
          "exact": OFTConfig(oft_block_size=8, use_cayley_neumann=False),
          "boft": BOFTConfig(boft_n_butterfly_factor=2), "lora": LoRAConfig(r=2)}  # fmt: skip


@torch.no_grad()
def run(model, inputs, setup):
    model.set_active_adapters(setup)
    return model(**inputs).last_hidden_state


# gpt2: Conv1D, fused in parts; llama: no bias
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "names", [("oft", "lora"), ("lora", "oft"), ("oft", "wide"), ("exact", "boft", "oft")]
)
def test_a_stack_is_what_merging_in_its_order_gives(family, names, tiny):
    model, inputs = tiny(family).double(), tiny_inputs(family)
    for i, name in enumerate(names):
        model.add_adapter(name, BESIDE[name])
        stir(model, name, seed=i)
    stacked = run(model, inputs, Stack(*names))
    assert (stacked - run(model, inputs, Stack(*reversed(names)))).abs().max() > 1e-5
    model.set_active_adapters(None)
    for name in names:
        model.merge_adapter(name)
    torch.testing.assert_close(run(model, inputs, None), stacked, rtol=0, atol=1e-11)
    model.reset_adapter()
    assert torch.equal(run(model, inputs, Stack(*names)), stacked)


def test_rows_of_a_batch_have_rotations_of_their_own(tiny):
    model, inputs = tiny("bert").double(), tiny_inputs("bert", batch=4)
    for i, name in enumerate(("a", "b")):
        model.add_adapter(name, BESIDE["oft"])
        stir(model, name, seed=i)
    names = ["b", None, "a", "b"]
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=names).last_hidden_state
    for row, name in enumerate(names):
        alone = run(model, inputs, name)[row]
        torch.testing.assert_close(mixed[row], alone, rtol=0, atol=1e-12)


def test_two_sizes_on_one_layer(tiny):
    model = tiny("bert").double()
    model.add_adapter("small", OFTConfig(oft_block_size=2))
    model.add_adapter("large", OFTConfig(r=2, oft_block_size=0))
    layer = model.base_model.encoder.layer[0].attention.self.query
    for name, shape in (("small", (16, 1)), ("large", (2, 120))):
        assert layer.adapters[name].oft_R.shape == shape


# --- configs and refusals ---


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"r": 4}, ["r=4, oft_block_size=32", "Write OFTConfig(r=4, oft_block_size=0)."]),
        ({"oft_block_size": 0}, ["r=0, oft_block_size=0", "Write OFTConfig(oft_block_size=32)."]),
        ({"oft_block_size": -1}, ["oft_block_size=-1", "Write oft_block_size=0."]),
        ({"num_cayley_neumann_terms": 1}, ["terms=1", "from 2 to 64", "Write", "terms=2."]),
        ({"eps": 0.0, "coft": True}, ["eps=0.0", "above 0"]),
        ({"module_dropout": 1.0}, ["module_dropout=1.0", "from 0 to below 1"]),
        ({"init_weights": "gaussian"}, ["init_weights='gaussian'", "Write init_weights=True."]),
    ],
)  # fmt: skip
def test_illegal_values_say_what_to_write(fields, parts):
    with pytest.raises(ConfigError) as raised:
        OFTConfig(**fields)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("d_in", "fields", "hint"),
    [
        (768, {"oft_block_size": 5}, {"oft_block_size": 6}),
        (768, {"oft_block_size": 1}, {"oft_block_size": 3}),
        (48, {}, {"oft_block_size": 24}),
        (768, {"r": 7, "oft_block_size": 0}, {"r": 8, "oft_block_size": 0}),
        (37, {"oft_block_size": 4}, {"oft_block_size": 37}),
        (32, {"r": 32, "oft_block_size": 0}, {"r": 16, "oft_block_size": 0}),
    ],
)
def test_blocks_that_do_not_fit_say_which_do(d_in, fields, hint):
    with pytest.raises(ConfigError) as raised:
        OFTConfig(**fields).build(site(d_in), CPU, torch.float32)
    shown = ", ".join(f"{name}={value}" for name, value in hint.items())
    assert f"at 'block.0.query': not legal for d_in={d_in}" in str(raised.value)
    assert f"Write {shown}." in str(raised.value)
    adapter = OFTConfig(**hint).build(site(d_in), CPU, torch.float32)
    assert adapter.block_size * adapter.block_number == d_in


def test_one_feature_has_nothing_to_rotate():
    with pytest.raises(ConfigError, match=r"d_in=1 .* Write exclude_modules=\['block.0.query'\]"):
        OFTConfig().build(site(1), CPU, torch.float32)


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("bert", {"oft_block_size": 5}, ["at 'encoder.layer.0.attention", "d_in=32", "Write"]),
        ("mixtral", {"selfattn_lora": False, "output_lora": True, "oft_block_size": 4,
                     "module_dropout": 0.5}, ["module_dropout=0.5", "Write module_dropout=0.0"]),
    ],
)  # fmt: skip
def test_a_refusal_leaves_the_model_alone(family, fields, says, tiny):
    model = tiny(family)
    with refused(model, ConfigError, *says):
        model.add_adapter("a", OFTConfig(**fields))


@pytest.mark.long
@pytest.mark.parametrize("form", ["exact", "constrained", "shared"])
def test_other_configs_conform_too(form):
    config = OFTConfig(
        oft_block_size=4, intermediate_lora=True, output_lora=True, module_dropout=0.2,
        **FORMS[form][0],
    )  # fmt: skip
    only = ["identity_at_birth", "gradients", "merge_equals_forward", "any_leading_shape",
            "dtype_follows", "gradient_checkpointing", "replicas_work"]  # fmt: skip
    assert not report(config, only=only)


def test_what_is_kept_in_evaluation_follows_the_parameters():
    adapter, layer, x = built(oft_block_size=4).eval(), linear(), hidden(2, 32)
    with torch.no_grad():
        adapter(x, base_of(layer))
        adapter.oft_R.mul_(2)
        fresh = copy.deepcopy(adapter)
        assert torch.equal(adapter(x, base_of(layer)), fresh(x, base_of(layer)))
