"""Merging: adapters that equal a changed weight become part of the base weights, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.contracts import Adapter, compute_dtype
from adapterzoo.errors import StateError

from .adapters import AdaptersMixin


class MergingMixin(AdaptersMixin):
    """`merge_adapter` and `reset_adapter`, once for all methods."""

    @torch.no_grad()
    def merge_adapter(self, name: str) -> None:
        """Make an adapter part of the base weights; its own parameters stay for `reset_adapter`.

        Merging a second adapter equals merging both at once. A merged adapter acts always; it
        needs not be active. The original weights are kept until `reset_adapter`.

        Raises:
            UnknownNameError: there is no adapter of this name.
            StateError: it is merged already, is no change of a weight (a bottleneck), or its
                merged weights are not finite; nothing has changed then.
        """
        call = f"merge_adapter({name!r})"
        self._find(name, call)
        self._refuse_if_merged(name, call)
        names = (*self._zoo.merged, name)
        modules = dict(self.adapter_modules(name))
        # every check that can be made comes before the first write
        for path, module in modules.items():
            _check_mergeable(module)
            self._refuse_tied(path, call)
        before: dict[str, dict[str, Tensor]] = {}
        kept = dict(self._zoo.originals)
        try:
            for path, module in modules.items():
                before[path] = _copies(self._backbone.get_submodule(path), module)
                # what an earlier merge kept is older: that is the original
                self._zoo.originals[path] = before[path] | kept.get(path, {})
                self._write(path, names, call)
        except Exception:
            for path, originals in before.items():
                _restore(self._backbone.get_submodule(path), originals)
            self._zoo.originals = kept
            raise
        self._zoo.merged = names
        self._replan()

    @torch.no_grad()
    def reset_adapter(self) -> None:
        """Give the base weights back their bits; the adapters that were merged act as before.

        Raises:
            StateError: the merged weights came from a file, so the originals are not known.
        """
        places = {p for n in self._zoo.merged for p, _ in self.adapter_modules(n)}
        if lost := places - set(self._zoo.originals):
            raise StateError(
                f"reset_adapter(): the base weights at {min(lost)!r} were merged before they were "
                f"saved, so the originals are not known. Load the base model again."
            )
        for path, originals in self._zoo.originals.items():
            _restore(self._backbone.get_submodule(path), originals)
        self._zoo.originals.clear()
        self._zoo.merged = ()
        self._replan()

    def _write(self, path: str, names: tuple[str, ...], call: str) -> None:
        layer = self._backbone.get_submodule(path)
        shelf = cast("Any", layer).adapters
        adapters = [shelf[name] for name in names if name in shelf]
        for parameter, stored in self._zoo.originals[path].items():
            if parameter == "bias":
                continue
            turned = inject.stores_transposed(layer, parameter)
            original = stored.mT if turned else stored
            base = inject.base_of(layer, original)
            w = original.to(compute_dtype(original.dtype))
            for adapter in adapters:
                if isinstance(adapter, inject.ParameterParts):
                    w = adapter.changed(parameter, w, base)
                else:
                    w = inject.mergeable(adapter).weight(w, base)
            merged = w.to(original.dtype)
            if not bool(merged.isfinite().all()):
                why = "overflows" if bool(w.isfinite().all()) else "is not finite"
                raise StateError(
                    f"{call}: the merged {parameter} at {path!r} {why} in {original.dtype}; "
                    f"nothing has changed. Look for NaN in the adapter, or merge in a wider dtype: "
                    f"model.float() before it."
                )
            cast("Tensor", layer._parameters[parameter]).copy_(merged.mT if turned else merged)
        self._write_bias(path, adapters, call)

    def _write_bias(self, path: str, adapters: list[Any], call: str) -> None:
        layer = self._backbone.get_submodule(path)
        stored = self._zoo.originals[path].get("bias")
        base = inject.base_of(layer)
        weight = layer._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            return
        zeros = torch.zeros_like(base.weight[:, 0], dtype=compute_dtype(weight.dtype))
        b = zeros if stored is None else stored.to(zeros.dtype)
        for adapter in adapters:
            if not isinstance(adapter, inject.ParameterParts):
                b = inject.mergeable(adapter).bias(b, base)
        if stored is not None:
            cast("Tensor", layer._parameters["bias"]).copy_(b)
        elif bool(b.count_nonzero()):
            raise StateError(
                f"{call}: the adapter adds a bias at {path!r}, where the layer has none. "
                f"Keep it active instead."
            )

    def _refuse_tied(self, path: str, call: str) -> None:
        weight = self._backbone.get_submodule(path)._parameters.get("weight")
        sharing = [
            n
            for n, p in cast("nn.Module", self).named_parameters(remove_duplicate=False)
            if p is weight
        ]
        if len(sharing) > 1:
            raise StateError(
                f"{call}: the weight at {path!r} is shared by {', '.join(map(repr, sharing))}; "
                f"merging would change all of them. Keep the adapter active instead."
            )


def _check_mergeable(adapter: Adapter) -> None:
    if not isinstance(adapter, inject.ParameterParts):
        inject.mergeable(adapter)


def _copies(layer: nn.Module, adapter: Adapter) -> dict[str, Tensor]:
    """The parameters that merging the adapter writes, bit for bit."""
    if isinstance(adapter, inject.ParameterParts):
        names = list(adapter._modules)
    else:
        names = ["weight", "bias"]
        inject.matrix(layer)
    stored = {name: layer._parameters.get(name) for name in names}
    return {name: t.detach().clone() for name, t in stored.items() if t is not None}


def _restore(layer: nn.Module, originals: Mapping[str, Tensor]) -> None:
    for name, tensor in originals.items():
        cast("Tensor", layer._parameters[name]).copy_(tensor)
