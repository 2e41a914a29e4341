"""LoRA: its formula in float64, PEFT beside it, where its adapters sit, and what it refuses."""

import itertools
import math
from types import SimpleNamespace

import peft
import pytest
import torch
from families import tiny_config, tiny_inputs
from snapshots import refused
from torch import nn
from transformers import AutoModel

import adapterzoo
from adapterzoo import LoRAConfig
from adapterzoo.anatomy import Site
from adapterzoo.errors import ConfigError, SiteError, StateError
from adapterzoo.inject.adapted import base_of
from adapterzoo.kernels import use
from adapterzoo.testing import checks, report

BATCH = 3


def model(family="bert"):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        made = AutoModel.from_config(tiny_config(family)).eval()
        # biases start as zeros: a mistake in them would not be seen
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
    return made


def adapted(config, family="bert", seed=1):
    """A model whose adapter "a" is active and holds no first value any more."""
    made = adapterzoo.init(model(family))
    made.add_adapter("a", config, set_active=True)
    stir(dict(parameters_of(made)), seed)
    return made


def parameters_of(made):
    return {
        f"{path}.{key}": parameter
        for path, module in made.adapter_modules("a")
        for key, parameter in module.named_parameters()
    }


def stir(parameters, seed):
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(parameters.items()):
            parameter.normal_(0.0, 0.2, generator=source)


# --- the formula ---


def linear(d_out, d_in):
    """A base layer y = W x + b, in float64."""
    source = torch.Generator().manual_seed(2)
    made = nn.Linear(d_in, d_out, dtype=torch.float64).requires_grad_(False)
    for parameter in made.parameters():
        parameter.normal_(generator=source)
    return base_of(made)


def layer(config, d_in=5, d_out=7):
    site = Site("layer.0.query", "query", 0, "layer", "linear", d_in, d_out)
    made = config.build(site, torch.device("cpu"), torch.float64)
    stir(dict(made.named_parameters()), seed=3)
    return made.eval()


X = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("r", [1, 3, 64])
@pytest.mark.parametrize("alpha", [1, 16, 0.5, -2])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_output_is_that_of_equation_3(r, alpha, use_rslora):
    lora, base = layer(LoRAConfig(r=r, alpha=alpha, use_rslora=use_rslora)), linear(7, 5)
    assert lora.lora_A.shape == (r, 5)
    assert lora.lora_B.shape == (7, r)
    s = alpha / (math.sqrt(r) if use_rslora else r)
    w = base.weight + s * lora.lora_B @ lora.lora_A
    torch.testing.assert_close(lora(X, base), X @ w.T + base.bias)
    torch.testing.assert_close(lora.merged_weight(base.weight, base), w)
    assert lora.merged_bias(base.bias, base) is base.bias


def test_the_bias_of_b_is_scaled_with_it():
    lora, base = layer(LoRAConfig(r=4, alpha=8, lora_bias=True)), linear(7, 5)
    w = base.weight + 2.0 * lora.lora_B @ lora.lora_A
    b = base.bias + 2.0 * lora.lora_B_bias
    torch.testing.assert_close(lora(X, base), X @ w.T + b)
    torch.testing.assert_close(lora.merged_bias(base.bias, base), b)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 4, 5), (2, 3, 4, 5)])
def test_the_gate_is_one_number_a_sequence(shape):
    config = LoRAConfig(r=4, alpha=8, use_gating=True, convention="adapterhub")
    lora, base = layer(config), linear(7, 5)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gates = torch.sigmoid((x * lora.gate.weight[0]).sum(-1) + lora.gate.bias[0])
    # the first dimension is the batch; what stands between it and the features are tokens
    means = gates if x.dim() < 3 else gates.flatten(1).mean(1).reshape(-1, *[1] * (x.dim() - 2))
    update = 2.0 * x @ (lora.lora_B @ lora.lora_A).T
    torch.testing.assert_close(lora(x, base), base(x) + update * means[..., None])
    with pytest.raises(StateError, match=r"use_gating=True.*Keep it active instead"):
        lora.merged_weight(base.weight, base)


