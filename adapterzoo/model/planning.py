"""What is active, compiled for this model: which step each layer takes, and which heads answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from adapterzoo.composition import (
    Composition,
    RowMap,
    Step,
    compile_rows,
    has_rows,
    has_tokens,
    numbered,
    rows_of,
    without,
)
from adapterzoo.contracts import Adapter, SharedInputAdapter
from adapterzoo.errors import AdapterZooError
from adapterzoo.runtime import Plan

from . import static_heads
from .refusals import RefusalsMixin


class PlanningMixin(RefusalsMixin):
    """Makes plans; the heads in them are those of a model without named heads: none."""

    def make_plan(
        self,
        setup: Composition | None,
        head_setup: str | list[str] | None = None,
        skip_layers: tuple[int, ...] = (),
    ) -> Plan:
        """Compile a composition for this model; nothing becomes active.

        Args:
            setup: what shall act.
            head_setup: which heads shall answer; None: those named like the adapters where
                there are any, else those that are active now.
            skip_layers: numbers of blocks in which no adapter acts.

        Raises:
            UnknownNameError: there is no adapter or head of this name.
        """
        names = setup.flatten() if setup is not None else ()
        for name in names:
            self._find(name, f"set_active_adapters({setup!r})")
        self._refuse_unfused(setup, f"set_active_adapters({setup!r})")
        heads = self._heads_for(setup, head_setup)
        acting = [name for name in names if name not in self._adapter_state.merged]
        self._refuse_mixed(self._adapter_state.merged, acting, f"set_active_adapters({setup!r})")
        if setup is None:
            return Plan(None, heads, skip_layers=skip_layers)
        present: dict[str, dict[str, Adapter]] = {}
        # a merged adapter acts through the base weights
        for name in acting:
            places = self._adapter_state.records[name].places
            for path, module in self.adapter_modules(name):
                # what all layers share sits at none
                if places[path] and places[path][0].site.layer not in skip_layers:
                    present.setdefault(path, {})[name] = module
        rows = None
        parts: tuple[Any, ...] = (setup,)
        if has_rows(setup):
            found, repeats, exact = rows_of(setup)
            parts, index = numbered(found)
            rows = RowMap(index, repeats, exact=exact)
        self._refuse_merged_part(
            setup, self._adapter_state.merged, f"set_active_adapters({setup!r})"
        )
        if len(parts) > 1 or has_tokens(setup):
            self._refuse_routed(setup, acting)
        steps: dict[str, Step] = {}
        for path, modules in present.items():
            step = compile_rows(parts, modules, modules.__getitem__)
            if step is not None:
                steps[path] = step
        steps.update(static_heads.steps_of(self, parts))
        captures: dict[str, tuple[str, ...]] = {}
        for name in acting:
            for source, reader in self._adapter_state.records[name].sources():
                if reader in steps and reader not in captures.get(source, ()):
                    captures[source] = (*captures.get(source, ()), reader)
        families = self._families(acting, steps, present)
        reads = any(self._adapter_state.records[name].reads_calls for name in acting)
        stacks = frozenset(self._stacks()) if reads else frozenset()
        return Plan(setup, heads, steps, captures, families, skip_layers, rows, stacks)

    def _stacks(self) -> Iterator[str]:
        """The paths of the base model and of the encoders and decoders in it."""
        yield ""
        yield from (path for path, _ in cast("Any", self)._models_inside())

    def _families(
        self,
        acting: list[str],
        steps: Mapping[str, Step],
        present: Mapping[str, Mapping[str, Adapter]],
    ) -> dict[str, tuple[tuple[str, tuple[str, ...]], ...]]:
        """The `families` of a plan.

        Args:
            acting: names.
            steps: path to what its adapters do; only those of a chain read the layer's own input.
            present: path to the adapters that act there.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for name in acting:
            for around, paths in self._adapter_state.records[name].families.items():
                for path in paths:
                    chain = steps.get(path)
                    acts = isinstance(chain, tuple) and name in chain
                    if acts and isinstance(present[path][name], SharedInputAdapter):
                        layer = path.rpartition(".")[2]
                        found.setdefault(around, {}).setdefault(layer, []).append(name)
        return {
            around: tuple((layer, tuple(names)) for layer, names in layers.items())
            for around, layers in found.items()
            if len(layers) > 1
        }

    def _heads_for(
        self, setup: Composition | None, head_setup: str | list[str] | None
    ) -> tuple[str, ...]:
        """The heads of a plan; a model without named heads has none."""
        return ()

    def _heads_named(
        self, setup: Composition | None, otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The heads named like the adapters that act last, where there are any."""
        return ()

    def _own_heads(self, parts: tuple[Any, ...]) -> list[str | None]:
        """For each part of a batch the head of its adapter's name, None where there is none."""
        return [None for _ in parts]

    def _heads_of_parts(
        self, parts: tuple[Any, ...], otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The head of each part of a batch, or the one of all of them."""
        return ()

    def _replan(self) -> None:
        """Compile what is active anew, without the adapters that are gone."""
        self._adapter_state.plans.clear()
        plan = self._active.default.plan
        names = plan.setup.flatten() if plan.setup is not None else ()
        setup = without(plan.setup, [n for n in names if n not in self._adapter_state.records])
        try:
            self._active.default.plan = self.make_plan(setup, list(plan.heads), plan.skip_layers)
        except AdapterZooError:
            # no step may name what is gone
            self._active.default.plan = Plan(None, plan.heads, skip_layers=plan.skip_layers)
            raise
