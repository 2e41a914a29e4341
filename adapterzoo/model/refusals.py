"""What is refused because of the model's state, before anything has changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, cast

from adapterzoo import inject
from adapterzoo.composition import Composition, Fuse, Stack, fusions_of
from adapterzoo.contracts import Adapter, WeightAdapter
from adapterzoo.errors import (
    CompositionError,
    DuplicateNameError,
    StateError,
    listing,
    unknown_name,
)
from adapterzoo.runtime import ActiveState

from .batching import refuse_while_batching
from .installed import AdapterRecord, AdapterState


class RefusalsMixin:
    """Checks that several methods of a model with adapters share."""

    _active: ActiveState
    _adapter_state: AdapterState

    @abstractmethod
    def adapter_modules(self, name: str) -> Iterator[tuple[str, Adapter]]:
        """The modules of an adapter with the paths of their layers."""

    def _find(self, name: object, call: str) -> AdapterRecord:
        if not isinstance(name, str) or name not in self._adapter_state.records:
            raise unknown_name(call, "adapter", name, self._adapter_state.records)
        return self._adapter_state.records[name]

    def _refuse_taken(
        self, name: str, call: str, overwrite_ok: bool, rename: str = "another name"
    ) -> None:
        """Refuse a name that is taken, and where it may be replaced, what is in use.

        Args:
            name: of an adapter that comes.
            call: what the user wrote, for messages.
            overwrite_ok: whether it may be replaced.
            rename: how the user gives it another name.
        """
        if name not in self._adapter_state.records:
            return
        if not overwrite_ok:
            raise DuplicateNameError(
                f"{call}: the name {name!r} is taken by "
                f"{self._adapter_state.records[name].config!r}. "
                f"Write {rename}, or {call[:-1]}, …, overwrite_ok=True)."
            )
        self._refuse_if_overridden(name, call)
        self._refuse_if_merged(name, call)
        self._refuse_if_fused(name, call)

    def _refuse_if_overridden(self, name: str, call: str) -> None:
        refuse_while_batching(cast("Any", self), call, name)
        if any(name in p.setup.flatten() for p in self._active.overrides if p.setup):
            raise StateError(
                f"{call}: {name!r} is active in an AdapterSetup of this thread. Leave the "
                f"'with AdapterSetup(…)' block first."
            )

    def _refuse_mixed(self, merged: Iterable[str], acting: Iterable[str], call: str) -> None:
        """Refuse what merging would change: the order in which changes of a weight are made."""
        inside: dict[str, list[Adapter]] = {}
        for name in merged:
            for path, module in self.adapter_modules(name):
                inside.setdefault(path, []).append(module)
        for name in acting if inside else ():
            for path, module in self.adapter_modules(name):
                beside = [*inside.get(path, ()), module]
                changes_weight = isinstance(module, (WeightAdapter, inject.ExpertAdapters))
                if len(beside) > 1 and changes_weight and not all(map(inject.is_additive, beside)):
                    raise StateError(
                        f"{call}: at {path!r} {name!r} would act on weights that hold "
                        f"{listing(merged)}, and not on the original ones. Write "
                        f"set_active_adapters(None) and merge all of them, or reset_adapter()."
                    )

    def _refuse_merged_part(self, setup: Composition | None, merged: Any, call: str) -> None:
        """Refuse what acts on all inputs by the weights, and shall act on a part of them."""
        inside = [] if setup is None else [n for n in setup.flatten() if n in merged]
        stacked = isinstance(setup, Stack) and all(isinstance(c, str) for c in setup)
        if inside and not stacked:
            raise StateError(
                f"{call}: {listing(inside)} in the base weights acts on every input, and in "
                f"{setup!r} on a part of it. Write reset_adapter(), or Stack('a', 'b')."
            )

    def _refuse_unfused(self, setup: Composition | None, call: str) -> None:
        for fuse in fusions_of(setup):
            found = self._adapter_state.fusions.get(fuse.name)
            if found is None or found.adapters != lasts_of(fuse):
                raise StateError(
                    f"{call}: there are no fusion layers {fuse.name!r} for {fuse!r}; fusions: "
                    f"{listing(self._adapter_state.fusions)}. Write add_adapter_fusion({fuse!r})."
                )

    def _refuse_if_fused(self, name: str, call: str) -> None:
        using = [n for n, fusion in self._adapter_state.fusions.items() if name in fusion.adapters]
        if using:
            raise StateError(
                f"{call}: the fusion {using[0]!r} is of {name!r}. "
                f"Write delete_adapter_fusion({using[0]!r}) first."
            )

    def _refuse_routed(self, setup: Composition, names: Iterable[str]) -> None:
        """Refuse a division of the batch where a layer does not get the batch."""
        for name in names:
            for path, placements in self._adapter_state.records[name].places.items():
                if any(p.site.is_routed for p in placements):
                    raise CompositionError(
                        f"{setup!r}: {name!r} sits at {path!r}, whose input is no batch of rows, "
                        f"but what is routed to experts. Activate one adapter for all rows, or add "
                        f"{name!r} with exclude_modules=[…] for such layers."
                    )

    def _refuse_if_merged(self, name: str, call: str) -> None:
        if name in self._adapter_state.merged:
            raise StateError(
                f"{call}: {name!r} is merged into the base weights. Write reset_adapter() first."
            )


def lasts_of(fuse: Fuse) -> tuple[str, ...]:
    """The adapters whose words a fusion weighs."""
    lasts = (c.last() if isinstance(c, Composition) else c for c in fuse.children)
    return tuple(str(last) for last in lasts)
