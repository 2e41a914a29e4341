"""Copies of the static head of a task class, one for each adapter that was trained with it.

A copy belongs to the adapter that acts last, or to the fusion. Its layers are stored with the
adapters, below the layers of the head (`classifier.adapters.<name>`), so that copies, pickles,
files and replicas of the model have them; the keys of the original stay those of the plain class.

What is shared with the base model has no copies. The output layer of a language model, which is as
large as the vocabulary, has one only for adapters whose `modules_to_save` name it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from adapterzoo import inject
from adapterzoo.anatomy import unwrapped
from adapterzoo.averaging import weighted_sum
from adapterzoo.composition import (
    Composition,
    Fuse,
    SiteStep,
    Stack,
    fusion_key,
    parts_of,
    step_of_copies,
)
from adapterzoo.contracts import Contained, upcast
from adapterzoo.errors import StateError
from adapterzoo.inject.building import (
    at_hand,
    layer_at,
    own_parameters,
    plain_modules,
    plain_state,
)
from adapterzoo.inject.quantized import packing_of
from adapterzoo.model.activation import replan
from adapterzoo.model.state import AdaptedModel, base_prefix
from adapterzoo.runtime import HEAD

# the submodule of a layer that holds the copies of it
_HELD = Contained.container

Layers = Mapping[str, nn.Module]


def owner_of(part: object) -> str | None:
    """Return the name under which a composition's copy is kept; None if it has none.

    Args:
        part: of a composition; all rows of a batch take it.
    """
    while isinstance(part, Stack):
        part = part.children[-1]
    if isinstance(part, Fuse):
        return fusion_key(part.name)
    return part if isinstance(part, str) else None


def owners_of(setup: Composition | None) -> tuple[str | None, ...]:
    """Return the owners of the active heads, None for the original; base rows have none."""
    if setup is None:
        return ()
    return tuple(dict.fromkeys(owner_of(p) for p in parts_of(setup)[0] if p is not None))


def layers_of(model: AdaptedModel) -> dict[str, nn.Module]:
    """Return the layers of a static head that can have copies, by path; none in a base model.

    A layer is the smallest module that computes with its tensors alone: what is below it belongs
    to it.
    """
    found: dict[str, nn.Module] = {}
    backbone = model._backbone
    if backbone is not cast("nn.Module", model):
        shared, seen = shared_ids(model), set[int]()
        for name, child in model.named_children():
            if child is not backbone:
                found.update(_layers(child, name, shared, seen))
    return found


def _layers(
    module: nn.Module, path: str, shared: set[int], seen: set[int]
) -> Iterator[tuple[str, nn.Module]]:
    module = unwrapped(module)
    if isinstance(module, inject.AdapterDict) or id(module) in seen:
        return
    seen.add(id(module))
    own = [t for _, t in _tensors(module) if id(t) not in shared]
    if own or is_parametrized(module):
        whole = (t for _, m in plain_modules(module) for _, t in _tensors(m))
        if not any(id(t) in shared for t in whole):
            seen.update(id(m) for _, m in plain_modules(module))
            yield path, module
            return
    for name, child in module.named_children():
        yield from _layers(child, f"{path}.{name}", shared, seen)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's own parameters and those of its buffers that are saved."""
    for key, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and key not in module._non_persistent_buffers_set:
            yield key, tensor


def shared_ids(model: AdaptedModel) -> set[int]:
    """Return the ids of tensors that have no copies: base model and vocabulary output layer."""
    output = model.get_output_embeddings()
    # not the state dict of the base model, which has all that its adapters have
    found = {id(p) for p in own_parameters(model._backbone)}
    return found | ({id(p) for p in output.parameters()} if output is not None else set())


# --- make and enter ---


