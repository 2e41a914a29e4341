"""The fusion layer against the formula of its paper, and its config."""

import pytest
import torch

from adapterzoo import AdapterFusionConfig, DynamicAdapterFusionConfig, StaticAdapterFusionConfig
from adapterzoo.errors import ConfigError, UnknownNameError
from adapterzoo.methods.fusion import Fusion


def fusion(config="dynamic", width=6, dropout=0.0, **changes):
    torch.manual_seed(0)
    loaded = AdapterFusionConfig.load({**AdapterFusionConfig.load(config).to_dict(), **changes})
    made = Fusion(loaded, width, dropout, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("without", ["query", "key", "value", None])
def test_it_is_the_attention_of_the_paper(n, before, without):
    options = {without: False} if without else {}
    layer = fusion(value_before_softmax=before, **options)
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    said = torch.randn(n, 2, 3, 6, dtype=torch.float64)
    found, shares = layer(x, list(said))

    def projected(name, t):
        p = getattr(layer, name)
        if p is None:
            return t
        y = torch.einsum("oi,...i->...o", p.weight, t)
        return y if p.bias is None else y + p.bias

    scores = torch.stack([(projected("query", x) * projected("key", z)).sum(-1) for z in said], -1)
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    expected = sum(weights[..., i : i + 1] * projected("value", said[i]) for i in range(n))
    torch.testing.assert_close(shares, weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_fresh_value_is_almost_the_identity():
    torch.manual_seed(0)
    made = Fusion(DynamicAdapterFusionConfig(), 5, 0.0, torch.device("cpu"), torch.float32)
    expected = torch.full((5, 5), 1e-6) + (1 - 1e-6) * torch.eye(5)
    torch.testing.assert_close(made.value.weight, expected, rtol=0, atol=1e-7)
    assert not made.query.bias.any()
    assert made.query.weight.std() < 0.05


def test_regularisation_is_the_distance_from_the_identity():
    layer = fusion()
    expected = ((layer.value.weight - torch.eye(6)) ** 2).sum()
    torch.testing.assert_close(layer.distance(), expected)
    assert fusion("static").distance() is None
    assert fusion(regularization=False).distance() is None


def test_the_temperature_decays_in_training_only():
    layer = fusion(temperature=True)
    x, said = torch.randn(2, 6).double(), [torch.randn(2, 6).double() for _ in range(2)]
    layer.eval()
    first = layer(x, said)[1]
    assert torch.equal(layer(x, said)[1], first)
    layer.train()
    assert torch.equal(layer(x, said)[1], first)
    assert layer.temperature(layer.steps) == pytest.approx(50 - 0.05)
    for _ in range(1200):
        layer(x, said)
    assert layer.temperature(layer.steps) == 1.0
    assert "steps" in layer.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_temperature_decays_in_every_dtype_and_lets_gradients_through(dtype):
    layer = fusion(temperature=True).to(dtype).train()
    x = torch.randn(2, 6, dtype=dtype, requires_grad=True)
    for _ in range(3):
        layer(x, [x, 2 * x])[0].sum().backward()
    assert layer.temperature(layer.steps) == pytest.approx(50 - 0.15)
    assert x.grad.isfinite().all()


def test_dropout_is_of_the_scores():
    layer = fusion(dropout=0.5).train()
    x, said = torch.randn(64, 6).double(), [torch.randn(64, 6).double() for _ in range(2)]
    assert not torch.equal(layer(x, said)[1], layer(x, said)[1])
    torch.testing.assert_close(layer(x, said)[1].sum(-1), torch.ones(64).double())
    layer.eval()
    assert torch.equal(layer(x, said)[1], layer(x, said)[1])


def test_config_strings_and_dicts():
    assert AdapterFusionConfig.load("static") == StaticAdapterFusionConfig()
    assert AdapterFusionConfig.load("dynamic") == DynamicAdapterFusionConfig()
    for config in (StaticAdapterFusionConfig(), DynamicAdapterFusionConfig(temperature=True)):
        assert AdapterFusionConfig.load(config) is config
        assert AdapterFusionConfig.load(config.to_dict()).to_dict() == config.to_dict()
        assert eval(repr(config)) == config
    static = StaticAdapterFusionConfig()
    assert (static.value, static.regularization, static.value_initialized) == (False,) * 3


@pytest.mark.parametrize(
    ("config", "error", "wrong", "hint"),
    [
        ("dynamik", UnknownNameError, "'dynamik'", "Did you mean 'dynamic'"),
        ({"keys": True}, ConfigError, "'keys'", "'key'"),
        ({1: True, "keys": True}, ConfigError, "1, 'keys'", "'key'"),
        (7, ConfigError, "config=7 is", "Write config='dynamic'"),
        (["key"], ConfigError, "config=['key'] is", "Write config='dynamic'"),
        ({"query_before_ln": True}, ConfigError, "query_before_ln=True", "query_before_ln=False"),
        ({"residual_before": True}, ConfigError, "residual_before=True", "residual_before=False"),
        ({"key": "false"}, ConfigError, "(key='false')", "Write key=True"),
        ({"value_initialized": 1}, ConfigError, "value_initialized=1", "Write value_initialized=T"),
        ({"dropout_prob": 1.0}, ConfigError, "dropout_prob=1.0", "Write dropout_prob=None"),
    ],
)
def test_what_is_not_legal_is_refused(config, error, wrong, hint):
    with pytest.raises(error) as caught:
        AdapterFusionConfig.load(config)
    assert wrong in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("without", [{}, {"query": False}, {"query": False, "key": False}], ids=str)
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float64), (torch.float32, torch.float32)], ids=str
)
def test_what_is_said_may_be_of_other_dtypes(dtypes, without):
    layer = fusion(**without)
    x = torch.randn(2, 3, 6)
    said = [torch.randn(2, 3, 6).to(dtype).requires_grad_() for dtype in dtypes]
    found, shares = layer(x, said)
    expected = layer(x.double(), [z.double() for z in said])
    torch.testing.assert_close((found, shares), expected, rtol=0, atol=0)
    found.sum().backward()
    assert all(z.grad.dtype is z.dtype and z.grad.any() for z in said)
