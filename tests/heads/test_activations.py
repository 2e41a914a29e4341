"""Activation functions are those of transformers, by name."""

import pytest
import torch
from transformers.activations import ACT2FN

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


@pytest.mark.parametrize("name", ["gellu", "", 3, "prelu"])
def test_an_unknown_one_names_the_value_and_the_cure(name):
    with pytest.raises(ConfigError, match=r"Write 'relu', or None"):
        activation(name)
