"""DVoRA: the formula, its magnitudes and gradients, merging; files are in the tests of formats."""

import pytest
import torch
from made import hidden, made

from adapterzoo import DvoRAConfig
from adapterzoo.errors import CompositionError, ConfigError

PAPER = DvoRAConfig(r=4, vera_b=0.3, attn_matrices=("q", "k", "v", "o"), intermediate_lora=True)
WIDE = PAPER.replace(output_lora=True)
DENSE = DvoRAConfig(r=4, convention="adapterhub", alpha=6, vera_b=0.3)
CONFIGS = pytest.mark.parametrize("config", [WIDE, DENSE], ids=["paper", "adapterhub"])


def of_layer(model, path, name="a"):
    """The layer, the adapter, and its part of the update B A without the factor s."""
    layer, module = model.get_submodule(path), dict(model.adapter_modules(name))[path]
    weight = layer.weight.T if "c_" in path else layer.weight
    shared = model.shared_parameters[name]
    A, B = shared.lora_A[:, : weight.shape[1]], shared.lora_B[: weight.shape[0]]
    d, b = (t if t.dim() == 2 else torch.diag(t) for t in (module.lambda_d, module.lambda_b))
    return layer, module, weight, b @ B @ d @ A


@CONFIGS
def test_the_formula(config):
    """A layer narrower than the widest, by plain torch."""
    model = made("bert", a=config)
    path = "encoder.layer.0.attention.self.value"
    layer, module, weight, update = of_layer(model, path)
    x = torch.randn(2, 3, weight.shape[1], dtype=torch.float64)
    model.set_active_adapters("a")
    if config.convention == "paper":
        changed = weight + update
        changed = changed * (module.m / changed.norm(dim=1))[:, None]
        expected = x @ changed.T + layer.bias
    else:
        gain = module.m / (weight + update).norm(dim=1)
        expected = gain * (x @ (weight + 6 / 4 * update).T + layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
@CONFIGS
def test_merged_is_active(family, config):
    model = made(family, a=config)
    model.set_active_adapters("a")
    want = hidden(model)
    model.merge_adapter("a")
    model.set_active_adapters(None)
    torch.testing.assert_close(hidden(model), want, rtol=1e-9, atol=1e-9)
    model.reset_adapter()
    assert not torch.allclose(hidden(model), want)


@CONFIGS
def test_a_fresh_one_is_the_identity_and_has_the_norms_of_the_rows(config):
    model = made("bert")
    model.add_adapter("a", config.replace(vera_b=0.0))
    path = "encoder.layer.1.attention.self.query"
    _, module, weight, _ = of_layer(model, path)
    torch.testing.assert_close(module.m.detach(), weight.norm(dim=1), rtol=1e-12, atol=0)
    base = hidden(model)
    model.set_active_adapters("a")
    assert torch.equal(hidden(model), base)


def test_magnitudes_stay_in_float32():
    model = made("bert", torch.bfloat16, a=PAPER)
    modules = [module for path, module in model.adapter_modules("a") if path]
    assert {m.m.dtype for m in modules} == {torch.float32}
    assert {m.lambda_b.dtype for m in modules} == {torch.bfloat16}


@CONFIGS
def test_only_the_norm_of_the_paper_is_a_constant(config):
    """The gradient of Λ_b, by autograd of the formula with a detached norm or without."""
    model = made("bert", a=config)
    path = "encoder.layer.0.attention.self.query"
    layer, module, weight, update = of_layer(model, path)
    x = torch.randn(2, 3, weight.shape[1], dtype=torch.float64)
    model.train_adapter("a")
    layer(x).square().sum().backward()
    found = module.lambda_b.grad.clone()
    module.lambda_b.grad = None
    _, _, _, update = of_layer(model, path)
    norm = (weight + update).norm(dim=1)
    gain = module.m / (norm.detach() if config.convention == "paper" else norm)
    s, inside, outside = (1.0, 0, 1) if config.convention == "paper" else (6 / 4, 1, 0)
    y = gain * (x @ (weight + s * update).T + inside * layer.bias) + outside * layer.bias
    y.square().sum().backward()
    torch.testing.assert_close(found, module.lambda_b.grad, rtol=1e-9, atol=1e-9)


def test_what_is_trained():
    model = made("bert", a=PAPER)
    model.train_adapter("a")
    trained = {n.rpartition(".")[2] for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"lambda_d", "lambda_b", "m"}


def test_averages_need_equal_matrices():
    model = made("bert", a=PAPER, b=PAPER, c=PAPER.replace(projection_prng_key=1))
    model.average_adapter("mean", ["a", "b"], weights=[0.25, 0.75])
    path = "encoder.layer.0.attention.self.query"
    found = {n: dict(model.adapter_modules(n))[path] for n in ("a", "b", "mean")}
    for key in ("lambda_d", "lambda_b", "m"):
        one, other, mean = (getattr(found[n], key) for n in ("a", "b", "mean"))
        torch.testing.assert_close(mean, 0.25 * one + 0.75 * other)
    with pytest.raises(CompositionError, match="one projection_prng_key, but these have 0 and 1"):
        model.average_adapter("other", ["a", "c"])


def test_an_embedding_is_refused():
    model = made("bert")
    with pytest.raises(ConfigError, match=r"DvoRAConfig.*cannot adapt an embedding.*exclude"):
        model.add_adapter("a", DvoRAConfig(r=4, target_modules=["word_embeddings"]))
    assert not list(model.adapters_config)
