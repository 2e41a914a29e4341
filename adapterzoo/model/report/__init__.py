"""Reports: which layers an adapter reaches, what it costs, and how much it changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from adapterzoo.anatomy import Site, part_names
from adapterzoo.composition import Fuse, Stack, fusion_key
from adapterzoo.config import Placement
from adapterzoo.errors import ConfigError
from adapterzoo.inject.layers import ExpertAdapters, FusedAdapters
from adapterzoo.model.conversion import random_inputs
from adapterzoo.model.heads import copies
from adapterzoo.model.heads.named import heads_by_name
from adapterzoo.model.sharding import groups_of, reshard, size_of
from adapterzoo.model.state import AdaptedModel, fusion_modules, modules_of
from adapterzoo.model.training import summary

from .costs import bytes_per_token
from .effect import norms, parameter_of, site_path
from .result import AdapterReport
from .sites import BlockReport, HeadReport, SiteReport

__all__ = ["AdapterReport", "coverage", "report"]

# the path, block and kind under which modules that layers share are shown
_SHARED = "", -1, "shared"
_WEIGHTS = ("linear", "embedding", "experts", "convolution", "layer")


def report(
    model: AdaptedModel, name: str, inputs: Mapping[str, Any] | None = None
) -> AdapterReport:
    """Return the full report on an adapter: its coverage, the changes of weights, and its memory.

    Args:
        model: with adapters.
        name: name of an adapter or a fusion.
        inputs: arguments of the call on which bytes are measured; None: random ones.
    """
    found = coverage(model, name)
    if groups_of(model):
        note = "the model is sharded; load the adapter in one process for ‖ΔW‖ and bytes"
        return dataclasses.replace(found, note=note)
    parts = [*_parts(model, name)]
    broken = {_shown(model, part.placement) for part in parts if _is_broken(part.module)}
    known = dict(norms(model, name)) if name in model._adapter_state.records else {}
    sites = []
    for site in found.sites:
        change, weight = known.get(site.path, (None, None))
        finite = (site.path, site.block, site.kind) not in broken
        sites.append(dataclasses.replace(site, change=change, weight=weight, is_finite=finite))
    found = dataclasses.replace(found, sites=tuple(sites))
    if name in model._adapter_state.merged:
        return dataclasses.replace(found, note="the adapter is merged, so bytes are not measured")
    try:
        given = random_inputs(model) if inputs is None else inputs
    except ConfigError as error:
        return dataclasses.replace(found, note=f"bytes are not measured: {error}")
    fusion = model._adapter_state.fusions.get(name)
    setup = Stack(name) if fusion is None else Fuse(*fusion.adapters, name=name)
    kept, unit = bytes_per_token(model, setup, _unique(part.module for part in parts), given)
    return dataclasses.replace(found, bytes_per_token=kept, unit=unit)


def _is_broken(module: nn.Module) -> bool:
    own = (p.detach() for p in module.parameters() if not p.is_meta)
    return not all(bool(p.isfinite().all()) for p in own)


# --- what it reaches ---


class _SitePart(NamedTuple):
    """The adapter's module at one site; `placement` is None for modules that its layers share."""

    placement: Placement | None
    module: nn.Module


def coverage(model: AdaptedModel, name: str) -> AdapterReport:
    """Return which layers an adapter reaches and how large it is, without reading weights.

    Args:
        model: with adapters; it may be sharded.
        name: name of an adapter or a fusion.

    Raises:
        UnknownNameError: there is no such adapter or fusion.
    """
    reshard(model)
    parts = [*_parts(model, name)]
    is_fusion = name not in model._adapter_state.records
    config: Any = None if is_fusion else model._adapter_state.records[name].config
    own = _unique(part.module for part in parts)
    # a batch without labels gives no gradient at all
    knows = not _is_dead(cast("nn.Module", model).parameters())
    # under a head initialized to zero, all gradients of an adapter are zero at first
    judges = knows and (not _is_dead(own) or all(p.grad is None for p in own))
    is_trainable = any(p.requires_grad for p in own)
    sites: dict[tuple[str, int, str], list[nn.Module]] = {}
    for part in parts:
        sites.setdefault(_shown(model, part.placement), []).append(part.module)
    members = () if config is None else config.members
    places = [p.placement for p in parts if p.placement and _is_place(p.placement.site)]
    can_name = any("target_modules" in member for member in members)
    return AdapterReport(
        name,
        "fusion" if config is None else config.architecture,
        tuple(
            SiteReport(*key, *_measured(modules, judges and is_trainable, key == _SHARED))
            for key, modules in sites.items()
        ),
        tuple(_blocks(model, [part.placement for part in parts if part.placement])),
        tuple(_heads(model, name, fusion_key(name) if is_fusion else name, knows)),
        tuple(dict.fromkeys(_kind(model, p.site, p.location) for p in places)),
        sum(map(size_of, own)),
        summary(model)[-1]["#param"],
        is_trainable,
        hint="Write target_modules='all-linear'" if can_name else "",
    )


