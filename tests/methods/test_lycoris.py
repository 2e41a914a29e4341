"""LoHa and LoKr: the formulas, initial values, dropout; files are in the tests of formats."""

import pytest
import torch
from made import hidden, made
from snapshots import refused
from torch import nn
from torch.autograd import gradcheck

from adapterzoo import LoHaConfig, LoKrConfig
from adapterzoo.anatomy import Site
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import ConfigError, SiteError
from adapterzoo.inject.adapted import base_of

CPU = torch.device("cpu")
# the rank 9 is so large that the whole change of the weight is cheaper
CONFIGS = {
    "loha": LoHaConfig(r=2, alpha=5),
    "loha, dense": LoHaConfig(r=9, alpha=5),
    "lokr": LoKrConfig(r=2, alpha=3),
    "lokr, both": LoKrConfig(r=1, alpha=3, decompose_both=True),
    "lokr, whole": LoKrConfig(r=40, alpha=3),
    "lokr of 2": LoKrConfig(r=3, alpha=5, decompose_factor=2),
    # most numbers in w1: its product comes first
    "lokr of 12": LoKrConfig(r=3, alpha=5, decompose_factor=12),
}
EVERY = pytest.mark.parametrize("kind", CONFIGS)


def built(config, d_in=48, d_out=24, **fields):
    """An adapter of its own for a layer, with random values in float64."""
    named = {"path": "block.0.query", "role": "query", "layer": 0, "stack": "block",
             "kind": "linear", "d_in": d_in, "d_out": d_out}  # fmt: skip
    site = Site(**named | fields)
    return config.replace(init_weights=False, init_weights_seed=3).build(site, CPU, torch.float64)


def layer(d_in=48, d_out=24):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Linear(d_in, d_out).double().requires_grad_(False)


def features(*shape):
    source = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def change(config, adapter):
    """ΔW with s, entry by entry of the formulas."""
    t = {name: value.detach() for name, value in adapter.named_parameters()}
    s = config.alpha / config.r
    if isinstance(config, LoHaConfig):
        one, two = (t[f"hada_{w}_a"] @ t[f"hada_{w}_b"] for w in ("w1", "w2"))
        return s * one * two
    w1, w2 = (
        t[f"lokr_{w}"] if f"lokr_{w}" in t else t[f"lokr_{w}_a"] @ t[f"lokr_{w}_b"]
        for w in ("w1", "w2")
    )
    return s * torch.kron(w1, w2)


@EVERY
@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0, 3)], ids=str)
def test_the_formula(kind, batch):
    config, base = CONFIGS[kind], layer()
    adapter, x = built(config), features(*batch, 48)
    expected = x @ (base.weight + change(config, adapter)).T + base.bias
    torch.testing.assert_close(adapter(x, base_of(base)), expected, rtol=1e-12, atol=1e-12)
    merged = adapter.merged_weight(base.weight, base_of(base))
    torch.testing.assert_close(merged, base.weight + change(config, adapter), rtol=0, atol=1e-13)
    if batch == (5,):
        assert (expected - base(x)).abs().max() > 0.01


@EVERY
def test_gradients_agree_with_differences(kind):
    config = CONFIGS[kind].replace(rank_dropout=0.0)
    adapter, plain = built(config, 12, 6), layer(12, 6)
    names = [name for name, _ in adapter.named_parameters()]

    def forward(x, *values):
        given = dict(zip(names, values, strict=True))
        # it remembers the output for an x, which is changed in place here
        base = base_of(plain)
        return torch.func.functional_call(adapter, given, (x, base))

    values = [p.detach().clone().requires_grad_() for p in adapter.parameters()]
    assert gradcheck(forward, (features(2, 12).requires_grad_(), *values))