def test_dropout_is_on_the_way_to_a():
    lora, base = layer(LoRAConfig(r=4, alpha=4, dropout=0.5)), linear(7, 5)
    torch.testing.assert_close(lora(X, base), layer(LoRAConfig(r=4, alpha=4))(X, base))
    lora.train()
    torch.manual_seed(0)
    # the definition draws the numbers that torch's dropout draws
    with use("reference"):
        y = lora(X, base)
    torch.manual_seed(0)
    dropped = nn.functional.dropout(X, 0.5)
    torch.testing.assert_close(y, base(X) + dropped @ (lora.lora_B @ lora.lora_A).T)


def test_first_values_are_those_of_a_linear_layer():
    torch.manual_seed(0)
    lora = LoRAConfig(r=8).build(
        Site("q", "query", 0, "", "linear", 256, 32), torch.device("cpu"), torch.float32
    )
    bound = 1 / math.sqrt(256)
    a, b = lora.lora_A.detach(), lora.lora_B.detach()
    assert not b.any()
    assert float(a.abs().max()) <= bound
    # uniform: deviation bound / √3
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [
        LoRAConfig(use_rslora=True, r=3, alpha=5),
        LoRAConfig(init_weights="bert"),
        LoRAConfig(use_gating=True, dropout=0.1),
        LoRAConfig(lora_bias=True),
        LoRAConfig(intermediate_lora=True, output_lora=True, attn_matrices=["q", "k", "v", "o"]),
        LoRAConfig(target_modules="all-linear", rank_pattern={"q_proj|c_attn": 2}),
        LoRAConfig(leave_out=[1], init_weights_seed=0),
    ],
    ids=repr,
)
def test_every_option_conforms(config):
    # compiling is slow, and the same for all options
    names = [name for name in checks if name != "compiles"]
    failures = report(config, only=names, kinds=["conv1d"])
    assert not failures, "\n".join(map(str, failures))


# --- PEFT beside it ---

# it warns of what this library refuses or finds by itself
quiet = pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::RuntimeWarning:peft")

TARGETS = {
    "bert": ["query", "value", "intermediate.dense", "output.dense"],
    "llama": ["q_proj", "v_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc"],
}


def peft_twin(made, family, **options):
    """PEFT's model with the values of ours, and its parameters by our names."""
    base = model(family).double()
    config = peft.LoraConfig(fan_in_fan_out=family == "gpt2", **options)
    twin = peft.get_peft_model(base, config).eval()
    names = {
        "lora_A": "lora_A.default.weight",
        "lora_B": "lora_B.default.weight",
        "lora_B_bias": "lora_B.default.bias",
    }
    theirs = {}
    for key, value in parameters_of(made).items():
        path, _, leaf = key.rpartition(".")
        site = base.get_submodule(path)
        embeds = isinstance(site, peft.tuners.lora.Embedding)
        name = f"lora_embedding_{leaf[-1]}.default" if embeds else names[leaf]
        theirs[key] = site.get_parameter(name)
        theirs[key].data.copy_(value)
    trained = [p for n, p in twin.named_parameters() if ".lora_" in n]
    assert {id(p) for p in trained} == {id(p) for p in theirs.values()}
    return twin, theirs


def assert_equals_peft(config, family, **options):
    made = adapted(config, family).double()
    made.train_adapter("a")
    made.eval()
    ours = parameters_of(made)
    twin, theirs = peft_twin(made, family, **options)
    batch = tiny_inputs(family, batch=BATCH)
    # the row of padding gets no gradient in an embedding
    batch["input_ids"][0, :2] = made.config.pad_token_id or 0
    outputs = [m(**batch).last_hidden_state for m in (made, twin)]
    assert outputs[1].dtype is torch.float64
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        made.set_active_adapters(None)
        plain = made(**batch).last_hidden_state
        made.set_active_adapters("a")
    assert float((outputs[0] - plain).detach().abs().max()) > 1e-2
    weights = torch.randn(plain.shape, generator=torch.Generator().manual_seed(6)) / plain.numel()
    for output in outputs:
        (output * weights).sum().backward()
    for key, parameter in theirs.items():
        torch.testing.assert_close(ours[key].grad, parameter.grad, rtol=1e-9, atol=1e-9)


