"""MiSS against dense matrices, and in company of other adapters."""

import pytest
import torch
from families import tiny_inputs
from rounded import as_near, rounding
from snapshots import refused, stir
from torch import nn
from torch.autograd import gradcheck

from adapterzoo import LoRAConfig, MissConfig, Stack
from adapterzoo.anatomy import Site
from adapterzoo.errors import ConfigError
from adapterzoo.inject.adapted import base_of
from adapterzoo.testing import report

CPU = torch.device("cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def site(d_in=32, d_out=24, **fields):
    return Site(
        **{"path": "block.0.query", "role": "query", "layer": 0, "stack": "block",
           "kind": "linear", "d_in": d_in, "d_out": d_out} | fields
    )  # fmt: skip


@torch.no_grad()
def built(d_in=32, d_out=24, of=torch.float64, at=None, **fields):
    """An adapter of its own, with random numbers."""
    adapter = MissConfig(**fields).build(at or site(d_in, d_out), CPU, of)
    source = torch.Generator().manual_seed(3)
    drawn = torch.randn(adapter.miss_block.shape, generator=source, dtype=torch.float64) * 0.3
    adapter.miss_block.copy_(drawn)
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


def changed(D, w):
    """W' `[d_out, d_in]` in float64, number by number."""
    D, w = D.double(), w.double()
    out = w.clone()
    d_out, d_in = w.shape
    r = D.shape[-1] if D.dim() == 3 else D.shape[0]
    for o in range(d_out):
        for i in range(d_in):
            if D.dim() == 2:
                out[o, i] += D[i % r, o % D.shape[1]]
            else:
                g, first = o // r, i - i % r
                product = sum(w[o, first + t] * D[g, t, i % r] for t in range(r))
                out[o, i] += product + D[g, o % r, i % r]
    return out


# 7 and 5 do not divide 32; a shard of the whole width; one feature
FORMS = {
    "default": {"r": 4},
    "a rest": {"r": 7},
    "another rest": {"r": 5, "init_weights": False},
    "one shard": {"r": 32},
    "shards of one": {"r": 1},
    "mini": {"r": 4, "init_weights": "mini", "mini_r": 6},
    "mini of one": {"r": 7, "init_weights": "mini"},
    "mini of all": {"r": 7, "init_weights": "mini", "mini_r": 24},
    "bat": {"r": 4, "init_weights": "bat"},
    "wide bat": {"r": 8, "init_weights": "bat"},
}


# --- the formula ---


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_the_formula_with_a_dense_weight(form, bias):
    adapter, layer, x = built(**FORMS[form]), linear(bias=bias), hidden(2, 5, 32)
    y = adapter(x, base_of(layer))
    w = changed(adapter.miss_block.detach(), layer.weight)
    torch.testing.assert_close(y, nn.functional.linear(x, w, layer.bias), rtol=0, atol=1e-12)
    assert (y - layer(x)).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_the_merged_weight_is_the_layer(form):
    adapter, layer = built(**FORMS[form]), linear()
    before = layer.weight.clone()
    w = adapter.merged_weight(layer.weight, base_of(layer)).detach()
    expected = changed(adapter.miss_block.detach(), before)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-12)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("form", FORMS)
def test_experts_have_matrices_of_their_own(form):
    adapter = built(at=site(parameter="gate_up_proj", experts=3), **FORMS[form])
    layer, w = linear(), hidden(3, 24, 32)

    class Base:
        weight = w

    got = adapter.merged_weight(w, Base() if adapter.is_bat else base_of(layer)).detach()
    for i in range(3):
        expected = changed(adapter.miss_block[i].detach(), w[i])
        torch.testing.assert_close(got[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_agree_with_differences(form):
    adapter, plain = built(**FORMS[form]), linear()

    def layer(x, D):
        # gradcheck changes x in place, and the base remembers what it computed of it
        return torch.func.functional_call(adapter, {"miss_block": D}, (x, base_of(plain)))

    D = adapter.miss_block.detach().clone().requires_grad_()
    assert gradcheck(layer, (hidden(2, 32).requires_grad_(), D))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "another rest"])
def test_a_fresh_adapter_changes_no_bit(form, dtype):
    config = MissConfig(**FORMS[form])
    assert config.starts_as_identity
    adapter = config.build(site(), CPU, dtype)
    layer, x = linear(dtype=dtype), hidden(7, 32, dtype=dtype) * 100
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    assert torch.equal(y, layer(x))
    assert torch.equal(adapter.merged_weight(layer.weight, base_of(layer)), layer.weight)