SHAPES = {
    "lokr": {"lokr_w1": [4, 6], "lokr_w2_a": [6, 2], "lokr_w2_b": [2, 8]},
    "lokr, both": {"lokr_w1_a": [4, 1], "lokr_w1_b": [1, 6], "lokr_w2_a": [6, 1],
                   "lokr_w2_b": [1, 8]},
    "lokr, whole": {"lokr_w1": [4, 6], "lokr_w2": [6, 8]},
    "lokr of 2": {"lokr_w1": [2, 2], "lokr_w2_a": [12, 3], "lokr_w2_b": [3, 24]},
    "lokr of 12": {"lokr_w1": [12, 12], "lokr_w2": [2, 4]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SHAPES)
def test_a_matrix_is_decomposed_where_the_rank_is_small(kind):
    found = {name: list(t.shape) for name, t in built(CONFIGS[kind]).named_parameters()}
    assert found == SHAPES[kind]


@EVERY
def test_experts_have_changes_of_their_own(kind):
    config = CONFIGS[kind]
    adapter = built(config, kind="experts", parameter="down", experts=3)
    each = adapter.delta(torch.float64)
    assert each.shape == (3, 24, 48)
    for i in range(3):
        own = built(config)
        own.load_state_dict({name: t[i] for name, t in adapter.state_dict().items()})
        torch.testing.assert_close(own.delta(torch.float64), each[i], rtol=0, atol=1e-14)


STARTS = {
    "loha": (True, {"hada_w2_b"}),
    "loha, dense": (False, set()),
    "lokr": (True, {"lokr_w1"}),
    "lokr, both": ("lycoris", {"lokr_w2_b"}),
    "lokr, whole": ("lycoris", {"lokr_w2"}),
    "lokr of 2": (False, set()),
}


@pytest.mark.parametrize("kind", STARTS)
def test_what_starts_as_zero(kind):
    how, zero = STARTS[kind]
    config = CONFIGS[kind].replace(init_weights=how)
    assert config.starts_as_identity == bool(zero)
    model = made("bert", torch.float32, fill=lambda *_: None, a=config)
    parameters = [(n, p) for _, m in model.adapter_modules("a") for n, p in m.named_parameters()]
    assert {name for name, p in parameters if not p.any()} == zero
    for name, p in parameters:
        if name not in zero:
            # uniform within ±1/√fan_in
            bound = p.shape[1] ** -0.5
            assert 0.3 * bound < p.abs().max() <= bound, name
    base = hidden(model)
    model.set_active_adapters("a")
    assert torch.equal(hidden(model), base) == bool(zero)


# --- dropout ---


def rows_of(adapter, base, x, config):
    """The factors by which rows of ΔW are multiplied in a call, `[d_out]`."""
    update = adapter(x, base_of(base)) - base(x)  # [tokens, d_out]
    whole = x @ change(config, adapter).T
    factors = update / whole
    # the same for each token
    torch.testing.assert_close(factors, factors[:1].expand_as(factors), rtol=1e-9, atol=1e-9)
    return factors[0].detach()


RANK_DROPOUT = {
    "loha": LoHaConfig(r=2, rank_dropout=0.5),
    "loha, dense": LoHaConfig(r=9, rank_dropout=0.5),
    "lokr": LoKrConfig(r=2, rank_dropout=0.5),
    "lokr, scaled": LoKrConfig(r=2, rank_dropout=0.5, rank_dropout_scale=True),
}


@pytest.mark.parametrize("kind", RANK_DROPOUT)
def test_dropout_of_rows(kind):
    config, base, x = RANK_DROPOUT[kind], layer(), features(3, 48)
    adapter = built(config).eval()
    assert torch.allclose(rows_of(adapter, base, x, config), torch.ones(24).double())
    adapter.train()
    torch.manual_seed(0)
    counts = torch.zeros(24)
    for _ in range(200):
        rows = rows_of(adapter, base, x, config)
        kept = rows.abs() > 1e-6
        counts += kept
        # LoHa of PEFT always divides by the share, LoKr if asked to
        expected = 1.0 if kind == "lokr" else 24 / kept.sum()
        torch.testing.assert_close(rows[kept], torch.full_like(rows[kept], float(expected)))
    # 200 draws with probability 1/2: six standard deviations
    assert ((counts - 100).abs() < 43).all()


def test_a_call_that_keeps_no_row_adds_nothing():
    config, base, x = LoHaConfig(r=2, rank_dropout=0.99), layer(48, 2), features(3, 48)
    adapter = built(config, d_out=2).train()
    torch.manual_seed(0)
    outs = [adapter(x, base_of(base)) for _ in range(20)]
    assert all(out.isfinite().all() for out in outs)
    assert any(torch.equal(out, base(x)) for out in outs)


@pytest.mark.parametrize("make", [LoHaConfig, LoKrConfig])
def test_dropout_of_modules(make):
    config, base, x = make(r=2, module_dropout=0.25), layer(), features(3, 48)
    adapter = built(config).train()
    torch.manual_seed(0)
    kept = [rows_of(adapter, base, x, config) for _ in range(400)]
    assert all((rows == 0).all() or torch.allclose(rows, torch.ones_like(rows)) for rows in kept)
    # 400 draws with probability 3/4: six standard deviations
    assert abs(sum(bool(rows.any()) for rows in kept) - 300) < 52
    adapter.eval()
    torch.testing.assert_close(adapter(x, base_of(base)), base(x) + x @ change(config, adapter).T)


@pytest.mark.parametrize("method", ["loha", "lokr"])
def test_rows_of_a_mixed_batch_have_dropout_of_their_own_adapter(method):
    text = f"{method}[r=2,rank_dropout=0.5]"
    model = made("bert", a=text, b=f"{method}[r=2]")
    for name in ("a", "b"):
        for _, module in model.adapter_modules(name):
            module.train(name == "a")
    path = "encoder.layer.0.attention.self.query"
    query, seen = model.get_submodule(path), {}
    query.register_forward_hook(lambda _, args, out: seen.update(x=args[0], y=out))
    plain = nn.functional.linear
    torch.manual_seed(0)
    hidden(model, input_ids=torch.ones(3, 4, dtype=torch.long), adapter_names=["a", "b", None])
    update = seen["y"] - plain(seen["x"], query.weight, query.bias)
    dropped = (update == 0).all(1)  # [rows, d_out]
    assert 0 < dropped[0].sum() < 32
    assert not dropped[1].any()
    assert dropped[2].all()


# --- what is refused ---


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (LoHaConfig, {"r": 0}, r"r=0.*from 1"),
        (LoHaConfig, {"rank_dropout": 1.0}, r"rank_dropout=1.0.*below 1"),
        (LoKrConfig, {"module_dropout": -1}, r"module_dropout=-1.*from 0"),
        (LoHaConfig, {"init_weights": "lycoris"}, r"init_weights='lycoris'.*False.*True"),
        (LoKrConfig, {"init_weights": "gaussian"}, r"init_weights='gaussian'.*lycoris"),
        (LoHaConfig, {"use_effective_conv2d": 1}, "use_effective_conv2d=1.*one of False, True"),
        (LoKrConfig, {"use_effective_conv2d": 1}, "use_effective_conv2d=1.*one of False, True"),
        (LoKrConfig, {"decompose_factor": 0}, r"decompose_factor=0.*-1.*from 1"),
        (LoKrConfig, {"rank_pattern": {"query": 0}}, r"r=0.*from 1"),
        (LoHaConfig, {"alpha_pattern": {"(a+": 1}}, r"alpha_pattern"),
        (LoHaConfig, {"dtype": "int8"}, r"dtype='int8'.*float32"),
    ],
)
def test_fields_out_of_range_are_named(make, fields, message):
    with pytest.raises(ConfigError, match=message):
        make(**fields)


@pytest.mark.parametrize(
    ("family", "text", "error", "words"),
    [
        ("bert", "loha[target_modules=['word_embeddings']]", ConfigError,
         ["word_embeddings", "cannot adapt an embedding", "exclude_modules"]),
        ("qwen3_moe", "lokr[intermediate_lora=True,rank_dropout=0.5]", ConfigError,
         ["rank_dropout=0.5", "no features to drop", "rank_dropout=0.0"]),
        ("bert", "loha[rank_pattern={'kye': 3}]", SiteError,
         ["rank_pattern={'kye': …}", "'query', 'value'"]),
    ],
)  # fmt: skip
def test_sites_that_do_not_fit_are_refused(family, text, error, words):
    model = made(family, torch.float32)
    with refused(model, error, "add_adapter('a'", *words):
        model.add_adapter("a", AdapterConfig.load(text))
