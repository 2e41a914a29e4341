"""Inputs with values for any model: the shapes that anatomy's survey feeds on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.anatomy.inputs import of_first_layer, of_model

from ._tiny import VOCABULARY

# special tokens are at both ends of the vocabulary
_FIRST_TOKEN, _LAST_TOKEN = 10, VOCABULARY // 2
# a page is 1000 wide, a tiny model's table of positions is shorter
_PAGE = 60


class Inputs(dict[str, Any]):
    """Keyword arguments of a forward, which go through the checks as one."""

    def is_floating_point(self) -> bool:
        """Whether any of them is."""
        return any(isinstance(v, Tensor) and v.is_floating_point() for v in self.values())

    def double(self) -> Inputs:
        """The same in float64."""
        return Inputs(
            {
                name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
                for name, v in self.items()
            }
        )


def feeds(model: nn.Module, seed: int = 0) -> Iterator[Inputs]:
    """Inputs to try for a model's forward, one set after the other.

    Text alone where a model reads text; then all that it reads; what its first layer reads; sounds
    with time in front; its main input alone.

    Args:
        model: of real or meta tensors.
        seed: of the values.
    """
    main = getattr(model, "main_input_name", "input_ids")
    text, every = of_model(model), of_model(model, modal=True)
    turned = {n: v.mT if v.dim() == 3 and "features" in n else v for n, v in every.items()}
    alone = {n: v for n, v in every.items() if n == main or "mask" in n}
    tried: list[list[tuple[str, tuple[int, ...]]]] = []
    for made in (text, every, of_first_layer(model), turned, alone):
        shapes = [(name, tuple(value.shape)) for name, value in made.items()]
        if made and shapes not in tried:
            tried.append(shapes)
            source = torch.Generator().manual_seed(seed)
            yield Inputs({name: _filled(name, v, source) for name, v in made.items()})


def _filled(name: str, value: Tensor, source: torch.Generator) -> Tensor:
    if not value.is_meta:
        # numbers that shapes are computed from
        return value
    with torch.device("cpu"):
        if value.is_floating_point():
            return torch.randn(value.shape, generator=source)
        if "mask" in name:
            return torch.ones(value.shape, dtype=value.dtype)
        if name == "bbox":
            # left, top, right, bottom
            return torch.randint(0, _PAGE, value.shape, generator=source).sort().values
        return torch.randint(_FIRST_TOKEN, _LAST_TOKEN, value.shape, generator=source)
