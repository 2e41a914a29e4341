"""Adapters and heads that become one: PEFT, AdapterHub's `adapters` and formulas are the judges."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from families import tiny_config, tiny_inputs
from peft_world import QUIET, ours, plain
from safetensors import safe_open
from snapshots import adapter_bits, output, refused, same_bits, stir
from transformers import BertConfig
from variants import VARIANTS

from adapterzoo import AutoAdapterModel, Average, DoRAConfig, LoRAConfig, Stack
from adapterzoo.averaging import STRATEGIES
from adapterzoo.errors import (
    CompositionError,
    ConfigError,
    DuplicateNameError,
    StateError,
    UnknownNameError,
)
from adapterzoo.kernels.cayley import cayley

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]

GOLDEN = Path(__file__).parents[1] / "data" / "averages.safetensors"
WEIGHTS = [0.75, -1.5]
PRUNING = sorted(name for name, row in STRATEGIES.items() if row.prunes)
OF_PEFT = {"linear": {}, "cat": {}, "svd": {}, **{name: {"density": 0.4} for name in PRUNING}}


def close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def factors(model, name):
    """A and B of each layer."""
    return {p: (m.lora_A.detach(), m.lora_B.detach()) for p, m in model.adapter_modules(name)}


# --- PEFT ---


def worlds(family, **configs):
    """The same adapters in PEFT and here, in float64; each config is of PEFT's words."""
    theirs = plain(family).double()
    for name, config in configs.items():
        config = peft.LoraConfig(**config)
        if name == next(iter(configs)):
            theirs = peft.get_peft_model(theirs, config, name)
        else:
            theirs.add_adapter(name, config)
    source = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "lora_" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=source))
    mine = ours(family).double()
    for name, config in configs.items():
        own = {"alpha" if k == "lora_alpha" else k: v for k, v in config.items()}
        mine.add_adapter(
            name, LoRAConfig(**{k: v for k, v in own.items() if k != "fan_in_fan_out"})
        )
        with torch.no_grad():
            for path, module in mine.adapter_modules(name):
                a, b = of_peft(theirs, mine, path, name)
                module.lora_A.copy_(a)
                module.lora_B.copy_(b)
    return theirs, mine


def of_peft(theirs, mine, path, name):
    prefix = mine.base_model_prefix
    layer = theirs.get_submodule(f"base_model.model.{prefix}.{path}")
    if name in layer.lora_embedding_A:
        return layer.lora_embedding_A[name].detach(), layer.lora_embedding_B[name].detach()
    return layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()


def combined(theirs, mine, strategy, weights=WEIGHTS, names=("u", "v"), **options):
    """Both combine adapters to c, from the same random numbers."""
    tuner = theirs.base_model
    inject = tuner.inject_adapter

    def injecting(*args):
        inject(*args)
        # PEFT draws values for the new adapter first, which it overwrites
        torch.manual_seed(11)

    tuner.inject_adapter = injecting
    default = torch.get_default_dtype()
    # PEFT makes its weights in the default dtype
    torch.set_default_dtype(torch.float64)
    try:
        theirs.add_weighted_adapter([*names], weights, "c", strategy, **options)
    finally:
        torch.set_default_dtype(default)
        del tuner.inject_adapter
    torch.manual_seed(11)
    mine.add_weighted_adapter([*names], weights, "c", strategy, **options)


ONE_RANK = {
    "u": {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]},
    "v": {"r": 4, "lora_alpha": 3, "target_modules": ["query", "value"]},
}
OTHER_RANKS = {
    "u": {"r": 4, "lora_alpha": 8, "target_modules": ["query", "word_embeddings"]},
    "v": {"r": 7, "lora_alpha": 3, "target_modules": ["query", "word_embeddings"]},
}


def check_as_in_peft(theirs, mine, strategy, same_ranks=True):
    """The change of each layer is PEFT's, and its factors where there is one way to have them."""
    found = factors(mine, "c")
    decomposed = strategy.endswith("svd")
    for path, (a, b) in found.items():
        their_a, their_b = of_peft(theirs, mine, path, "c")
        # singular vectors magnify the rounding of the product by the gap between singular values
        close(b @ a, their_b @ their_a, 1e-10 if decomposed else 1e-12)
        if same_ranks:
            assert a.shape == their_a.shape
        if same_ranks and not decomposed:
            close(a, their_a)
            close(b, their_b)
    return len(found)