def test_random_first_values():
    config = MissConfig(init_weights=False, init_weights_seed=1)
    assert not config.starts_as_identity
    one, again = (config.build(site(512, 256), CPU, torch.float32) for _ in range(2))
    other = config.build(site(512, 256, path="block.1.query"), CPU, torch.float32)
    assert one.miss_block.shape == (64, 256)
    assert torch.equal(one.miss_block, again.miss_block)
    assert not torch.equal(one.miss_block, other.miss_block)
    # uniform within ±1 / √d_out
    assert 0.99 / 16 < one.miss_block.abs().max() <= 1 / 16
    assert abs(one.miss_block.mean()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", ["default", "a rest", "mini", "bat"])
def test_precision_of_each_dtype(dtype, wide, form):
    fields = {"dtype": "float32" if wide else None, **FORMS[form]}
    adapter, layer = built(of=dtype, **fields), linear(dtype=dtype)
    x = hidden(32, 32, dtype=dtype)
    assert adapter.miss_block.dtype is (torch.float32 if wide else dtype)
    y = adapter(x, base_of(layer))
    assert y.dtype is dtype
    W = changed(adapter.miss_block.detach(), layer.weight)
    exact = nn.functional.linear(x.double(), W, layer.bias.double())
    # what a reference of the same dtype does: the layer, and the product with the change, rounded
    same = layer(x) + x @ (W - layer.weight.double()).to(dtype).T
    sizes = x.double().abs() @ (W.abs() + layer.weight.double().abs()).T
    as_near(y, same, exact, rounding(2 * 32, torch.float32) * sizes.max())


# --- dropout ---


@pytest.mark.parametrize("form", ["default", "a rest", "mini"])
def test_dropout_is_on_the_way_to_the_matrix_alone(form):
    adapter, layer = built(miss_dropout=0.5, **FORMS[form]), linear()
    x = torch.ones(4000, 32, dtype=torch.float64)
    torch.manual_seed(0)
    y = adapter(x, base_of(layer)).detach()
    change = y - layer(x)
    whole = adapter.eval()(x, base_of(layer)).detach() - layer(x)
    assert (change - whole).abs().max() > 0.1
    # kept features count double, so that the mean is what it is without
    scale = whole.abs().max()
    assert ((change.mean(0) - whole[0]) / scale).abs().max() < 0.1
    # half of the features are gone: each sum over a shard is an even number
    if form == "default":
        sums = torch.linalg.lstsq(adapter.miss_block.detach().T, change.T).solution  # [r, rows]
        torch.testing.assert_close(sums / 2, (sums / 2).round(), rtol=0, atol=1e-8)


# --- several adapters ---

BESIDE = {"miss": MissConfig(r=4), "rest": MissConfig(r=5), "lora": LoRAConfig(r=2),
          "mini": MissConfig(r=4, init_weights="mini", mini_r=8),
          "bat": MissConfig(r=4, init_weights="bat")}  # fmt: skip


@torch.no_grad()
def run(model, inputs, setup):
    model.set_active_adapters(setup)
    return model(**inputs).last_hidden_state


# gpt2: Conv1D, fused in parts; llama: no bias
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize(
    "names", [("miss", "lora"), ("rest", "miss"), ("bat", "lora"), ("mini", "bat", "miss")]
)
def test_a_stack_is_what_merging_gives_in_any_order(family, names, tiny):
    model, inputs = tiny(family).double(), tiny_inputs(family)
    for i, name in enumerate(names):
        model.add_adapter(name, BESIDE[name])
        stir(model, name, seed=i)
    stacked = run(model, inputs, Stack(*names))
    other = run(model, inputs, Stack(*reversed(names)))
    torch.testing.assert_close(other, stacked, rtol=0, atol=1e-11)
    assert (stacked - run(model, inputs, None)).abs().max() > 1e-3
    model.set_active_adapters(None)
    for name in reversed(names):
        model.merge_adapter(name)
    torch.testing.assert_close(run(model, inputs, None), stacked, rtol=0, atol=1e-11)
    model.reset_adapter()
    assert torch.equal(run(model, inputs, Stack(*names)), stacked)


@pytest.mark.parametrize("kind", ["miss", "rest", "mini", "bat"])
def test_rows_of_a_batch_have_matrices_of_their_own(kind, tiny):
    model, inputs = tiny("bert").double(), tiny_inputs("bert", batch=4)
    for i, name in enumerate(("a", "b")):
        model.add_adapter(name, BESIDE[kind])
        stir(model, name, seed=i)
    names = ["b", None, "a", "b"]
    with torch.no_grad():
        mixed = model(**inputs, adapter_names=names).last_hidden_state
    for row, name in enumerate(names):
        alone = run(model, inputs, name)[row]
        torch.testing.assert_close(mixed[row], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["miss", "mini", "bat"])
def test_a_sum_of_adapters_adds_their_changes(kind, tiny):
    model, inputs = tiny("bert").double(), tiny_inputs("bert")
    for i, name in enumerate(("a", "b")):
        model.add_adapter(name, BESIDE[kind])
        stir(model, name, seed=i)
    model.average_adapter("sum", ["a", "b"], weights=[0.5, -2.0], normalize_weights=False)
    layer = model.base_model.encoder.layer[0].attention.self.query
    changes = {
        name: adapter.merged_weight(layer.weight, base_of(layer)).detach() - layer.weight.detach()
        for name, adapter in layer.adapters.items()
    }
    expected = 0.5 * changes["a"] - 2.0 * changes["b"]
    torch.testing.assert_close(changes["sum"], expected, rtol=0, atol=1e-12)
    assert run(model, inputs, "sum").isfinite().all()


# --- configs and refusals ---


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"r": 0}, ["r=0", "Write r=1."]),
        ({"init_weights": "miss"}, ["init_weights='miss'", "'bat'", "Write init_weights=True."]),
        ({"init_weights": "bat", "miss_dropout": 0.1},
         ["miss_dropout=0.1", "init_weights='bat'", "Write miss_dropout=0.0."]),
        ({"miss_dropout": 1.0}, ["miss_dropout=1.0", "from 0 to below 1"]),
    ],
)  # fmt: skip
def test_illegal_values_say_what_to_write(fields, parts):
    with pytest.raises(ConfigError) as raised:
        MissConfig(**fields)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"r": 33}, {"r": 32}),
        ({"r": 64}, {"r": 32}),
        ({"r": 6, "init_weights": "bat"}, {"r": 8}),
        ({"r": 16, "init_weights": "bat"}, {"r": 8}),
        ({"r": 4, "init_weights": "mini", "mini_r": 5}, {"mini_r": 6}),
        ({"r": 4, "init_weights": "mini", "mini_r": 25}, {"mini_r": 24}),
    ],
)
def test_sizes_that_do_not_fit_say_which_do(fields, hint):
    with pytest.raises(ConfigError) as raised:
        MissConfig(**fields).build(site(), CPU, torch.float32)
    ((name, value),) = hint.items()
    says = [f"Write {name}={value}.", "'block.0.query'", "d_in=32 and d_out=24"]
    for part in [*says, f"{name}={fields[name]}"]:
        assert part in str(raised.value)
    MissConfig(**fields | hint).build(site(), CPU, torch.float32)


