"""Bottlenecks: every option against its formula and against AdapterHub's `adapters` itself."""

import copy
import dataclasses
import itertools
import json
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F

from adapterzoo.anatomy import Anatomy, Block, Site, SubLayer, find
from adapterzoo.composition import Stack
from adapterzoo.composition.compile import compile_site
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.errors import ConfigError, MissingEntryError, SiteError
from adapterzoo.inject import capture_input, put
from adapterzoo.methods.bottleneck import (
    AdapterPlusConfig,
    BnConfig,
    DoubleSeqBnConfig,
    ParBnConfig,
    SeqBnConfig,
    scaled_par_bn,
)
from adapterzoo.runtime import ActiveState, Default, Plan

DATA = Path(__file__).resolve().parents[1] / "data"
CPU = torch.device("cpu")
D = 8
PLAIN = {"mh_adapter": True, "output_adapter": True, "reduction_factor": 2, "non_linearity": "tanh"}


class TinyBlock(nn.Module):
    """Attention and feed-forward part reduced to what a bottleneck can tell apart."""

    def __init__(self, post_norm):
        super().__init__()
        self.post_norm = post_norm
        for name in ("attention", "mlp"):
            self.add_module(f"{name}_in", nn.Linear(D, D + 1))
            self.add_module(f"{name}_out", nn.Linear(D + 1, D))
            self.add_module(f"{name}_norm", nn.LayerNorm(D))

    def forward(self, x, stream=None):
        for name in ("attention", "mlp"):
            into, out, norm = (getattr(self, f"{name}_{part}") for part in ("in", "out", "norm"))
            h = out(F.relu(into(x if self.post_norm else norm(x))))
            if stream is not None:
                x = stream(name, h, x, norm if self.post_norm else None)
            else:
                x = norm(h + x) if self.post_norm else h + x
        return x


def tiny(post_norm, layers=1):
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(TinyBlock(post_norm) for _ in range(layers))
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.3, 0.5)
    return model.double()


def anatomy_of(model, kinds=("attention", "mlp"), note=""):
    def block(number, post_norm):
        path = f"blocks.{number}"
        sites = tuple(
            Site(f"{path}.{name}_out", role, number, "blocks", "linear", D + 1, D)
            for name, role in (("attention", "attention_out"), ("mlp", "mlp_out"))
        )
        sublayers = tuple(
            SubLayer(
                kind,
                out=f"{path}.{kind}_out",
                source=f"{path}.{kind}_{'in' if post_norm else 'norm'}",
                norm=f"{path}.{kind}_norm" if post_norm else None,
            )
            for kind in kinds
        )
        return Block(path, number, "blocks", D, sites, (), sublayers, post_norm, note=note)

    return Anatomy(tuple(block(i, b.post_norm) for i, b in enumerate(model.blocks)), ())


def adapt(model, anatomy, configs, dtype=torch.float64):
    """Injects the configs, activates them as a stack; name → {(layer, sub-layer): adapter}."""
    selection, made, present, taps = ActiveState(Default()), {}, {}, {}
    for name, config in configs.items():
        for placement in config.placements(anatomy):
            site = placement.site
            adapter = placement.config.build(site, CPU, dtype)
            layer = model.get_submodule(site.path)
            put(layer, name, adapter, selection, site.path)
            kind = "mh" if site.role == "attention_out" else "output"
            made.setdefault(name, {})[site.layer, kind] = adapter
            present.setdefault(site.path, {})[name] = adapter
            if site.source is not None:
                capture_input(
                    model.get_submodule(site.source), site.path, name, selection, site.source
                )
                taps.setdefault(site.source, {})[site.path] = None
    setup = Stack(*configs)
    selection.default.plan = Plan(
        setup=setup,
        sites={
            path: dataclasses.replace(compile_site([setup], at), only=None)
            for path, at in present.items()
        },
        captures={source: tuple(readers) for source, readers in taps.items()},
    )
    return made