def check_same_logits(theirs, mine, family):
    theirs.set_adapter("c")
    mine.set_active_adapters("c")
    with torch.no_grad():
        inputs = tiny_inputs(family)
        close(mine(**inputs).logits, theirs.eval()(**inputs).logits, 1e-10)


@pytest.mark.needs("peft>=0.21", "it weighted differently")
@pytest.mark.parametrize("strategy", sorted(OF_PEFT))
def test_every_combination_is_that_of_peft(strategy):
    theirs, mine = worlds("bert", **ONE_RANK)
    combined(theirs, mine, strategy, **OF_PEFT[strategy])
    assert check_as_in_peft(theirs, mine, strategy) == 4
    config = mine.adapters_config["c"]
    assert (config.r, config.alpha) == ((8, 8) if strategy == "cat" else (4, 4))
    check_same_logits(theirs, mine, "bert")


@pytest.mark.needs("peft>=0.21", "it weighted differently")
@pytest.mark.parametrize("strategy", ["svd", "dare_ties_svd"])
@pytest.mark.parametrize(
    "options", [{"svd_rank": 3}, {"svd_clamp": 0.7}, {"svd_full_matrices": True, "svd_rank": 1}]
)
def test_options_of_svd_are_those_of_peft(strategy, options):
    # PEFT prunes the change of an embedding transposed
    configs = {k: {**v, "target_modules": ["query"]} for k, v in OTHER_RANKS.items()}
    theirs, mine = worlds("bert", **configs)
    combined(theirs, mine, strategy, **OF_PEFT[strategy], **options)
    check_as_in_peft(theirs, mine, strategy)


@pytest.mark.needs("peft>=0.21", "it weighted differently")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("strategy", ["cat", "svd"])
def test_other_ranks_and_places_are_combined_as_in_peft(family, strategy):
    names = {"bert": ["query", "word_embeddings"], "gpt2": ["c_fc", "mlp.c_proj"]}[family]
    fan = {"fan_in_fan_out": True} if family == "gpt2" else {}
    u = {"r": 4, "lora_alpha": 8, "target_modules": names[:1], **fan}
    v = {"r": 7, "lora_alpha": 3, "target_modules": names, **fan}
    theirs, mine = worlds(family, u=u, v=v)
    combined(theirs, mine, strategy)
    # PEFT fills up with zeros where one adapter is alone
    found = check_as_in_peft(theirs, mine, strategy, same_ranks=False)
    assert found == {"bert": 3, "gpt2": 4}[family]
    # ranks of layers where one is alone are its own
    if strategy == "cat":
        assert len(mine.adapters_config["c"].rank_pattern) == {"bert": 1, "gpt2": 2}[family]
    check_same_logits(theirs, mine, family)


@pytest.mark.parametrize("method", ["total", "frequency"])
def test_signs_are_elected_as_in_peft(method):
    theirs, mine = worlds("bert", **ONE_RANK, w={**ONE_RANK["u"], "lora_alpha": 1})
    options = {"density": 0.6, "majority_sign_method": method}
    combined(theirs, mine, "ties", [1.0, 4.0, 1.0], "uvw", **options)
    check_as_in_peft(theirs, mine, "ties")


# --- adapters ---


def golden():
    with safe_open(GOLDEN, "pt") as file:
        said = {key: json.loads(value) for key, value in file.metadata().items()}
        return said, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


SAID, TENSORS = golden()


def as_folder(place, folder, stem):
    """What `adapters` saved, in the files in which it did."""
    folder.mkdir()
    files = {"adapter": "pytorch_adapter.bin", "head": "pytorch_model_head.bin"}
    own = {k.removeprefix(f"{place}/"): t for k, t in TENSORS.items() if k.startswith(f"{place}/")}
    torch.save(own, folder / files[stem])
    (folder / f"{stem}_config.json").write_text(json.dumps(SAID["documents"][place]))
    return folder


def check_like_golden(found, expected):
    """In float64, so that what is compared with the peer's float32 is the same everywhere."""
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        close(tensor, expected[key].double(), 1e-6)


