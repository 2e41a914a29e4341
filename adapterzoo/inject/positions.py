"""Modules that take position numbers: position tables and rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.caches import cached_tokens
from adapterzoo.composition import evaluate
from adapterzoo.contracts import PositionAdapter
from adapterzoo.errors import StateError
from adapterzoo.runtime import HEAD, Plan

from .adapted import Adapted, acting
from .building import layer_at
from .containers import adapters_of
from .views import LayerCall

NUMBERS = "position_ids"
"""The argument for the numbers of tokens."""


class AdaptedPositions(Adapted):
    """Mixed into the class of a module whose position numbers adapters change."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the position numbers of the active adapters."""
        link = self._link
        active = link.active
        plan = active.plan
        site = plan.sites.get(link.path)
        plain = super(Adapted, self).forward
        if site is None:
            return plain(*args, **kwargs)
        given = {**dict(zip(self._positions, args, strict=False)), **kwargs}
        name = NUMBERS if NUMBERS in given else next(iter(given))
        numbers = given[name]
        if plan.rows is not None and numbers.shape[0] == 1:
            numbers = numbers.expand(len(plan.rows.index), -1)  # [rows, tokens]

        def read(numbers: Tensor) -> Any:
            # a table gives embeddings, to which other adapters may add; a rotation has none
            return plain(self._checked(numbers)) if is_table else numbers

        is_table = isinstance(self, nn.Embedding)
        base = LayerCall(self, read, context=active.call)
        found = evaluate(*acting(self, site), numbers, base, plan.rows)
        return found if is_table else plain(**{**given, name: found})

    def _checked(self, numbers: Tensor) -> Tensor:
        """Check that the table has the numbers, and return them; on a GPU the look-up raises."""
        if numbers.is_cpu and not torch.compiler.is_compiling():
            self._check(int(numbers.max()))
        return numbers

    def _check(self, last: int) -> None:
        size = cast("nn.Embedding", self).num_embeddings
        if last >= size:
            raise StateError(
                f"position {last}: the prefix comes before the tokens, and the model has {size} "
                f"positions for both. Give it {last - size + 1} tokens less."
            )


def counted(given: Mapping[str, Any], around: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call with numbers that start at the first real token of each row.

    Rotations depend on distances only, so that padding at the start changes nothing between tokens,
    but a prefix keeps its position. Numbers that the caller gives are kept.

    Args:
        given: arguments of the model that numbers the tokens of its stack, by name.
        around: those of the outermost model, which may have numbered them already.
    """
    t = next((given[n] for n in ("input_ids", "inputs_embeds") if given.get(n) is not None), None)
    if t is None or around.get(NUMBERS) is not None:
        return given
    tokens, before = t.shape[1], cached_tokens(given) or 0
    masks = (given.get("attention_mask"), around.get("attention_mask"))
    mask = next((m for m in masks if isinstance(m, Tensor) and m.dim() == 2), None)
    numbers = given.get(NUMBERS)
    if numbers is None:
        numbers = torch.arange(before, before + tokens, device=t.device)[None]  # [1, tokens]
    # three numbers for each token are counted by the mask
    if mask is None or mask.shape[1] != before + tokens or numbers.dim() != 2:
        return given
    first = (mask != 0).int().argmax(1, keepdim=True)  # [rows, 1]
    start = numbers[:, :1]
    if before:
        shift = torch.minimum(first, start - before + first)
    else:
        shift = numbers.expand(len(first), -1).gather(1, first) - start
    numbers = (numbers - shift.clamp(min=0)).clamp(min=0)  # [rows, tokens]
    return {**given, NUMBERS: numbers}


def check_positions(model: nn.Module, plan: Plan, tokens: int, legal: int) -> None:
    """Check that the tables of positions have a number for each token, as adapters change it.

    Args:
        model: the base model.
        plan: the active plan.
        tokens: of the longest row.
        legal: how many tokens the tables are for.

    Raises:
        StateError: there are too many.
    """
    for path, site in plan.sites.items():
        if path.startswith(HEAD):
            continue
        table = layer_at(model, path)
        if not (isinstance(table, AdaptedPositions) and isinstance(table, nn.Embedding)):
            continue
        # a table may begin with numbers that no token has
        last = table.num_embeddings - legal + tokens - 1
        rows = 1 if plan.rows is None else len(plan.rows.index)
        numbers = torch.full((rows, 1), last, device=table.weight.device)

        def read(numbers: Tensor, table: Any = table) -> Any:
            table._check(int(numbers.max()))
            return torch.zeros_like(numbers)

        base = LayerCall(table, read, context=table._link.active.call)
        if all(isinstance(adapter, PositionAdapter) for adapter in adapters_of(table).values()):
            evaluate(*acting(table, site), numbers, base, plan.rows)
