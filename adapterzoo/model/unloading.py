"""Back to a plain model of transformers, with adapters in its weights or without them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from adapterzoo import inject
from adapterzoo.composition import Stack, fusion_key, parse
from adapterzoo.errors import StateError, listing
from adapterzoo.runtime import Plan

from . import static_heads
from .fusing import FusionMixin
from .merging import MergingMixin
from .setup import withdraw
from .sharding import refuse_if_sharded


class UnloadingMixin(FusionMixin, MergingMixin):
    """`merge_and_unload` and `unload`, for models whose own class is one of transformers."""

    def merge_and_unload(
        self, adapter_names: Sequence[str] | None = None, safe_merge: bool = True
    ) -> Any:
        """Merge adapters and give the plain model back: this object, of its own class again.

        `save_pretrained` writes what transformers loads alone, with the same outputs. Adapters
        and fusions are gone; which parameters are trained stays as it is.

        Args:
            adapter_names: which ones, in the order in which they act; None: the active ones.
                Those that are merged already stay so.
            safe_merge: PEFT's switch; weights that are not finite are refused in any case.

        Raises:
            CompositionError: `adapter_names` are no names.
            StateError: nothing is active, the active composition is no stack, an adapter is no
                change of a weight, or as `merge_adapter`; nothing has changed then.
            UnknownNameError: there is no adapter of a name.
        """
        call = "merge_and_unload()"
        self._refuse_unloading(call)
        self._merge(self._to_merge(adapter_names, call), call)
        return self._unloaded()

    def unload(self) -> Any:
        """Give the plain model back without adapters: this object, of its own class again.

        Weights that adapters were merged into are what they were before.

        Raises:
            StateError: an `AdapterSetup` of this thread holds, the model is sharded or of a class
                of yours, or merged weights came from a file, so that the originals are not known.
        """
        self._refuse_unloading("unload()")
        self.reset_adapter()
        return self._unloaded()

    def _to_merge(self, names: Sequence[str] | None, call: str) -> tuple[str, ...]:
        """The names of the adapters that are to be merged and are not."""
        if names is None:
            asked = self._active_stack(self._active.default.plan, call)
        else:
            listed = names if isinstance(names, (list, tuple)) else self._stacked(names, call)
            for name in listed:
                self._find(name, call)
            asked = tuple(dict.fromkeys(listed))
        if not asked and not self._adapter_state.merged:
            raise StateError(
                f"{call}: no adapter is active. Write merge_and_unload(['a']); adapters: "
                f"{listing(self._adapter_state.records)}. Or unload(), for the model without "
                f"adapters."
            )
        return tuple(name for name in asked if name not in self._adapter_state.merged)

    def _active_stack(self, plan: Plan, call: str) -> tuple[str, ...]:
        setup = plan.setup
        if setup is None:
            return ()
        if plan.skip_layers:
            raise StateError(
                f"{call}: the active adapters act in some blocks only, as skip_layers="
                f"{list(plan.skip_layers)!r} says, and would be merged in all. Write "
                f"set_active_adapters({setup!r}), or merge_and_unload({list(setup.flatten())!r})."
            )
        return self._stacked(setup, call)

    def _stacked(self, asked: object, call: str) -> tuple[str, ...]:
        """The names in a stack of names, the only composition that weights can express."""
        setup = parse(asked)
        if not isinstance(setup, Stack) or not all(isinstance(c, str) for c in setup):
            raise StateError(
                f"{call}: {setup!r} is no stack of adapters, and no weight can express it. Write "
                f"merge_and_unload(['a']), or for an average average_adapter('c', ['a', 'b'], "
                f"combine_strategy='cat') first."
            )
        return setup.flatten()

    def _refuse_unloading(self, call: str) -> None:
        refuse_if_sharded(self, call, "Write it before fully_shard(model).")
        for plan in self._active.overrides:
            raise StateError(
                f"{call}: an AdapterSetup of this thread holds, with {plan.setup!r}. Leave the "
                f"'with AdapterSetup(…)' block first."
            )
        if self._class_alone() is None:
            raise StateError(
                f"{call}: {type(self).__name__} is a class of yours that always has adapters, so "
                f"there is no plain one to go back to. Write merge_adapter('a'), or "
                f"adapterzoo.init(model) of a class of transformers."
            )

    def _class_alone(self) -> type[nn.Module] | None:
        """The class that `init` found; None: the adapters are a part of the class."""
        return type(self).__dict__.get("_plain_class")

    def _unloaded(self) -> Any:
        """This object as a plain model; nothing in here can fail."""
        plain = cast("type[nn.Module]", self._class_alone())
        self._take_all()
        withdraw(self)
        del self._adapter_state, self._active
        inject.set_class(cast("nn.Module", self), plain)
        return self

    def _take_all(self) -> None:
        """Take every adapter and fusion out of the layers; merged weights stay."""
        self._active.default.plan = Plan(None, self._active.default.plan.heads)
        for name, fusion in self._adapter_state.fusions.items():
            for path in fusion.paths:
                inject.take(self._backbone.get_submodule(path), fusion_key(name))
            static_heads.take(self, fusion_key(name))
        self._adapter_state.fusions.clear()
        for name in tuple(self._adapter_state.records):
            self._remove(name)
        self._adapter_state.merged = ()
        self._adapter_state.originals.clear()
        self._adapter_state.head.clear()
