"""Rows of the table of tokens that an adapter has for itself, in the output layers tied to it.

All modules that share the table share the rows, those of heads too. An output layer can be tied or
untied while adapters are there, by a head that comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import nn

from adapterzoo import inject
from adapterzoo.anatomy import without_wrappers
from adapterzoo.composition import SiteStep, compile_site
from adapterzoo.configs import Placement
from adapterzoo.inject.building import layer_at
from adapterzoo.methods.copies.rows import ROWS, TokenRows
from adapterzoo.model.state import AdaptedModel, modules_of
from adapterzoo.runtime import HEAD


def paths_of(model: AdaptedModel, name: str) -> tuple[str, ...]:
    """Return the paths of the embeddings of which an adapter has rows of its own."""
    record = model._adapter_state.records.get(name)
    return () if record is None else record.located.get(ROWS, ())


def shared(places: Mapping[str, Sequence[Placement]], modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the one module of rows for each of the paths that share a table.

    Args:
        places: of an adapter.
        modules: built for each path.
    """
    firsts: dict[int, Any] = {}
    return {
        path: firsts.setdefault(id(ps[0].config), modules[path])
        for path, ps in places.items()
        if ps and ps[0].location == ROWS
    }


def _outputs(model: AdaptedModel) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """Yield path, layer and embeddings of each output layer that is tied to a table."""
    tables: dict[int, list[str]] = {}
    for path, module in model._backbone.named_modules():
        if isinstance(module, nn.Embedding):
            tables.setdefault(id(module._parameters["weight"]), []).append(without_wrappers(path))
    for path, module in cast("nn.Module", model).named_modules():
        weight = module._parameters.get("weight")
        if isinstance(module, nn.Linear) and (paths := tables.get(id(weight))):
            yield without_wrappers(path), module, tuple(paths)


def update(model: AdaptedModel) -> bool:
    """Let the output layers that are tied to a table have its rows, and no others.

    Returns:
        Whether something has changed, so that plans have to be made anew.
    """
    names = [name for name in model._adapter_state.records if paths_of(model, name)]
    state = model._adapter_state
    if not names and not state.outputs:
        return False
    whole = cast("nn.Module", model)
    wanted: dict[tuple[str, str], tuple[nn.Module, Any]] = {}
    for path, layer, tables in _outputs(model):
        for name in names:
            rows = {p: module for p, module in modules_of(model, name) if p in tables}
            if found := [rows[p] for p in paths_of(model, name) if p in rows]:
                wanted[path, name] = layer, found[0]
    for path, name in state.outputs:
        old = _there(whole, path)
        kept = wanted.get((path, name))
        held = None if old is None else _held(old).get(name)
        if old is not None and held is not None and (kept is None or held is not kept[1]):
            inject.take(old, name)
    for (path, name), (layer, rows) in wanted.items():
        if name not in _held(layer):
            inject.put(layer, name, rows, model._active, HEAD + path)
    before, state.outputs = state.outputs, tuple(wanted)
    return before != state.outputs


def renumber(model: AdaptedModel) -> None:
    """Set the numbers of tokens again, which a model that is loaded does not have."""
    for name in model._adapter_state.records:
        for path in paths_of(model, name):
            module = dict(modules_of(model, name))[path]
            cast("TokenRows", module).renumber()


def leave(model: AdaptedModel, name: str) -> None:
    """Take the rows of an adapter, which is removed, out of the output layers."""
    state = model._adapter_state
    for path, owner in state.outputs:
        layer = _there(cast("nn.Module", model), path)
        if owner == name and layer is not None and name in _held(layer):
            inject.take(layer, name)
    state.outputs = tuple(each for each in state.outputs if each[1] != name)


def act_on_all(model: AdaptedModel, name: str, path: str) -> bool:
    """Return whether the rows of an adapter act in every module that shares the table at a path."""
    if path not in paths_of(model, name):
        return False
    whole, weight = cast("nn.Module", model), layer_at(model._backbone, path)._parameters["weight"]
    held = [m for m in whole.modules() if m._parameters.get("weight") is weight]
    return all(name in _held(module) for module in held)


def steps(model: AdaptedModel, parts: Sequence[Any], acting: Sequence[str]) -> dict[str, SiteStep]:
    """Return the steps of the output layers.

    Args:
        model: with adapters.
        parts: of a composition, one for each kind of rows.
        acting: names of the adapters that act.
    """
    found: dict[str, SiteStep] = {}
    for path in dict.fromkeys(path for path, _ in model._adapter_state.outputs):
        layer = _there(cast("nn.Module", model), path)
        held = {} if layer is None else _held(layer)
        present = {name: module for name, module in held.items() if name in acting}
        step = compile_site(parts, present)
        if step is not None:
            found[HEAD + path] = step.by_name()
    return found


def ties(model: AdaptedModel) -> dict[str, str]:
    """Map keys of shared rows in the state dict to the keys of those that they share."""
    found: dict[str, str] = {}
    own = {
        id(tensor)
        for name in model._adapter_state.records
        if (paths := paths_of(model, name))
        for path, module in modules_of(model, name)
        if path in paths
        for tensor in module.state_dict(keep_vars=True).values()
    }
    first: dict[int, str] = {}
    tensors = cast("nn.Module", model).state_dict(keep_vars=True) if own else {}
    for key, tensor in tensors.items():
        if id(tensor) in own and first.setdefault(id(tensor), key) != key:
            found[key] = first[id(tensor)]
    return found


def _held(layer: nn.Module) -> Mapping[str, Any]:
    return inject.adapters_of(layer) if isinstance(layer, inject.Adapted) else {}


def _there(model: nn.Module, path: str) -> nn.Module | None:
    """Return the module at a path, which may be gone with its head."""
    for name in path.split("."):
        found = model._modules.get(name)
        if found is None:
            return None
        model = found
    return model
