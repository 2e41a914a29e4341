"""Activation functions are those of transformers, by name."""

import importlib.util

import pytest
import torch
from transformers.activations import ACT2FN

from adapterzoo import activations
from adapterzoo.activations import ACTIVATIONS, activation
from adapterzoo.errors import ConfigError

X = torch.linspace(-12, 12, 2001)


@pytest.mark.parametrize("name", sorted(set(ACTIVATIONS) - {"leakyrelu"}))
def test_each_equals_that_of_transformers_bit_for_bit(name):
    assert torch.equal(activation(name)(X), ACT2FN[name](X))


def test_adapterhubs_own_name_and_none_and_capitals():
    assert torch.equal(activation("leakyrelu")(X), torch.nn.functional.leaky_relu(X))
    assert activation(None)(X) is X
    assert torch.equal(activation("GELU")(X), ACT2FN["gelu"](X))


def test_transformers_has_no_other_function_without_parameters():
    rest = set(ACT2FN) - set(ACTIVATIONS)
    assert all(list(ACT2FN[name].parameters()) for name in rest)


def test_a_name_that_an_older_transformers_lacks_is_left_out(monkeypatch):
    monkeypatch.delitem(ACT2FN, "laplace")
    spec = importlib.util.spec_from_file_location(activations.__name__, activations.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert ACTIVATIONS.keys() - module.ACTIVATIONS.keys() == {"laplace"}
    assert torch.equal(module.activation("mish")(X), activation("mish")(X))
    with pytest.raises(ConfigError, match="laplace"):
        module.activation("laplace")


@pytest.mark.parametrize("name", ["gellu", "", 3, "prelu"])
def test_an_unknown_one_names_the_value_and_the_cure(name):
    with pytest.raises(ConfigError, match=r"Write 'relu', or None"):
        activation(name)
