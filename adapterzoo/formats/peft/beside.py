"""What PEFT trains beside an adapter: whole modules, rows of embeddings and biases.

A copy of a module has the keys of the module itself, and so has a bias; rows are a tensor
`<embedding>.token_adapter.trainable_tokens_delta` in the order of the tokens in the config, or
`<embedding>.trainable_tokens_delta` of a method that trains nothing else. That one repeats them for
every module that shares the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapterzoo.anatomy import Anatomy, Site
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, argument
from adapterzoo.fields import checks
from adapterzoo.formats.checkpoint import ModelInfo, short
from adapterzoo.formats.places import Place, places_of
from adapterzoo.patterns import short_names
from adapterzoo.peft_arguments import ADAPTED_BIASES
from adapterzoo.spelling import Fields, PeftSpelling

from .config import CONFIG, TOKENS, PeftConfig
from .heads import class_in
from .patterns import exactly

_DELTA, _TABLE = "trainable_tokens_delta", "base_layer.weight"
# of placements → PEFT's fields
FIELD_AT = {
    "modules_to_save": "modules_to_save",
    "token rows": "trainable_token_indices",
    "bias": "bias",
}


@dataclass(slots=True)
class Beside:
    """What a file has beside its adapters, by paths in this model.

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


Find = Callable[[str, Mapping[str, Site]], "str | None"]


# --- read ---


def read(
    theirs: PeftConfig, rest: Mapping[str, Tensor], info: ModelInfo, find: Find
) -> tuple[Beside, dict[str, Tensor]]:
    """Return what is trained beside the adapters, and all other tensors.

    Args:
        theirs: the config.
        rest: all tensors but the adapter's, by key in the task class.
        info: of the model to fill.
        find: path in the file, and sites by path, to the path in this model.

    Raises:
        CheckpointError: the tokens in the config are not those of the rows.
    """
    beside, left = Beside(), dict(rest)
    can = _fields(theirs.spelling)
    start = _start(theirs.spelling)
    delta, kept = start + _DELTA, start + _TABLE
    copies: list[str] = []
    anatomy = info.anatomy
    sites = {s.path: s for s in (*anatomy.others, *anatomy) if s.parameter is None}
    tables: dict[str, tuple[str, Tensor]] = {}
    for key, tensor in rest.items():
        if key.endswith(delta) and TOKENS in can:
            named = key.removesuffix(delta)
            if (path := find(named, sites)) is not None:
                beside.rows[path] = _rows(theirs, named, left.pop(key), sites[path], info)
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
        if "modules_to_save" in can and _is_saved(layer, theirs.modules_to_save):
            beside.copies.setdefault(path, {})[parameter] = _cast(left.pop(key), path, info)
        elif "bias" in can and theirs.bias != "none" and parameter == "bias":
            beside.biases[path] = _cast(left.pop(key), path, info)
            beside.kind = "all" if theirs.bias == "all" else ADAPTED_BIASES
    _refuse_other_rows(beside, anatomy)
    if beside.kind == "all":
        beside.biases = _outside_of_task(theirs, info, find, sites) | beside.biases
    for path, (key, table) in tables.items():
        if path in beside.rows and _is_same(table, path, beside.rows[path][0], info):
            # a vocabulary that was resized: PEFT saves the table, whose new rows are trained
            del left[key]
    tables_of_rows = {key for key in rest if key.endswith(delta) and key not in copies}
    for key in copies if theirs.spelling.rows_field else ():
        # a tied output layer, which follows the table here
        if any(torch.equal(rest[other], rest[key]) for other in tables_of_rows):
            del left[key]
    return beside, left


def _outside_of_task(
    theirs: PeftConfig, info: ModelInfo, find: Find, sites: Mapping[str, Site]
) -> dict[str, Tensor]:
    """Return the biases of layers that the file's class of models lacks, such as a pooler."""
    if (task := class_in(theirs, info)) is None:
        return {}
    there = {find(path, sites) for path in info.modules(task)}
    own = ((s.path, _own(s.path, "bias", info)) for s in info.anatomy.biases if s.path not in there)
    return {path: bias.detach() for path, bias in own if bias is not None}


def _start(spelling: PeftSpelling) -> str:
    """Return what is between the path of an embedding and the name of its tensors."""
    return "." if spelling.rows_field else ".token_adapter."


def _fields(spelling: PeftSpelling) -> frozenset[str]:
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


def _own(path: str, parameter: str, info: ModelInfo) -> Tensor | None:
    return info.tensor(f"{info.prefix}.{path}.{parameter}".removeprefix("."))