def randomise(adapters, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters.values():
        for parameter in adapter.parameters():
            parameter.data = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float32
            ).to(parameter.dtype)


def update(config, p, x):
    """f(x) by the config's words, from a state dict; without norm behind it."""
    down = "adapter_down.0"
    z = x
    if config.ln_before:
        z = F.layer_norm(x, (D,), p[f"{down}.weight"], p[f"{down}.bias"])
        down = "adapter_down.1"
    z = torch.tanh(z @ p[f"{down}.weight"].T + p[f"{down}.bias"])
    z = z @ p["adapter_up.weight"].T + p["adapter_up.bias"]
    z = z * p.get("scaling", config.scaling)
    if config.use_gating:
        gate = 1 / (1 + torch.exp(-(x @ p["gate.weight"].T + p["gate.bias"])))
        z = z * gate.mean(1, keepdim=True)
    return z


def stream(config, p, h, inp, norm):
    """What the sub-layer leaves on the residual stream, by the config's words."""

    def behind(z):
        weight, bias = p["adapter_norm_after.weight"], p["adapter_norm_after.bias"]
        return F.layer_norm(z, (D,), weight, bias)

    def add(to, z):
        if config.ln_after and config.adapter_residual_before_ln:
            return behind(to + z)
        return to + (behind(z) if config.ln_after else z)

    apply = norm if norm is not None else lambda s: s
    if config.is_parallel:
        out = add(h, update(config, p, inp))
    elif config.original_ln_before:
        read = apply(h + inp)
        to = {True: h, "post_add": h + inp, False: read}[config.residual_before_ln]
        out = add(to, update(config, p, read))
    else:
        out = add(h, update(config, p, h))
    return apply(out + inp) if config.original_ln_after else out


# the gate of the paper's convention, which reads the mask of a call, is in test_gates
GATED = {"use_gating": True, "convention": "adapterhub"}
WHERE = ("original_ln_before", "original_ln_after", "residual_before_ln", "is_parallel")
EITHER = (False, True)
RESIDUALS = [
    dict(zip(WHERE, values, strict=True))
    for values in itertools.product(EITHER, EITHER, (True, False, "post_add"), EITHER)
]
INSIDES = [
    {},
    {"ln_before": True, "scaling": 3},
    {"ln_after": True, "scaling": "learned"},
    {"ln_after": True, "adapter_residual_before_ln": True, "scaling": 0.5},
    {**GATED, "scaling": "channel", "ln_before": True},
    {**GATED, "ln_before": True, "ln_after": True, "adapter_residual_before_ln": True},
]


def refused(options):
    before, after, residual, parallel = options.values()
    loses = not after and (not before or residual is not False)
    return loses or (parallel and before)


def idle(options):
    """Whether an option has no effect, of which a warning tells."""
    return options["residual_before_ln"] is not True and not options["original_ln_before"]


@pytest.mark.parametrize("inside", INSIDES, ids=lambda i: "-".join(i) or "plain")
@pytest.mark.parametrize("post_norm", [True, False], ids=["post-LN", "pre-LN"])
def test_every_combination_of_options_is_its_formula(post_norm, inside):
    x = torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tested = 0
    for residuals in RESIDUALS:
        options = {**PLAIN, **residuals, **inside}
        encloses = options.get("adapter_residual_before_ln", False)
        if refused(residuals) or (encloses and options["is_parallel"]):
            # some of their options have no effect besides
            with pytest.raises(ConfigError), warnings.catch_warnings(action="ignore"):
                BnConfig(**options)
            continue
        if idle(residuals):
            with pytest.warns(UserWarning, match="has an effect only with"):
                BnConfig(**options)
            continue
        config = BnConfig(**options)
        model = tiny(post_norm, layers=2)
        plain = copy.deepcopy(model)
        adapters = adapt(model, anatomy_of(model), {"a": config})["a"]
        randomise(adapters)
        expected = actual = x
        for number in range(2):

            def leave(name, h, inp, norm, number=number, config=config, adapters=adapters):
                kind = "mh" if name == "attention" else "output"
                return stream(config, adapters[number, kind].state_dict(), h, inp, norm)

            expected = plain.blocks[number](expected, leave)
            actual = model.blocks[number](actual)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10, msg=str(residuals))
        assert not torch.allclose(actual, plain.blocks[1](plain.blocks[0](x)))
        tested += 1
    assert tested == (5 if inside.get("adapter_residual_before_ln") else 6)