@pytest.mark.parametrize("case", [c for c in SAID["calls"] if not c.startswith("head/")])
def test_every_average_is_that_of_adapters(case, tmp_path):
    method, name = case.split("/")
    model = AutoAdapterModel.from_config(BertConfig(**SAID["sizes"])).eval()
    for each in ("a", "b", name):
        model.load_adapter(as_folder(f"{method}/{each}", tmp_path / each, "adapter"))
    model.double().average_adapter("c", ["a", "b"], **SAID["calls"][case])
    expected, found = dict(model.adapter_modules(name)), dict(model.adapter_modules("c"))
    assert list(expected) == list(found)
    for path, module in found.items():
        theirs, mine = expected[path].state_dict(), module.state_dict()
        if "svd" in str(SAID["calls"][case]):
            # theirs is without the scaling alpha / r of 2, and its config has it
            theirs, mine = ({"delta": change(m)} for m in (expected[path], module))
        check_like_golden(mine, theirs)


@pytest.mark.parametrize("case", [c for c in SAID["calls"] if c.startswith("head/")])
def test_every_average_of_heads_is_that_of_adapters(case, tmp_path):
    name = case.removeprefix("head/")
    model = AutoAdapterModel.from_config(BertConfig(**SAID["sizes"])).eval()
    for each in ("a", "b", name):
        model.load_head(as_folder(f"head/{each}", tmp_path / each, "head"))
    model.active_head = "a"
    model.double().average_head("c", ["a", "b"], **SAID["calls"][case])
    assert model.active_head == "a"
    check_like_golden(model.heads["c"].state_dict(), model.heads[name].state_dict())


def change(module):
    """The change of the weight, s · B A."""
    return module.scaling * module.delta_w.double()


@pytest.mark.parametrize("alpha", [8, 3.5, 0])
def test_the_change_keeps_its_size_at_any_rank(tiny, alpha):
    """With adapters, which leaves the scaling out, rank 2 of rank 4 would double it."""
    configs = [LoRAConfig(r=4, alpha=alpha, lora_bias=True), LoRAConfig(r=3, lora_bias=True)]
    model = with_adapters(tiny, configs)
    model.average_adapter("c", ["a", "b"], combine_strategy="lora_delta_w_svd", svd_rank=2)
    assert model.adapters_config["c"] == configs[0].replace(r=2, alpha=alpha or 2)
    for path, module in model.adapter_modules("c"):
        both = [dict(model.adapter_modules(n))[path] for n in "ab"]
        u, s, v = torch.linalg.svd(sum(change(each) for each in both) / 2)
        close(change(module), u[:, :2] * s[:2] @ v[:2], 1e-10)
        zero = torch.zeros_like(module.lora_B_bias)
        close(
            module.merged_bias(zero, None),
            sum(each.merged_bias(zero, None) for each in both) / 2,
            1e-12,
        )


# --- formulas ---

METHODS = ["lora", "dora", "dora[convention='adapterhub']", "lora[lora_bias=True]"]
FUSED = 'lora[attn_matrices=["q","k","v"],r=3]'


def with_adapters(tiny, config, family="bert", names="ab", std=0.3):
    """A model in float64 with stirred adapters; one config for all, or one for each."""
    model = tiny(family).double()
    configs = config if isinstance(config, list) else [config] * len(names)
    for seed, (name, own) in enumerate(zip(names, configs, strict=True)):
        model.add_adapter(name, own)
        stir(model, name, seed, std)
        with torch.no_grad():
            for _, module in model.adapter_modules(name):
                for key, parameter in module.named_parameters():
                    # where ones are no change, be near them
                    if key.endswith(("m", "boft_s")):
                        parameter.add_(1)
    return model


def acts(model, setup):
    model.set_active_adapters(setup)
    return output(model)


def changes_of(model, name):
    """By how much an adapter changes each weight, from merging it."""

    def weights():
        get = model.base_model.get_submodule
        return {p: get(p).weight.detach().clone() for p, _ in model.adapter_modules(name)}

    before = weights()
    model.merge_adapter(name)
    found = {path: weight - before[path] for path, weight in weights().items()}
    model.reset_adapter()
    return found


@pytest.mark.parametrize("strategy", ["cat", "svd"])
@pytest.mark.parametrize("config", METHODS)
def test_cat_and_svd_of_full_rank_add_what_adapters_do(tiny, config, strategy):
    model = with_adapters(tiny, config)
    rank = {"svd_rank": 32} if strategy == "svd" else {}
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "c", strategy, **rank)
    both, base = acts(model, Stack("a", "b")), acts(model, None)
    assert (both - base).abs().max() > 1e-2
    close(acts(model, "c"), both, 1e-11)
    # with weights: negation, addition, and a part of it
    model.add_weighted_adapter(["a", "b"], [-1.0, 0.5], "d", strategy, **rank)
    model.set_active_adapters(None)
    a, b, d = (changes_of(model, name) for name in "abd")
    for path in d:
        close(d[path], 0.5 * b[path] - a[path], 1e-11)


