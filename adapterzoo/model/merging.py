"""Merging: write adapters that change weights into the base weights, and undo it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import shown
from adapterzoo.composition import Stack, parse, refuse_merged_unless_stacked
from adapterzoo.contracts import Adapter, CopyAdapter, compute_dtype
from adapterzoo.errors import StateError, listing
from adapterzoo.inject.adapted import adapters_of, base_of
from adapterzoo.inject.layers import (
    ExpertAdapters,
    as_matrix,
    changed,
    is_quantized,
    matrix,
    mergeable,
    write_finite,
)
from adapterzoo.inject.parallel import whole
from adapterzoo.tensor_parallel import whole_tensor

from .activation import refuse_merged, refuse_mixed, refuse_overridden, replan, set_active
from .heads import copies, plain
from .hf.guards import refuse_trained, refuse_while_batching, soon_undone
from .hf.init_data import can_dequantize
from .hf.untying import untied
from .sharding import refuse_if_fixed, refuse_if_sharded
from .state import AdaptedModel, layer_in, modules_of, parameters_of

# --- merge and reset ---


@torch.no_grad()
def merge(model: AdaptedModel, added: Sequence[str]) -> None:
    """Merge adapters into the base weights, all or none.

    Args:
        model: with adapters.
        added: names, in the order in which they act.

    Raises:
        StateError: they cannot be merged; nothing has changed.
    """
    state = model._adapter_state
    refuse_if_fixed(model, "Merge before fully_shard(model).")
    refuse_while_batching(model)
    for name in added:
        state.find(name)
        refuse_merged(model, name)
        refuse_overridden(model, name)
    names = (*state.merged, *added)
    setup = model._active.default.plan.setup
    for each in (setup, *(plan.setup for plan in model._active.overrides)):
        active = each.flatten() if each is not None else ()
        refuse_mixed(model, names, [n for n in active if n not in names])
    refuse_merged_unless_stacked(setup, names)
    modules: dict[str, list[Adapter]] = {}
    for name in added:
        for path, module in modules_of(model, name):
            # shared modules do not change a weight themselves
            if path:
                modules.setdefault(path, []).append(module)
    _refuse_lost(model, set(modules))
    # check all that can be checked before the first write
    for path, own in modules.items():
        for module in own:
            if not isinstance(module, ExpertAdapters):
                mergeable(module)
        _refuse_unwritable(model, path)
    # rows that act in all modules with a table may change it
    rows = [p for p in modules if any(copies.act_on_all(model, name, p) for name in added)]
    _refuse_tied(model, (path for path in modules if path not in rows))
    copies.check_merging(model, names)
    first = _first_with(model, modules)
    # undo a partial merge, even after Ctrl-C
    with contextlib.ExitStack() as undo:
        # runs last
        undo.callback(replan, model)
        for name in ("merged", "originals", "head"):
            undo.callback(setattr, state, name, copy.copy(getattr(state, name)))
        for path, own in modules.items():
            if first[path] == path:
                layer = layer_in(model, path)
                values = _copies(layer, own)
                undo.callback(copies.restore, layer._parameters, values)
                # values kept by an earlier merge are the originals
                state.originals[path] = values | state.originals.get(path, {})
                write(model, path, names)
        state.merged = names
        copies.merge(model, undo)
        replan(model)
        undo.pop_all()
    model._active.change_weights(added, "merged")


@torch.no_grad()
def reset(model: AdaptedModel) -> None:
    """Restore the base weights bit for bit; the adapters that were merged act as before."""
    state = model._adapter_state
    if state.merged:
        refuse_if_fixed(model, "Load the base model and the adapters again.")
        refuse_while_batching(model)
    for name in state.merged:
        refuse_overridden(model, name)
    _refuse_lost(model)
    for path in state.originals:
        _refuse_unwritable(model, path)
    for path, originals in state.originals.items():
        copies.restore(layer_in(model, path)._parameters, originals)
    state.originals.clear()
    copies.reset(model)
    merged, state.merged = state.merged, ()
    replan(model)
    model._active.change_weights(merged, "unmerged")


@contextlib.contextmanager
def merged(model: AdaptedModel) -> Iterator[None]:
    """Return a context within which the active adapters are merged, also in a running Trainer.

    Raises:
        StateError: they cannot be merged.
    """
    before, plan = model._adapter_state.merged, model._active.default.plan
    added = () if plan.setup is None else to_merge(model, None)
    with soon_undone():
        merge(model, added)
    try:
        yield
    finally:
        with soon_undone():
            reset(model)
            merge(model, before)


# --- a plain model again ---


def merge_and_unload(
    model: AdaptedModel, names: Sequence[str] | None, architecture: str | None
) -> Any:
    """Merge adapters and return a plain model of transformers."""
    _refuse_unloading(model)
    added = to_merge(model, names)

    def change(changed: Any) -> None:
        plan = changed._active.default.plan
        if names is not None:
            # nothing remains of the active ones
            set_active(changed, Stack(*added) if added else None)
        try:
            with untied_for(changed, added):
                merge(changed, added)
        except BaseException:
            changed._active.default.plan = plan
            raise

    return plain.unloaded(model, change, architecture)


def unload(model: AdaptedModel, architecture: str | None) -> Any:
    """Return a plain model of transformers without adapters."""
    _refuse_unloading(model)
    return plain.unloaded(model, reset, architecture)


def to_merge(model: AdaptedModel, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the adapters that remain to be merged; None: of the active ones.

    Raises:
        StateError: there is none, or the active composition cannot be merged.
    """
    state, plan = model._adapter_state, model._active.default.plan
    if names is None:
        if plan.setup is not None and plan.skip_layers:
            raise StateError(
                f"the active adapters do not act in the blocks {list(plan.skip_layers)!r}. Write "
                f"set_active_adapters({plan.setup!r})."
            )
        asked = () if plan.setup is None else _stacked(plan.setup)
    else:
        listed = names if isinstance(names, (list, tuple)) else _stacked(names)
        for name in listed:
            state.find(name)
        asked = tuple(dict.fromkeys(listed))
    if not asked and not state.merged:
        raise StateError(
            "no adapter is active or named. Write merge_and_unload(['a']) or unload()."
        )
    return tuple(name for name in asked if name not in state.merged)


