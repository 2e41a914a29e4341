"""Merging: adapters that equal a changed weight become part of the base weights, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.contracts import Adapter, compute_dtype
from adapterzoo.errors import StateError, listing
from adapterzoo.inject.quantised import is_quantised

from . import static_heads
from .adapters import AdaptersMixin
from .batching import refuse_while_batching
from .sharding import refuse_if_sharded


class MergingMixin(AdaptersMixin):
    """`merge_adapter` and `reset_adapter`, once for all methods."""

    @torch.no_grad()
    def merge_adapter(self, name: str) -> None:
        """Make an adapter part of the base weights; its own parameters stay for `reset_adapter`.

        Merging a second adapter equals merging both at once. A merged adapter acts always; it
        needs not be active. The original weights are kept until `reset_adapter`. A copy that it
        has of a static head is merged with it: the head of the last one that has one answers.

        Raises:
            UnknownNameError: there is no adapter of this name.
            StateError: it is merged already, is no change of a weight (a bottleneck), is active
                in an `AdapterSetup` of this thread, its merged weights are not finite, or the
                model is sharded or quantised; nothing has changed then.
        """
        call = f"merge_adapter({name!r})"
        self._find(name, call)
        self._refuse_if_merged(name, call)
        self._merge((name,), call)

    @torch.no_grad()
    def _merge(self, added: Sequence[str], call: str) -> None:
        """Merge several adapters that are not, all or none.

        Args:
            added: names, in the order in which they act.
            call: what the user wrote, for messages.

        Raises:
            StateError: as `merge_adapter`; nothing has changed then.
        """
        refuse_if_sharded(self, call, "Merge before fully_shard(model).")
        refuse_while_batching(self, call)
        for name in added:
            self._refuse_if_overridden(name, call)
        names = (*self._adapter_state.merged, *added)
        setup = self._active.default.plan.setup
        for each in (setup, *(plan.setup for plan in self._active.overrides)):
            active = each.flatten() if each is not None else ()
            self._refuse_mixed(names, [n for n in active if n not in names], call)
        self._refuse_merged_part(setup, names, call)
        modules: dict[str, list[Adapter]] = {}
        for name in added:
            for path, module in self.adapter_modules(name):
                # what all layers share is no change of a weight itself
                if path:
                    modules.setdefault(path, []).append(module)
        self._refuse_lost(call, set(modules))
        # every check that can be made comes before the first write
        for path, beside in modules.items():
            for module in beside:
                _check_mergeable(module)
            self._refuse_elsewhere(path, call)
        self._refuse_tied(modules, call)
        before: dict[str, dict[str, Tensor]] = {}
        kept = dict(self._adapter_state.originals)
        with ExitStack() as undo:
            # whatever stops it, Ctrl-C too, leaves no weight merged by half
            undo.callback(self._take_back, before, kept)
            for path, beside in modules.items():
                before[path] = _copies(self._backbone.get_submodule(path), beside)
                # what an earlier merge kept is older: that is the original
                self._adapter_state.originals[path] = before[path] | kept.get(path, {})
                self._write(path, names, call)
            undo.pop_all()
        self._adapter_state.merged = names
        static_heads.merge(self)
        self._replan()

    def _take_back(
        self, before: Mapping[str, Mapping[str, Tensor]], kept: dict[str, dict[str, Tensor]]
    ) -> None:
        """Undo a merge that has come to some layers only.

        Args:
            before: path of a layer to its parameters as they were.
            kept: the originals that were known.
        """
        for path, originals in before.items():
            _restore(self._backbone.get_submodule(path), originals)
        self._adapter_state.originals = kept

    @torch.no_grad()
    def reset_adapter(self) -> None:
        """Give the base weights back their bits; the adapters that were merged act as before.

        Raises:
            StateError: the merged weights came from a file, so the originals are not known; or a
                merged adapter is active in an `AdapterSetup` of this thread, or the model was
                sharded after it was merged.
        """
        if self._adapter_state.merged:
            refuse_if_sharded(
                self, "reset_adapter()", "Load the base model and the adapters again."
            )
            refuse_while_batching(self, "reset_adapter()")
        for name in self._adapter_state.merged:
            self._refuse_if_overridden(name, "reset_adapter()")
        self._refuse_lost("reset_adapter()")
        for path in self._adapter_state.originals:
            self._refuse_elsewhere(path, "reset_adapter()")
        for path, originals in self._adapter_state.originals.items():
            _restore(self._backbone.get_submodule(path), originals)
        self._adapter_state.originals.clear()
        static_heads.reset(self)
        self._adapter_state.merged = ()
        self._replan()

    def _refuse_elsewhere(self, path: str, call: str) -> None:
        layer = self._backbone.get_submodule(path)
        if any(p is not None and p.is_meta for p in layer._parameters.values()):
            raise StateError(
                f"{call}: the weights at {path!r} are offloaded and cannot be written. Load the "
                f"model without device_map, or merge before accelerate dispatches it."
            )
        if is_quantised(layer):
            raise StateError(
                f"{call}: the weights at {path!r} are quantised, and merged ones would be rounded "
                f"anew. Write model.dequantize() first, or load the adapter into the model that is "
                f"not quantised and merge it there."
            )

    def _refuse_lost(self, call: str, at: set[str] | None = None) -> None:
        merged = {p for n in self._adapter_state.merged for p, _ in self.adapter_modules(n) if p}
        lost = merged - set(self._adapter_state.originals)
        if at is not None:
            lost &= at
        if lost:
            raise StateError(
                f"{call}: the base weights at {min(lost)!r} were merged before they were saved, so "
                f"the originals are not known. Load the base model and the adapters again."
            )

    def _write(self, path: str, names: tuple[str, ...], call: str) -> None:
        layer = self._backbone.get_submodule(path)
        shelf = cast("Any", layer).adapters
        adapters = [shelf[name] for name in names if name in shelf]
        for parameter, stored in self._adapter_state.originals[path].items():
            if parameter == "bias":
                continue
            target = cast("Tensor", layer._parameters[parameter])
            turned = inject.stores_transposed(layer, parameter)
            # the model may have been moved since the copy was made
            original = stored.to(target.device)
            original = original.mT if turned else original  # [*experts, d_out, d_in]
            base = inject.base_of(layer, original)
            w = original.to(compute_dtype(original.dtype))
            for adapter in adapters:
                if isinstance(adapter, inject.ExpertAdapters):
                    w = adapter.changed(parameter, w, base)
                else:
                    w = inject.mergeable(adapter).weight(w, base)
            _fill(target, w.mT if turned else w, f"{call}: the merged {parameter} at {path!r}")
        self._write_bias(path, adapters, call)

    def _write_bias(self, path: str, adapters: list[Any], call: str) -> None:
        layer = self._backbone.get_submodule(path)
        stored = self._adapter_state.originals[path].get("bias")
        weight = self._adapter_state.originals[path].get("weight")
        if weight is None or weight.dim() != 2:
            return
        # what the layer holds now is merged already, and may have been moved since the copy
        original = weight.to(cast("Tensor", layer._parameters["weight"]).device)
        turned = inject.stores_transposed(layer)
        original = original.mT if turned else original  # [d_out, d_in]
        own = None if stored is None else stored.to(original.device)
        base = inject.base_of(layer, original, own)
        zeros = torch.zeros_like(original[:, 0], dtype=compute_dtype(original.dtype))
        b = zeros if own is None else own.to(zeros.dtype)
        for adapter in adapters:
            if not isinstance(adapter, inject.ExpertAdapters):
                b = inject.mergeable(adapter).bias(b, base)
        if stored is not None:
            target = cast("Tensor", layer._parameters["bias"])
            _fill(target, b, f"{call}: the merged bias at {path!r}")
        elif bool(b.count_nonzero()):
            raise StateError(
                f"{call}: the adapter adds a bias at {path!r}, where the layer has none. "
                f"Keep it active instead."
            )

    def _refuse_tied(self, paths: Iterable[str], call: str) -> None:
        sharing: dict[int, list[str]] = {}
        for name, p in cast("nn.Module", self).named_parameters(remove_duplicate=False):
            sharing.setdefault(id(p), []).append(name)
        for path in paths:
            own = self._backbone.get_submodule(path)._parameters.values()
            names = max((sharing.get(id(p), []) for p in own), key=len, default=[])
            if len(names) > 1:
                raise StateError(
                    f"{call}: the weight at {path!r} is shared by {listing(names)}; merging would "
                    f"change all of them. Keep the adapter active instead."
                )


def _check_mergeable(adapter: Adapter) -> None:
    if not isinstance(adapter, inject.ExpertAdapters):
        inject.mergeable(adapter)


def _fill(target: Tensor, value: Tensor, what: str) -> None:
    merged = value.to(target.dtype)
    if not _is_finite(merged):
        why = "overflows" if _is_finite(value) else "is not finite"
        raise StateError(
            f"{what} {why} in {target.dtype}; nothing has changed. Look for NaN in the adapter, or "
            f"merge in a wider dtype: model.float() before it."
        )
    target.copy_(merged)


def _is_finite(t: Tensor) -> bool:
    # one pass without a tensor of truth values; NaN is both the least and the greatest
    return not t.numel() or bool(torch.stack(t.aminmax()).isfinite().all())


def _copies(layer: nn.Module, adapters: Iterable[Adapter]) -> dict[str, Tensor]:
    """The parameters that merging the adapters writes, bit for bit."""
    names: dict[str, None] = {}
    for adapter in adapters:
        if isinstance(adapter, inject.ExpertAdapters):
            names.update(dict.fromkeys(adapter._modules))
        else:
            names.update(weight=None, bias=None)
            inject.matrix(layer)
    stored = {name: layer._parameters.get(name) for name in names}
    return {name: t.detach().clone() for name, t in stored.items() if t is not None}


def _restore(layer: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for name, tensor in originals.items():
        cast("Tensor", layer._parameters[name]).copy_(tensor)