@pytest.mark.parametrize("config", METHODS)
def test_a_change_at_another_rank_than_alpha_is_the_sum_of_changes(tiny, config):
    """The rank divides the scaling, which the norm of adapters' DoRA leaves out."""
    model = with_adapters(tiny, config)
    # as many ranks as both have, and twice their alpha
    model.average_adapter("c", ["a", "b"], combine_strategy="lora_delta_w_svd", svd_rank=16)
    model.set_active_adapters(None)
    a, b, c = (changes_of(model, name) for name in "abc")
    for path in c:
        close(c[path], (a[path] + b[path]) / 2, 1e-11)


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "gpt_neox"])
@pytest.mark.parametrize("strategy", ["cat", "svd"])
def test_parts_of_layers_and_experts_are_added_too(tiny, family, strategy):
    config = FUSED if family != "mixtral" else "lora[intermediate_lora=True,output_lora=True]"
    model = with_adapters(tiny, config, family, std=1.0)
    rank = {"svd_rank": 32} if strategy == "svd" else {}
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "c", strategy, **rank)
    both = acts(model, Stack("a", "b"))
    assert (both - acts(model, None)).abs().max() > 1e-2
    close(acts(model, "c"), both, 1e-10)


# that "linear" turns the signs of both factors is in the peer's averages above
@pytest.mark.parametrize("call", [
    {"combine_strategy": "lora_linear_only_negate_b"}, {"combine_strategy": "lora_linear_sqrt"},
    {"combine_strategy": "cat"}, {"combine_strategy": "svd", "svd_rank": 8},
])  # fmt: skip
def test_a_negated_lora_is_the_base_less_its_change(tiny, call):
    model = with_adapters(tiny, LoRAConfig(r=4, alpha=6))
    model.average_adapter("c", ["a"], [-1.0], normalize_weights=False, **call)
    model.set_active_adapters(None)
    a, c = changes_of(model, "a"), changes_of(model, "c")
    for path in a:
        close(c[path], -a[path])
    # forgetting what was added: together they do nothing
    base = output(model)
    close(acts(model, Stack("a", "c")), base)


def test_linear_of_boft_and_dora_turns_about_what_changes_nothing(tiny):
    for config in ("boft", "dora"):
        model = with_adapters(tiny, config)
        model.average_adapter("c", ["a", "b"], [0.0, 0.0], normalize_weights=False)
        close(acts(model, "c"), acts(model, None))
    model = with_adapters(tiny, "boft")
    model.average_adapter("c", ["a"], [-1.0], normalize_weights=False)
    rotations = {n: dict(model.adapter_modules(n)) for n in "ac"}
    for path, module in rotations["a"].items():
        # the generator with the other sign is the inverse rotation
        first, second = module.boft_R.double(), rotations["c"][path].boft_R.double()
        turned = cayley(first) @ cayley(second)
        close(turned, torch.eye(turned.shape[-1]).double().expand_as(turned))


@pytest.mark.parametrize("convention", ["paper", "adapterhub"])
def test_linear_of_dora_is_its_formula(tiny, convention):
    model = with_adapters(tiny, DoRAConfig(convention=convention))
    model.average_adapter("c", ["a", "b"], [0.5, 1.0], normalize_weights=False)
    a, b, c = (dict(model.adapter_modules(name)) for name in "abc")
    for path, module in c.items():
        norm = model.base_model.get_submodule(path).weight.norm(dim=1)
        close(module.m, norm + 0.5 * (a[path].m - norm) + (b[path].m - norm))
        close(module.lora_A, 0.5 * a[path].lora_A + b[path].lora_A)
        close(module.lora_B, 0.5 * a[path].lora_B + b[path].lora_B)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_adapters_average_to_that_adapter(tiny, variant):
    """INVARIANTS 13: one adapter with weight 1 is that adapter, for every method."""
    model = with_adapters(tiny, VARIANTS[variant], names="a")
    for weights in ([1.0], [0.25, 0.75]):
        model.average_adapter("c", ["a"] * len(weights), weights, overwrite_ok=True)
        expected = dict(model.adapter_modules("a"))
        for path, module in model.adapter_modules("c"):
            theirs = expected[path].state_dict()
            for key, tensor in module.state_dict().items():
                close(tensor, theirs[key], 0 if len(weights) == 1 else 1e-12)
        assert model.adapters_config["c"] == model.adapters_config["a"]