def _stacked(asked: object) -> tuple[str, ...]:
    """Return the names of a stack of names, the only composition that can be merged."""
    setup = parse(asked)
    if not isinstance(setup, Stack) or not all(isinstance(c, str) for c in setup):
        raise StateError(
            f"{setup!r} is not a stack of adapters, so it cannot be merged. Write "
            "merge_and_unload(['a']), or average_adapter(…, combine_strategy='cat') first."
        )
    return setup.flatten()


def _refuse_unloading(model: AdaptedModel) -> None:
    # with named heads it is a copy, which the functions of a split model do not allow
    refuse = refuse_if_sharded if model._has_named_heads else refuse_if_fixed
    refuse(model, "Write it before fully_shard(model).")
    for name in model._adapter_state.records:
        refuse_trained(model, name, parameters_of(model, name))
    for plan in model._active.overrides:
        raise StateError(f"AdapterSetup({plan.setup!r}) is active in this thread. Leave the block.")
    if plain.plain_class(model) is None:
        raise StateError(
            f"{type(model).__name__} is a class of yours that always has adapters. Write "
            "merge_adapter('a'), or adapterzoo.init(model) of a class of transformers."
        )


# --- what cannot be merged ---


def _refuse_unwritable(model: AdaptedModel, path: str) -> None:
    layer = layer_in(model, path)
    if any(p is not None and p.is_meta for p in layer._parameters.values()):
        raise StateError(f"the weights at {shown(path)!r} are offloaded. Load without device_map.")
    if is_quantized(layer):
        how = (
            "Write model.dequantize() first."
            if can_dequantize(model)
            else "Load the plain model, then write load_adapter(…) and merge_adapter(…) there."
        )
        raise StateError(f"the weights at {shown(path)!r} are quantized. {how}")


def lost_originals(model: AdaptedModel) -> set[str]:
    """Return the paths of merged layers whose base weights are not known any more."""
    state = model._adapter_state
    if not state.merged:
        return set()
    lost = {path for name in state.merged for path in state.records[name].places if path}
    first = _first_with(model, (*state.originals, *lost))
    return {path for path in lost if first[path] not in state.originals}