@quiet
@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"lora_bias": True}, {"target_modules": "embedding"}],
    ids=str,
)
def test_outputs_and_gradients_are_pefts(family, options):
    embedding = {"bert": "word_embeddings", "llama": "embed_tokens", "gpt2": "wte"}[family]
    targets = [embedding] if "target_modules" in options else TARGETS[family]
    options = {**options, "target_modules": targets}
    assert_equals_peft(LoRAConfig(r=4, alpha=12, **options), family, r=4, lora_alpha=12, **options)


@quiet
@pytest.mark.parametrize(
    ("family", "ranks", "alphas"),
    [
        ("bert", {"query": 2, "layer.1.output.dense": 6}, {"value": 20}),
        ("bert", {r"encoder\.layer\.0\..*": 3}, {r".*\.1\.intermediate\.dense": 1}),
        ("llama", {"q_proj|up_proj": 2}, {"layers.0.self_attn.v_proj": 3, "down_proj": 5}),
        ("llama", {"layers.1.self_attn.q_proj": 2}, {"v_proj": 3}),
    ],
)
def test_patterns_mean_what_they_mean_in_peft(family, ranks, alphas):
    targets, patterns = TARGETS[family], {"rank_pattern": ranks, "alpha_pattern": alphas}
    config = LoRAConfig(r=4, alpha=8, target_modules=targets, **patterns)
    assert_equals_peft(config, family, r=4, lora_alpha=8, target_modules=targets, **patterns)