@pytest.mark.parametrize("strategy", OF_PEFT)
@pytest.mark.parametrize("config", [*METHODS, "lora[use_rslora=True,rank_pattern={'value': 3}]"])
def test_one_adapter_of_weight_one_is_that_adapter(tiny, config, strategy):
    model = with_adapters(tiny, config)
    # at density 1 nothing is pruned
    density = {"density": 1.0} if strategy in PRUNING else {}
    model.add_weighted_adapter(["a"], [1.0], "c", strategy, **density)
    close(acts(model, "c"), acts(model, "a"), 1e-10)


def test_a_union_is_combined_member_by_member(tiny):
    model = with_adapters(tiny, "lora[r=4]|boft")
    model.average_adapter("c", ["a", "b"])
    for path, module in model.adapter_modules("c"):
        a, b = (dict(model.adapter_modules(name))[path].state_dict() for name in "ab")
        for key, tensor in module.state_dict().items():
            close(tensor, (a[key] + b[key]) / 2)
    with refused(model, CompositionError, "a BOFT adapter has none", "combine_strategy='linear'"):
        model.average_adapter("d", ["a", "b"], combine_strategy="cat")


def test_ranks_by_pattern_and_role(tiny):
    a = LoRAConfig(r=2, rank_pattern={"layer.0.attention.self.query": 5}, use_rslora=True)
    b = LoRAConfig(r=3, alpha_pattern={"value": 1.5}, attn_matrices=("v", "q"))
    model = with_adapters(tiny, [a, b])
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "c", "cat")
    ranks = {path: module.lora_A.shape[0] for path, module in model.adapter_modules("c")}
    assert ranks == {
        path: 8 if path == "encoder.layer.0.attention.self.query" else 5 for path in ranks
    }
    assert all(module.scaling == 1 for _, module in model.adapter_modules("c"))
    close(acts(model, "c"), acts(model, Stack("a", "b")), 1e-11)


# --- random numbers, dtypes, states ---


