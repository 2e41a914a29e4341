"""What the model should hold, written down beside it; nothing here asks the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from adapterzoo import BatchSplit, Parallel, Stack
from adapterzoo.composition import Composition

Bits = dict[str, bytes]


@dataclass
class Ledger:
    """The expected state, in the words of the documentation.

    Attributes:
        adapters: name to config, in the order of `adapters_config`.
        values: name of an adapter to its tensors.
        heads: name to the dict of its config.
        head_values: name of a head to its tensors.
        fusions: name to the adapters that it fuses.
        fusion_values: name of a fusion to its tensors.
        active: what acts.
        skipped: blocks in which nothing acts.
        answering: the active heads.
        merged: adapters in the base weights.
        originals_lost: whether merged weights came from a file.
        dtype: of the base model.
    """

    adapters: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Bits] = field(default_factory=dict)
    heads: dict[str, dict[str, Any]] = field(default_factory=dict)
    head_values: dict[str, Bits] = field(default_factory=dict)
    fusions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fusion_values: dict[str, Bits] = field(default_factory=dict)
    active: Composition | None = None
    skipped: tuple[int, ...] = ()
    answering: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    originals_lost: bool = False
    dtype: torch.dtype = torch.float32

    def activate(self, setup: Composition | None, skipped: tuple[int, ...] = ()) -> None:
        """`set_active_adapters`: heads of the adapters' names become active with them."""
        self.active, self.skipped = setup, skipped
        self.answering = self.heads_with(setup, self.answering)

    def heads_with(self, setup: Composition | None, before: tuple[str, ...]) -> tuple[str, ...]:
        """The active heads once a setup is active.

        A part of the batch is answered by the head of the adapter that acts last on it, or by the
        one head that was active; a `Fuse`, `Average` or `Split` is no adapter's answer.
        """
        if setup is None:
            return before
        parts = list(_parts(setup))
        own = [name if name in self.heads else None for name in map(_last, parts)]
        if not any(own):
            return before
        if None in own and len(before) != 1:
            return before
        found = [name or before[0] for name in own]
        return (found[0],) if len(set(found)) == 1 else tuple(found)

    def forget_head(self, name: str) -> None:
        """`delete_head`: what answers goes on without it."""
        del self.heads[name], self.head_values[name]
        self.answering = tuple(n for n in self.answering if n != name)


def _parts(setup: Any) -> Any:
    """The parts of a batch, each with what acts on it."""
    if isinstance(setup, (BatchSplit, Parallel)):
        for child in setup.children:
            yield from _parts(child)
    elif isinstance(setup, Stack) and any(isinstance(c, Composition) for c in setup):
        # what comes after a division acts on every part of it
        inner = [c for c in setup.children if isinstance(c, (BatchSplit, Parallel))]
        if not inner:
            yield setup
        elif setup.children[-1] is inner[-1]:
            yield from _parts(inner[-1])
        else:
            yield from ([setup] * len(list(_parts(inner[-1]))))
    else:
        yield setup


def _last(part: Any) -> str | None:
    while isinstance(part, Stack):
        part = part.children[-1]
    return part if isinstance(part, str) else None
