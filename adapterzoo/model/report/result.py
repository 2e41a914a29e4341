"""The report on an adapter: its data, its text and its table."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adapterzoo.errors import columns, counted, listing

from .picture import draw
from .sites import LEFT_OUT, BlockReport, Cell, HeadReport, SiteReport, number

_SHARED = "shared by its layers"
# a change larger than the weight itself is hardly intended
_HUGE = 1.0
# names the first paths, and how many more there are
_some = functools.partial(listing, limit=3, show=str)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Which layers an adapter reaches, what it costs, and how much it changes; `str` is a table.

    Attributes:
        adapter: the name of the adapter or fusion.
        method: the method of the adapter; "fusion" for a fusion.
        sites: the sites of the adapter, in model order.
        blocks: all blocks of the model, in model order.
        heads: the heads that are used with the adapter.
        places: the kinds of sites that are places in the stream or in attention, not layers.
        parameters: the number of the adapter's parameters, without heads.
        base_parameters: the number of the base model's parameters.
        is_trainable: whether any parameter of the adapter is trainable.
        bytes_per_token: the bytes that a training step keeps for the backward pass because of the
            adapter, for each token of the input: those in addition to a frozen base model that
            passes gradients through, in evaluation mode and so without dropout. None: not measured.
        unit: "row", or a description of the tokens, such as "token of rows of 16".
        note: the reason why a value is missing; empty if none is.
        hint: what to write for an adapter in all blocks; empty if its config has no field for it.
    """

    adapter: str
    method: str
    sites: tuple[SiteReport, ...]
    blocks: tuple[BlockReport, ...]
    heads: tuple[HeadReport, ...]
    places: tuple[str, ...]
    parameters: int
    base_parameters: int
    is_trainable: bool
    bytes_per_token: float | None = None
    unit: str = "token"
    note: str = ""
    hint: str = ""

    # --- what it reaches ---

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers in blocks that the adapter reaches."""
        return tuple(dict.fromkeys(site.kind for site in self.sites if site.block >= 0))

    @property
    def left_out(self) -> dict[str, tuple[int, ...]]:
        """The kinds that the adapter reaches, with the blocks where it leaves out some of them."""
        lacking = [(n, kind) for n, kind, cell in self.cells() if len(cell.sites) < cell.there]
        found = {kind: tuple(n for n, other in lacking if other == kind) for kind in self.kinds}
        return {kind: numbers for kind, numbers in found.items() if numbers}

    @property
    def blocks_left_out(self) -> tuple[int, ...]:
        """The numbers of the blocks without the adapter; empty if it reaches no block at all."""
        reached = {site.block for site in self.sites}
        found = tuple(n for n in range(len(self.blocks)) if n not in reached)
        return found if self.kinds else ()

    @property
    def blocks_of_other_kinds(self) -> tuple[int, ...]:
        """The blocks without the adapter that have none of the kinds of layers that it reaches.

        An example is a state-space block, which has no query: it was not left out by choice.
        """
        return tuple(
            n for n in self.blocks_left_out if self.blocks[n].kinds.keys().isdisjoint(self.kinds)
        )

    @property
    def dead(self) -> tuple[str, ...]:
        """The paths of the sites that got no gradient."""
        return tuple(site.path or _SHARED for site in self.sites if site.is_dead)

    def cells(self) -> Iterator[tuple[int, str, Cell]]:
        """Yield the number of each block, each kind of layer in it, and the cell of the two.

        Kinds that the adapter reaches nowhere have an empty cell.
        """
        at: dict[tuple[int, str], list[SiteReport]] = {}
        for site in self.sites:
            at.setdefault((site.block, site.kind), []).append(site)
        for place, block in enumerate(self.blocks):
            own = [kind for n, kind in at if n == place]
            for kind in dict.fromkeys([*block.kinds, *own]):
                sites = tuple(at.get((place, kind), ()))
                yield place, kind, Cell(sites, max(block.kinds.get(kind, 0), len(sites)))

    def _label(self, number: int) -> str:
        path = self.blocks[number].path
        return f"{path} ({LEFT_OUT})" if number in self.blocks_left_out else path

    # --- in words ---

    @property
    def summary(self) -> tuple[str, str, str]:
        """Three lines on how large the adapter is, where it is, and where it is not."""
        count = sum(1 for site in self.sites if site.path)
        heads = "".join(
            f"; head {head.name!r} {head.parameters:,}{'' if head.is_trained else ' (frozen)'}"
            for head in self.heads
        )
        reached = len(self.blocks) - len(self.blocks_left_out) if self.kinds else 0
        outside = sum(1 for site in self.sites if site.path and site.block < 0)
        alike: dict[str, list[str]] = {}
        for kind in self.kinds:
            alike.setdefault(self._reached(kind), []).append(kind)
        where = "; ".join(f"{', '.join(kinds)} in {blocks}" for blocks, kinds in alike.items())
        places = [
            f"in {reached} of {len(self.blocks)} blocks ({where})" * bool(self.kinds),
            f"at {counted(outside, 'layer')} outside blocks" * bool(outside),
        ]
        missing = [
            in_words(self.blocks_left_out) * bool(self.blocks_left_out),
            *(
                f"{kind} in {in_words(rest)}"
                for kind, blocks in self.left_out.items()
                if (rest := [n for n in blocks if n not in self.blocks_left_out])
            ),
        ]
        share = 100.0 * self.parameters / max(self.base_parameters, 1)
        size = f"{self.parameters:,} parameters, {share:.3g} % of the base model"
        return (
            f"adapter {self.adapter!r} ({self.method}): {size}{heads}",
            f"it acts at {counted(count, 'place')}, {' and '.join(filter(None, places))}",
            f"left out: {', '.join(filter(None, missing)) or 'nothing'}",
        )

    def _reached(self, kind: str) -> str:
        """Return how many of the blocks with a kind of layer the adapter reaches, "2 of 4"."""
        own = {site.block for site in self.sites if site.kind == kind}
        there = own | {n for n, block in enumerate(self.blocks) if kind in block.kinds}
        return f"{len(own)} of {len(there)}"

    def faults(self) -> tuple[str, ...]:
        """Return what looks wrong, one line for each; none for a good adapter."""
        found = [self.unreached(), self.without_gradient()]
        broken = [s.path or _SHARED for s in self.sites if not s.is_finite]
        huge = [s.path for s in self.sites if (s.relative or 0.0) > _HUGE]
        if broken:
            found.append(f"NaN or infinite values at {_some(broken)}")
        if huge:
            found.append(f"a change larger than the weight itself at {_some(huge)}")
        frozen = [h.name for h in self.heads if self.is_trainable and not h.is_trained]
        if frozen:
            found.append(f"the head {_some(frozen)} is not trained")
        idle = [h.name for h in self.heads if h.is_trained and h.is_dead]
        if idle:
            found.append(f"no gradient at the head {_some(idle)}")
        return tuple(filter(None, found))

    def unreached(self) -> str:
        """Return the fault of `blocks_of_other_kinds`; empty without any."""
        if not (blocks := self.blocks_of_other_kinds):
            return ""
        hint = f". {self.hint}" if self.hint else ""
        return f"no adapter in {in_words(blocks)}, which have no {' or '.join(self.kinds)}{hint}"

    def without_gradient(self) -> str:
        """Return the fault of sites that got no gradient; empty without any."""
        return f"no gradient at {_some(self.dead)}" if self.dead else ""

    def __str__(self) -> str:
        """Return the summary, the faults, and ‖ΔW‖ / ‖W‖ for each block and kind of layer."""
        lines = [*self.summary]
        if self.bytes_per_token is not None:
            kept = f"{self.bytes_per_token:,.0f} bytes"
            lines.append(f"a training step keeps {kept} per {self.unit} for the backward pass")
        lines += [f"fault: {fault}" for fault in self.faults()]
        lines += [f"note: {self.note}"] if self.note else []
        return "\n".join([*lines, "", *self._table()])

    __repr__ = __str__

    def _table(self) -> list[str]:
        kinds, cells = self.shown_kinds(), {(n, kind): cell for n, kind, cell in self.cells()}
        measured = any(site.change is not None for site in self.sites)
        title = "‖ΔW‖ / ‖W‖" if measured else "block"
        rows = [[title, *kinds]] if kinds else []
        for n in range(len(self.blocks)) if kinds else ():
            at = [self._text(kind, cells.get((n, kind))) for kind in kinds]
            rows.append([self._label(n), *at])
        lines = columns(rows, [False, *[True] * len(kinds)]) if rows else []
        outside = [
            [s.path or _SHARED, s.kind, str(Cell((s,), 1)), f"{s.parameters:,} parameters"]
            for s in self.sites
            if s.block < 0
        ]
        if outside:
            lines += [*([""] if lines else []), *columns(outside, [False, False, True, True])]
        return lines

    def _text(self, kind: str, cell: Cell | None) -> str:
        if cell is None:
            return ""
        return str(cell) if kind in self.kinds else "–"

    def shown_kinds(self) -> tuple[str, ...]:
        """Return the columns of the table: kinds of layers, and places in the stream.

        If the adapter acts only on the stream, kinds of layers are left out.
        """
        found = dict.fromkeys(kind for _, kind, _ in self.cells())
        if set(self.kinds) <= set(self.places):
            return tuple(kind for kind in found if kind in self.places)
        return tuple(sorted(found, key=lambda kind: (kind in self.places, _order(kind))))

    def to_dict(self) -> dict[str, Any]:
        """Return all values as JSON types; numbers that are not finite are strings."""
        return {
            "adapter": self.adapter, "method": self.method, "parameters": self.parameters,
            "base_parameters": self.base_parameters, "trainable": self.is_trainable,
            "bytes_per_token": self.bytes_per_token, "unit": self.unit, "note": self.note,
            "faults": list(self.faults()), "blocks_left_out": list(self.blocks_left_out),
            "left_out": {kind: list(blocks) for kind, blocks in self.left_out.items()},
            "heads": [
                {"name": head.name, "parameters": head.parameters, "trained": head.is_trained,
                 "dead": head.is_dead}
                for head in self.heads
            ],
            "blocks": [
                {"path": block.path, "kinds": dict(block.kinds)} for block in self.blocks
            ],
            "sites": [
                {"path": site.path, "block": site.block, "kind": site.kind,
                 "parameters": site.parameters, "dead": site.is_dead,
                 "change": _json(site.change), "weight": _json(site.weight),
                 "relative": _json(site.relative), "finite": site.is_finite}
                for site in self.sites
            ],
        }  # fmt: skip

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return a heat map of ‖ΔW‖ / ‖W‖, blocks × kinds of layers, as a matplotlib figure.

        Layers that are left out are hatched, and dead ones are labeled.

        Args:
            path: the file to write; its ending chooses the format, such as ".svg".

        Raises:
            ConfigError: the path has no image suffix.
            StateError: matplotlib is not installed.
        """
        return draw(self, path)


def in_words(blocks: Sequence[int]) -> str:
    """Return the numbers of blocks, with consecutive ones joined, such as "blocks 0–3, 7"."""
    runs: list[list[int]] = []
    for n in blocks:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    shown = (f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)
    return f"{'block' if len(blocks) == 1 else 'blocks'} {', '.join(shown)}"


def _json(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else number(value)


# the order of columns: attention or what replaces it, the feed-forward part, then the stream
_FIRST = ("query", "key", "value", "qkv", "attention_out")
_LAST = ("mlp_gate", "mlp_in", "mlp_out")


def _order(kind: str) -> tuple[int, int]:
    role = kind.removeprefix("cross ")
    if role in _FIRST:
        return (1 if role != kind else 0), _FIRST.index(role)
    return (3, _LAST.index(role)) if role in _LAST else (2, 0)