@quiet
@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        *itertools.product(
            TARGETS,
            [
                ["query", "q_proj", "c_attn"],
                ["dense", "down_proj", "c_proj"],
                ["attention.self.query", "self_attn.q_proj", "attn.c_attn"],
                ["0.attention.self.query", "0.self_attn.q_proj", "0.attn.c_attn"],
                r".*\.1\..*(query|value|q_proj|v_proj|c_attn)",
                r".*(key|k_proj|c_fc)$",
                r".*(encoder|layers|h)\..*\d+\..*(query|dense|_proj|c_\w+)",
                "all-linear",
            ],
        ),
        ("bert", {"exclude_modules": ["1.attention.self.query"]}),
        ("bert", {"exclude_modules": r".*layer\.0.*"}),
        ("bert", {"layers_to_transform": [1]}),
    ],
    ids=str,
)
def test_the_same_layers_are_adapted_as_in_peft(family, wanted):
    plain = model(family)
    if isinstance(wanted, list):
        # here a name that matches nothing is an error, in PEFT it is not
        paths = [path for path, _ in plain.named_modules()]
        wanted = [n for n in wanted if any(p == n or p.endswith(f".{n}") for p in paths)]
    options = {"target_modules": wanted}
    if isinstance(wanted, dict):
        options = {"target_modules": ["query", "value"], **wanted}
    theirs = peft.get_peft_model(plain, peft.LoraConfig(r=2, **options)).base_model.model
    expected = [p for p, m in theirs.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
    if wanted == "all-linear":
        # PEFT's also means a pooler behind the blocks
        expected = [path for path in expected if not path.startswith("pooler.")]
    assert expected
    made = adapted(LoRAConfig(r=2, **options), family)
    assert sorted(path for path, _ in made.adapter_modules("a")) == sorted(expected)


# --- the vocabulary of adapters ---


@pytest.mark.parametrize(
    ("fields", "expected", "blocks"),
    [
        ({}, ["attention.self.query", "attention.self.value"], [0, 1]),
        ({"attn_matrices": ["k"]}, ["attention.self.key"], [0, 1]),
        ({"attn_matrices": ["o"]}, ["attention.output.dense"], [0, 1]),
        # named twice, adapted once
        ({"attn_matrices": ["q", "q"]}, ["attention.self.query"], [0, 1]),
        ({"selfattn_lora": False, "intermediate_lora": True}, ["intermediate.dense"], [0, 1]),
        ({"selfattn_lora": False, "output_lora": True}, ["output.dense"], [0, 1]),
        ({"attn_matrices": ["q"], "leave_out": [0]}, ["attention.self.query"], [1]),
        ({"attn_matrices": ["q"], "layers_to_transform": [1]}, ["attention.self.query"], [1]),
    ],
    ids=str,
)
def test_roles_and_numbers_choose_layers(fields, expected, blocks):
    made = adapted(LoRAConfig(r=2, **fields))
    paths = [f"encoder.layer.{i}.{name}" for i in blocks for name in expected]
    assert sorted(path for path, _ in made.adapter_modules("a")) == sorted(paths)
    # rank · (d_in + d_out)
    sizes = {"intermediate.dense": 96, "output.dense": 96}
    count = sum(2 * sizes.get(name, 64) for name in expected) * len(blocks)
    assert sum(p.numel() for p in parameters_of(made).values()) == count


@pytest.mark.parametrize("matrices", ["q", "k", "v", "qv", "qkv"])
def test_the_parts_of_a_fused_layer_are_adapted_one_by_one(matrices):
    made = adapted(LoRAConfig(r=2, alpha=6, attn_matrices=matrices), "gpt2").double()
    plain = model("gpt2").double()
    # the definition: each part's update on its third of c_attn's columns [d_in, 3 d]
    with torch.no_grad():
        for path, parts in made.adapter_modules("a"):
            weight = plain.get_submodule(path).weight
            width = weight.shape[1] // 3
            for matrix in matrices:
                part = parts.get_submodule({"q": "query", "k": "key", "v": "value"}[matrix])
                first = "qkv".index(matrix) * width
                assert part.lora_B.shape == (width, 2)
                weight[:, first : first + width] += 3.0 * (part.lora_B @ part.lora_A).T
    batch = tiny_inputs("gpt2", batch=BATCH)
    with torch.no_grad():
        outputs = [m(**batch).last_hidden_state for m in (made, plain)]
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_of_their_layers_dtype_or_as_said(dtype):
    made = adapterzoo.init(model().to(dtype))
    made.add_adapter("as layer", LoRAConfig(r=2))
    made.add_adapter("as said", LoRAConfig(r=2, dtype="float32"), set_active=True)
    for name, expected in (("as layer", dtype), ("as said", torch.float32)):
        for _, module in made.adapter_modules(name):
            assert {p.dtype for p in module.parameters()} == {expected}
    with torch.no_grad():
        assert made(**tiny_inputs("bert", batch=BATCH)).last_hidden_state.dtype is dtype


# --- refusals ---


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"init_weights_seed": "x"}, ["init_weights_seed='x'", "a whole number", "=None."]),
        ({"r": 0}, ["LoRAConfig(r=0)", "1 to 65536", "Write r=1"]),
        ({"r": -1}, ["LoRAConfig(r=-1)", "1 to 65536", "Write r=1"]),
        ({"r": 10**9}, ["LoRAConfig(r=1000000000)", "65536", "Write r=65536"]),
        ({"r": 2.5}, ["r=2.5", "whole number"]),
        ({"r": True}, ["r=True"]),
        ({"r": "8"}, ["r='8'"]),
        ({"alpha": float("nan")}, ["alpha=nan"]),
        ({"alpha": float("inf")}, ["alpha=inf"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"dropout": -0.1}, ["dropout=-0.1", "Write dropout=0.0"]),
        ({"init_weights": "pizza"}, ["init_weights='pizza'", "'lora', 'bert'"]),
        ({"dtype": "int8"}, ["dtype='int8'", "float32"]),
        ({"attn_matrices": ["q", "x"]}, ["'x'", "'q', 'k', 'v', 'o'", "Write attn_matrices"]),
        ({"attn_matrices": [["q"]]}, ["attn_matrices=[['q']]", "Write attn_matrices"]),
        ({"selfattn_lora": False}, ["nothing is left to adapt", "target_modules='all-linear'"]),
        ({"attn_matrices": []}, ["nothing is left to adapt", "target_modules='all-linear'"]),
        ({"attn_matrices": None}, ["Write attn_matrices=['q', 'v']"]),
        ({"attn_matrices": 3}, ["Write attn_matrices=['q', 'v']"]),
        ({"target_modules": []}, ["no target_modules", "Write target_modules"]),
        ({"target_modules": 3}, ["target_modules=3", "Write target_modules"]),
        ({"target_modules": "(query"}, ["'(query'", "not a regular expression"]),
        ({"target_modules": ["query", 1]}, ["target_modules=['query', 1]", "Write target_modules"]),
        ({"exclude_modules": ""}, ["exclude_modules=''"]),
        ({"leave_out": [-1]}, ["leave_out=[-1]", "Write leave_out=[0, 1]"]),
        ({"leave_out": "0"}, ["leave_out='0'", "Write leave_out=[0, 1]"]),
        ({"layers_to_transform": [0.5]}, ["layers_to_transform=[0.5]"]),
        ({"rank_pattern": {"query": 0}}, ["r=0"]),
        ({"rank_pattern": {"(query": 2}}, ["'(query'", "not a regular", "={'query': 4}"]),
        ({"rank_pattern": 3}, ["rank_pattern=3", "Write rank_pattern={'query': 4}"]),
        ({"alpha_pattern": {3: 4}}, ["alpha_pattern={3: 4}", "Write alpha_pattern"]),
        ({"alpha_pattern": {"query": "a"}}, ["alpha='a'"]),
    ],
    ids=str,
)
def test_a_value_that_is_not_legal_is_refused(fields, says):
    with pytest.raises(ConfigError) as caught:
        LoRAConfig(**fields)
    for part in says:
        assert part in str(caught.value)