def peer():
    with safe_open(DATA / "bottleneck_options.safetensors", "pt") as file:
        configs = json.loads(file.metadata()["configs"])
        return configs, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


PEER_CONFIGS, PEER = peer()


def below(prefix):
    return {k.removeprefix(prefix): v for k, v in PEER.items() if k.startswith(prefix)}


def peer_model(family):
    sizes = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16,
    }  # fmt: skip
    if family == "bert":
        config = transformers.BertConfig(**sizes)
        model = transformers.BertModel(config, add_pooling_layer=False)
    else:
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_key_value_heads=1))
    model.load_state_dict(below(f"{family}/base/"))
    return model.eval()


CASES = [(f, case) for f in ("bert", "llama") for case in PEER_CONFIGS if f"{f}/{case}" in PEER]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_every_option_gives_what_adapters_gives(family, case):
    model = peer_model(family)
    base = model(PEER[f"{family}/input_ids"])[0]
    config = AdapterConfig.from_dict(PEER_CONFIGS[case])
    assert isinstance(config, BnConfig)
    if config.use_gating:
        config = config.replace(convention="adapterhub")
    adapters = adapt(model, find(model), {"a": config}, torch.float32)["a"]
    used = set()
    for (layer, kind), adapter in adapters.items():
        tensors = below(f"{family}/{case}/{layer}/{kind}/")
        used |= {f"{family}/{case}/{layer}/{kind}/{suffix}" for suffix in tensors}
        adapter.load_state_dict(tensors)
    assert used == {key for key in PEER if key.startswith(f"{family}/{case}/")}
    with torch.no_grad():
        hidden = model(PEER[f"{family}/input_ids"])[0]
    torch.testing.assert_close(hidden, PEER[f"{family}/{case}"], rtol=0, atol=1e-5)
    assert (hidden - base).abs().max() > 0.05


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("config", [SeqBnConfig(), DoubleSeqBnConfig(), ParBnConfig()])
def test_in_a_stack_the_first_acts_first(post_norm, config):
    config = config.replace(non_linearity="tanh", mh_adapter=True)
    model = tiny(post_norm)
    plain = copy.deepcopy(model)
    made = adapt(model, anatomy_of(model), {"a": config, "b": config})
    randomise(made["a"], seed=3)
    randomise(made["b"], seed=4)
    x = torch.randn(2, 3, D, dtype=torch.float64)

    def leave(name, h, inp, norm):
        # the first one's h, then the second's; inp is added and normed once at the end
        kind = (0, "mh" if name == "attention" else "output")
        for adapter in (made["a"][kind], made["b"][kind]):
            p = adapter.state_dict()
            read = inp if config.is_parallel else h
            if config.original_ln_before:
                read = norm(h + inp) if norm is not None else h + inp
            h = h + update(config, p, read)
        return h + inp if norm is None else norm(h + inp)

    torch.testing.assert_close(
        model.blocks[0](x), plain.blocks[0](x, leave), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(
    ("config", "post_norm", "expected"),
    [
        (DoubleSeqBnConfig(), True, [("attention_out", 0), ("mlp_out", 0)]),
        (DoubleSeqBnConfig(), False, [("attention_out", 0), ("mlp_out", 0)]),
        (SeqBnConfig(), True, [("mlp_norm", 0)]),
        (SeqBnConfig(), False, [("", 0)]),
        (SeqBnConfig(mh_adapter=True), False, [("attention_out", 1), ("", 0)]),
        (SeqBnConfig(residual_before_ln="post_add"), True, [("mlp_norm", 1)]),
        (ParBnConfig(), True, [("mlp_out", 1)]),
        (ParBnConfig(), False, [("mlp_out", 1)]),
        (AdapterPlusConfig(), True, [("mlp_norm", 0)]),
        (AdapterPlusConfig(), False, [("", 0)]),
    ],
)
def test_a_site_taps_the_stream_only_where_the_formula_needs_it(config, post_norm, expected):
    sites = [p.site for p in config.placements(anatomy_of(tiny(post_norm)))]
    shown = [
        (s.path.removeprefix("blocks.0").lstrip("."), int(s.source is not None)) for s in sites
    ]
    assert shown == expected
    assert all(s.d_in == s.d_out == D and s.stack == "blocks" for s in sites)


def test_leave_out_passes_over_blocks():
    anatomy = anatomy_of(tiny(True, layers=4))
    sites = [p.site for p in SeqBnConfig(leave_out=[0, 2]).placements(anatomy)]
    assert [s.layer for s in sites] == [1, 3]
    with pytest.raises(SiteError, match=r"blocks left by leave_out.*shorter leave_out"):
        SeqBnConfig(leave_out=[0, 1, 2, 3]).placements(anatomy)


def test_cross_adapters_sit_at_cross_attention_only():
    config = transformers.T5Config(
        d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=1, vocab_size=16
    )
    anatomy = find(transformers.T5Model(config))
    asked = DoubleSeqBnConfig(output_adapter=False, cross_adapter=True)
    sites = [(p.site.path, p.site.cross) for p in asked.placements(anatomy)]
    assert sites == [
        ("encoder.block.0.layer.0.SelfAttention.o", False),
        ("decoder.block.0.layer.0.SelfAttention.o", False),
        ("decoder.block.0.layer.1.EncDecAttention.o", True),
    ]
    with pytest.raises(SiteError, match=r"cross_adapter=True.*Write cross_adapter=False"):
        SeqBnConfig(cross_adapter=True).placements(anatomy_of(tiny(True)))


def test_a_block_that_cannot_be_read_is_an_error_with_its_layers_and_the_cure():
    anatomy = anatomy_of(tiny(True), kinds=("mlp",), note="two norms in front")
    assert len(SeqBnConfig().placements(anatomy)) == 1
    with pytest.raises(SiteError) as error:
        DoubleSeqBnConfig().placements(anatomy)
    for part in ("mh_adapter=True", "blocks.0", "(two norms in front)", "[0]"):
        assert part in str(error.value)
    with pytest.raises(SiteError, match="no transformer blocks: only convolutions"):
        SeqBnConfig().placements(Anatomy((), (), "only convolutions"))


def built(config, layer=0, d_model=D, dtype=torch.float32, path="block.out"):
    site = Site(path, "mlp_out", layer, "blocks", "output", d_model, d_model)
    return config.build(site, CPU, dtype)


def test_initial_values_follow_the_named_scheme():
    def weights(scheme):
        config = BnConfig(
            **{**PLAIN, "use_gating": True, "scaling": "channel", "init_weights": scheme},
            init_weights_seed=0,
            ln_before=True,
            ln_after=True,
        )
        return {k: v.detach() for k, v in built(config, d_model=256).named_parameters()}

    for scheme in ("bert", "mam_adapter", "houlsby"):
        p = weights(scheme)
        ones = ("scaling", "adapter_down.0.weight", "adapter_norm_after.weight")
        for key, value in p.items():
            if key in ones:
                assert torch.equal(value, torch.ones_like(value)), key
            elif key.endswith("bias"):
                assert torch.equal(value, torch.zeros_like(value)), key
        assert 0.015 < p["gate.weight"].std() < 0.025
    p = weights("bert")
    for key in ("adapter_down.1.weight", "adapter_up.weight"):
        assert 0.0195 < p[key].std() < 0.0205
        assert p[key].abs().max() > 0.06
    p = weights("mam_adapter")
    assert p["adapter_down.1.weight"].abs().max() <= 1 / 16
    assert p["adapter_down.1.weight"].abs().max() > 0.99 / 16
    assert not p["adapter_up.weight"].any()
    p = weights("houlsby")
    for key in ("adapter_down.1.weight", "adapter_up.weight"):
        assert 0.0085 < p[key].std() < 0.0092  # 0.88 of 0.01, by the cut
        assert 0.0199 < p[key].abs().max() <= 0.02


@pytest.mark.parametrize("scheme", ["bert", "mam_adapter", "houlsby"])
@pytest.mark.parametrize("seed", [0, -7, 2**40])
def test_a_seed_gives_each_site_values_of_its_own_in_any_order(scheme, seed):
    config = SeqBnConfig(init_weights=scheme, init_weights_seed=seed, reduction_factor=2)

    def make(path, dtype=torch.float32):
        return built(config, path=path, dtype=dtype).adapter_down[0].weight.detach()

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = make("a.0"), make("a.1")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(make("a.1"), second)
    assert torch.equal(make("a.0"), first)
    assert not torch.equal(first, second)
    assert torch.equal(make("a.0", torch.float16), first.half())


@pytest.mark.parametrize(
    "inside",
    [{}, {"ln_before": True, "ln_after": True}, GATED, {"scaling": "learned"},
     {"ln_after": True, "adapter_residual_before_ln": True}],
    ids=str,
)  # fmt: skip
def test_the_result_has_the_dtype_of_the_model_whatever_that_of_the_parameters(inside):
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for d_type, p_type in itertools.product(dtypes, dtypes):
        adapter = built(BnConfig(**PLAIN, **inside), dtype=p_type)
        randomise({0: adapter})
        x = torch.randn(2, 3, D).to(d_type)
        out = adapter.added(x, to=x, base=None)
        assert out.dtype == d_type
        exact = copy.deepcopy(adapter).double().added(x.double(), to=x.double(), base=None)
        near = 12 * max(torch.finfo(dtype).eps for dtype in (d_type, p_type))
        torch.testing.assert_close(out.double(), exact, rtol=near, atol=near)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (AdapterPlusConfig(reduction_factor=2, stochastic_depth=0.25), 4000),
        (SeqBnConfig(reduction_factor=2, dropout=0.25), 500),
    ],
)
def test_rows_or_features_are_dropped_in_training_only(config, rows):
    adapter = built(config)
    randomise({0: adapter})
    x = torch.randn(rows, 3, D)
    whole = adapter.eval().added(x, to=torch.zeros_like(x), base=None)
    torch.manual_seed(0)
    parts = adapter.train().added(x, to=torch.zeros_like(x), base=None)
    dropped = parts == 0
    if config.stochastic_depth:
        dropped = dropped.all(-1).all(-1)
    assert abs(dropped.double().mean() - 0.25) < 4 * (0.25 * 0.75 / dropped.numel()) ** 0.5
    torch.testing.assert_close(parts[~dropped], whole[~dropped] / 0.75)


