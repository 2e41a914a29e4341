"""Parts of the model of which an adapter has its own copy, and parameters that heads share.

*Copies of the static head* of a task class, one for each adapter that was trained with it. A copy
belongs to the adapter that acts last, or to the fusion. Its layers are stored with the adapters,
below the layers of the head (`classifier.adapters.<name>`), so copies, pickles, files and replicas
of the model include them; the keys of the original stay those of the plain class. Parameters that
the head shares with the base model have no copies. The output layer of a language model, which is
as large as the vocabulary, has copies only for adapters whose `modules_to_save` name it.

*Rows of the token table* also act in the output layers that are tied to the table, including those
of heads. Adding or deleting a head ties or unties its output layer.

*Token tables* of an adapter are shared by the modules that look up tokens, and by the head with the
adapter's name.

Copies of layers in the base model (`modules_to_save`, norms, biases) are adapters like all others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from adapterzoo import inject
from adapterzoo.anatomy import HEAD, Site, shown, without_wrappers
from adapterzoo.averaging import weighted_sum
from adapterzoo.composition import Composition, Fuse, Stack, fusion_key
from adapterzoo.composition.compile import SiteStep, compile_site, step_of_copies
from adapterzoo.composition.rows import parts_of
from adapterzoo.config import AdapterConfig, ConfigUnion, Placement
from adapterzoo.contracts import Contained, upcast
from adapterzoo.errors import ConfigError, SiteError, StateError, argument, listing
from adapterzoo.inject.adapted import Adapted, AdapterDict, adapters_of, container_of, discard
from adapterzoo.inject.building import (
    at_hand,
    layer_at,
    own_parameters,
    plain_modules,
    plain_state,
)
from adapterzoo.inject.layers import is_quantized, packing_of, write_finite
from adapterzoo.inject.parallel import parallel_forward
from adapterzoo.methods._copies import ROWS, WITH_OUTPUTS, Table, tied_layers
from adapterzoo.model.hf.task_classes import head_tensors
from adapterzoo.model.state import (
    DEFAULT_EMBEDDINGS,
    AdaptedModel,
    base_prefix,
    heads_of,
    layer_in,
    modules_of,
    output_embeddings_of,
    output_path,
    outside,
    prefixes_of,
    token_table,
)
from adapterzoo.patterns import exactly, matches, short_names

# the submodule of a layer that holds the copies of it
_HELD = Contained.container


def owner_of(part: object) -> str | None:
    """Return the owner of the copy that a composition uses; None for the original head.

    Args:
        part: a part of a composition that does not divide the batch.
    """
    while isinstance(part, Stack):
        part = part.children[-1]
    if isinstance(part, Fuse):
        return fusion_key(part.name)
    return part if isinstance(part, str) else None


def owners_of(setup: Composition | None) -> tuple[str | None, ...]:
    """Return the owners of the active heads, None for the original; base rows have no owner."""
    if setup is None:
        return ()
    return tuple(dict.fromkeys(owner_of(p) for p in parts_of(setup)[0] if p is not None))


def layers_of(model: AdaptedModel) -> dict[str, nn.Module]:
    """Return the layers of a static head that can have copies, by path; none for a base model.

    A layer is the smallest module that computes only with its own tensors and those of the modules
    below it.
    """
    found: dict[str, nn.Module] = {}
    if model._has_named_heads or model._backbone is cast("nn.Module", model):
        return found
    shared, inside = shared_ids(model), set[int]()
    for path, module in outside(model):
        own = any(id(t) not in shared for _, t in saved_tensors(module))
        if id(module) in inside or not (own or is_parametrized(module)):
            continue
        below = [part for _, part in plain_modules(module)]
        if not any(id(t) in shared for part in below for _, t in saved_tensors(part)):
            inside.update(map(id, below))
            found[path] = module
    return found


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's own parameters and its persistent buffers."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield key, tensor


def shared_ids(model: AdaptedModel) -> set[int]:
    """Return the ids of tensors without copies: those of the base model and the output layer."""
    output = output_embeddings_of(model)
    # not the state dict of the base model, which includes its adapters
    found = {id(p) for p in own_parameters(model._backbone)}
    return found | ({id(p) for p in output.parameters()} if output is not None else set())


def output_tensors(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors of the layer at `output_path` by their keys in the task class."""
    if (path := output_path(model)) is None:
        return {}
    own = _layer(model, path)._parameters.items()
    return {f"{path}.{name}": t for name, t in own if t is not None}