EMBEDDING = {"target_modules": ["word_embeddings"]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"target_modules": ["no_such"]}, ["'no_such'", "'query'", "some of these names"]),
        ({"target_modules": ["query", "vlaue"]}, ["no layer matches 'vlaue'", "'value'"]),
        ({"target_modules": r"layers\.\d+\.q"}, [r"layers\\.\\d+\\.q", "'query'"]),
        ({"leave_out": [0, 1]}, ["leave_out", "blocks"]),
        ({"target_modules": ["query"], "leave_out": [0, 1]}, ["leave_out", "2 blocks"]),
        ({"exclude_modules": ["query", "value"]}, ["exclude_modules", "2 blocks"]),
        ({"rank_pattern": {"proj": 4}}, ["'proj'", "names, 'query', 'value'"]),
        ({"alpha_pattern": {"proj": 4}}, ["'proj'", "names, 'query', 'value'"]),
        # an embedding has no features to drop or gate
        ({**EMBEDDING, "dropout": 0.1}, ["dropout=0.1", "Write"]),
        ({**EMBEDDING, "use_gating": True}, ["word_embeddings", "Write use_gating=False"]),
        ({**EMBEDDING, "lora_bias": True}, ["word_embeddings", "lora_bias=False"]),
    ],
    ids=str,
)
def test_what_fits_no_layer_is_refused_and_changes_nothing(fields, says):
    made = adapterzoo.init(model())
    error = ConfigError if fields.get("target_modules") == ["word_embeddings"] else SiteError
    with refused(made, error, *says):
        made.add_adapter("a", LoRAConfig(**fields))


