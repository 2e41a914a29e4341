"""Compacter: the sums of Kronecker products by torch.kron, what layers share, and its costs."""

import itertools
import json
import math
from functools import partial

import pytest
import torch
from families import tiny_config, tiny_inputs
from made import hidden
from made import made as filled
from safetensors.torch import load_file
from snapshots import adapter_bits, refused, stir
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel

from adapterzoo import (
    BatchSplit,
    CompacterConfig,
    CompacterPlusPlusConfig,
    ConfigUnion,
    Fuse,
    SeqBnConfig,
    StaticAdapterFusionConfig,
    init,
)
from adapterzoo.anatomy import Site
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError, ConfigError, StateError

PLUS = CompacterPlusPlusConfig(reduction_factor=4)
OWN = PLUS.replace(shared_phm_rule=False, factorized_phm_W=False, phm_bias=False, phm_dim=2)
ALL_SHARED = PLUS.replace(shared_W_phm=True, factorized_phm_rule=True, phm_rank=2)


def fill(model, name, seed=1):
    """Every tensor, also those that are not trained."""
    source = torch.Generator().manual_seed(seed)
    for _, module in model.adapter_modules(name):
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=source) * 0.4)


made = partial(filled, fill=fill)


def tensors(model, path, name="a"):
    """Those of one bottleneck and those of all, by the names of adapters."""
    modules = dict(model.adapter_modules(name))
    shared = modules.get("")
    own = dict(modules[path].state_dict())
    return own, {} if shared is None else dict(shared.state_dict())


def factor(found, name):
    """A tensor, or the product of its two factors."""
    return found[name] if name in found else found[f"{name}_left"] @ found[f"{name}_right"]


def f(model, config, path, x, name="a"):
    """The function of a bottleneck, with every matrix built as the paper writes it."""
    own, shared = tensors(model, path, name)
    shared = {key.removeprefix("phm."): t for key, t in shared.items()}
    for part, start in (("down", "adapter_down.0."), ("up", "adapter_up.")):
        mine = {key.removeprefix(start): t for key, t in own.items() if key.startswith(start)}
        rule = factor(shared if config.shared_phm_rule else mine, "phm_rule")
        w = factor(shared, f"W_{part}") if config.shared_W_phm else factor(mine, "W")
        assert rule.shape == (config.phm_dim,) * 3
        x = x @ sum(torch.kron(r, each) for r, each in zip(rule, w, strict=True))
        assert ("b" in mine) == config.phm_bias
        x = x + mine.get("b", 0)
        x = F.gelu(x) if part == "down" else x
    return x


OPTIONS = [
    dict(zip(("shared_phm_rule", "factorized_phm_rule", "shared_W_phm", "factorized_phm_W"), each,
             strict=True))
    for each in itertools.product((True, False), repeat=4)
]  # fmt: skip
SIZES = (
    {"phm_dim": 4, "phm_rank": 1, "reduction_factor": 4},
    # H is built; and wider inside than outside
    {"phm_dim": 2, "phm_rank": 5, "reduction_factor": 8, "phm_bias": False},
    {"phm_dim": 2, "phm_rank": 1, "reduction_factor": 0.5},
    {"phm_dim": 1, "phm_rank": 1, "reduction_factor": 4, "learn_phm": False},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "".join("01"[v] for v in o.values()))
def test_the_formula(options):
    """The output of each block of GPT-2 is s + f(s), with H by torch.kron."""
    for sizes in SIZES:
        fields = {**options, **sizes}
        if not fields["factorized_phm_W"]:
            del fields["phm_rank"]
        config = CompacterPlusPlusConfig(**fields)
        model = made("gpt2", a=config)
        plain = hidden(model)
        model.set_active_adapters("a")
        found = hidden(model)
        model.set_active_adapters(None)

        def change(_module, _args, out, path, config=config, model=model):
            s = out[0] if isinstance(out, tuple) else out
            s = s + f(model, config, path, s)
            return (s, *out[1:]) if isinstance(out, tuple) else s

        handles = []
        for path in ("h.0", "h.1"):
            block = model.get_submodule(path)
            handles.append(
                block.register_forward_hook(lambda *args, path=path, c=change: c(*args, path))
            )
        expected = hidden(model)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("config", [PLUS, OWN, ALL_SHARED])