def _refuse_lost(model: AdaptedModel, at: set[str] | None = None) -> None:
    lost = lost_originals(model)
    if at is not None:
        lost &= at
    if lost:
        raise StateError(
            f"the base weights at {shown(min(lost))!r} were saved merged, so the originals are not "
            "known. Load the base model and the adapters again."
        )


def _first_with(model: AdaptedModel, paths: Iterable[str]) -> dict[str, str]:
    """Return for each path the first one whose layer has the same weight."""
    found: dict[object, str] = {}
    firsts = {}
    for path in paths:
        weight = layer_in(model, path)._parameters.get("weight")
        firsts[path] = found.setdefault(path if weight is None else id(weight), path)
    return firsts


def untied_for(
    model: AdaptedModel, added: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """Return a context that gives layers a weight of their own if merging would change several.

    Rows of a table that act in all of these layers are merged there anyway.
    """
    if not any(copies.rows_of(model, name) for name in added):
        paths = {path for name in added for path, _ in modules_of(model, name) if path}
        try:
            _refuse_tied(model, paths)
            copies.check_merging(model, (*model._adapter_state.merged, *added))
        except StateError:
            return untied(model)
    return contextlib.nullcontext()


def _refuse_tied(model: AdaptedModel, paths: Iterable[str]) -> None:
    # a module with several names is one layer
    sharing: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is not None:
                sharing.setdefault(id(p), []).append(f"{prefix}.{name}" if prefix else name)
    for path in paths:
        own = layer_in(model, path)._parameters.values()
        names = max((sharing.get(id(p), []) for p in own), key=len, default=[])
        if len(names) > 1:
            raise StateError(
                f"the weight at {shown(path)!r} is shared by {listing(names)}; merging would "
                "change all of them. Keep the adapter active."
            )


# --- write ---


def write(model: AdaptedModel, path: str, names: tuple[str, ...]) -> None:
    """Write the merged weights of one layer.

    Args:
        model: holds the layer's originals.
        path: of the layer.
        names: all merged adapters, in the order in which they act.

    Raises:
        StateError: a merged value is not finite.
    """
    layer = layer_in(model, path)
    there = adapters_of(layer)
    adapters = [whole(there[name]) for name in names if name in there]
    kept = {n: whole_tensor(t) for n, t in model._adapter_state.originals[path].items()}
    # the model may have been moved after copying
    own = {name: t.to(cast("Tensor", layer._parameters[name]).device) for name, t in kept.items()}
    bias = own.get("bias")
    if "weight" in own:
        # written with the weight
        own.pop("bias", None)
    for parameter, stored in own.items():
        original = as_matrix(layer, parameter, stored)  # [*experts, d_out, d_in]
        base = base_of(layer, original, bias, kept=kept)
        w = stored.to(compute_dtype(stored.dtype))
        for adapter in adapters:
            w = changed(adapter, parameter, w, base, layer)
        target = cast("Tensor", layer._parameters[parameter])
        write_finite(target, w, f"the merged {parameter} at {shown(path)!r}")
        if parameter == "weight" and (original.dim() == 2 or bias is not None):
            # adapters of a parameter do not change the bias, of which there is no copy
            b = torch.zeros_like(original[:, 0]) if bias is None else bias
            b = b.to(w.dtype)
            for adapter in adapters:
                if not isinstance(adapter, ExpertAdapters):
                    b = mergeable(adapter).merged_bias(b, base)
            if bias is not None:
                own_bias = cast("Tensor", layer._parameters["bias"])
                write_finite(own_bias, b, f"the merged bias at {shown(path)!r}")
            elif bool(b.count_nonzero()):
                raise StateError(
                    f"{shown(path)!r} has no bias, and the adapter adds one. Keep it active."
                )


def _copies(layer: nn.Module, adapters: Iterable[Adapter]) -> dict[str, Tensor]:
    """Return the parameters that merging the adapters writes, bit for bit."""
    names: dict[str, None] = {}
    for adapter in adapters:
        if isinstance(adapter, ExpertAdapters):
            names.update(dict.fromkeys(adapter._modules))
        else:
            names.update(weight=None, bias=None)
            if isinstance(adapter, CopyAdapter):
                names.update(dict.fromkeys(layer._parameters))
            elif not mergeable(adapter).keeps_weight:
                matrix(layer)
    stored = {name: layer._parameters.get(name) for name in names}
    return {name: t.detach().clone() for name, t in stored.items() if t is not None}