def _layer(model: AdaptedModel, path: str) -> nn.Module:
    return layer_at(cast("nn.Module", model), path)


def made(model: AdaptedModel, with_output: bool = False) -> dict[str, nn.Module]:
    """Return copies of the layers of the original head, optionally of the output layer too.

    Raises:
        StateError: a layer is quantized, or split over processes.
    """
    found = layers_of(model)
    if with_output and (path := output_path(model)) is not None:
        found[path] = _layer(model, path)
    for path, layer in found.items():
        if any(is_quantized(part) for _, part in plain_modules(layer)):
            raise StateError(
                f"{path!r} of the head is quantized and cannot be trained. Load the model with "
                f"modules_to_not_convert=[{path!r}] (bitsandbytes: llm_int8_skip_modules)."
            )
        if parallel_forward(layer) is not None:
            raise StateError(
                f"a tp_plan has split {path!r}, of which an adapter cannot have a copy. Write "
                f"{argument('with_head', False, 'load_adapter')}, or load the model without it."
            )
    return {path: _copied(layer) for path, layer in found.items()}


def _copied(layer: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    if isinstance(layer, Adapted):
        # without the other copies, and with the same link to the model
        memo = {id(layer._link): layer._link}
        memo |= {id(layer._modules[name]): AdapterDict() for name in layer._link.containers}
    with at_hand(layer):
        twin = copy.deepcopy(layer, memo)
    for hook in ("_hf_hook", "_old_forward", "forward"):
        # accelerate's hooks on the layer also run around its copies
        vars(twin).pop(hook, None)
    if isinstance(twin, Adapted):
        discard(twin)
    return twin


def put(model: AdaptedModel, owner: str, layers: Mapping[str, nn.Module]) -> None:
    """Give an adapter its own head, replacing an earlier one; the caller then makes plans anew.

    Args:
        model: a model with adapters.
        owner: the owner of the head, see `owner_of`.
        layers: the layers of the head by path, see `made`.
    """
    take(model, owner)
    for path, layer in layers.items():
        inject.put(_layer(model, path), owner, layer, model._active, HEAD + path)
    if layers:
        model._adapter_state.copies[owner] = tuple(layers)


def take(model: AdaptedModel, owner: str) -> dict[str, nn.Module]:
    """Take an adapter's own head, if it has one, out of the model.

    Args:
        model: a model with adapters.
        owner: the owner of the head.

    Returns:
        The layers of the head by path.
    """
    paths = model._adapter_state.copies.pop(owner, ())
    return {path: inject.take(_layer(model, path), owner) for path in paths}


def layers_with(model: AdaptedModel, *owners: str | None) -> dict[str, nn.Module]:
    """Return the head of the last of these owners that has one: its layers by path.

    Args:
        model: a model with adapters.
        *owners: owners of heads, or None.
    """
    paths = model._adapter_state.copies
    owner = next((o for o in reversed(owners) if o is not None and o in paths), "")
    return {path: adapters_of(_layer(model, path))[owner] for path in paths.get(owner, ())}


def trained(
    model: AdaptedModel, setup: Composition | None, gives_heads: bool = True
) -> Iterator[nn.Parameter]:
    """Yield the parameters of the active heads.

    If no single adapter acts last, as in an `Average`, the original head is active.

    Args:
        model: a model with adapters.
        setup: the active composition.
        gives_heads: whether to give adapters without a copy one first.
    """
    for owner in owners_of(setup):
        if owner is None:
            layers = layers_of(model) if gives_heads else {}
        else:
            if gives_heads and owner not in model._adapter_state.copies:
                put(model, owner, made(model))
            layers = layers_with(model, owner)
        for layer in layers.values():
            own = own_parameters(layer)
            yield from (p for p in own if p.is_floating_point() and packing_of(p) is None)


def fitted(layer: nn.Module, own: nn.Module) -> nn.Module:
    """Return the copy of a layer, resized to the shapes that the layer has now.

    New entries get the values of the layer.

    Args:
        layer: the layer in the model.
        own: the copy.
    """
    mine = plain_state(own)
    if all(tensor.shape == mine[key].shape for key, tensor in plain_state(layer).items()):
        return own
    wide = _copied(layer).train(own.training)
    with torch.no_grad():
        for key, tensor in plain_state(wide).items():
            old = mine[key]
            if isinstance(tensor, nn.Parameter):
                tensor.data = tensor.data.to(old.dtype)
                tensor.requires_grad_(old.requires_grad)
            both = tuple(map(slice, map(min, tensor.shape, old.shape)))
            tensor[both] = old[both]
    return wide


def modules_with(model: AdaptedModel, name: str) -> list[nn.Module]:
    """Return the head layers that move with an adapter: its copies, or the head with its name."""
    own = heads_of(model).get(name)
    return [*layers_with(model, name).values(), *([] if own is None else [own])]


# --- run, save, merge ---


def steps_of(model: AdaptedModel, parts: Sequence[Any]) -> dict[str, SiteStep]:
    """Return the step of each layer of the head.

    Args:
        model: a model with adapters.
        parts: the composition of each kind of row.
    """
    copies = model._adapter_state.copies
    if not copies:
        return {}
    # runs inside compiled calls: use only what a compiler can trace
    named = [owner_of(part) for part in parts]
    owners = [owner if owner in copies else None for owner in named]
    paths = dict.fromkeys(path for o in owners if o is not None for path in copies[o])
    return {
        HEAD + path: step_of_copies([o if o and path in copies[o] else None for o in owners])
        for path in paths
    }


def tensors_of(model: AdaptedModel, owner: str | None) -> dict[str, Tensor]:
    """Return the tensors of a static head by their keys in the task class.

    Args:
        model: a model with adapters.
        owner: the owner of the head; layers without a copy are the original's. None: the original.
    """
    if model._has_named_heads or model._backbone is cast("nn.Module", model):
        return {}
    shared, output = shared_ids(model), output_path(model)
    found = {key: t for key, t in head_tensors(model).items() if id(t) not in shared}
    for path, layer in layers_with(model, owner).items():
        own = layer.state_dict(prefix=f"{path}.", keep_vars=True)
        found |= {key: t for key, t in own.items() if key in found or path == output}
    return found


def check_merging(model: AdaptedModel, names: Sequence[str]) -> None:
    """Check that the head of the last of these adapters that has one can be merged.

    Raises:
        StateError: it includes the output layer, which is tied to the embeddings in the model.
    """
    own = layers_with(model, *names)
    if own and (path := output_path(model)) in own:
        weight = _layer(model, str(path))._parameters["weight"]
        if any(weight is parameter for parameter in own_parameters(model._backbone)):
            raise StateError(
                f"{listing(names)}: the head has the output layer {path!r}, and that of the model "
                f"is tied to its embeddings, which merging would change. Keep the adapter active."
            )


@torch.no_grad()
def merge(model: AdaptedModel, undo: ExitStack) -> None:
    """Write the head of the last merged adapter that has one into the original head.

    Args:
        model: a model with merged adapters.
        undo: gets a callback that restores the original head.

    Raises:
        StateError: a value is not finite in the dtype of the original.
    """
    state = model._adapter_state
    for path, mine in layers_with(model, *state.merged).items():
        original = plain_state(_layer(model, path))
        before = {key: t.detach().clone() for key, t in original.items()}
        undo.callback(restore, original, before)
        state.head.setdefault(path, before)
        for key, tensor in plain_state(mine).items():
            write_finite(original[key], tensor.detach(), f"the merged {key} at {path!r}")


@torch.no_grad()
def reset(model: AdaptedModel) -> None:
    """Restore the original head bit for bit."""
    for path, tensors in model._adapter_state.head.items():
        restore(plain_state(_layer(model, path)), tensors)
    model._adapter_state.head.clear()


def restore(own: Mapping[str, Tensor | None], values: Mapping[str, Tensor]) -> None:
    """Write values back to the tensors of the same keys, bit for bit."""
    for key, value in values.items():
        cast("Tensor", own[key]).copy_(value)


@torch.no_grad()
def combined(
    model: AdaptedModel, names: Sequence[str], weights: Sequence[float]
) -> dict[str, nn.Module]:
    """Return the head of an average: θ₀ + Σ wᵢ (θᵢ − θ₀), with θ₀ the original head.

    Args:
        model: a model with adapters.
        names: names of the adapters.
        weights: one weight for each adapter.

    Returns:
        The layers of the head by path; empty if no adapter has its own head.
    """
    theirs = [layers_with(model, name) for name in names]
    if not any(theirs):
        return {}
    found = made(model, with_output=any(output_path(model) in each for each in theirs))
    for path, layer in found.items():
        original = {key: t.detach().clone() for key, t in layer.state_dict().items()}
        states = [each[path].state_dict() if path in each else original for each in theirs]
        for key, target in layer.state_dict(keep_vars=True).items():
            if target.is_floating_point() and packing_of(target) is None:
                total = weighted_sum([upcast(state[key], target) for state in states], weights)
                target.copy_(total + (1 - sum(weights)) * upcast(original[key], target))
    return found


# --- rows of the table of tokens ---


def rows_of(model: AdaptedModel, name: str) -> tuple[str, ...]:
    """Return the paths of the embeddings whose adapter also acts in tied output layers."""
    record = model._adapter_state.records.get(name)
    if record is None or record.located.keys().isdisjoint(WITH_OUTPUTS):
        return ()
    return tuple(path for at in WITH_OUTPUTS for path in record.located.get(at, ()))


def update_rows(model: AdaptedModel) -> bool:
    """Put rows of adapters into the output layers tied to their table, and take all others out.

    Returns:
        Whether anything has changed, so that the caller must make plans anew.
    """
    names = [name for name in model._adapter_state.records if rows_of(model, name)]
    state = model._adapter_state
    if not names and not state.outputs:
        return False
    tables: dict[int, list[str]] = {}
    for path, module in model._backbone.named_modules():
        if isinstance(module, nn.Embedding):
            tables.setdefault(id(module._parameters["weight"]), []).append(without_wrappers(path))
    wanted: dict[tuple[str, str], tuple[nn.Module, Any]] = {}
    for path, layer in cast("nn.Module", model).named_modules():
        tied = tables.get(id(layer._parameters.get("weight")), ())
        for name in names if tied and isinstance(layer, nn.Linear) else ():
            rows = dict(modules_of(model, name))
            if found := [rows[p] for p in rows_of(model, name) if p in tied]:
                wanted[without_wrappers(path), name] = layer, found[0]
    for path, name in state.outputs:
        if (path, name) not in wanted and name in _adapters_at(model, path):
            inject.take(_layer(model, path), name)
    for (path, name), (layer, rows) in wanted.items():
        if name not in _adapters_at(model, path):
            inject.put(layer, name, rows, model._active, HEAD + path)
    before, state.outputs = state.outputs, tuple(wanted)
    return before != state.outputs


def act_on_all(model: AdaptedModel, name: str, path: str) -> bool:
    """Return whether an adapter's rows act in all modules that share the table at a path."""
    if path not in rows_of(model, name):
        return False
    weight = layer_in(model, path)._parameters["weight"]
    every = plain_modules(cast("nn.Module", model))
    held = [at for at, module in every if module._parameters.get("weight") is weight]
    return all(name in _adapters_at(model, at) for at in held)


def row_steps(
    model: AdaptedModel, parts: Sequence[Any], acting: Sequence[str]
) -> dict[str, SiteStep]:
    """Return the steps of the output layers that have rows of adapters.

    Args:
        model: a model with adapters.
        parts: the composition of each kind of row.
        acting: names of the adapters that act.
    """
    found: dict[str, SiteStep] = {}
    for path in dict.fromkeys(path for path, _ in model._adapter_state.outputs):
        held = _adapters_at(model, path).items()
        own = {name for at, name in model._adapter_state.outputs if at == path}
        present = {name: module for name, module in held if name in own and name in acting}
        step = compile_site(parts, present)
        if step is not None:
            found[HEAD + path] = step.by_name()
    return found


def _adapters_at(model: AdaptedModel, path: str) -> Mapping[str, Any]:
    """Return the adapters of a layer by name; empty if the layer is plain, or deleted."""
    try:
        layer = _layer(model, path)
    except (AttributeError, KeyError):
        return {}
    return adapters_of(layer) if isinstance(layer, Adapted) else {}


# --- token tables, and ties ---


LOCATION = "embeddings"
"""The location of an adapter's own token table."""


def tables_of(model: AdaptedModel, name: str) -> tuple[str, ...]:
    """Return the paths of the embeddings that an adapter's own table replaces."""
    record = model._adapter_state.records.get(name)
    return () if record is None else record.located.get(LOCATION, ())


def table_of(model: AdaptedModel, name: str) -> nn.Parameter | None:
    """Return an adapter's own table; None if it has none, or the adapter is unknown."""
    for path in tables_of(model, name):
        found = adapters_of(layer_in(model, path))
        return cast("nn.Parameter", cast("Table", found[name]).table.weight)
    return None


def shared_with_heads(model: AdaptedModel) -> dict[int, str]:
    """Return the parameters that heads may share, of the base model and of tables: id → name."""
    start, found = base_prefix(model), dict[int, str]()
    for path, module in plain_modules(model._backbone):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # a parameter may have several names: the first one counts
                found.setdefault(id(parameter), f"{start}{path}.{name}" if path else start + name)
    for name in model._adapter_state.records:
        for path in tables_of(model, name)[:1]:
            key = f"{prefixes_of(model, name)[path]}table.weight"
            found.setdefault(id(table_of(model, name)), key)
    return found


def ties(model: AdaptedModel) -> dict[str, str]:
    """Return the state-dict keys of parameters that repeat another one → its key."""
    state = model._adapter_state
    own = [name for name in state.records if tables_of(model, name) or rows_of(model, name)]
    keyed: list[tuple[str, nn.Parameter]] = []
    for name in dict.fromkeys([*chain(*state.sharing.values()), *own]):
        prefixes = prefixes_of(model, name)
        for path, module in modules_of(model, name):
            keyed += module.named_parameters(prefixes[path].removesuffix("."))
    for name, head in heads_of(model).items():
        for path, layer in plain_modules(head, f"heads.{name}"):
            keyed += ((f"{path}.{n}", p) for n, p in layer._parameters.items() if p is not None)
    for path, name in state.outputs:
        output = _adapters_at(model, path)[name]
        keyed += output.named_parameters(f"{path}.{container_of(output)}.{name}")
    names = shared_with_heads(model) if keyed else {}
    sources = ((key, names.setdefault(id(parameter), key)) for key, parameter in keyed)
    return {key: source for key, source in sources if source != key}


def list_ties(model: AdaptedModel, name: str | None = None) -> None:
    """Tell transformers which parameters are shared.

    Args:
        model: a model with adapters.
        name: the adapter that was added or removed; None: something else has changed.
    """
    own, state = cast("Any", model), model._adapter_state
    before = state.tied
    # absent until transformers has finished the constructor
    listed = vars(own).get("all_tied_weights_keys")
    if name is not None:
        # most adapters share nothing, and adding the fiftieth must cost no more than the first
        was_tied = any(f".{name}." in f"{key} {other}" for key, other in before.items())
        shares = any(name in group for group in state.sharing.values())
        if not (was_tied or shares or tables_of(model, name) or rows_of(model, name)):
            return
    tied = ties(model)
    vars(own).pop("_tied_weights_keys", None)
    if tied:
        # transformers reads these as patterns
        patterns = {re.escape(k): re.escape(v) for k, v in tied.items()}
        known = type(own)._tied_weights_keys
        # classes written for transformers 4 have a list, without the keys that are shared
        own._tied_weights_keys = {**(known if isinstance(known, Mapping) else {}), **patterns}
    if listed is not None:
        for key in before:
            listed.pop(key, None)
        listed.update(tied)
    state.tied = tied


def leave_groups(model: AdaptedModel, names: Sequence[str]) -> None:
    """Remove adapters from the groups that share parameters; a group of one is deleted."""
    sharing = model._adapter_state.sharing
    for group, members in list(sharing.items()):
        left = tuple(name for name in members if name not in names)
        if left != members:
            del sharing[group]
            if len(left) > 1:
                sharing[group] = left


# --- adapters whose size depends on the table ---


def at_table(model: AdaptedModel, places: Mapping[str, Sequence[Placement]]) -> list[str]:
    """Return the paths at which an adapter's size is that of the active token table."""
    kinds = {path: {p.site.kind for p in placements} for path, placements in places.items()}
    paths = [p for p, kind in kinds.items() if "embedding" in kind or p.startswith(HEAD)]
    table = token_table(model) if paths else None
    layers = ((path, layer_in(model, path)) for path in paths)
    return [path for path, m in layers if table and m._parameters.get("weight") is table.weight]


def refuse_own_size(
    model: AdaptedModel, name: str, places: Mapping[str, Sequence[Placement]]
) -> None:
    """Refuse an adapter of the model's own table while other embeddings are active.

    Raises:
        StateError: the adapter is one.
    """
    active = model._adapter_state.embeddings
    if active != DEFAULT_EMBEDDINGS and (found := at_table(model, places)):
        names = [*map(shown, found)]
        raise StateError(
            f"{name} adapts {listing(names)}, and the embeddings {active!r} may have another size. "
            f"Write set_active_embeddings({DEFAULT_EMBEDDINGS!r}) first."
        )


def refuse_both(
    model: AdaptedModel, places: Mapping[str, Sequence[Placement]], head: Iterable[str] = ()
) -> None:
    """Refuse an adapter that changes an output layer and also has a copy or rows of it.

    Args:
        model: a model with adapters.
        places: the places of the adapter.
        head: paths of the head's layers of which it has a copy.

    Raises:
        ConfigError: the adapter is one.
    """
    outputs = [path for path in places if path.startswith(HEAD)]
    rows = [path for path, ps in places.items() if any(p.location == ROWS for p in ps)]
    tables = [layer_in(model, path)._parameters["weight"] for path in rows]
    for path in outputs:
        weight = layer_in(model, path)._parameters.get("weight")
        if path.removeprefix(HEAD) in head or any(weight is table for table in tables):
            raise ConfigError(
                f"the adapter has its own copy of {path.removeprefix(HEAD)!r}, or of rows of it, "
                f"and also changes it. Leave it out of target_modules."
            )


# --- names of head layers in the config of a new adapter ---


def without_head(model: AdaptedModel, config: AdapterConfig) -> tuple[AdapterConfig, bool]:
    """Return a config without names of head layers, and whether the output layer gets a copy.

    The head is trained as a whole, with a copy for each adapter, except for the layer onto the
    vocabulary, which may have adapters.

    Args:
        model: a model with adapters.
        config: the config of a new adapter.

    Raises:
        SiteError: the config names other layers of the head, which PEFT would adapt.
    """
    fields = ("modules_to_save", "target_modules", "exclude_modules")
    named = (*fields, "target_parameters")
    unnamed = all(member.get(field) is None for member in config.members for field in named)
    if unnamed or model._has_named_heads:
        return config, False
    head = {path: module for path, module in outside(model) if path}
    base = [f"{base_prefix(model)}{path}" for path, _ in plain_modules(model._backbone)]
    output, has_output, members = output_path(model), False, list[AdapterConfig]()
    for member in config.members:
        is_tied = f"{HEAD}{output}" in tied_layers(member, model.anatomy)
        copied = output is not None and any(matches(output, p) for p in _parts(member, fields[0]))
        is_saved = copied and not is_tied
        has_output |= is_saved
        adapted = [] if model.anatomy.output is None or is_saved else [str(output)]
        apart = {path: module for path, module in head.items() if path not in adapted}
        changes: dict[str, Any] = {}
        for field in fields:
            parts = _parts(member, field)
            mine = [part for part in parts if any(matches(path, part) for path in apart)]
            there = [*base, *adapted]
            kept = [p for p in parts if p not in mine or any(matches(path, p) for path in there)]
            # no targets at all would mean the default ones
            if len(kept) < len(parts) and (kept or field != "target_modules"):
                changes[field] = tuple(name for part in kept for name in part) or None
        own = member.replace(**changes) if changes else member
        members.append(_of_base(model, member, own, apart))
    if all(one is other for one, other in zip(members, config.members, strict=True)):
        return config, has_output
    return members[0] if len(members) == 1 else ConfigUnion(*members), has_output


def _parts(config: AdapterConfig, field: str) -> list[str | tuple[str]]:
    """Return the names of layers in a field, one by one; a string is a single pattern."""
    wanted = config.get(field) or ()
    return [wanted] if isinstance(wanted, str) else [(name,) for name in wanted]


def _of_base(
    model: AdaptedModel, config: AdapterConfig, own: AdapterConfig, head: Mapping[str, nn.Module]
) -> AdapterConfig:
    """Return a config whose `target_modules` name no layers of the head, even as PEFT reads them.

    Args:
        model: a model with adapters.
        config: the user's config.
        own: the same config without names that occur only in the head.
        head: the modules of the head that get no adapters, by path.

    Raises:
        SiteError: PEFT would adapt layers or parameters of the head.
    """
    asked = config.get("target_parameters") or ()
    keys = [f"{path}.{name}" for path, module in head.items() for name in module._parameters]
    theirs, field = [key for key in keys if matches(key, asked)], "target_parameters"
    names: Any = [
        f"{base_prefix(model)}{key}" for key in model.anatomy.weights() if matches(key, asked)
    ]
    wanted, excluded = config.get("target_modules") or (), config.get("exclude_modules") or ()
    layers = [path for path, module in head.items() if module._parameters and matches(path, wanted)]
    if config.get("layers_to_transform") is not None:
        # PEFT then needs the whole path of a layer outside blocks
        layers = [path for path in layers if path in wanted]
    if layers and not (names and theirs):
        alone = own.replace(target_parameters=None) if asked else own
        placements = alone.below(base_prefix(model), model.anatomy).placements(model.anatomy)
        sites = [placement.site for placement in placements]
        # layers that are trained in full get no adapters
        names = names_of(model, (s for s in sites if shown(s.path) not in head))
        own = own.replace(target_modules=names)
        # PEFT does not adapt them either
        saved = tuple(f"{p}." for p in head if matches(p, config.get("modules_to_save") or ()))
        theirs = [p for p in layers if not matches(p, excluded) and not f"{p}.".startswith(saved)]
        field = "target_modules"
    if names and theirs:
        raise SiteError(
            f"{type(own).__name__}: in PEFT it adapts {listing(theirs)} of the head too, which has "
            f"no adapters here. Write {field}={names!r} for the base model alone."
        )
    return own


def names_of(model: AdaptedModel, sites: Iterable[Site]) -> str | list[str]:
    """Return a value of `target_modules` that names these layers and no others."""
    chosen = list(dict.fromkeys(site.path for site in sites))
    layers = (site.path for site in (*model.anatomy, *model.anatomy.others))
    every = dict.fromkeys((*layers, *(path for path, _ in outside(model) if path)))
    names = short_names(chosen, every)
    return exactly(chosen) if names is None else list(names)