@pytest.mark.parametrize(
    ("family", "fields", "says"),
    [
        ("bert", {}, ["r=64", "d_in=32", "Write r=32."]),
        ("bert", {"r": 4, "target_modules": ["word_embeddings"]},
         ["token numbers", "exclude_modules=['embeddings.word_embeddings']"]),
        ("mixtral", {"r": 4, "selfattn_lora": False, "output_lora": True, "miss_dropout": 0.5},
         ["miss_dropout=0.5", "Write miss_dropout=0.0"]),
    ],
)  # fmt: skip
def test_a_refusal_leaves_the_model_alone(family, fields, says, tiny):
    model = tiny(family)
    with refused(model, ConfigError, *says):
        model.add_adapter("a", MissConfig(**fields))


@pytest.mark.long
@pytest.mark.parametrize("form", ["a rest", "mini", "bat"])
def test_other_configs_conform_too(form):
    fields = {**FORMS[form], "mini_r": 8} if form == "mini" else FORMS[form]
    config = MissConfig(intermediate_lora=True, output_lora=True, **fields)
    only = ["identity_at_birth", "gradients", "merge_equals_forward", "any_leading_shape",
            "dtype_follows", "gradient_checkpointing", "replicas_work"]  # fmt: skip
    assert not report(config, only=only)
