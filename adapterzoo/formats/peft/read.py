"""Read an adapter from PEFT's tensors and config.

Sites and sizes come from the tensors: in PEFT's config they are patterns that may match nothing, or
numbers that PEFT did not use. Only facts that the tensors lack come from the config.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError, listing
from adapterzoo.fields import checks
from adapterzoo.formats.checkpoint import ModelInfo
from adapterzoo.formats.files import AGAIN
from adapterzoo.formats.places import shared_key
from adapterzoo.patterns import short_names
from adapterzoo.spelling import PeftLayer, PeftSpelling, Tensors, peft_readable

from . import beside, parameters
from .config import CONFIG, PeftConfig
from .patterns import by_name, exactly, most_common, values_at

_LOG = logging.getLogger(__name__)
# PEFT's keys do not have the adapter's name, those of other tools do
_NAME = "default"

Layers = Mapping[str, PeftLayer]


def read_adapter(
    theirs: PeftConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return config and tensors of the adapter, and all other tensors.

    Raises:
        CheckpointError: an adapter is at a layer that cannot have one here; tensors are missing,
            or contradict each other or the config.
    """
    spelling = theirs.spelling
    layers, shared, rest = _sorted(theirs, tensors, info)
    held, rest = beside.read(theirs, rest, info, lambda name, sites: _here(name, sites, info))
    _check_complete(theirs, layers)
    rows = {path: tensor for path, (_, tensor) in held.rows.items()}
    dtype, layers, shared = _in_one_dtype(spelling, layers, shared, rows, info)
    held.rows = {path: (ids, rows[path]) for path, (ids, _) in held.rows.items()}
    try:
        fields, shared = spelling.read_model(
            theirs.fields, shared, [*layers.values()], info.anatomy
        )
        own = {"dtype": dtype} if "dtype" in checks(spelling.config) else {}
        more = beside.fields_of(held, spelling, info.anatomy)
        configs = [
            spelling.config.from_dict({**own, **member, **fields, **_once(more, number)})
            for number, member in enumerate(_members(theirs, layers, info) or [{}])
        ]
        config = configs[0] if len(configs) == 1 else ConfigUnion(*configs)
        # legal values depend on the widths of the sites
        config.all_placements(info.anatomy)
    except ConfigError as error:
        raise CheckpointError(
            f"the config of the checkpoint is not legal; nothing has been loaded. {error}"
        ) from error
    if spelling.becomes:
        _LOG.warning("A %s adapter of PEFT becomes %s.", spelling.peft_type, spelling.becomes)
    read = {path: spelling.read(layer) for path, layer in layers.items()}
    found = beside.keyed(config, held, read, info.anatomy)
    return config, found | {shared_key(name): t for name, t in shared.items()}, rest