def _cast(tensor: Tensor, path: str, info: ModelInfo) -> Tensor:
    """Return a copy of a layer's tensor in the dtype of the layer."""
    own = _own(path, "weight", info)
    return tensor if own is None or not tensor.is_floating_point() else tensor.to(own.dtype)


def _as(tensor: Tensor, path: str, info: ModelInfo) -> Tensor:
    """Return a value in the dtype of its layer's weight, if that is exact."""
    own = _own(path, "weight", info)
    if own is None or torch.promote_types(own.dtype, tensor.dtype) is not own.dtype:
        return tensor
    return tensor.to(own.dtype)


def _rows(
    theirs: PeftConfig, named: str, rows: Tensor, site: Site, info: ModelInfo
) -> tuple[tuple[int, ...], Tensor]:
    given = theirs.trainable_token_indices
    if isinstance(given, Mapping):
        found = [ids for name, ids in given.items() if named.endswith(name)]
        given = found[0] if found else None
    if not isinstance(given, list) or rows.dim() != 2 or len(given) != len(rows):
        raise CheckpointError(
            f"{CONFIG} says trainable_token_indices={short(theirs.trainable_token_indices)}, and "
            f"the file has rows {list(rows.shape)} for {named!r}, so it is unknown to which "
            f"tokens they belong. Copy both files again from where they were saved."
        )
    order = sorted(range(len(given)), key=given.__getitem__)
    return tuple(given[i] for i in order), _as(rows[order], site.path, info)


def _refuse_other_rows(beside: Beside, anatomy: Anatomy) -> None:
    """Refuse rows of their own for modules that share a table; an adapter has the same in all.

    Raises:
        CheckpointError: there are some.
    """
    for group in anatomy.shared_tables:
        first, *others = [path for path in group if path in beside.rows] or group[:1]
        for path in others:
            (ids, rows), (other_ids, other_rows) = beside.rows[first], beside.rows[path]
            if ids != other_ids or not torch.equal(rows, other_rows):
                raise CheckpointError(
                    f"the file has other rows of tokens at {path!r} than at {first!r}; here these "
                    f"share one table, and an adapter has the same rows in both. Train it again "
                    f"with target_modules=[{group[0]!r}] in PEFT."
                )


def _is_same(table: Tensor, path: str, but: Sequence[int], info: ModelInfo) -> bool:
    """Return whether a table equals the model's, except for some rows."""
    own = _own(path, "weight", info)
    if own is None or own.is_meta or own.shape != table.shape:
        return False
    kept = torch.ones(len(table), dtype=torch.bool)
    kept[[n for n in but if n < len(table)]] = False
    return torch.equal(own.detach().cpu()[kept], table[kept].to(own.dtype))


def fields_of(beside: Beside, spelling: PeftSpelling, anatomy: Anatomy) -> Fields:
    """Return the fields of our config; `bias` is one of each config of a union."""
    found: Fields = {}
    if beside.copies:
        layers = [s.path for s in (*anatomy.others, *anatomy)]
        around = {path[:i] for path in layers for i, c in enumerate(path) if c == "."}
        names = short_names([*beside.copies], [*layers, *around])
        found["modules_to_save"] = exactly(beside.copies) if names is None else list(names)
    if beside.rows:
        table = anatomy.own_table
        alike = next((group for group in anatomy.shared_tables if table in group), (table,))
        tokens = {path: list(ids) for path, (ids, _) in beside.rows.items()}
        first, is_own = next(iter(tokens.values())), {*tokens} <= {*alike}
        if spelling.rows_field:
            targets = None if is_own else exactly(tokens)
            found |= {spelling.rows_field: first, "target_modules": targets}
        else:
            found[TOKENS] = first if is_own and len(tokens) == 1 else tokens
    if beside.kind != "none":
        found["bias"] = beside.kind
    return found


def keyed(
    config: AdapterConfig,
    beside: Beside,
    layers: Mapping[str, Mapping[str, Tensor]],
    anatomy: Anatomy,
) -> dict[str, Tensor]:
    """Return all tensors at layers under our keys.

    Args:
        config: of the adapter.
        beside: what it has beside its adapters.
        layers: `Site.name` → the tensors of its adapter.
        anatomy: of the model.
    """
    if not (beside.copies or beside.biases or beside.rows) and not _has_parameters(config):
        return {f"{path}/{name}": t for path, own in layers.items() for name, t in own.items()}
    tied = {path: group for group in anatomy.shared_tables for path in group}
    rows = {
        path: {"rows": values}
        for given, (_, values) in beside.rows.items()
        for path in tied.get(given, (given,))
    }
    found: dict[str, Tensor] = {}
    for place in places_of(config, anatomy):
        path, kind = place.path, FIELD_AT.get(place.placement.location)
        if kind == "modules_to_save":
            values = {f"layer.{name}": t for name, t in beside.copies.get(path, {}).items()}
        elif kind == "bias":
            values = {"own": beside.biases[path]} if path in beside.biases else {}
        elif kind == TOKENS:
            values = rows.get(path, {})
        else:
            values = dict(layers.get(place.placement.site.name, {}))
        found |= {place.key(name): tensor for name, tensor in values.items()}
    return found