def test_a_gate_is_one_number_per_sequence_for_any_shape_of_tokens():
    adapter = built(SeqBnConfig(reduction_factor=2, **GATED))
    randomise({0: adapter})
    image = torch.randn(2, 3, 4, D)
    zero = torch.zeros_like(image)
    tokens = adapter.added(image.flatten(1, 2), to=zero.flatten(1, 2), base=None)
    torch.testing.assert_close(adapter.added(image, to=zero, base=None).flatten(1, 2), tokens)
    # without tokens each row has its gate
    rows = adapter.added(image[:, :1, 0], to=zero[:, :1, 0], base=None)[:, 0]
    torch.testing.assert_close(adapter.added(image[:, 0, 0], to=zero[:, 0, 0], base=None), rows)


def test_gradients_are_exact():
    config = BnConfig(
        **PLAIN, **GATED, ln_before=True, ln_after=True, adapter_residual_before_ln=True,
        scaling="channel",
    )  # fmt: skip
    adapter = built(config, dtype=torch.float64)
    randomise({0: adapter})
    adapter.forward = lambda x, to: adapter.added(x, to=to, base=None)
    names, values = zip(*adapter.named_parameters(), strict=True)

    def call(x, to, *parameters):
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(adapter, state, (x, to))

    x, to = (torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(call, (x, to, *(v.detach().requires_grad_() for v in values)))


@pytest.mark.parametrize(
    ("factor", "layer", "width"),
    [(16, 0, 48), (2, 0, 384), (1.5, 0, 512), (0.5, 0, 1536), (1e6, 0, 1),
     ({"1": 8, "default": 16}, 0, 48), ({1: 8, "default": 16}, 1, 96), ({"0": 7}, 0, 109)],
)  # fmt: skip
def test_the_width_is_d_model_over_the_reduction_factor(factor, layer, width):
    adapter = built(SeqBnConfig(reduction_factor=factor), layer, 768)
    assert tuple(adapter.adapter_up.weight.shape) == (768, width)
    # as code for `adapters` reads it
    down = adapter.adapter_down[0]
    assert (down.in_features, down.out_features) == (768, width)


def test_a_width_that_does_not_exist_or_fit_is_an_error():
    with pytest.raises(MissingEntryError, match=r"no entry for block 3.*'default': 16") as error:
        built(SeqBnConfig(reduction_factor={"0": 8}), layer=3)
    assert isinstance(error.value, KeyError)  # as in `adapters`
    with pytest.raises(ConfigError, match=r"width of 7\d{11} exceeds 65536.*=16"):
        built(SeqBnConfig(reduction_factor=1e-9), d_model=768)
    with pytest.raises(ConfigError, match=r"width of inf exceeds 65536.*=16"):
        built(SeqBnConfig(reduction_factor=5e-324), d_model=768)


def test_options_of_compacter_warn_where_they_have_no_effect():
    """Configs written for adapters give them to any bottleneck."""
    with pytest.warns(UserWarning, match=r"phm_dim=8.*only with phm_layer=True.*phm_dim=4"):
        config = SeqBnConfig(phm_dim=8)
    assert config.phm_dim == 8


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"reduction_factor": 0}, ["reduction_factor=0", "above 0", "reduction_factor=16"]),
        ({"reduction_factor": -1}, ["-1", "reduction_factor=16"]),
        ({"reduction_factor": float("nan")}, ["nan", "reduction_factor=16"]),
        ({"reduction_factor": True}, ["True", "reduction_factor=16"]),
        ({"reduction_factor": "16"}, ["'16'", "reduction_factor=16"]),
        ({"reduction_factor": {"first": 2}}, ["'first'", "layer number"]),
        ({"reduction_factor": {"0": 0}}, ["{'0': 0}", "a number above 0"]),
        ({"reduction_factor": {}}, ["reduction_factor={}", "Write reduction_factor=16"]),
        ({"non_linearity": "reul"}, ["'reul'", "'relu'"]),
        ({"scaling": "learn"}, ["'learn'", "'learned', 'channel'"]),
        ({"scaling": float("nan")}, ["scaling=nan"]),
        ({"scaling": True}, ["scaling=True"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"stochastic_depth": -0.1}, ["stochastic_depth=-0.1", "stochastic_depth=0.0"]),
        ({"dtype": "int8"}, ["dtype='int8'", "'float32'", "dtype=None"]),
        ({"init_weights": "xavier"}, ["'xavier'", "'bert', 'mam_adapter', 'houlsby'"]),
        ({"init_weights_seed": 1.5}, ["init_weights_seed=1.5"]),
        ({"residual_before_ln": "post"}, ["'post'", "'post_add'"]),
        ({"residual_before_ln": 1}, ["residual_before_ln=1"]),
        ({"ln_before": "yes"}, ["ln_before='yes'", "True"]),
        ({"leave_out": [-1]}, ["leave_out=[-1]"]),
        ({"phm_layer": True, "init_weights": "houlsby"}, ["phm_layer=False"]),
        ({"phm_layer": True, "phm_rank": 0}, ["phm_rank=0", "from 1 to", "phm_rank=1"]),
        ({"phm_layer": True, "hypercomplex_nonlinearity": "phm"}, ["'phm'", "'glorot-normal'"]),
        ({"is_parallel": True}, ["is_parallel=True", "Write original_ln_before=False"]),
        ({"inv_adapter": "flow"}, ["inv_adapter='flow'", "one of None, 'nice'"]),
        ({"output_adapter": False}, ["no such bottleneck", "Write output_adapter=True"]),
        ({"original_ln_after": False}, ["original_ln_after=False", "Write original_ln_after=True"]),
    ],
)  # fmt: skip
def test_what_is_not_legal_says_what_is(fields, parts):
    with pytest.raises(ConfigError) as error:
        SeqBnConfig(**fields)
    for part in ("SeqBnConfig" if "non_linearity" not in fields else "", *parts):
        assert part in str(error.value)
    with pytest.raises(ConfigError):
        SeqBnConfig().replace(**fields)


