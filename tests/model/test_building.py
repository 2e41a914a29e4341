"""What is built for one layer: the error names the two configs that do not go together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError
from adapterzoo.inject.building import build


class Plain(Adapter):
    """Nothing beside the layer."""

    def forward(self, x, base):
        return base(x)


class Before(Plain):
    """Changes what the layer gets."""

    acts_on: ClassVar[str] = "input"


class Made:
    """The config of one of these."""

    def __init__(self, name: str, kind: type[Adapter]) -> None:
        self.name, self.kind = name, kind

    def build(self, *_: Any) -> Adapter:
        return self.kind()

    def __repr__(self) -> str:
        return self.name


def placed(*configs: Made) -> list[Any]:
    site = SimpleNamespace(kind="linear", output_slice=None, parameter=None)
    return [SimpleNamespace(config=config, site=site) for config in configs]


@pytest.mark.parametrize(
    ("kinds", "says"),
    [((Plain, Plain, Before), "C2 with C0: one of them changes the input of 'a.b'"),
     ((Plain, Before, Before), "C1 with C2: one of them changes the input of 'a.b'"),
     ((Before, Plain), "C0 with C1: one of them changes the input of 'a.b'")],
)  # fmt: skip
def test_the_two_that_cannot_share_a_layer_are_named(kinds, says):
    configs = [Made(f"C{i}", kind) for i, kind in enumerate(kinds)]
    with pytest.raises(ConfigError) as caught:
        build(nn.Linear(2, 2), "a.b", placed(*configs), torch.float32)
    assert str(caught.value).startswith(says)
    assert "set_active_adapters(Stack('a', 'b'))" in str(caught.value)