def test_each_row_has_its_own(config):
    other = config.replace(init_weights_seed=1)
    model = made("bert", a=config, b=other, c=PLUS.replace(phm_dim=2, reduction_factor=8))
    inputs = tiny_inputs("bert", batch=3)
    alone = {}
    for name in ("a", "b", "c", None):
        model.set_active_adapters(name)
        alone[name] = hidden(model, **inputs)
    for names in (["b", None, "a"], ["a", "c", "b"], ["b", "b", "a"]):
        mixed = hidden(model, **inputs, adapter_names=names)
        want = torch.stack([alone[name][row] for row, name in enumerate(names)])
        torch.testing.assert_close(mixed, want, rtol=1e-9, atol=1e-9)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    want = torch.cat([alone["a"][:1], alone["b"][1:]])
    torch.testing.assert_close(hidden(model, **inputs), want, rtol=1e-9, atol=1e-9)


def test_it_is_fused_with_other_bottlenecks():
    """A fusion with V the identity gives an adapter beside itself the outputs of one."""
    bare = ALL_SHARED.replace(phm_bias=False)
    model = made("bert", a=bare, b=bare, c=SeqBnConfig(reduction_factor=4))
    fill(model, "b", 0)
    model.add_adapter_fusion("a,b", StaticAdapterFusionConfig())
    model.set_active_adapters("a")
    expected = hidden(model)
    model.set_active_adapters(Fuse("a", "b"))
    torch.testing.assert_close(hidden(model), expected, rtol=0, atol=1e-9)
    model.add_adapter_fusion("a,c", StaticAdapterFusionConfig())
    model.set_active_adapters(Fuse("a", "c"))
    assert (hidden(model) - expected).abs().max() > 1e-3


# --- what layers share, and what is trained ---


def test_what_layers_share_is_there_once_and_is_trained():
    model = made("bert", torch.float32, a=ALL_SHARED)
    keys = [key for key in model.state_dict() if key.startswith("shared_parameters.a.")]
    assert keys == [
        f"shared_parameters.a.phm.{key}"
        for key in ("phm_rule_left", "phm_rule_right", "W_down_left", "W_down_right", "W_up_left",
                    "W_up_right")
    ]  # fmt: skip
    model.train_adapter("a")
    model(**tiny_inputs("bert"))[0].square().sum().backward()
    own = {n: p for n, p in model.named_parameters() if n in keys}
    assert len(own) == len(keys)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in own.values())


@pytest.mark.parametrize("config", [PLUS, OWN])
def test_a_rule_that_is_not_learned_is_never_trained(config, tmp_path):
    model = made("bert", torch.float32, a=config.replace(learn_phm=False))
    model.train_adapter("a")
    rules = {k: t.clone() for k, t in model.state_dict().items() if "phm_rule" in k}
    assert len(rules) == (1 if config.shared_phm_rule else 4)
    assert not [n for n, p in model.named_parameters() if "phm_rule" in n]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(**tiny_inputs("bert"))[0].square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(t, after[key]) for key, t in rules.items())
    # it is saved, and averaged as what is trained
    model.save_adapter(tmp_path, "a")
    model.load_adapter(tmp_path, load_as="b")
    assert adapter_bits(model, "a") == adapter_bits(model, "b")
    stir(model, "b", 5)
    model.average_adapter("mean", ["a", "b"], weights=[0.25, 0.75])
    found = [dict(model.adapter_modules(n)) for n in ("a", "b", "mean")]
    for path in found[0]:
        a, b, mean = (each[path].state_dict() for each in found)
        for key, t in mean.items():
            torch.testing.assert_close(t, 0.25 * a[key] + 0.75 * b[key])


