"""Read an adapter from PEFT's tensors and config.

Sites and sizes come from the tensors: in PEFT's config they are patterns that may match nothing, or
numbers that PEFT did not use. Only facts that the tensors lack come from the config.

Besides an adapter PEFT trains whole modules, rows of embeddings and biases. A copy of a module has
the keys of the module itself, and so has a bias; rows are a tensor
`<embedding>.token_adapter.trainable_tokens_delta` in the order of the tokens in the config, or
`<embedding>.trainable_tokens_delta` of a method that trains nothing else. That one repeats them for
every module that shares the table.

For its field `target_parameters` PEFT wraps a module once for each of its parameters, in the order
in which the module has them. The keys of the last parameter are those of the module, each earlier
one has `base_layer` once more; no key has the parameter's name.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.config import AdapterConfig, ConfigUnion, checks
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError, argument, in_python, listing
from adapterzoo.formats.checkpoint import OWN_OUTPUT, SavedModel, places_of, shared_key, short
from adapterzoo.formats.files import AGAIN
from adapterzoo.heads import STATIC
from adapterzoo.methods.copies import all_placements
from adapterzoo.patterns import short_names
from adapterzoo.peft_arguments import ADAPTED_BIASES
from adapterzoo.spelling import Fields, PeftLayer, PeftSpelling, Tensors, peft_readable

from .config import (
    CONFIG,
    MERGE,
    TASKS,
    TOKENS,
    PeftConfig,
    by_name,
    class_in,
    exactly,
    most_common,
    values_at,
)

_LOG = logging.getLogger(__name__)

# PEFT's keys do not have the adapter's name, those of other tools do
_NAME = "default"
# layers that a message names
_SHOWN = 10

# ends of the keys of rows of an embedding, and of its table
DELTA, _TABLE = "trainable_tokens_delta", "base_layer.weight"
WRAPPED = "base_layer"
# of placements → PEFT's fields
FIELD_AT = {
    "modules_to_save": "modules_to_save",
    "token rows": "trainable_token_indices",
    "bias": "bias",
}

Layers = Mapping[str, PeftLayer]
Find = Callable[[str, Mapping[str, Site]], "str | None"]


def read_adapter(
    peft_config: PeftConfig, tensors: Mapping[str, Tensor], info: SavedModel
) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return config and tensors of the adapter, and all other tensors.

    Raises:
        CheckpointError: an adapter is at a layer that cannot have one here; tensors are missing,
            or contradict each other or the config.
    """
    spelling = peft_config.spelling
    layers, shared, rest = _sorted(peft_config, tensors, info)
    extras, rest = _read_extras(
        peft_config, rest, info, lambda name, sites: _here(name, sites, info)
    )
    _check_complete(peft_config, layers)
    rows = {path: tensor for path, (_, tensor) in extras.rows.items()}
    dtype, layers, shared = _in_one_dtype(spelling, layers, shared, rows, info)
    extras.rows = {path: (ids, rows[path]) for path, (ids, _) in extras.rows.items()}
    try:
        fields, shared = spelling.read_model(
            peft_config.fields, shared, [*layers.values()], info.anatomy
        )
        own = {"dtype": dtype} if "dtype" in checks(spelling.config) else {}
        more = _fields_of_extras(extras, spelling, info.anatomy)
        configs = [
            spelling.config.from_dict({**own, **member, **fields, **_once(more, number)})
            for number, member in enumerate(_members(peft_config, layers, info) or [{}])
        ]
        config = configs[0] if len(configs) == 1 else ConfigUnion(*configs)
        # legal values depend on the widths of the sites
        all_placements(config, info.anatomy)
    except ConfigError as error:
        raise CheckpointError(
            f"the config of the checkpoint is not legal; nothing has been loaded. {error}"
        ) from error
    if spelling.becomes:
        _LOG.warning("A %s adapter of PEFT becomes %s.", spelling.peft_type, spelling.becomes)
    read = {path: spelling.read(layer) for path, layer in layers.items()}
    found = _keyed(config, extras, read, info.anatomy)
    return config, found | {shared_key(name): t for name, t in shared.items()}, rest