def _has_parameters(config: AdapterConfig) -> bool:
    return any(member.to_dict().get("target_parameters") for member in config.members)


# --- write ---


def write(
    places: Sequence[tuple[Place, Mapping[str, Tensor]]],
    spelling: PeftSpelling,
    adapted: Mapping[str, str],
    modules: Mapping[str, tuple[str, ...]],
    path_in_task: Callable[[str], str],
    info: ModelInfo,
) -> tuple[Fields, dict[str, Tensor]]:
    """Return PEFT's fields and its tensors without the prefix.

    Args:
        places: what is trained beside the adapters, with its tensors by parameter.
        spelling: of the method.
        adapted: paths of the adapted layers, here and in the task class.
        modules: of the task class.
        path_in_task: path here → path in the task class.
        info: of the model.

    Raises:
        CheckpointError: PEFT's method has no such field.
    """
    fields: Fields = {}
    tensors: dict[str, Tensor] = {}
    saved: list[str] = []
    tokens: dict[int, tuple[str | None, str, list[int]]] = {}
    for place, values in places:
        path, config = path_in_task(place.path), place.placement.config.to_dict()
        kind = FIELD_AT[place.placement.location]
        if kind not in _fields(spelling):
            raise CheckpointError(
                f"the adapter has {kind} at {place.path!r}, and PEFT's {spelling.peft_type} has no "
                f"such field. Write {argument('format', 'native')}."
            )
        if kind == "modules_to_save":
            saved.append(path)
            start = f"{path}."
            tensors |= {start + n.removeprefix("layer."): t for n, t in values.items()}
        elif kind == "bias":
            inside = ".base_layer" if place.path in adapted else ""
            tensors[f"{path}{inside}.bias"] = values["own"]
            # a config for all biases lists no layers
            fields["bias"] = "all" if config["paths"] is None else ADAPTED_BIASES
        elif (key := id(place.placement.config)) not in tokens:
            tokens[key] = config["table"], path, list(config["tokens"])
            tensors[path + _start(spelling) + _DELTA] = values["rows"]
            for layer in _sharing(place.path, modules, info) if spelling.rows_field else ():
                # each has a tensor of its own in the file
                tensors.setdefault(f"{layer}.{_DELTA}", values["rows"].clone())
    if saved:
        names = short_names(saved, modules)
        if names is None or any(_ends_wrongly(name, saved, modules) for name in names):
            names = tuple(sorted(saved))
        fields["modules_to_save"] = list(names)
    if tokens and spelling.rows_field:
        fields |= _rows_alone(spelling, list(tokens.values()))
    elif tokens:
        found = list(tokens.values())
        alone = len(found) == 1 and found[0][0] is None
        listed = {path: ids for _, path, ids in found}
        fields[TOKENS] = found[0][2] if alone else listed
    return fields, tensors


def _sharing(path: str, modules: Mapping[str, tuple[str, ...]], info: ModelInfo) -> list[str]:
    """Return the paths in the task class of all modules with the table at a path."""
    own = _own(path, "weight", info)
    weights = [name for name, tensors in modules.items() if "weight" in tensors]
    return [name for name in weights if info.tensor(f"{name}.weight") is own]


def _rows_alone(
    spelling: PeftSpelling, found: Sequence[tuple[str | None, str, list[int]]]
) -> Fields:
    """Return the fields of a method that only trains rows, which are the same in each table."""
    lists = [ids for _, _, ids in found]
    if lists != [lists[0]] * len(lists):
        raise CheckpointError(
            f"the tables have rows of different tokens, and PEFT's {spelling.peft_type} has one "
            f"list for all. Write {argument('format', 'native')}."
        )
    return {spelling.rows_field: lists[0], "target_modules": [path for _, path, _ in found]}


def _ends_wrongly(name: str, saved: Sequence[str], modules: Mapping[str, Any]) -> bool:
    """Return whether PEFT, which compares ends even within words, would take other modules."""
    return any(path.endswith(name) and path not in saved for path in modules)
