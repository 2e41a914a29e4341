"""Adapters whose layers read one input, and what is computed from it for all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .contracts import Adapter, SharingAdapter
from .kernels import mode

# numbers of an input
FEW = 1 << 14


class Family:
    """The adapters of query, key and value, or of gate and up, in one call of what holds them.

    What is made for the others when the first one asks waits for them. Each gets it once, and
    only for the very tensor that it was made from: whoever passes another one, or asks again, has
    it made anew.
    """

    __slots__ = ("_members", "_waiting")

    def __init__(self, members: Sequence[Adapter]) -> None:
        """Nothing is made yet.

        Args:
            members: adapters of any classes.
        """
        self._members = members
        self._waiting: list[tuple[SharingAdapter, Tensor, Any]] = []

    def from_input(self, adapter: SharingAdapter, x: Tensor) -> Any:
        """What the adapter, which need not be a member, makes of x `[*batch, d_in]`."""
        kind = type(adapter)
        # of few tokens it costs more calls than it saves, but on a GPU launches count; training and
        # evaluation do the same, so that without dropout they have the same bits
        if x.numel() <= FEW and mode.is_plain(x):
            return kind.from_input((adapter,), x)[0]
        for i, (owner, source, part) in enumerate(self._waiting):
            if owner is adapter and source is x:
                del self._waiting[i]
                return part
        key = adapter.sharing_key
        alike: list[SharingAdapter] = [adapter]
        if any(member is adapter for member in self._members):
            for member in self._members:
                if member is not adapter and type(member) is kind and member.sharing_key == key:
                    alike.append(member)
        made = kind.from_input(alike, x)
        # what was made of another tensor before, and nobody has asked for, goes
        self._waiting = [
            entry for entry in self._waiting if entry[1] is x and entry[0] not in alike
        ]
        self._waiting += [(owner, x, part) for owner, part in zip(alike, made, strict=True)][1:]
        return made[0]