def _once(more: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return fields for one config of a union: the first has all that concern the whole model."""
    whole = number > 0
    return {k: v for k, v in more.items() if not whole or (k == "bias" and v != "all")}


def _sorted(
    theirs: PeftConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[dict[str, PeftLayer], Tensors, dict[str, Tensor]]:
    """Return the layers by path in this model, the adapter-wide tensors, and all others by key."""
    spelling = theirs.spelling
    ends = _ends(spelling)
    wide = {key: name for name, key in spelling.shared.items()}
    others = {key for each in peft_readable() for key in each.shared.values()} - {*wide}
    # the tensor names of other methods, and of other versions of this one
    # norms are called `ln_1` too
    spelled = [s for s in peft_readable() if not s.of_norms]
    stems = {f".{end.partition('_')[0]}_" for s in spelled for end in _ends(s)}
    sites = {site.path: site for site in _sites(spelling, info)}
    modules: dict[str, list[Site]] = {}
    for site in info.anatomy.weights().values() if theirs.target_parameters else ():
        modules.setdefault(site.path, []).append(site)
    wrapped: dict[str, list[Site]] = {}
    layers: dict[str, PeftLayer] = {}
    shared: Tensors = {}
    rest: dict[str, Tensor] = {}
    lost: set[str] = set()
    for key, tensor in tensors.items():
        if key in wide:
            shared[wide[key]] = tensor
            continue
        place = key.removeprefix(spelling.prefix)
        named, parameter = _split(place, ends)
        if parameter is None:
            if key in others or any(stem in place for stem in stems):
                raise CheckpointError(
                    f"the tensor {place!r} is not of a known kind; {spelling.peft_type} has "
                    f"{listing(sorted((*ends, *wide)), limit=20)}. Save the adapter again with "
                    f"PEFT, as the only adapter."
                )
            rest[place] = tensor
            continue
        module, depth = parameters.unwrapped(named) if modules else (named, 0)
        path = _here(module, {**sites, **modules}, info)
        own = parameters.adapted(module, modules.get(path or "", ()), theirs.target_parameters)
        if path is None or not (own or (path in sites and not depth)):
            lost.add(named)
            continue
        site = parameters.at_depth(module, depth, own) if own else sites[path]
        if own:
            wrapped[module], named = own, f"{module}.{parameters.parameter_of(site)}"
        weight = functools.partial(_weight, site, info)
        fresh = PeftLayer(named, site, theirs.fields, weight, is_parameter=bool(own))
        layer = layers.setdefault(site.name, fresh)
        if parameter in layer.tensors:
            raise CheckpointError(
                f"the file has two tensors {parameter!r} for {site.name!r}. Save the adapter "
                f"again, alone."
            )
        layer.tensors[parameter] = tensor
    if lost:
        names = listing(sorted({path.rpartition(".")[2] for path in sites}), limit=30)
        also = "" if not modules else f" (target_parameters={theirs.target_parameters!r})"
        raise CheckpointError(
            f"the file has adapters at {listing(sorted(lost))}{also}, where this "
            f"{info.model_class} has no layers that can have adapters. Its base model has layers "
            f"named {names}; layers of heads and convolutions have no adapters. Load the file into "
            f"the model that it was trained on."
        )
    if not layers and not shared and not spelling.rows_field:
        raise CheckpointError(
            f"the file holds no tensors of {spelling.peft_type} "
            f"({listing(sorted((*ends, *wide)))}); it holds {listing(sorted(tensors))}. {AGAIN}."
        )
    parameters.check_all(wrapped, layers)
    for name in theirs.patterns:
        _resolve(name, theirs, layers)
    return layers, shared, rest


def _sites(spelling: PeftSpelling, info: ModelInfo) -> list[Site]:
    """Return the layers that a method can adapt."""
    if spelling.of_norms:
        return list(info.anatomy.others)
    return [site for site in info.anatomy if site.parameter is None]


def _weight(site: Site, info: ModelInfo) -> Tensor | None:
    """Return the weight of a layer `[d_out, d_in]`; None if it is quantized or has no values."""
    found = info.tensor(f"{info.prefix}.{site.path}.weight".removeprefix("."))
    if found is None or found.is_meta or found.dim() != 2 or not found.is_floating_point():
        return None
    return found.detach().mT if site.transposed else found.detach()


def _ends(spelling: PeftSpelling) -> dict[str, str]:
    """Return the ends of PEFT's keys to our parameters."""
    tables = (spelling.tensors, spelling.embedding_tensors)
    return {end: ours for table in tables for ours, ends in table.items() for end in ends}


def _split(place: str, ends: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the path of the layer in a key, and our name of the parameter."""
    words = place.split(".")
    for count in (1, 2, 3):
        end = ".".join(word for word in words[-count:] if word != _NAME)
        if end in ends and len(words) > count:
            return ".".join(words[:-count]), ends[end]
    return place, None


def _here(named: str, sites: Mapping[str, object], info: ModelInfo) -> str | None:
    """Return the path in this model of a layer in the file."""
    # the file may come from another release of transformers
    for name in (named, info.renamed(named)):
        for path in _candidates(name, info):
            if path in sites:
                return path
    return None


def _candidates(named: str, info: ModelInfo) -> Iterable[str]:
    yield named
    # or from another task class, with or without a base model in it
    cls = getattr(transformers, info.model_class, None)
    prefix = info.prefix or getattr(cls, "base_model_prefix", "")
    yield named.removeprefix(f"{prefix}.")


def _resolve(name: str, theirs: PeftConfig, layers: Layers) -> None:
    """Give each layer the number that a pattern has for it."""
    field, _ = theirs.spelling.patterns[name]
    found = values_at(name, theirs.patterns[name], [layer.name for layer in layers.values()])
    for layer in layers.values():
        if layer.name in found:
            layer.fields = {**layer.fields, field: found[layer.name]}


def _check_complete(theirs: PeftConfig, layers: Layers) -> None:
    spelling = theirs.spelling
    off = {name for name, flag in spelling.optional.items() if not theirs.fields[flag]}
    forms = spelling.forms or (frozenset(spelling.tensors) - off,)
    for layer in layers.values():
        needed = max(
            forms, key=lambda form: (form == {*layer.tensors}, len(form & {*layer.tensors}))
        )
        missing = needed - set(layer.tensors) - spelling.maybe
        surplus = set(layer.tensors) - needed
        if missing or surplus:
            which = f"no {listing(sorted(missing))}" if missing else listing(sorted(surplus))
            flags = {name: theirs.fields[flag] for name, flag in spelling.optional.items()}
            said = {**spelling.fixed, **{spelling.optional[n]: v for n, v in flags.items()}}
            shown = "".join(f", {k}={v!r}" for k, v in said.items())
            raise CheckpointError(
                f"the file has {which} at {layer.name!r}; with peft_type="
                f"{spelling.peft_type!r}{shown} in {CONFIG} it has {listing(sorted(needed))}. Copy "
                f"both files again from where they were saved."
            )


def _in_one_dtype(
    spelling: PeftSpelling, layers: Layers, shared: Tensors, rows: Tensors, info: ModelInfo
) -> tuple[str | None, dict[str, PeftLayer], Tensors]:
    """Return the config's dtype, and the tensors converted to it without loss."""
    each = [*(layer.tensors for layer in layers.values()), shared, rows]
    found = {t.dtype for own in each for name, t in own.items() if name not in spelling.wide}
    if wrong := [dtype for dtype in found if not dtype.is_floating_point]:
        raise CheckpointError(
            f"the file has tensors of {wrong[0]}; those of adapters have a floating-point dtype. "
            f"Save the adapter again in float32."
        )
    own, dtype = info.dtype, torch.float32
    # widening is exact; PEFT too keeps other dtypes in float32 over half-precision layers
    if found == {own} or own is torch.float64:
        dtype = own
    elif torch.float64 in found:
        # wider than the model: loading asks whether to round
        dtype = torch.float64
    for tensors in each:
        for name in tensors:
            to = compute_dtype(dtype) if name in spelling.wide else dtype
            tensors[name] = tensors[name].to(to)
    said = None if dtype in (own, torch.float64) else str(dtype).removeprefix("torch.")
    return said, dict(layers), shared


def _members(theirs: PeftConfig, layers: Layers, info: ModelInfo) -> list[dict[str, Any]]:
    """Return the fields of our configs: one config for all layers that differ only in patterns."""
    subsets = theirs.spelling.subsets
    patterns = {**theirs.spelling.patterns, **theirs.spelling.derived}
    varying = {ours for _, ours in patterns.values()}
    groups: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
    read = theirs.spelling.read_layers([*layers.values()]) if layers else ()
    for path, fields in zip(layers, read, strict=True):
        alike = {name: value for name, value in fields.items() if name not in varying}
        paths = next((paths for known, paths in groups if known == alike), None)
        if paths is None:
            groups.append((alike, paths := {}))
        paths[path] = {name: fields[name] for name in varying}
    members = []
    for alike, paths in groups:
        numbers = {}
        for pattern, (field, ours) in patterns.items():
            values = {path: own[ours] for path, own in paths.items()}
            numbers[ours] = most_common(values, theirs.fields[field])
            numbers[pattern] = by_name(values, numbers[ours])
        chosen = {
            name: _names([p for p in paths if among(layers[p].tensors)], paths)
            for name, among in subsets.items()
        }
        targets = _targets([layers[path].site for path in paths], theirs, info)
        members.append({**alike, **numbers, **chosen, **targets})
    return members


def _targets(chosen: Sequence[Site], theirs: PeftConfig, info: ModelInfo) -> dict[str, Any]:
    """Return the fields of our config that select some sites."""
    modules = [site.path for site in chosen if site.parameter is None]
    weights = [site.name for site in chosen if site.parameter is not None]
    names = _names(modules, (site.path for site in _sites(theirs.spelling, info)))
    if not weights:
        return {"target_modules": names}
    ends = short_names(weights, info.anatomy.weights()) or weights
    return {"target_modules": names or [], "target_parameters": list(ends)}


def _names(paths: Sequence[str], everything: Iterable[str]) -> str | list[str] | None:
    """Return the value of a config field that selects some of all paths; None for none."""
    names = short_names(paths, everything)
    return exactly(paths) if names is None else list(names) or None