# --- initial values ---


def fresh(config, seed=0):
    torch.manual_seed(seed)
    model = init(AutoModel.from_config(tiny_config("bert")))
    model.add_adapter("a", config)
    return {key: t for key, t in model.state_dict().items() if ".a." in key}


def pooled(found, end):
    return torch.cat([t.flatten() for key, t in found.items() if key.endswith(end)])


@pytest.mark.parametrize("drawn", ["glorot-uniform", "glorot-normal", "normal"])
def test_w_is_drawn_as_the_config_says(drawn):
    """In adapters W is glorot-normal whatever it says."""
    config = CompacterConfig(
        phm_dim=8, reduction_factor=1, factorized_phm_W=False, hypercomplex_nonlinearity=drawn,
        phm_init_range=0.3,
    )  # fmt: skip
    w = pooled(fresh(config), ".W")
    std = 0.3 if drawn == "normal" else math.sqrt(2 / (4 + 4))
    assert len(w) == 8 * 8 * 4 * 4
    assert abs(w.std() / std - 1) < 0.1
    # of 1,024 normal values some are beyond three deviations
    assert (w.abs().max() <= math.sqrt(3) * std) == (drawn == "glorot-uniform")


@pytest.mark.parametrize(
    ("shared", "drawn", "std"),
    [(True, "normal", 0.3), (False, "normal", 0.01), (True, "uniform", 1 / math.sqrt(3)),
     (False, "uniform", 0.01 / math.sqrt(3))],
)  # fmt: skip
def test_rules_are_drawn_as_those_of_adapters(shared, drawn, std):
    config = CompacterConfig(
        phm_dim=8, reduction_factor=1, shared_phm_rule=shared, phm_c_init=drawn, phm_init_range=0.3
    )
    rule = pooled(fresh(config), "phm_rule")
    assert len(rule) == 8**3 * (1 if shared else 8)
    assert abs(rule.std() / std - 1) < 0.15
    assert (pooled(fresh(config), ".b") == 0).all()


@pytest.mark.parametrize("config", [PLUS, OWN, ALL_SHARED])
def test_with_mam_adapter_it_starts_as_the_identity(config):
    model = made("bert")
    config = config.replace(init_weights="mam_adapter")
    assert config.starts_as_identity
    model.add_adapter("a", config)
    base = hidden(model)
    model.train_adapter("a")
    model.eval()
    out = model(**tiny_inputs("bert"))[0]
    assert torch.equal(out, base)
    # and leaves it
    out.square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


# --- costs ---


@pytest.mark.parametrize(("n", "rank", "reduction"), [(4, 1, 32), (4, 2, 16), (8, 1, 16)])
def test_the_matrices_are_never_built_where_there_is_a_cheaper_product(n, rank, reduction):
    """Each takes n · rank · (d_model + n · width) multiplications per token."""
    d, tokens = 768, 64
    width = d // reduction
    config = PLUS.replace(phm_dim=n, phm_rank=rank, reduction_factor=reduction,
                          shared_phm_rule=False)  # fmt: skip
    site = Site("block.output", "mlp_out", 0, "block", "linear", d, d)
    layer = config.build(site, torch.device("cpu"), torch.float32)
    x = torch.randn(tokens, d)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer.transformed(x, None)
    rules = 2 * n * n * n * rank * width  # the rule into the narrower factor of each
    legal = 2 * (2 * n * rank * (d + n * width) * tokens + rules)
    assert counter.get_total_flops() <= legal
    assert legal < 2 * (2 * d * width * tokens)


def test_what_it_has_is_what_the_page_says():
    model = made("bert", a=CompacterConfig(reduction_factor=4))
    d, width, n = 32, 8, 4
    per_site = 2 * (d + width) + width + d
    assert sum(t.numel() for key, t in model.state_dict().items() if ".a." in key) == (
        4 * per_site + n**3
    )