def _once(more: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return fields for one config of a union: the first has all that concern the whole model."""
    whole = number > 0
    return {k: v for k, v in more.items() if not whole or (k == "bias" and v != "all")}


def _sorted(
    peft_config: PeftConfig, tensors: Mapping[str, Tensor], info: SavedModel
) -> tuple[dict[str, PeftLayer], Tensors, dict[str, Tensor]]:
    """Return the layers by path in this model, the adapter-wide tensors, and all others by key."""
    spelling = peft_config.spelling
    ends = _ends(spelling)
    wide = {key: name for name, key in spelling.shared.items()}
    others = {key for each in peft_readable() for key in each.shared.values()} - {*wide}
    # the tensor names of other methods, and of other versions of this one
    # norms are called `ln_1` too
    spelled = [s for s in peft_readable() if not s.of_norms]
    stems = {f".{end.partition('_')[0]}_" for s in spelled for end in _ends(s)}
    sites = {site.path: site for site in _sites(spelling, info)}
    modules: dict[str, list[Site]] = {}
    for site in info.anatomy.weights().values() if peft_config.target_parameters else ():
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
        module, depth = unwrapped(named) if modules else (named, 0)
        path = _here(module, {**sites, **modules}, info)
        own = adapted(module, modules.get(path or "", ()), peft_config.target_parameters)
        if path is None or not (own or (path in sites and not depth)):
            lost.add(named)
            continue
        site = at_depth(module, depth, own) if own else sites[path]
        if own:
            wrapped[module], named = own, f"{module}.{parameter_of(site)}"
        weight = functools.partial(_weight, site, info)
        fresh = PeftLayer(named, site, peft_config.fields, weight, is_parameter=bool(own))
        layer = layers.setdefault(site.name, fresh)
        if parameter in layer.tensors:
            raise CheckpointError(
                f"the file has two tensors {parameter!r} for {site.name!r}. Save the adapter "
                f"again, alone."
            )
        layer.tensors[parameter] = tensor
    if lost:
        names = listing(sorted({path.rpartition(".")[2] for path in sites}), limit=30)
        also = "" if not modules else f" (target_parameters={peft_config.target_parameters!r})"
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
    check_all(wrapped, layers)
    for name in peft_config.patterns:
        _resolve(name, peft_config, layers)
    return layers, shared, rest


def _sites(spelling: PeftSpelling, info: SavedModel) -> list[Site]:
    """Return the layers that a method can adapt."""
    if spelling.of_norms:
        return list(info.anatomy.others)
    return [site for site in info.anatomy if site.parameter is None]


def _weight(site: Site, info: SavedModel) -> Tensor | None:
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


def _here(named: str, sites: Mapping[str, object], info: SavedModel) -> str | None:
    """Return the path in this model of a layer in the file."""
    # the file may come from another task class, with or without a base model in it
    cls = getattr(transformers, info.model_class, None)
    prefix = info.prefix or getattr(cls, "base_model_prefix", "")
    # or from another release of transformers
    for name in (named, info.renamed(named)):
        for path in (name, name.removeprefix(f"{prefix}.")):
            if path in sites:
                return path
    return None


def _resolve(name: str, peft_config: PeftConfig, layers: Layers) -> None:
    """Give each layer the number that a pattern has for it."""
    field, _ = peft_config.spelling.patterns[name]
    found = values_at(name, peft_config.patterns[name], [layer.name for layer in layers.values()])
    for layer in layers.values():
        if layer.name in found:
            layer.fields = {**layer.fields, field: found[layer.name]}


def _check_complete(peft_config: PeftConfig, layers: Layers) -> None:
    """Raise one error with all layers that lack tensors or have others than the config says."""
    spelling = peft_config.spelling
    off = {name for name, flag in spelling.optional.items() if not peft_config.fields[flag]}
    forms = spelling.forms or (frozenset(spelling.tensors) - off,)
    wrong: dict[str, frozenset[str]] = {}
    for layer in layers.values():
        own = {*layer.tensors}
        needed = max(forms, key=lambda form: (form == own, len(form & own)))
        if missing := needed - own - spelling.maybe:
            wrong[f"no {listing(sorted(missing))} at {layer.name!r}"] = needed
        elif surplus := own - needed:
            wrong[f"{listing(sorted(surplus))} at {layer.name!r}"] = needed
    if wrong:
        flags = {flag: peft_config.fields[flag] for flag in spelling.optional.values()}
        shown = "".join(f", {k}={v!r}" for k, v in {**spelling.fixed, **flags}.items())
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"the file has {'; '.join([*wrong][:_SHOWN])}{more}; with peft_type="
            f"{spelling.peft_type!r}{shown} in {CONFIG} it has "
            f"{listing(sorted(next(iter(wrong.values()))))}. Copy both files again from where they "
            f"were saved."
        )


def _in_one_dtype(
    spelling: PeftSpelling, layers: Layers, shared: Tensors, rows: Tensors, info: SavedModel
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


def _members(peft_config: PeftConfig, layers: Layers, info: SavedModel) -> list[dict[str, Any]]:
    """Return the fields of our configs: one config for all layers that differ only in patterns."""
    subsets = peft_config.spelling.subsets
    patterns = {**peft_config.spelling.patterns, **peft_config.spelling.derived}
    varying = {ours for _, ours in patterns.values()}
    groups: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
    read = peft_config.spelling.read_layers([*layers.values()]) if layers else ()
    for path, fields in zip(layers, read, strict=True):
        alike = {name: value for name, value in fields.items() if name not in varying}
        paths = next((paths for known, paths in groups if known == alike), None)
        if paths is None:
            groups.append((alike, paths := {}))
        paths[path] = {name: fields[name] for name in varying}
    members = []
    for alike, paths in groups:
        numbers = {}
        for pattern, (default, ours) in patterns.items():
            values = {path: own[ours] for path, own in paths.items()}
            numbers[ours] = most_common(values, peft_config.fields[default])
            numbers[pattern] = by_name(values, numbers[ours])
        chosen = {
            name: _names([p for p in paths if among(layers[p].tensors)], paths)
            for name, among in subsets.items()
        }
        targets = _targets([layers[path].site for path in paths], peft_config, info)
        members.append({**alike, **numbers, **chosen, **targets})
    return members


def _targets(chosen: Sequence[Site], peft_config: PeftConfig, info: SavedModel) -> dict[str, Any]:
    """Return the fields of our config that select some sites."""
    modules = [site.path for site in chosen if site.parameter is None]
    weights = [site.name for site in chosen if site.parameter is not None]
    names = _names(modules, (site.path for site in _sites(peft_config.spelling, info)))
    if not weights:
        return {"target_modules": names}
    ends = short_names(weights, info.anatomy.weights()) or weights
    return {"target_modules": names or [], "target_parameters": list(ends)}


def _names(paths: Sequence[str], everything: Iterable[str]) -> str | list[str] | None:
    """Return the value of a config field that selects some of all paths; None for none."""
    names = short_names(paths, everything)
    return exactly(paths) if names is None else list(names) or None


def unwrapped(named: str) -> tuple[str, int]:
    """Return the path of the module in a path with wrappers, and how many wrap it."""
    words = named.split(".")
    inner = [word for word in words if word != WRAPPED]
    last = len(words) - next((i for i, w in enumerate(reversed(words)) if w != WRAPPED), 0)
    return ".".join(inner), len(words) - last


def adapted(named: str, own: Iterable[Site], targets: Sequence[str]) -> list[Site]:
    """Return the sites at a module whose parameters a file adapts, by PEFT's rule for names.

    Args:
        named: path of the module in the file.
        own: the sites at the module, in its order.
        targets: PEFT's `target_parameters`.
    """
    ends = [f".{target}" for target in targets]
    return [s for s in own if any(f".{named}.{parameter_of(s)}".endswith(end) for end in ends)]


def parameter_of(site: Site) -> str:
    """Return the name of the parameter that is adapted at a site."""
    return site.parameter or "weight"


def at_depth(named: str, depth: int, sites: Sequence[Site]) -> Site:
    """Return the site to which the keys of a wrapper belong.

    Args:
        named: path of the module in the file.
        depth: how many wrappers are around this one.
        sites: the adapted ones of the module.

    Raises:
        CheckpointError: there are more wrappers than parameters.
    """
    if depth >= len(sites):
        listed = ", ".join(map(repr, map(parameter_of, sites)))
        raise CheckpointError(
            f"the file has adapters of {depth + 1} or more parameters at {named!r}, but "
            f"target_parameters names {len(sites)} of this model there ({listed}). Load it into "
            f"the model that it was trained on."
        )
    return sites[-1 - depth]


def check_all(found: Mapping[str, Iterable[Site]], layers: Iterable[str]) -> None:
    """Check that the file has an adapter of each parameter that it names at a module.

    Args:
        found: path of a module in the file → its adapted sites.
        layers: names of the sites that have adapters.

    Raises:
        CheckpointError: one is missing, so that it is unknown to which the others belong.
    """
    there = {*layers}
    for named, sites in found.items():
        if missing := [parameter_of(s) for s in sites if s.parameter and s.name not in there]:
            raise CheckpointError(
                f"target_parameters names {missing[0]!r} at {named!r} too, and the file has no "
                f"adapter of it. Copy both files again from where they were saved."
            )


@dataclass(slots=True)
class Extras:
    """What a file has besides its adapters, by paths in this model.

    Attributes:
        copies: of layers: path → name of a parameter → its value.
        biases: path of a layer → its bias.
        rows: path of an embedding → numbers of tokens in ascending order, and their rows.
        kind: PEFT's value of `bias`.
    """

    copies: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    kind: str = "none"


def _read_extras(
    peft_config: PeftConfig, rest: Mapping[str, Tensor], info: SavedModel, find: Find
) -> tuple[Extras, dict[str, Tensor]]:
    """Return what is trained besides the adapters, and all other tensors.

    Args:
        peft_config: the config.
        rest: all tensors but the adapter's, by key in the task class.
        info: of the model to fill.
        find: path in the file, and sites by path, to the path in this model.

    Raises:
        CheckpointError: the tokens in the config are not those of the rows.
    """
    extras, left = Extras(), dict(rest)
    can = fields_for_extras(peft_config.spelling)
    start = start_of_rows(peft_config.spelling)
    delta, kept = start + DELTA, start + _TABLE
    copies: list[str] = []
    anatomy = info.anatomy
    sites = {s.path: s for s in (*anatomy.others, *anatomy) if s.parameter is None}
    tables: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in rest.items():
        if key.endswith(delta) and TOKENS in can:
            named = key.removesuffix(delta)
            if (path := find(named, sites)) is not None:
                extras.rows[path] = _rows(peft_config, named, left.pop(key), sites[path], info)
            else:
                copies.append(key)
            continue
        if key.endswith(kept):
            named = key.removesuffix(kept)
            if (path := find(named, sites)) is not None:
                tables[path] = key, tensor
            continue
        layer, _, parameter = _plain(key).rpartition(".")
        path = None if ".original_module." in key else find(layer, sites)
        if path is None:
            continue
        if "modules_to_save" in can and _is_saved(layer, peft_config.modules_to_save):
            extras.copies.setdefault(path, {})[parameter] = _cast(left.pop(key), path, info)
        elif "bias" in can and peft_config.bias != "none" and parameter == "bias":
            extras.biases[path] = _cast(left.pop(key), path, info)
            extras.kind = "all" if peft_config.bias == "all" else ADAPTED_BIASES
    _refuse_other_rows(extras, anatomy)
    if extras.kind == "all":
        extras.biases = _outside_of_task(peft_config, info, find, sites) | extras.biases
    for path, (key, table) in tables.items():
        if path in extras.rows and _is_same(table, path, extras.rows[path][0], info):
            # a vocabulary that was resized: PEFT saves the table, whose new rows are trained
            del left[key]
    tables_of_rows = {key for key in rest if key.endswith(delta) and key not in copies}
    for key in copies if peft_config.spelling.rows_field else ():
        # a tied output layer, which follows the table here
        if any(torch.equal(rest[other], rest[key]) for other in tables_of_rows):
            del left[key]
    return extras, left


def _outside_of_task(
    peft_config: PeftConfig, info: SavedModel, find: Find, sites: Mapping[str, Site]
) -> dict[str, Tensor]:
    """Return the biases of layers that the file's class of models lacks, such as a pooler."""
    if (task := class_in(peft_config, info)) is None:
        return {}
    there = {find(path, sites) for path in info.modules(task)}
    own = (
        (s.path, base_tensor(s.path, "bias", info))
        for s in info.anatomy.biases
        if s.path not in there
    )
    return {path: bias.detach() for path, bias in own if bias is not None}


def start_of_rows(spelling: PeftSpelling) -> str:
    """Return what is between the path of an embedding and the name of its tensors."""
    return "." if spelling.rows_field else ".token_adapter."


def fields_for_extras(spelling: PeftSpelling) -> frozenset[str]:
    """Return the fields that both PEFT's method and ours have; PEFT saves modules with all."""
    rows = {TOKENS} if spelling.rows_field else set()
    return spelling.beside | rows | ({"modules_to_save"} & checks(spelling.config).keys())


def _plain(key: str) -> str:
    name = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
    return name.replace(".base_layer.", ".")


def _is_saved(layer: str, names: Sequence[str]) -> bool:
    """Return whether a layer is in one of the modules, by PEFT's rule for names."""
    parts = layer.split(".")
    around = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(module.endswith(name) for module in around for name in names)


def base_tensor(path: str, parameter: str, info: SavedModel) -> Tensor | None:
    """Return a tensor of the base model; None if the module has none of this name."""
    return info.tensor(f"{info.prefix}.{path}.{parameter}".removeprefix("."))


def _cast(tensor: Tensor, path: str, info: SavedModel) -> Tensor:
    """Return a copy of a layer's tensor in the dtype of the layer."""
    own = base_tensor(path, "weight", info)
    return tensor if own is None or not tensor.is_floating_point() else tensor.to(own.dtype)


def _as(tensor: Tensor, path: str, info: SavedModel) -> Tensor:
    """Return a value in the dtype of its layer's weight, if that is exact."""
    own = base_tensor(path, "weight", info)
    if own is None or torch.promote_types(own.dtype, tensor.dtype) is not own.dtype:
        return tensor
    return tensor.to(own.dtype)


def _rows(
    peft_config: PeftConfig, named: str, rows: Tensor, site: Site, info: SavedModel
) -> tuple[tuple[int, ...], Tensor]:
    given = peft_config.trainable_token_indices
    if isinstance(given, Mapping):
        found = [ids for name, ids in given.items() if named.endswith(name)]
        given = found[0] if found else None
    if not isinstance(given, list) or rows.dim() != 2 or len(given) != len(rows):
        raise CheckpointError(
            f"{CONFIG} says trainable_token_indices="
            f"{short(peft_config.trainable_token_indices)}, and the file has rows "
            f"{list(rows.shape)} for {named!r}, so it is unknown to which tokens they belong. "
            f"Copy both files again from where they were saved."
        )
    order = sorted(range(len(given)), key=given.__getitem__)
    return tuple(given[i] for i in order), _as(rows[order], site.path, info)


def _refuse_other_rows(extras: Extras, anatomy: Anatomy) -> None:
    """Refuse rows of their own for modules that share a table; an adapter has the same in all.

    Raises:
        CheckpointError: there are some.
    """
    for group in anatomy.shared_tables:
        first, *others = [path for path in group if path in extras.rows] or group[:1]
        for path in others:
            (ids, rows), (other_ids, other_rows) = extras.rows[first], extras.rows[path]
            if ids != other_ids or not torch.equal(rows, other_rows):
                raise CheckpointError(
                    f"the file has other rows of tokens at {path!r} than at {first!r}; here these "
                    f"share one table, and an adapter has the same rows in both. Train it again "
                    f"with target_modules=[{group[0]!r}] in PEFT."
                )


def _is_same(table: Tensor, path: str, but: Sequence[int], info: SavedModel) -> bool:
    """Return whether a table equals the model's, except for some rows."""
    own = base_tensor(path, "weight", info)
    if own is None or own.is_meta or own.shape != table.shape:
        return False
    kept = torch.ones(len(table), dtype=torch.bool)
    kept[[n for n in but if n < len(table)]] = False
    return torch.equal(own.detach().cpu()[kept], table[kept].to(own.dtype))


def _fields_of_extras(extras: Extras, spelling: PeftSpelling, anatomy: Anatomy) -> Fields:
    """Return the fields of our config; `bias` is one of each config of a union."""
    found: Fields = {}
    if extras.copies:
        layers = [s.path for s in (*anatomy.others, *anatomy)]
        around = {path[:i] for path in layers for i, c in enumerate(path) if c == "."}
        names = short_names([*extras.copies], [*layers, *around])
        found["modules_to_save"] = exactly(extras.copies) if names is None else list(names)
    if extras.rows:
        table = anatomy.own_table
        alike = next((group for group in anatomy.shared_tables if table in group), (table,))
        tokens = {path: list(ids) for path, (ids, _) in extras.rows.items()}
        first, is_own = next(iter(tokens.values())), {*tokens} <= {*alike}
        if spelling.rows_field:
            targets = None if is_own else exactly(tokens)
            found |= {spelling.rows_field: first, "target_modules": targets}
        else:
            found[TOKENS] = first if is_own and len(tokens) == 1 else tokens
    if extras.kind != "none":
        found["bias"] = extras.kind
    return found


def _keyed(
    config: AdapterConfig,
    extras: Extras,
    layers: Mapping[str, Mapping[str, Tensor]],
    anatomy: Anatomy,
) -> dict[str, Tensor]:
    """Return all tensors at layers under our keys.

    Args:
        config: of the adapter.
        extras: what it has besides its adapters.
        layers: `Site.name` → the tensors of its adapter.
        anatomy: of the model.
    """
    of_parameters = any(m.to_dict().get("target_parameters") for m in config.members)
    if not (extras.copies or extras.biases or extras.rows or of_parameters):
        return {f"{path}/{name}": t for path, own in layers.items() for name, t in own.items()}
    tied = {path: group for group in anatomy.shared_tables for path in group}
    rows = {
        path: {"rows": values}
        for given, (_, values) in extras.rows.items()
        for path in tied.get(given, (given,))
    }
    found: dict[str, Tensor] = {}
    for place in places_of(config, anatomy):
        path, kind = place.path, FIELD_AT.get(place.placement.location)
        if kind == "modules_to_save":
            values = {f"layer.{name}": t for name, t in extras.copies.get(path, {}).items()}
        elif kind == "bias":
            values = {"own": extras.biases[path]} if path in extras.biases else {}
        elif kind == TOKENS:
            values = rows.get(path, {})
        else:
            values = dict(layers.get(place.placement.site.name, {}))
        found |= {place.key(name): tensor for name, tensor in values.items()}
    return found


def head_from(
    peft_config: PeftConfig, rest: Mapping[str, Tensor], info: SavedModel
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return metadata and tensors of the head in a file; None if there is none.

    Args:
        peft_config: the config.
        rest: all tensors but the adapter's, by key in the task class.
        info: of the model to fill.

    Raises:
        CheckpointError: a weight of the base model was trained too, or the head has no equivalent.
    """
    head: dict[str, Tensor] = {}
    trained, own_output = [], False
    for key, tensor in rest.items():
        if ".original_module." in key:
            continue
        name = _plain(key)
        own = _in_base(name, info)
        is_own = name in info.output and _is_saved(
            name.rpartition(".")[0], peft_config.modules_to_save
        )
        own_output |= is_own
        if own is None or is_own or (name in info.output and _is_other(own, tensor)):
            head[name] = tensor
        # PEFT saves adapted embeddings too: ignore them if they equal the model's
        elif _is_other(own, tensor):
            trained.append(key)
    if trained:
        raise CheckpointError(
            f"the file holds weights of the base model that differ from those here: "
            f"{listing(sorted(trained))}; of what PEFT saves whole, only heads can be loaded "
            f"beside an adapter. {MERGE}"
        )
    if not head or not info.with_head:
        return None, {}
    if not info.named_heads:
        # tensors that the file lacks do not change
        kept = {key: info.tensor(key) for key in info.static_head if key not in head}
        head |= {key: tensor.detach() for key, tensor in kept.items() if tensor is not None}
        return {STATIC: info.model_class, **({OWN_OUTPUT: True} if own_output else {})}, head
    # PEFT's files have no labels: take those of the model
    return info.from_static(_class_of_head(peft_config, info), head, info.config.get("label2id"))


def _is_other(own: Tensor, tensor: Tensor) -> bool:
    return own.shape != tensor.shape or not torch.equal(own.detach().cpu(), tensor.to(own.dtype))


def _in_base(key: str, info: SavedModel) -> Tensor | None:
    """Return the tensor of the base model that a key of some task class names."""
    if key in info.static_head:
        return None
    for name in (key, info.renamed(key)):
        first, _, below = name.partition(".")
        if info.prefix not in ("", first):
            below = f"{info.prefix}.{below}"
        for place in (name, f"{info.prefix}.{name}", below):
            if (found := info.tensor(place)) is not None:
                return found
    return None


def _class_of_head(peft_config: PeftConfig, info: SavedModel) -> str:
    task = peft_config.task_type
    if peft_config.base_class is None and (task is None or task not in TASKS):
        raise CheckpointError(
            f"the file has a head, and {CONFIG} says task_type={task!r}, so the "
            f"kind of the head is unknown; legal are {listing(TASKS)}. Write "
            f"{argument('with_head', False, 'load_adapter')}"
            f"{in_python(', or load it into the class of its head after adapterzoo.init(model)')}."
        )
    return class_in(peft_config, info) or str(task)