@pytest.mark.parametrize(
    ("exclude", "missing"),
    [(["qurey"], "'qurey'"), (["value", "qurey", "dnese"], "'qurey', 'dnese'"),
     (["0.attention.self.queri"], "'0.attention.self.queri'"),
     (r".*\.q(ue)?rey", r"'.*\\.q(ue)?rey'")],
    ids=str,
)  # fmt: skip
def test_an_exclusion_that_matches_no_layer_is_said(exclude, missing):
    made = adapterzoo.init(model())
    with pytest.warns(UserWarning, match="exclude_modules") as caught:
        made.add_adapter("a", LoRAConfig(exclude_modules=exclude))
    (warning,) = caught
    assert f"no layer matches {missing}" in str(warning.message)
    assert "LoRAConfig(exclude_modules=" in str(warning.message)
    assert "'query'" in str(warning.message)
    # what PEFT says of it, and what it does: it adapts the others
    assert len(list(made.adapter_modules("a"))) == (2 if "value" in exclude else 4)


EXCLUDED = [["key"], ["word_embeddings"], r".*layer\.1\..*", "pooler.dense"]


@pytest.mark.parametrize("exclude", EXCLUDED)
def test_an_exclusion_of_what_is_not_targeted_is_fine(exclude):
    made = adapterzoo.init(model())
    made.add_adapter("a", LoRAConfig(exclude_modules=exclude))
    assert "a" in made.adapters_config


def test_a_bias_is_not_merged_where_there_is_none():
    made = adapted(LoRAConfig(target_modules=["q_proj"], lora_bias=True), "llama")
    with refused(made, StateError, "has no bias", "Keep it active"):
        made.merge_adapter("a")


@pytest.mark.parametrize("fields", [{"leave_out": [1]}, {"layers_to_transform": [0]}], ids=str)
def test_a_pattern_may_be_of_a_block_without_adapters(fields):
    key = "layer.1.attention.self.query"
    made = adapterzoo.init(model())
    made.add_adapter("a", LoRAConfig(rank_pattern={key: 4, "value": 2}, **fields))
    ranks = {path: module.lora_A.shape[0] for path, module in made.adapter_modules("a")}
    assert ranks == {
        f"encoder.layer.0.attention.self.{k}": r for k, r in (("query", 8), ("value", 2))
    }


@pytest.mark.parametrize(
    ("pattern", "path", "rank"),
    [
        ("(?i)QUERY", "layer.0.self.query", 3),
        ("self.query", "layer.0.self.query", 3),
        (r"layer\.\d.*", "layer.0.self.query", 3),
        (r"layer.*|key", "encoder.layer.0.self.query", 3),
        ("^query", "layer.0.self.query", 8),
        ("^query", "query", 3),
        ("uery", "layer.0.self.query", 8),
        ("self", "layer.0.self.query", 8),
    ],
)
def test_the_key_of_a_pattern_fits_from_a_name_on(pattern, path, rank):
    assert LoRAConfig(rank_pattern={pattern: 3}).rank_at(path) == rank


@pytest.mark.parametrize("name", ["lora", "dora"])
def test_padding_gives_no_gradient_to_its_column_of_a(name):
    made = adapted(f"{name}[r=4,target_modules=['word_embeddings']]")
    made.train_adapter("a")
    table = made.get_input_embeddings()
    ((_, adapter),) = made.adapter_modules("a")
    tokens = torch.tensor([[table.padding_idx, 5, 6, table.padding_idx, 5]])
    weight = torch.randn(*tokens.shape, table.weight.shape[1])
    (table(tokens) * weight).sum().backward()
    a = adapter.lora_A.detach().clone().requires_grad_()
    gain = 1.0
    if name == "dora":
        gain = adapter.gain(SimpleNamespace(weight=table.weight.T, split=None)).detach()
    update = a.T[tokens] @ adapter.lora_B.detach().T * adapter.scaling * gain
    (expected,) = torch.autograd.grad((update * weight).sum(), a)
    assert expected[:, table.padding_idx].all()
    expected[:, table.padding_idx] = 0.0
    torch.testing.assert_close(adapter.lora_A.grad, expected, rtol=1e-5, atol=1e-6)
