"""Modules that are given the numbers of tokens: tables of positions and rotary embeddings."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition import evaluate
from adapterzoo.errors import StateError

from .adapted import Adapted, positions_of
from .views import LayerCall

_NUMBERS = "position_ids"


class AdaptedPositions(Adapted):
    """Mixed into the class of a module whose tokens get other numbers."""

    # arguments of the forward that can be given by position
    _positions: tuple[str, ...] = ()

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """The arguments of the forward of a class."""
        return {"_positions": positions_of(plain)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward of the numbers that the active adapters make."""
        link = self._link
        active = link.active
        plan = active.plan
        step = plan.steps.get(link.path)
        plain = super(Adapted, self).forward
        if step is None:
            return plain(*args, **kwargs)
        given = {**dict(zip(self._positions, args, strict=False)), **kwargs}
        name = _NUMBERS if _NUMBERS in given else next(iter(given))
        numbers = given[name]
        if plan.rows is not None and numbers.shape[0] == 1:
            numbers = numbers.expand(len(plan.rows.index), -1)  # [rows, tokens]

        def read(numbers: Tensor) -> Any:
            # a table gives embeddings, to which other adapters may add; a rotation has none
            return plain(self._checked(numbers)) if is_table else numbers

        is_table = isinstance(self, nn.Embedding)
        adapters = cast("Any", self._modules["adapters"])._modules
        base = LayerCall(self, read, context=active.call)
        found = evaluate(step, adapters, numbers, base, plan.rows)
        return found if is_table else plain(**{**given, name: found})

    def _checked(self, numbers: Tensor) -> Tensor:
        """The numbers, which the table must have; on a GPU the look-up itself says so."""
        size = cast("nn.Embedding", self).num_embeddings
        if numbers.is_cpu and not torch.compiler.is_compiling() and int(numbers.max()) >= size:
            raise StateError(
                f"position {int(numbers.max())}: the prefix comes before the tokens, and the model "
                f"has {size} positions for both. Give it {int(numbers.max()) - size + 1} tokens "
                f"less."
            )
        return numbers