def test_config_strings_are_those_of_adapters():
    for names, config in {
        ("seq_bn", "pfeiffer", None): SeqBnConfig(),
        ("double_seq_bn", "houlsby"): DoubleSeqBnConfig(),
        ("par_bn", "parallel"): ParBnConfig(),
        ("scaled_par_bn", "scaled_parallel"): ParBnConfig(scaling="learned"),
        ("adapter_plus",): AdapterPlusConfig(),
    }.items():
        for name in names:
            loaded = AdapterConfig.load(name)
            assert loaded == config
            assert type(loaded) is type(config)
    changed = AdapterConfig.load("scaled_par_bn[reduction_factor={'0': 4, 'default': 2}]")
    assert changed == scaled_par_bn().replace(reduction_factor={0: 4, "default": 2})
    union = AdapterConfig.load("seq_bn[leave_out=[0]]|par_bn")
    assert union == ConfigUnion(SeqBnConfig(leave_out=(0,)), ParBnConfig())


@pytest.mark.parametrize(
    "config",
    [DoubleSeqBnConfig(leave_out=[1]), scaled_par_bn(),
     SeqBnConfig(reduction_factor={"0": 4, "default": 2.5})],
)  # fmt: skip
def test_a_config_survives_json_repr_and_pickle(config):
    document = json.loads(json.dumps(config.to_dict()))
    # files of the peer have no architecture
    without = {k: v for k, v in document.items() if k != "architecture"}
    for read in (document, without):
        assert AdapterConfig.from_dict(read) == config
    assert hash(AdapterConfig.from_dict(document)) == hash(config)
    assert eval(repr(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_defaults_are_those_of_adapters():
    with pytest.raises(ConfigError, match=re.escape("no field 'reduction'")):
        AdapterConfig.load("seq_bn[reduction=2]")
    # these are ours
    ours = {"dtype": None, "convention": "paper", "site_convention": "paper"}
    defaults = {**PEER_CONFIGS["after"], **ours}
    for config in map(AdapterConfig.from_dict, PEER_CONFIGS.values()):
        assert {k for k in config.to_dict() if k != "architecture"} == set(defaults)
    plain = BnConfig(**{k: defaults[k] for k in PLAIN}).to_dict()
    assert {k: v for k, v in plain.items() if k != "architecture"} == defaults
