"""VeRA: the formula, what layers share, merging, averages; files are in the tests of formats."""

import pytest
import torch
from families import tiny_config, tiny_inputs
from made import hidden, made
from peft import VeraConfig as PeftVeraConfig
from peft import get_peft_model
from snapshots import of_adapter
from transformers import AutoModel

from adapterzoo import BatchSplit, Stack, VeraConfig
from adapterzoo.errors import CompositionError, ConfigError

PAPER = VeraConfig(r=4, vera_b=0.3, attn_matrices=("q", "k", "v", "o"), intermediate_lora=True)
WIDE = PAPER.replace(output_lora=True)
DENSE = VeraConfig(r=4, convention="adapterhub", alpha=6, vera_b=0.3)


def shared(model, name="a"):
    return model.shared_parameters[name].lora_A, model.shared_parameters[name].lora_B


def adapter(model, path, name="a"):
    return dict(model.adapter_modules(name))[path]


@pytest.mark.parametrize("config", [WIDE, DENSE], ids=["paper", "adapterhub"])
def test_the_formula(config):
    """Output y + s · Λ_b B Λ_d A x of a layer narrower than the widest, by plain torch."""
    model = made("llama", a=config)
    path = "layers.0.self_attn.v_proj"
    layer, module = model.get_submodule(path), adapter(model, path)
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    with torch.no_grad():
        base = layer(x)
        model.set_active_adapters("a")
        got = layer(x)
    A, B = (t[: layer.out_features] if i else t[:, :32] for i, t in enumerate(shared(model)))
    d, b = module.lambda_d.detach(), module.lambda_b.detach()
    d, b = (t if config.convention == "adapterhub" else torch.diag(t) for t in (d, b))
    s = 6 / 4 if config.convention == "adapterhub" else 1.0
    torch.testing.assert_close(got, base + s * x @ (b @ B @ d @ A).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "d_in", "d_out"),
    # the feed-forward part is the widest; keys and values of groups the narrowest
    [("llama", 64, 64), ("bert", 64, 64), ("gpt2", 128, 128)],
)
def test_the_widest_layer_sets_the_size(family, d_in, d_out):
    model = made(family, a=WIDE)
    A, B = shared(model)
    assert (A.shape, B.shape) == ((4, d_in), (d_out, 4))
    assert (A.dtype, A.requires_grad, B.requires_grad) == (torch.float64, False, False)
    model.set_active_adapters("a")
    active = hidden(model)
    model.set_active_adapters(None)
    assert not torch.allclose(active, hidden(model))


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("config", [WIDE, DENSE], ids=["paper", "adapterhub"])
def test_merged_is_active(family, config):
    model = made(family, a=config)
    model.set_active_adapters("a")
    want = hidden(model)
    model.merge_adapter("a")
    model.set_active_adapters(None)
    torch.testing.assert_close(hidden(model), want, rtol=1e-9, atol=1e-9)
    model.reset_adapter()
    assert not torch.allclose(hidden(model), want)


def test_the_shared_matrices_are_there_once_and_are_never_trained():
    model = made("bert", a=WIDE)
    model.train_adapter("a")
    assert [k for k in model.state_dict() if "lora_" in k] == [
        "shared_parameters.a.lora_A",
        "shared_parameters.a.lora_B",
    ]
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all(n.endswith(("lambda_d", "lambda_b")) for n in trained)
    before = [t.clone() for t in shared(model)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(**tiny_inputs("bert"))[0].square().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n in trained)
    optimizer.step()
    assert all(t.grad is None for t in shared(model))
    assert all(torch.equal(*pair) for pair in zip(before, shared(model), strict=True))


def test_the_matrices_are_those_of_peft():
    """One seed draws A, then B, as PEFT's do: files need not hold them."""
    base = AutoModel.from_config(tiny_config("bert"))
    targets = ["query", "value"]
    peft = get_peft_model(base, PeftVeraConfig(r=4, target_modules=targets, projection_prng_key=7))
    model = made("bert", torch.float32, a=VeraConfig(r=4, projection_prng_key=7))
    buffers = dict(peft.named_buffers())
    for name, ours in zip(("vera_A", "vera_B"), shared(model), strict=True):
        theirs = next(t for n, t in buffers.items() if n.endswith(f"{name}.default"))
        assert torch.equal(ours, theirs)