# --- what is refused ---


def test_it_cannot_be_merged():
    model = made("bert", a=PLUS)
    with pytest.raises(StateError, match="a"):
        model.merge_adapter("a")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (PLUS.replace(phm_dim=3), ["phm_dim=3", "does not divide 32", "phm_dim=8"]),
        (PLUS.replace(reduction_factor=5), ["does not divide 6", "phm_dim=2"]),
        (ALL_SHARED.replace(reduction_factor={"0": 4, "default": 8}),
         ["shared_W_phm=True", "[(32, 4), (32, 8)]", "shared_W_phm=False"]),
    ],
)  # fmt: skip
def test_widths_that_do_not_fit_are_refused(config, parts):
    model = made("bert")
    before = list(model.state_dict())
    with pytest.raises(ConfigError) as error:
        model.add_adapter("a", config)
    for part in ("CompacterPlusPlusConfig(", *parts):
        assert part in str(error.value)
    assert list(model.state_dict()) == before


def test_it_is_at_least_as_wide_as_its_rule():
    """32 features over 32 are one, which four products cannot give."""
    model = made("bert", a=CompacterConfig())
    assert model.adapters_config["a"].width_at(0, 32) == 4


def test_its_config_is_that_of_adapters():
    for text, config in {
        "compacter": CompacterConfig(),
        "compacter++": CompacterPlusPlusConfig(),
        "seq_bn[phm_layer=True,reduction_factor=32,non_linearity='gelu']": PLUS.replace(
            reduction_factor=32
        ),
    }.items():
        assert AdapterConfig.load(text) == config
        assert AdapterConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# --- files ---


@pytest.mark.parametrize("form", ["native", "adapterhub"])
@pytest.mark.parametrize("base", [PLUS, OWN, ALL_SHARED])
@pytest.mark.parametrize(
    "more",
    [{}, {"inv_adapter": "nice", "inv_adapter_reduction_factor": 2}, {"learn_phm": False},
     {"ln_before": True, "scaling": "channel"}],
    ids=["plain", "invertible", "frozen", "norm"],
)  # fmt: skip
def test_files_give_it_back(base, more, form, tmp_path):
    model = made("bert", torch.float32, a=base.replace(**more))
    model.save_adapter(tmp_path, "a", format=form)
    model.load_adapter(tmp_path, load_as="b")
    assert adapter_bits(model, "a") == adapter_bits(model, "b")
    assert model.adapters_config["a"] == model.adapters_config["b"]
    found = []
    for name in "ab":
        model.set_active_adapters(name)
        found.append(hidden(model))
    assert torch.equal(*found)
    if form == "native":
        shared = [k for k in load_file(tmp_path / "adapter.safetensors") if k.startswith("/phm.")]
        assert len(shared) == base.shared_phm_rule * (1 + base.factorized_phm_rule) + 4 * (
            base.shared_W_phm
        )


HALVES = ConfigUnion(
    PLUS.replace(mh_adapter=True, output_adapter=False), PLUS.replace(init_weights_seed=1)
)


def test_adapters_has_one_rule_for_a_union_of_two(tmp_path):
    """A file of such a union gives both the rule; two rules that differ cannot be written."""
    model = made("bert", torch.float32, a=HALVES)
    out = tmp_path / "out"
    with refused(model, CheckpointError, "shared_parameters", "format='native'"):
        model.save_adapter(out, "a", format="adapterhub")
    assert not out.exists()
    shared = dict(model.adapter_modules("a"))[""]
    shared["1"].load_state_dict(shared["0"].state_dict())
    model.save_adapter(out, "a", format="adapterhub")
    written = torch.load(out / "pytorch_adapter.bin", weights_only=True)
    assert [key for key in written if "phm_rule" in key] == ["shared_parameters.a.phm_rule"]
    model.load_adapter(out, load_as="b")
    assert adapter_bits(model, "a") == adapter_bits(model, "b")