def _parts(model: AdaptedModel, name: str) -> Iterator[_SitePart]:
    """Yield the adapter's modules at all sites; the parts of a fused layer one by one."""
    state = model._adapter_state
    if name in state.fusions and name not in state.records:
        first = state.records[state.fusions[name].adapters[0]]
        for path, layer in fusion_modules(model, name):
            yield _SitePart(first.places[path][0], layer)
        return
    record = state.find(name)
    for path, module in modules_of(model, name):
        placements = record.places[path]
        if not placements and any(True for _ in module.parameters()):
            yield _SitePart(None, module)
        labels = part_names([placement.site for placement in placements])
        for placement, label in zip(placements, labels, strict=True):
            own: nn.Module | None = module
            if isinstance(own, ExpertAdapters):
                own = own._modules[parameter_of(placement.site)]
            if isinstance(own, FusedAdapters):
                own = own._modules[label]
            yield _SitePart(placement, cast("nn.Module", own))


def _shown(model: AdaptedModel, placement: Placement | None) -> tuple[str, int, str]:
    """Return the path, the block and the kind of a site, as the report shows them."""
    if placement is None:
        return _SHARED
    site = placement.site
    return site_path(site), site.layer, _kind(model, site, placement.location)


def _is_place(site: Site) -> bool:
    """Return whether a site is a place in the residual stream or in attention, not a layer."""
    # a bottleneck placed at a norm has the role of the sub-layer
    return site.kind not in _WEIGHTS and not (site.kind == "norm" and site.role == "other")


def _kind(model: AdaptedModel, site: Site, location: str = "") -> str:
    """Return the kind of a layer in its block; for places in the stream, the location."""
    if _is_place(site):
        return location or site.role
    if site.role != "other":
        return f"cross {site.role}" if site.cross else site.role
    path = site_path(site)
    if site.layer >= 0:
        path = path.removeprefix(f"{model.anatomy.blocks[site.layer].path}.")
    # without the numbers of experts
    names = [name for name in path.split(".") if not name.isdigit()]
    return ".".join(names[-2:])


def _blocks(model: AdaptedModel, placed: Iterable[Placement]) -> Iterator[BlockReport]:
    """Yield the blocks with the kinds of their layers, and of the adapter's places in the stream.

    The parts of a fused layer count separately if the adapter is at some of them.
    """
    anatomy, placed = model.anatomy, [*placed]
    adapted = [placement.site for placement in placed]
    in_parts = {site.name for site in adapted if site.output_slice is not None}
    whole = {site.name for site in adapted if site.output_slice is None}
    kinds = {_kind(model, site) for site in adapted}
    places = {
        (_kind(model, p.site, p.location), p.site.stack, p.site.kind == "attention")
        for p in placed
        if _is_place(p.site)
    }
    attending = {site.layer for site in anatomy.attentions}
    for block in anatomy.blocks:
        there = [site for site in block.sites if site.name not in in_parts - whole]
        there += [site for site in block.parts if site.name in in_parts]
        found = Counter(_kind(model, site) for site in there)
        # norms and the like count only if the adapter is at some of that kind
        others = (s for s in (*anatomy.others, *anatomy.convolutions) if s.layer == block.layer)
        found.update(kind for kind in (_kind(model, s) for s in others) if kind in kinds)
        for kind, stack, attends in places:
            if stack == block.stack and (not attends or block.layer in attending):
                found.setdefault(kind, 1)
        yield BlockReport(block.path, block.stack, dict(found))


def _unique(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [*dict.fromkeys(p for module in modules for p in module.parameters())]


def _measured(
    modules: Iterable[nn.Module], judges: bool, is_shared: bool
) -> tuple[int, bool | None]:
    """Return the number of parameters, and whether none got a gradient; None: unknown."""
    own = _unique(modules)
    is_dead = _is_dead(own) if judges and own else None
    # a factor of each layer, often zero at first, scales this gradient
    is_scaled_to_zero = is_shared and any(p.grad is not None for p in own)
    return sum(map(size_of, own)), None if is_dead and is_scaled_to_zero else is_dead


def _is_dead(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether no parameter has a nonzero gradient; NaN counts as nonzero."""
    for grad in (p.grad for p in parameters):
        if grad is not None:
            norm: Any = torch.linalg.vector_norm(grad.detach())
            if float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) != 0.0:
                return False
    return True


def _heads(model: AdaptedModel, name: str, owner: str, knows: bool) -> Iterator[HeadReport]:
    """Yield the adapter's own head or copy of a static head, and the other active heads."""
    inside = {id(p) for p in model._backbone.parameters()}
    found = {name: copies.modules_with(model, owner)}
    setup = model._active.plan.setup
    if model._has_named_heads and setup is not None and name in setup.flatten():
        found |= {key: [head] for key, head in heads_by_name(model).items()}
    for key, modules in found.items():
        own = [p for p in _unique(modules) if id(p) not in inside]
        if own:
            trained = any(p.requires_grad for p in own)
            dead = _is_dead(own) if knows else None
            yield HeadReport(key, sum(map(size_of, own)), trained, dead)