def test_a_fresh_one_is_the_identity():
    model = made("bert")
    model.add_adapter("a", VeraConfig(r=4))
    base = hidden(model)
    model.set_active_adapters("a")
    assert torch.equal(hidden(model), base)


def test_averages_need_equal_matrices():
    model = made("bert", a=PAPER, b=PAPER, c=PAPER.replace(projection_prng_key=1))
    model.average_adapter("mean", ["a", "b"], weights=[0.25, 0.75])
    path = "encoder.layer.0.attention.self.query"
    found = {n: adapter(model, path, n).lambda_d for n in ("a", "b", "mean")}
    torch.testing.assert_close(found["mean"], 0.25 * found["a"] + 0.75 * found["b"])
    assert torch.equal(shared(model, "mean")[0], shared(model)[0])
    with pytest.raises(
        CompositionError, match=r"one projection_prng_key, but these have 0 and 1.*Average"
    ):
        model.average_adapter("other", ["a", "c"])
    assert "other" not in model.adapters_config


def test_rows_and_stacks_are_those_of_each_alone():
    model = made("llama", a=PAPER, b=PAPER.replace(projection_prng_key=3))
    inputs = tiny_inputs("llama", batch=3)
    alone = {}
    for name in ("a", "b", None):
        model.set_active_adapters(name)
        alone[name] = hidden(model, **inputs)
    mixed = hidden(model, **inputs, adapter_names=["b", None, "a"])
    want = torch.stack([alone["b"][0], alone[None][1], alone["a"][2]])
    torch.testing.assert_close(mixed, want, rtol=1e-9, atol=1e-9)
    model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
    want = torch.cat([alone["a"][:1], alone["b"][1:]])
    torch.testing.assert_close(hidden(model, **inputs), want, rtol=1e-9, atol=1e-9)
    model.set_active_adapters(Stack("a", "b"))
    both = hidden(model, **inputs)
    model.merge_adapter("a")
    model.set_active_adapters("b")
    torch.testing.assert_close(hidden(model, **inputs), both, rtol=1e-9, atol=1e-9)


def test_the_dtype_is_that_of_the_layer_or_the_named_one():
    for named, kind in ((None, torch.bfloat16), ("float32", torch.float32)):
        model = made("bert", torch.bfloat16, a=VeraConfig(r=4, dtype=named))
        assert {p.dtype for _, m in model.adapter_modules("a") for p in m.parameters()} == {kind}
        assert {t.dtype for t in shared(model)} == {kind}
        model.set_active_adapters("a")
        assert hidden(model).dtype is torch.bfloat16


def test_one_layer_that_is_adapted_twice_keeps_one_copy():
    model = made("albert", a=PAPER)
    assert len([k for k in model.state_dict() if "lora_A" in k]) == 1
    model.delete_adapter("a")
    assert not any(of_adapter(key) for key in model.state_dict())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, r"r=0.*from 1"),
        ({"r": 65_537}, r"r=65537.*65,?536"),
        ({"dropout": 1.0}, r"dropout=1.0.*below 1"),
        ({"vera_d": float("nan")}, r"vera_d=nan"),
        ({"vera_b": "x"}, r"vera_b='x'"),
        ({"projection_prng_key": -1}, r"projection_prng_key=-1.*from 0"),
        ({"convention": "mine"}, r"convention='mine'.*'paper'.*'adapterhub'"),
        ({"alpha": float("inf")}, r"alpha=inf"),
        ({"dtype": "int8"}, r"dtype='int8'.*float32"),
    ],
)
def test_fields_out_of_range_are_named(fields, message):
    with pytest.raises(ConfigError, match=message):
        VeraConfig(**fields)


def test_an_embedding_is_refused():
    model = made("bert")
    with pytest.raises(ConfigError, match=r"word_embeddings.*cannot adapt an embedding.*exclude"):
        model.add_adapter("a", VeraConfig(r=4, target_modules=["word_embeddings"]))
    assert not list(model.adapters_config)