def output_tensors(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors of the layer at `output_path` by their keys in the task class."""
    if (path := output_path(model)) is None:
        return {}
    own = _layer(model, path)._parameters.items()
    return {f"{path}.{name}": t for name, t in own if t is not None}


def _layer(model: AdaptedModel, path: str) -> nn.Module:
    return layer_at(cast("nn.Module", model), path)


def made(model: AdaptedModel, with_output: bool = False) -> dict[str, nn.Module]:
    """Return copies of the layers of the original head, perhaps with a language model's output."""
    found = layers_of(model)
    if with_output and (path := output_path(model)) is not None:
        found[path] = _layer(model, path)
    return {path: _copied(layer) for path, layer in found.items()}


def output_path(model: AdaptedModel) -> str | None:
    """Return the path of the output layer of a language model, if it is a layer of the head."""
    output = model.get_output_embeddings()
    if output is None or model._backbone is cast("nn.Module", model):
        return None
    return next((path for path, module in outside(model) if module is unwrapped(output)), None)


def outside(model: AdaptedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules outside the base model with their paths, without adapters."""
    inside = {id(module) for _, module in plain_modules(model._backbone)}
    for path, module in plain_modules(cast("nn.Module", model)):
        if id(module) not in inside:
            yield path, module


def _copied(layer: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    if isinstance(layer, inject.Adapted):
        # leave out the other copies, and share the link to the model
        memo = {id(layer._link): layer._link, id(layer._modules[_HELD]): inject.AdapterDict()}
    with at_hand(layer):
        twin = copy.deepcopy(layer, memo)
    for hook in ("_hf_hook", "_old_forward", "forward"):
        # accelerate's hooks on the layer run around its copies, too
        vars(twin).pop(hook, None)
    if isinstance(twin, inject.Adapted):
        inject.discard(twin)
    return twin


def put(model: AdaptedModel, owner: str, layers: Layers) -> None:
    """Give an adapter its own head, replacing the one that it has.

    Args:
        model: with adapters.
        owner: of the head, see `owner_of`.
        layers: by path; see `made`.
    """
    taken = take(model, owner)
    for path, layer in layers.items():
        inject.put(_layer(model, path), owner, layer, model._active, HEAD + path)
    if layers:
        model._adapter_state.copies[owner] = tuple(layers)
    if layers or taken:
        replan(model)


def take(model: AdaptedModel, owner: str) -> dict[str, nn.Module]:
    """Take an adapter's head out of the model, if it has one.

    Args:
        model: with adapters.
        owner: of the head.

    Returns:
        Its layers by path.
    """
    paths = model._adapter_state.copies.pop(owner, ())
    return {path: inject.take(_layer(model, path), owner) for path in paths}


def layers_with(model: AdaptedModel, owner: str | None) -> dict[str, nn.Module]:
    """Return the layers of an adapter's own head by path; none where it has no head of its own.

    Args:
        model: with adapters.
        owner: of the head.
    """
    if owner is None:
        return {}
    paths = model._adapter_state.copies.get(owner, ())
    return {path: inject.adapters_of(_layer(model, path))[owner] for path in paths}


def trained(model: AdaptedModel, setup: Composition | None) -> Iterator[nn.Parameter]:
    """Yield the parameters of the active heads; an adapter without a copy gets one here.

    If no single adapter acts last, as in an `Average`, the original is used.

    Args:
        model: with adapters.
        setup: that is active.
    """
    for owner in owners_of(setup):
        if owner is None:
            layers = layers_of(model)
        else:
            if owner not in model._adapter_state.copies:
                put(model, owner, made(model))
            layers = layers_with(model, owner)
        for layer in layers.values():
            modules = (module for _, module in plain_modules(layer))
            own = (p for m in modules for p in m._parameters.values() if p is not None)
            yield from (p for p in own if p.is_floating_point() and packing_of(p) is None)


def fitted(layer: nn.Module, own: nn.Module) -> nn.Module:
    """Return the copy of a layer in the size that the layer has now.

    What the copy does not have gets the values of the layer.

    Args:
        layer: of the model.
        own: the copy.
    """
    mine = own.state_dict(keep_vars=True)
    if all(tensor.shape == mine[key].shape for key, tensor in _state(layer).items()):
        return own
    wide = _copied(layer).train(own.training)
    for key, parameter in wide.named_parameters():
        parameter.data = parameter.data.to(mine[key].dtype)
        parameter.requires_grad_(mine[key].requires_grad)
    with torch.no_grad():
        for key, tensor in wide.state_dict(keep_vars=True).items():
            sizes = zip(tensor.shape, mine[key].shape, strict=True)
            both = tuple(slice(min(pair)) for pair in sizes)
            tensor[both] = mine[key][both]
    return wide


# --- run, save, merge ---


def steps_of(model: AdaptedModel, parts: Sequence[Any]) -> dict[str, SiteStep]:
    """Return the step of each layer of the head.

    Args:
        model: with adapters.
        parts: of a composition, one for each kind of rows.
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
        model: with adapters.
        owner: of the head; where it has no copy, the original's are returned. None: the original.
    """
    found, output = _original(model), output_path(model)
    for path, layer in layers_with(model, owner).items():
        own = layer.state_dict(prefix=f"{path}.", keep_vars=True)
        found |= {key: t for key, t in own.items() if key in found or path == output}
    return found


def _original(model: AdaptedModel) -> dict[str, Tensor]:
    backbone = model._backbone
    if backbone is cast("nn.Module", model):
        return {}
    shared, inside = shared_ids(model), base_prefix(model)
    kept = dict(_tensors(cast("nn.Module", model)))
    for name, child in model.named_children():
        if child is not backbone:
            kept |= plain_state(child, name)
    # quantized layers make some entries anew each time, so compare names
    return {
        key: tensor
        for key, tensor in kept.items()
        if id(tensor) not in shared and not key.startswith(inside)
    }


def rest_of(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the tensors of the original head that have no copies."""
    inside = tuple(f"{path}." for path in layers_of(model))
    return {key: t for key, t in _original(model).items() if not key.startswith(inside)}


def check_merging(model: AdaptedModel, names: Sequence[str]) -> None:
    """Check that the head of the last of these adapters that has one can be merged.

    Raises:
        StateError: it has the output layer, and that of the model is tied.
    """
    owner = _last_owner(model, names)
    if (path := output_path(model)) in layers_with(model, owner):
        weight = _layer(model, str(path))._parameters["weight"]
        if any(weight is parameter for parameter in own_parameters(model._backbone)):
            raise StateError(
                f"{owner!r} has the output layer {path!r} for itself, and that of the model is "
                f"tied to its embeddings, and merging would change both. Keep the adapter active."
            )


def _last_owner(model: AdaptedModel, names: Sequence[str]) -> str | None:
    copies = model._adapter_state.copies
    return next((name for name in reversed(names) if name in copies), None)


@torch.no_grad()
def merge(model: AdaptedModel) -> None:
    """Write the head of the last merged adapter that has one into the original.

    Args:
        model: with merged adapters.
    """
    state = model._adapter_state
    owner = _last_owner(model, state.merged)
    for path, mine in layers_with(model, owner).items():
        original = _state(_layer(model, path))
        state.head.setdefault(path, {k: t.detach().clone() for k, t in original.items()})
        for key, tensor in mine.state_dict().items():
            original[key].copy_(tensor)


@torch.no_grad()
def reset(model: AdaptedModel) -> None:
    """Restore the original head bit for bit."""
    for path, tensors in model._adapter_state.head.items():
        own = _state(_layer(model, path))
        for key, tensor in tensors.items():
            own[key].copy_(tensor)
    model._adapter_state.head.clear()


def _state(layer: nn.Module) -> dict[str, Tensor]:
    state = layer.state_dict(keep_vars=True)
    return {key: t for key, t in state.items() if not key.startswith(f"{_HELD}.")}


@torch.no_grad()
def combined(
    model: AdaptedModel, names: Sequence[str], weights: Sequence[float]
) -> dict[str, nn.Module]:
    """Return the head of an average: θ₀ + Σ wᵢ (θᵢ − θ₀), with θ₀ the original; or nothing.

    Args:
        model: with adapters.
        names: of the adapters.
        weights: one for each.
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