def test_a_seed_rules_and_disturbs_nobody(tiny):
    model = with_adapters(tiny, "lora")
    before = torch.get_rng_state()
    for name, seed in {"c": 3, "d": 3, "e": 4}.items():
        model.add_weighted_adapter(
            ["a", "b"], [1.0, 1.0], name, "dare_ties", density=0.5, seed=seed
        )
    assert torch.equal(before, torch.get_rng_state())
    assert adapter_bits(model, "c") == adapter_bits(model, "d")
    assert adapter_bits(model, "c") != adapter_bits(model, "e")
    # each layer has numbers of its own
    masks = [module.lora_A == 0 for _, module in model.adapter_modules("c")]
    assert not torch.equal(masks[0], masks[1])
    torch.manual_seed(1)
    model.add_weighted_adapter(["a", "b"], [1.0, 1.0], "f", "dare_linear", density=0.5)
    assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("strategy", ["linear", "svd", "ties"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_combined_in_float32(tiny, dtype, strategy):
    model = tiny().to(dtype)
    for seed, name in enumerate("ab"):
        model.add_adapter(name, "lora")
        stir(model, name, seed)
    call = {"combine_strategy": strategy, **({"density": 0.5} if strategy == "ties" else {})}
    model.average_adapter("c", ["a", "b"], **call)
    wide = copy.deepcopy(model).float()
    wide.average_adapter("d", ["a", "b"], **call)
    expected = dict(wide.adapter_modules("d"))
    for path, module in model.adapter_modules("c"):
        assert module.lora_A.dtype is dtype
        for key, tensor in module.state_dict().items():
            assert same_bits(tensor, expected[path].state_dict()[key].to(dtype))


def test_merged_weights_count_as_they_were(tiny):
    """DoRA's norms are those of the untouched weights."""
    model = with_adapters(tiny, "dora")
    model.average_adapter("c", ["a", "b"], combine_strategy="cat")
    model.merge_adapter("a")
    model.average_adapter("d", ["a", "b"], combine_strategy="cat")
    assert adapter_bits(model, "c") == adapter_bits(model, "d")


def test_an_average_is_saved_loaded_trained_and_merged(tiny, tmp_path):
    model = with_adapters(tiny, ["lora[r=2]", "lora[r=3]"])
    model.add_weighted_adapter(["a", "b"], WEIGHTS, "c", "svd", svd_rank=4)
    expected = acts(model, "c")
    model.save_adapter(tmp_path, "c")
    other = tiny().double()
    other.load_adapter(tmp_path, set_active=True)
    assert same_bits(output(other), expected)
    other.merge_adapter("c")
    close(output(other), expected, 1e-11)
    model.train_adapter("c")
    output(model)
    assert all(p.requires_grad for _, m in model.adapter_modules("c") for p in m.parameters())


def test_activation_and_overwriting(tiny):
    model = with_adapters(tiny, "lora")
    model.set_active_adapters("a")
    kept = adapter_bits(model, "b")
    model.average_adapter("c", ["a", "b"])
    assert model.active_adapters == Stack("a")
    model.average_adapter("d", {"a": 3, "b": 1}, set_active=True)
    assert model.active_adapters == Stack("d")
    a, b = (dict(model.adapter_modules(name)) for name in "ab")
    expected = {p: 0.75 * m.lora_A.detach() + 0.25 * b[p].lora_A.detach() for p, m in a.items()}
    # one of the list is replaced by the average
    model.average_adapter("a", {"a": 3, "b": 1}, overwrite_ok=True)
    for path, module in model.adapter_modules("a"):
        close(module.lora_A, expected[path])
    assert adapter_bits(model, "b") == kept


# --- refused, before anything has changed ---


@pytest.mark.parametrize(
    ("configs", "call", "says"),
    [
        (["lora[r=4]", "lora[r=8]"], {}, ["one r, but these have 4 and 8", "'cat' or 'svd'"]),
        (["lora[r=4]", "lora[r=8]"], {"combine_strategy": "lora_linear_sqrt"},
         ["one rank", "have [4, 8]", "'cat' or 'svd'"]),
        (["lora[alpha=4]", "lora"], {"combine_strategy": "lora_linear_only_negate_b"},
         ["one alpha, but these have 4 and 8", "'cat' or 'svd'"]),
        (["lora", "lora[attn_matrices=['k']]"], {},
         ["one attn_matrices, but these have ['q', 'v'] and ['k']", "'cat' or 'svd'"]),
        # no strategy takes these
        (["dora", "dora[convention='adapterhub']"], {}, ["one convention", "Average('a', 'b')"]),
        (["lora", "dora"], {}, ["methods lora, dora", "Average('a', 'b')"]),
        (["lora", "lora|seq_bn"], {}, ["methods lora, union", "Average('a', 'b')"]),
        (["lora|boft", "lora|seq_bn"], {}, ["'lora|boft', 'lora|bottleneck'"]),
        (["dora", "dora[convention='adapterhub']"], {"combine_strategy": "cat"},
         ["one convention, but these have paper and adapterhub", "Average('a', 'b')"]),
        (["seq_bn", "seq_bn[reduction_factor=8]"], {},
         ["one reduction_factor, but these have 16 and 8", "Average('a', 'b')"]),
        (["seq_bn"] * 2, {"combine_strategy": "svd"}, ["Bottleneck adapter has none", "'linear'"]),
        (["boft"] * 2, {"combine_strategy": "lora_linear_only_negate_b"},
         ["a BOFT adapter has none", "combine_strategy='linear'"]),
        (["lora[use_gating=True]"] * 2, {"combine_strategy": "cat"},
         ["use_gating=True", "combine_strategy='linear'"]),
        (["lora"] * 2, {"weights": [1e200, 1e200], "normalize_weights": False,
                        "combine_strategy": "cat"}, ["is not finite", "smaller weights"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tiny, configs, call, says):
    model = tiny()
    for seed, (name, config) in enumerate(zip("ab", configs, strict=True)):
        model.add_adapter(name, config)
        stir(model, name, seed)
    model.set_active_adapters("a")
    with refused(model, CompositionError, "average_adapter('c')", *says):
        model.average_adapter("c", ["a", "b"], **call)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if hasattr(VARIANTS[v], "attn_matrices")])
def test_layers_may_be_named_in_other_ways(tiny, variant):
    config = VARIANTS[variant]
    roles = {"q": "query", "k": "key", "v": "value", "o": "attention.output.dense"}
    names = [roles[matrix] for matrix in config.attn_matrices]
    more = {"feedforward_modules": []} if config.architecture == "ia3" else {}
    plain = config.replace(intermediate_lora=False, output_lora=False)
    model = with_adapters(tiny, plain, names="a")
    model.add_adapter("b", plain.replace(target_modules=names, **more))
    stir(model, "b", 1)
    model.average_adapter("c", ["a", "b"], [0.25, 0.75])
    model.add_adapter("d", plain)
    values = {path: module.state_dict() for path, module in model.adapter_modules("b")}
    for path, module in model.adapter_modules("d"):
        module.load_state_dict(values[path])
    model.average_adapter("e", ["a", "d"], [0.25, 0.75])
    found = dict(model.adapter_modules("e"))
    for path, module in model.adapter_modules("c"):
        for key, tensor in module.state_dict().items():
            close(tensor, found[path].state_dict()[key], 0)


def test_parts_of_a_layer_in_other_places_are_refused(tiny):
    model = tiny("gpt2")
    model.add_adapter("a", 'lora[attn_matrices=["q"]]')
    model.add_adapter("b", 'lora[attn_matrices=["q","v"]]')
    model.add_adapter("c", 'lora[attn_matrices=["q","v"],output_lora=True]')
    with refused(model, CompositionError, "attn_matrices", "Average('a', 'b')"):
        model.add_weighted_adapter(["a", "b"], WEIGHTS, "d", "cat")
    with refused(model, CompositionError, "parts of 'h.0.attn.c_attn'", "Stack('a', 'b')"):
        model.add_weighted_adapter(["b", "c"], WEIGHTS, "d", "cat")


@pytest.mark.parametrize("strategy", ["linear", "ties"])
def test_what_is_not_finite_is_refused(tiny, strategy):
    model = with_adapters(tiny, "lora")
    *_, (_, module) = model.adapter_modules("b")
    with torch.no_grad():
        module.lora_B[0, 0] = float("nan")
    density = {"density": 0.5} if strategy == "ties" else {}
    with refused(model, CompositionError, "is not finite", "Look for NaN"):
        model.average_adapter("c", ["a", "b"], combine_strategy=strategy, **density)


def test_what_torch_refuses_changes_nothing(tiny):
    model = with_adapters(tiny, "lora")
    with refused(model, RuntimeError, "driver", "only supported on CUDA"):
        model.average_adapter("c", ["a", "b"], combine_strategy="svd", svd_driver="gesvd")
    *_, (_, module) = model.adapter_modules("b")
    with torch.no_grad():
        module.lora_B[0, 0] = float("nan")
    with refused(model, RuntimeError, "svd", "non-finite values"):
        model.average_adapter("c", ["a", "b"], combine_strategy="svd")


def test_hints_name_the_adapters_of_the_model(tiny):
    model = tiny()
    with refused(model, ConfigError, "'first' is not a list", "Write ['a', 'b']."):
        model.average_adapter("c", "first")
    model.add_adapter("first", "seq_bn")
    with refused(model, ConfigError, "'first' is not a list", "Write ['first']."):
        model.average_adapter("c", "first")
    for name in ("second", "third"):
        model.add_adapter(name, "seq_bn" if name == "third" else "boft")
    for given, hint in {
        "first": "Write ['first', 'second'].",
        "third": "Write ['third', 'first'].",
        "none": "Write ['first', 'second'].",
        Average("third", "second"): "Write ['third', 'second'].",
    }.items():
        with refused(model, ConfigError, "average_adapter('c')", "is not a list", hint):
            model.average_adapter("c", given)
    for strategy, names in (("cat", ["third"]), ("linear", ["second", "third"])):
        hint = f"set_active_adapters(Average({', '.join(map(repr, names))}))"
        with refused(model, CompositionError, "average_adapter('c')", hint):
            model.average_adapter("c", names, combine_strategy=strategy)
    model.add_classification_head("h")
    with refused(model, ConfigError, "'h' is not a list", "Write ['h']."):
        model.average_head("c", "h")


def test_names_are_checked(tiny):
    model = with_adapters(tiny, "lora")
    with refused(model, UnknownNameError, "'bb'", "Did you mean 'b'"):
        model.average_adapter("c", ["a", "bb"])
    with refused(model, UnknownNameError, "'tie'", "Did you mean 'ties'"):
        model.average_adapter("c", ["a", "b"], combine_strategy="tie")
    with refused(model, DuplicateNameError, "average_adapter('a')", "overwrite_ok=True"):
        model.average_adapter("a", ["a", "b"])
    with refused(model, ConfigError, "average_adapter", "'../c'"):
        model.average_adapter("../c", ["a", "b"])
    with refused(model, ConfigError, "weights=[1.0] is not a list of 2", "weights=[1.0, 1.0]"):
        model.add_weighted_adapter(["a", "b"], [1.0], "c", "linear")
    model.merge_adapter("a")
    with refused(model, StateError, "'a' is merged", "reset_adapter()"):
        model.average_adapter("a", ["a", "b"], overwrite_ok=True)


def test_an_adapter_that_cannot_be_replaced_stays(tiny):
    """An average that may not act beside what is merged: the old one is back in its place."""
    model = with_adapters(tiny, ["dora", "dora", "lora[attn_matrices=['o']]"], names="adb")
    model.merge_adapter("a")
    model.set_active_adapters("b")
    with refused(model, StateError, "would act on weights that hold 'a'", "reset_adapter()"):
        model.average_adapter("d", ["d"], overwrite_ok=True, set_active=True)
    with refused(model, StateError, "would act on weights that hold 'a'", "reset_adapter()"):
        model.average_adapter("e", ["d"], set_active=True)


# --- heads ---


def with_heads(tiny):
    model = tiny()
    for seed, name in enumerate("ab"):
        model.add_classification_head(name, num_labels=3)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.heads[name].parameters():
                parameter.copy_(torch.randn_like(parameter))
    return model


def test_an_average_of_heads_is_active_when_asked_and_replaces(tiny):
    model = with_heads(tiny)
    a, b = (model.heads[name].state_dict() for name in "ab")
    expected = {key: 0.75 * a[key] + 0.25 * b[key] for key in a}
    model.average_head("a", {"a": 3, "b": 1}, overwrite_ok=True, set_active=True)
    assert model.active_head == "a"
    assert model.config.prediction_heads["a"] == model.config.prediction_heads["b"]
    for key, tensor in model.heads["a"].state_dict().items():
        close(tensor, expected[key], 1e-6)


def test_a_tied_language_model_stays_tied():
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for name in "ab":
        model.add_masked_lm_head(name)
    with torch.no_grad():
        model.heads["b"].get_parameter("0.bias").fill_(2.0)
    model.average_head("c", ["a", "b"])
    embedding = model.get_input_embeddings().weight
    assert any(parameter is embedding for parameter in model.heads["c"].parameters())
    close(model.heads["c"].get_parameter("0.bias"), torch.ones(32), 1e-6)


def test_heads_that_do_not_fit_are_refused(tiny):
    model = with_heads(tiny)
    model.add_classification_head("more", num_labels=4)
    model.add_tagging_head("tags", num_labels=3)
    model.active_head = "a"
    for name, heads, error, says in (
        ("c", ["a", "more"], CompositionError, ("one label2id", "'LABEL_3': 3", "one config")),
        ("c", ["a", "tags"], CompositionError, ("'classification', 'tagging'", "of one type")),
        ("c", ["a", "bb"], UnknownNameError, ("'bb'", "Did you mean 'b'")),
        ("a", ["a", "b"], DuplicateNameError, ("average_head('a')", "overwrite_ok=True")),
    ):
        with refused(model, error, *says):
            model.average_head(name, heads)
    with torch.no_grad():
        next(model.heads["b"].parameters()).fill_(float("inf"))
    with refused(model, CompositionError, "is not finite", "smaller weights"):
        model.average_head("c", ["a", "b"])


@pytest.mark.parametrize("kind", [["svd"], 5])
def test_the_way_of_combining_is_a_name(tiny, kind):
    model = tiny()
    model.add_adapter("a", "lora")
    with refused(model, UnknownNameError, "add_weighted_adapter(['a'])", repr(kind), "'cat'"):
        model.add_weighted_adapter(["a"], [1.0], "c", combination_type=kind)
    with refused(model, UnknownNameError, "average_adapter('c')", repr(kind), "'cat'"):
        model.average_adapter("c", ["a"], combine_strategy=kind)
