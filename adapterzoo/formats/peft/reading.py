r"""Read an adapter from PEFT's config and tensors.

The keys of the tensors name the layers. The config's patterns do not: they are for the model class
that PEFT was given, and may match nothing here. The config names the kind of adapter, by the table
that also reads config objects. Loading builds an empty adapter and compares it with the file;
tensors without a place in the adapter keep PEFT's keys, so that errors name them.

A file is refused if a field changes what the adapter computes in a way that cannot be reproduced
here. Fields that only matter to PEFT's training, and fields that are off, are ignored. PEFT matches
the keys of `rank_pattern` and `alpha_pattern` by `(.*\.)?(key)$`.

Besides adapters PEFT trains whole modules, rows of embeddings and biases. Copies of modules have
the keys of the modules themselves, and so do biases. Rows are a tensor
`<embedding>.token_adapter.trainable_tokens_delta`, in the order of the tokens in the config. A
method that trains only rows calls it `<embedding>.trainable_tokens_delta`, and repeats it for every
module that shares the table.

For its field `target_parameters` PEFT wraps a module once for each of its parameters, in the
module's order. The last parameter has the module's keys, and each earlier one has one `base_layer`
more; no key has the parameter's name.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from adapterzoo.anatomy import HEAD, Anatomy, Site
from adapterzoo.config import AdapterConfig, Check, Text, checks, union_of
from adapterzoo.contracts import compute_dtype
from adapterzoo.errors import CheckpointError, ConfigError, argument, listing, short
from adapterzoo.folders.names import CONFIG
from adapterzoo.folders.reading import AGAIN
from adapterzoo.formats.checkpoint import method_of, places_of, shared_key
from adapterzoo.formats.fit import same_values
from adapterzoo.heads import OWN_OUTPUT, STATIC
from adapterzoo.methods._copies import TIED_COPY, all_placements
from adapterzoo.patterns import TokenIds, around, exactly, fault, is_named, short_names
from adapterzoo.peft_arguments import ADAPTED_BIASES, COMMON, instead
from adapterzoo.spelling import (
    Fields,
    PeftLayer,
    PeftSpelling,
    Tensors,
    peft_readable,
    peft_spellings,
)

from . import tying

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

TOKENS = "trainable_token_indices"

# the hint for an adapter that PEFT can merge
MERGE = "Merge the adapter with PEFT: peft_model.merge_and_unload().save_pretrained(…)."

_SELECTION = "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileConfig:
    """The checked facts in a PEFT config.

    Attributes:
        spelling: the method's spelling.
        fields: the fields of the method.
        patterns: a field of patterns → its regular expressions and their numbers.
        task_type: PEFT's name of the task; None if unknown.
        base_class: the class of the model, if PEFT does not know the task.
        modules_to_save: ends of names of the modules that the file holds whole.
        target_parameters: ends of names of the parameters that it adapts.
        trainable_token_indices: the tokens whose rows it holds, as in the file.
        bias: which biases it has.
        selection: the fields that select layers, unchecked.
    """

    spelling: PeftSpelling
    fields: Mapping[str, Any]
    patterns: Mapping[str, Mapping[str, Any]]
    task_type: str | None
    base_class: str | None
    modules_to_save: Sequence[str] = ()
    target_parameters: Sequence[str] = ()
    trainable_token_indices: Any = None
    bias: str = "none"
    selection: Mapping[str, Any] = field(default_factory=dict)


def checked(metadata: Mapping[str, Any]) -> FileConfig:
    """Check a PEFT config and return its facts.

    Raises:
        CheckpointError: there is no such method here, or a value is invalid or cannot be
            reproduced.
    """
    types = sorted({spelling.peft_type for spelling in peft_readable()})
    kind = metadata.get("peft_type")
    named = [s for s in peft_readable() if s.peft_type == kind]
    spelling = method_of(
        metadata,
        "peft_type",
        named,
        f"PEFT that exist here: {listing(types, limit=40)} "
        f"(as {listing(peft_spellings, limit=40)}). {MERGE if named else instead(kind)}",
    )
    if (why := spelling.refuse(metadata)) is not None:
        raise CheckpointError(f"{CONFIG}: {why}")
    known = {n for s in peft_readable() for own in (s.inert, s.fixed, s.fields) for n in own}
    known |= COMMON.keys()
    if unknown := sorted(k for k, v in metadata.items() if v and k not in known):
        warnings.warn(
            f"{CONFIG} has unknown fields: {listing(unknown)}. They are ignored; "
            f"compare the outputs with those of PEFT.",
            stacklevel=2,
        )
    mapping = metadata.get("auto_mapping")
    base_class = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    legal = {name: cast("Check", argument.check) for name, argument in spelling.fields.items()}
    tokens = spelling.rows_field or TOKENS
    return FileConfig(
        spelling=spelling,
        fields={
            name: _value(metadata, name, legal[name], argument.default)
            for name, argument in spelling.fields.items()
        },
        patterns={
            name: _value(metadata, name, _ByLayer(legal[base]), {})
            for name, base in spelling.patterns.items()
        },
        task_type=_value(metadata, "task_type", Text()),
        base_class=base_class if isinstance(base_class, str) else None,
        modules_to_save=_value(metadata, "modules_to_save", _Names(), []),
        target_parameters=_value(metadata, "target_parameters", _Names(), [])
        if spelling.of_parameters
        else (),
        # an empty list asks for no tokens
        trainable_token_indices=_value({tokens: metadata.get(tokens) or None}, tokens, TokenIds()),
        bias=_value(metadata, "bias", Text(), "none"),
        selection={name: metadata.get(name) for name in _SELECTION},
    )


class _Names(Check):
    legal = "a list of names or null"

    def fits(self, value: object) -> bool:
        return isinstance(value, list) and all(isinstance(n, str) for n in value)


class _ByLayer(Check):
    def __init__(self, check: Check) -> None:
        self.check, self.legal = check, f"layer names with {check.legal} each"

    def fits(self, value: object) -> bool:
        return isinstance(value, Mapping) and all(map(self.check.fits, value.values()))


def _value(metadata: Mapping[str, Any], name: str, check: Check, default: Any = None) -> Any:
    """Return the checked value of a field, or its default."""
    value = metadata.get(name)
    if value is None:
        return default
    if not check.fits(check.convert(value)):
        raise CheckpointError(
            f"{CONFIG} says {name}={short(value)}; it must be {check.legal}. If the tensors are "
            f"right, write {name!r}: {default} there; else copy the checkpoint again."
        )
    return value


_T = TypeVar("_T")


def values_at(field: str, patterns: Mapping[str, _T], paths: Collection[str]) -> dict[str, _T]:
    """Return the value of the first pattern that matches each path; omit other paths.

    Args:
        field: the config's field, for messages.
        patterns: PEFT's keys → values.
        paths: paths of layers.

    Raises:
        CheckpointError: a key is not a regular expression.
    """
    whole = {rf"(.*\.)?({pattern})$": pattern for pattern in patterns}
    if (wrong := fault(whole)) is not None:
        raise CheckpointError(
            f"{field} has the key {whole[wrong[0]]!r}: {wrong[1]}. Write a name: {{'q_proj': …}}."
        )
    compiled = [(re.compile(expression), patterns[key]) for expression, key in whole.items()]
    fitting = {p: [value for expression, value in compiled if expression.match(p)] for p in paths}
    return {path: values[0] for path, values in fitting.items() if values}


def most_common(values: Mapping[str, _T], preferred: _T) -> _T:
    """Return the preferred value if any path has it, else the most common one."""
    if preferred in values.values():
        return preferred
    return Counter(values.values()).most_common(1)[0][0]


def by_name(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return a few keys that give paths their values, except for the default.

    A key is a name of layers that all have the same value, or a regular expression for the
    paths that share it.
    """
    names: dict[str, set[_T]] = {}
    for path, value in values.items():
        names.setdefault(path.rpartition(".")[2], set()).add(value)
    keys: dict[str, _T] = {}
    rest: dict[_T, list[str]] = {}
    for path, value in values.items():
        name = path.rpartition(".")[2]
        if value != default and len(names[name]) == 1:
            keys[re.escape(name)] = value
        elif value != default:
            rest.setdefault(value, []).append(path)
    return keys | {exactly(paths): value for value, paths in rest.items()}


def by_path(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return what `by_name` does, but with only names and paths as keys, for other programs."""
    keys: dict[str, _T] = {}
    for key, value in by_name(values, default).items():
        if not key.startswith("^"):
            keys[key] = value
            continue
        for path in (p for p, v in values.items() if v == value and re.match(key, p)):
            # the path alone would also match the end of a longer one
            longer = any(other.endswith(f".{path}") for other in values)
            keys[f"^{re.escape(path)}" if longer else path] = value
    return keys


TASKS: Mapping[str, Mapping[str, Any]] = {
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "FEATURE_EXTRACTION": modeling_auto.MODEL_MAPPING_NAMES,
}
"""PEFT's names of tasks → transformers' classes for them, by model type."""


@dataclass(frozen=True, slots=True)
class ExportedTask:
    """The task class that an exported adapter belongs to.

    Attributes:
        model_class: name of the class.
        task_type: PEFT's name of the task; None if it has none.
    """

    model_class: str
    task_type: str | None


def class_in(peft_config: FileConfig, info: ModelInfo) -> str | None:
    """Return the class of models that a file belongs to; None if it does not say."""
    if peft_config.base_class is not None or peft_config.task_type is None:
        return peft_config.base_class
    return next(classes_for(TASKS.get(peft_config.task_type, {}), info.model_type), None)


def classes_for(mapping: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield the classes of transformers for a task of a model type."""
    found = mapping.get(model_type)
    yield from (found,) if isinstance(found, str) else found or ()


def task_of(model_class: str) -> str | None:
    """Return PEFT's name of the task of a class; None if it has none."""
    for task, mapping in TASKS.items():
        if any(model_class in classes_for(mapping, model_type) for model_type in mapping):
            return task
    return None


# --- the tensors ---

_LOG = logging.getLogger(__name__)

# PEFT's keys omit the adapter's name; those of other tools include it
_NAME = "default"
# endings of the keys of an embedding's rows, and of its table
DELTA, _TABLE = "trainable_tokens_delta", "base_layer.weight"
WRAPPED = "base_layer"
# fields of placements → PEFT's fields
FIELD_AT = {
    "modules_to_save": "modules_to_save",
    "token rows": "trainable_token_indices",
    "bias": "bias",
    TIED_COPY: "modules_to_save",
}

PATTERNS = {"rank_pattern": "r", "alpha_pattern": "alpha"}
"""Our fields with values for some layers → the field with the value for all others."""

Layers = Mapping[str, PeftLayer]


def read_adapter(
    peft_config: FileConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[AdapterConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return the adapter's config and tensors, and all other tensors.

    Raises:
        CheckpointError: a layer cannot have such an adapter here, or tensors are missing, or
            contradict each other or the config.
    """
    spelling = peft_config.spelling
    is_tied, count = bool(peft_config.fields.get(tying.FIELD)), len(tensors)
    if is_tied:
        layers_here = ((named_in_peft(s), s.is_used) for s in _sites(spelling, info))
        used = {f"{spelling.prefix}{info.whole(n)}": is_used for n, is_used in layers_here}
        tensors = tying.without_twins(tensors, spelling, peft_config.modules_to_save, used)
        # PEFT ties only layers named "embed_tokens" and "lm_head"
        is_tied = len(tensors) < count
        peft_config = replace(peft_config, fields={**peft_config.fields, tying.FIELD: is_tied})
    layers, shared, lost, rest = _sorted(peft_config, tensors, info)
    extras, rest = _read_extras(peft_config, rest, info)
    if not lost:
        _check_layers(peft_config, layers, info)
    rows = {path: tensor for path, (_, tensor) in extras.rows.items()}
    dtype = _to_one_dtype(spelling, layers, shared, rows, info)
    try:
        fields, shared = spelling.read_model(
            peft_config.fields, shared, [*layers.values()], info.anatomy
        )
        own = {"dtype": dtype} if "dtype" in checks(spelling.config) else {}
        first = _fields_of_extras(extras, spelling, info.anatomy)
        # in a union, the first config has the fields of the whole model
        others = {k: v for k, v in first.items() if k == "bias" and v != "all"}
        configs = [
            spelling.config.from_dict({**own, **member, **fields, **(others if number else first)})
            for number, member in enumerate(_members(peft_config, layers, info) or [{}])
        ]
        config = union_of(configs)
        # which values are legal depends on the widths of the sites
        all_placements(config, info.anatomy)
    except ConfigError as error:
        raise CheckpointError(
            f"the config of the file is invalid; nothing has been loaded. {error}"
        ) from error
    if spelling.becomes:
        _LOG.warning("A %s adapter of PEFT becomes %s.", spelling.peft_type, spelling.becomes)
    read: dict[str, Tensors] = {}
    for path, layer in layers.items():
        try:
            read[path] = spelling.read(layer)
        except (IndexError, KeyError, RuntimeError) as error:
            shown = listing(
                layer.tensors.items(), show=lambda own: f"{own[0]} {list(own[1].shape)}"
            )
            raise CheckpointError(
                f"at {layer.name!r} the tensors do not fit together: {shown} ({error}). {AGAIN}."
            ) from error
    # modules that share a table have the same rows
    sharing = info.anatomy.sharing
    rows = {same: rows[path] for path in rows for same in sharing(path)}
    if is_tied:
        read = {same: read[path] for path in read for same in sharing(path)}
        copied = extras.copies
        extras.copies = {same: copied[path] for path in copied for same in sharing(path)}
    # field of the extras → path → our parameters
    held: dict[str, Mapping[str, Tensors]] = {
        "modules_to_save": extras.copies,
        "bias": {path: {"own": bias} for path, bias in extras.biases.items()},
        TOKENS: {path: {"rows": tensor} for path, tensor in rows.items()},
    }
    found: dict[str, Tensor] = {}
    for place in places_of(config, info.anatomy):
        kind = FIELD_AT.get(place.placement.location)
        at, name = (held[kind], place.path) if kind else (read, place.placement.site.name)
        found |= {place.key(parameter): t for parameter, t in at.get(name, {}).items()}
    return config, found | {shared_key(name): t for name, t in shared.items()} | lost, rest


def _check_layers(peft_config: FileConfig, layers: Layers, info: ModelInfo) -> None:
    """Check that all layers named by the config have tensors, in each stack where any has.

    The model class that wrote the file may lack whole stacks, and layers outside the blocks.

    Raises:
        CheckpointError: a layer has no tensors.
    """
    names, excluded, numbers, patterns = (peft_config.selection[name] for name in _SELECTION)
    if not isinstance(names, str | list) or patterns:
        return
    numbers = [numbers] if isinstance(numbers, int) else numbers
    there = {layer.site.path for layer in layers.values()}
    stacks = {layer.site.stack for layer in layers.values()} - {""}

    def is_chosen(path: str, wanted: Any) -> bool:
        if isinstance(wanted, str):
            return fault([wanted]) is None and re.fullmatch(wanted, path) is not None
        return any(is_named(path, name) for name in wanted or ())

    lacking = []
    for site in _sites(peft_config.spelling, info):
        path = info.whole(site.path)
        if site.stack not in stacks or site.path in there or not is_chosen(path, names):
            continue
        number = re.match(r".*?\.[^.]*\.(\d+)\.", path)
        in_layers = not numbers or path in names or (number and int(number[1]) in numbers)
        is_copy = is_saved(path, peft_config.modules_to_save)
        if in_layers and not is_copy and not is_chosen(path, excluded):
            lacking.append(path)
    if lacking:
        raise CheckpointError(
            f"the file lacks {len(lacking)} of the layers of target_modules={short(names)}: "
            f"{listing(lacking)}. {AGAIN}."
        )


def _sorted(
    peft_config: FileConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[dict[str, PeftLayer], Tensors, Tensors, Tensors]:
    """Return the file's tensors: of layers, adapter-wide, without a place here, and the rest.

    Those of layers are by `Site.name`, those without a place by their key in the file, and the rest
    by their key in the task class.
    """
    spelling = peft_config.spelling
    ends = _ends(spelling)
    wide = {key: name for name, key in spelling.shared.items()}
    others = {key for each in peft_readable() for key in each.shared.values()} - {*wide}
    # starts of tensor names of other methods, and of other versions of this one; not of those that
    # adapt norms, as layers are called `ln_1` too
    spelled = [s for s in peft_readable() if not s.of_norms]
    stems = {f".{end.partition('_')[0]}_" for s in spelled for end in _ends(s)}
    sites = {named_in_peft(site): site for site in _sites(spelling, info)}
    modules: dict[str, list[Site]] = {}
    for site in info.anatomy.weights().values() if peft_config.target_parameters else ():
        modules.setdefault(site.path, []).append(site)
    layers: dict[str, PeftLayer] = {}
    shared: Tensors = {}
    lost: Tensors = {}
    rest: Tensors = {}

    def layer_at(named: str, site: Site, is_parameter: bool) -> PeftLayer:
        weight = functools.partial(_weight, site, info)
        fresh = PeftLayer(named, site, peft_config.fields, weight, is_parameter)
        return layers.setdefault(site.name, fresh)

    for key, tensor in tensors.items():
        if key in wide:
            shared[wide[key]] = tensor
            continue
        place = key.removeprefix(spelling.prefix)
        named, parameter = _split(place, ends)
        if parameter is None:
            is_other = key in others or any(stem in place for stem in stems)
            (lost if is_other else rest)[key if is_other else place] = tensor
            continue
        module, depth = unwrapped(named) if modules else (named, 0)
        path = _here(module, {**sites, **modules}, info)
        own = adapted(module, modules.get(path or "", ()), peft_config.target_parameters)
        # the last parameter has no wrapper in its keys
        here = [layer_at(f"{module}.{parameter_of(s)}", s, True) for s in reversed(own)]
        if path in sites and not own:
            here = [layer_at(named, sites[path], False)]
        if depth >= len(here):
            lost[key] = tensor
        elif parameter in here[depth].tensors:
            raise CheckpointError(f"the file has two tensors {parameter!r} for {named!r}. {AGAIN}.")
        else:
            shape = spelling.convolution_shapes.get(parameter)
            if shape is not None and here[depth].site.kernel:
                tensor = shape.read(tensor, here[depth])
            here[depth].tensors[parameter] = tensor
    for name, patterns in peft_config.patterns.items():
        numbers = values_at(name, patterns, [layer.name for layer in layers.values()])
        for layer in layers.values():
            if layer.name in numbers:
                layer.fields = {**layer.fields, spelling.patterns[name]: numbers[layer.name]}
    return layers, shared, lost, rest


def _sites(spelling: PeftSpelling, info: ModelInfo) -> list[Site]:
    """Return the layers that a method can adapt."""
    norms = info.anatomy.others if spelling.of_norms else ()
    layers = [s for s in info.anatomy if s.parameter is None or s.is_of_attention]
    return [*norms, *layers, *info.anatomy.named]


def named_in_peft(site: Site) -> str:
    """Return the path of a site in the keys of PEFT, which wraps `nn.MultiheadAttention` whole."""
    projects = site.is_of_attention and site.parameter == "out_proj.weight"
    path = site.path.removeprefix(HEAD)
    return f"{path}.{WRAPPED}.out_proj" if projects else path


def _weight(site: Site, info: ModelInfo) -> Tensor | None:
    """Return the weight of a layer `[d_out, d_in]`; None if it is quantized or has no values."""
    found = base_tensor(site.path, "weight", info)
    if found is not None and site.kernel:
        found = found.flatten(1)
    if found is None or found.is_meta or found.dim() != 2 or not found.is_floating_point():
        return None
    return found.detach().mT if site.transposed else found.detach()


def _ends(spelling: PeftSpelling) -> dict[str, str]:
    """Return endings of PEFT's keys → our parameters."""
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
    # the file may be of another task class, or of a base model alone
    cls = getattr(transformers, info.model_class, None)
    prefix = info.prefix or getattr(cls, "base_model_prefix", "")
    # or of another release of transformers
    for name in (named, info.renamed(named)):
        for path in (name, name.removeprefix(f"{prefix}.")):
            if path in sites:
                return path
    return None


def _to_one_dtype(
    spelling: PeftSpelling, layers: Layers, shared: Tensors, rows: Tensors, info: ModelInfo
) -> str | None:
    """Convert the tensors to one dtype without loss, and return the config's `dtype`."""
    each = [*(layer.tensors for layer in layers.values()), shared, rows]
    found = {t.dtype for own in each for name, t in own.items() if name not in spelling.wide}
    if wrong := [dtype for dtype in found if not dtype.is_floating_point]:
        raise CheckpointError(f"the file has tensors of {wrong[0]}. Save it again in float32.")
    own, dtype = info.dtype, torch.float32
    # widening to float32 is exact, and PEFT does it too over half-precision layers
    if found == {own} or own is torch.float64:
        dtype = own
    elif torch.float64 in found:
        # wider than the model: loading refuses to round unless the user gives a dtype
        dtype = torch.float64
    for tensors in each:
        for name in tensors:
            to = compute_dtype(dtype) if name in spelling.wide else dtype
            tensors[name] = tensors[name].to(to)
    return None if dtype in (own, torch.float64) else str(dtype).removeprefix("torch.")


def _members(peft_config: FileConfig, layers: Layers, info: ModelInfo) -> list[dict[str, Any]]:
    """Return the fields of each of our configs; layers that differ only in patterns share one."""
    spelling = peft_config.spelling
    patterns = {name: ours for name, ours in PATTERNS.items() if name in checks(spelling.config)}
    fields_of = {argument.ours: name for name, argument in spelling.fields.items()}
    groups: list[tuple[dict[str, Any], dict[str, dict[str, Any]]]] = []
    for path, layer in layers.items():
        said = {ours: layer.fields[name] for ours, name in fields_of.items() if ours is not None}
        try:
            fields = spelling.read_fields(layer, said)
        except (IndexError, KeyError):
            # a tensor is missing, and the comparison with the model will name it
            fields = said
        alike = {name: v for name, v in fields.items() if name not in patterns.values()}
        paths = next((paths for known, paths in groups if known == alike), None)
        if paths is None:
            groups.append((alike, paths := {}))
        paths[path] = fields
    members = []
    for alike, paths in groups:
        numbers = {}
        for pattern, ours in patterns.items():
            values = {path: own[ours] for path, own in paths.items()}
            numbers[ours] = most_common(values, peft_config.fields[fields_of[ours]])
            numbers[pattern] = by_name(values, numbers[ours])
        chosen = {
            name: _names([p for p in paths if among(layers[p].tensors)], paths)
            for name, among in spelling.subsets.items()
        }
        targets = _targets([layers[path].site for path in paths], peft_config, info)
        members.append({**alike, **numbers, **chosen, **targets})
    return members


def _targets(chosen: Sequence[Site], peft_config: FileConfig, info: ModelInfo) -> dict[str, Any]:
    """Return the fields of our config that select these sites."""
    layers = [s for s in chosen if s.parameter is None or s.is_of_attention]
    modules = [*dict.fromkeys(site.path for site in layers)]
    weights = [site.name for site in chosen if site not in layers]
    names = _names(modules, (site.path for site in _sites(peft_config.spelling, info)))
    if not weights:
        return {"target_modules": names}
    ends = short_names(weights, info.anatomy.weights()) or weights
    return {"target_modules": names or [], "target_parameters": list(ends)}


def _names(paths: Sequence[str], everything: Iterable[str]) -> str | list[str] | None:
    """Return the value of a config field that selects just these paths; None if there are none."""
    names = short_names(paths, everything)
    return exactly(paths) if names is None else list(names) or None


def unwrapped(named: str) -> tuple[str, int]:
    """Return the module's path in a path with wrappers, and the number of wrappers."""
    outer = named.removesuffix("".join(re.findall(rf"(?:\.{WRAPPED})+$", named)))
    depth = (len(named) - len(outer)) // len(f".{WRAPPED}")
    return outer.replace(f".{WRAPPED}", ""), depth


def adapted(named: str, own: Iterable[Site], targets: Sequence[str]) -> list[Site]:
    """Return the sites at a module whose parameters a file adapts, by PEFT's rule for names.

    Args:
        named: path of the module in the file.
        own: the sites at the module, in the module's order.
        targets: PEFT's `target_parameters`.
    """
    ends = [f".{target}" for target in targets]
    return [s for s in own if any(f".{named}.{parameter_of(s)}".endswith(end) for end in ends)]


def parameter_of(site: Site) -> str:
    """Return the name of the parameter that is adapted at a site."""
    return site.parameter or "weight"


@dataclass(slots=True)
class Extras:
    """The trained values in a file besides its adapters, by paths in this model.

    Attributes:
        copies: path of a copied layer → our parameters.
        biases: path of a layer → its bias.
        rows: path of an embedding → token ids in ascending order, and their rows.
        kind: PEFT's value of `bias`.
    """

    copies: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, tuple[tuple[int, ...], Tensor]] = field(default_factory=dict)
    kind: str = "none"


def _read_extras(
    peft_config: FileConfig, rest: Mapping[str, Tensor], info: ModelInfo
) -> tuple[Extras, dict[str, Tensor]]:
    """Return the values trained besides the adapters, and all other tensors.

    Args:
        peft_config: the config.
        rest: all tensors except the adapter's, by key in the task class.
        info: info of the model to fill.

    Raises:
        CheckpointError: the tokens in the config are not those of the rows, or modules that share
            a table have different rows.
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
            if (path := _here(named, sites, info)) is not None:
                extras.rows[path] = _rows(peft_config, named, left.pop(key), sites[path], info)
            else:
                copies.append(key)
            continue
        if key.endswith(kept):
            if (path := _here(key.removesuffix(kept), sites, info)) is not None:
                tables[path] = key, tensor
            continue
        layer, _, parameter = _plain(key).rpartition(".")
        path = None if ".original_module." in key else _here(layer, sites, info)
        if path is None:
            continue
        if "modules_to_save" in can and is_saved(layer, peft_config.modules_to_save):
            own = extras.copies.setdefault(path, {})
            own[f"layer.{parameter}"] = _cast(left.pop(key), path, info)
        elif "bias" in can and peft_config.bias != "none" and parameter == "bias":
            extras.biases[path] = _cast(left.pop(key), path, info)
            extras.kind = "all" if peft_config.bias == "all" else ADAPTED_BIASES
    for group in anatomy.shared_tables:
        # modules that share a table have the same rows here
        first, *others = [path for path in group if path in extras.rows] or group[:1]
        for path in others:
            (ids, rows), (other_ids, other_rows) = extras.rows[first], extras.rows[path]
            if ids != other_ids or not torch.equal(rows, other_rows):
                raise CheckpointError(
                    f"the file has other rows at {path!r} than at {first!r}, which share one "
                    f"table here. Train it again with target_modules=[{group[0]!r}] in PEFT."
                )
    if extras.kind == "all" and (task := class_in(peft_config, info)) is not None:
        # the file's model class may lack layers, such as a pooler
        there = {_here(path, sites, info) for path in info.modules(task)}
        for site in anatomy.biases:
            bias = None if site.path in there else base_tensor(site.path, "bias", info)
            if bias is not None:
                extras.biases.setdefault(site.path, bias.detach())
    for path, (key, table) in tables.items():
        if path in extras.rows and _is_same(table, path, extras.rows[path][0], info):
            # after resizing the vocabulary PEFT saves the table too; the trained rows are `rows`
            del left[key]
    tables_of_rows = {key for key in rest if key.endswith(delta) and key not in copies}
    for key in copies if peft_config.spelling.rows_field else ():
        # of a tied output layer, which follows the table here
        if any(torch.equal(rest[other], rest[key]) for other in tables_of_rows):
            del left[key]
    return extras, left


def start_of_rows(spelling: PeftSpelling) -> str:
    """Return the part between an embedding's path and the name of its tensors."""
    return "." if spelling.rows_field else ".token_adapter."


def fields_for_extras(spelling: PeftSpelling) -> frozenset[str]:
    """Return the fields of extras that a method has in PEFT and here.

    In PEFT every method has `modules_to_save`.
    """
    rows = {TOKENS} if spelling.rows_field else set()
    return spelling.beside | rows | ({"modules_to_save"} & checks(spelling.config).keys())


def _plain(key: str) -> str:
    name = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
    return name.replace(".base_layer.", ".")


def is_saved(layer: str, names: Sequence[str]) -> bool:
    """Return whether a layer is in one of the modules, by PEFT's rule for names.

    Args:
        layer: path of the layer.
        names: names of modules.
    """
    return any(module.endswith(name) for module in around(layer) for name in names)


def base_tensor(path: str, parameter: str, info: ModelInfo) -> Tensor | None:
    """Return a tensor of the base model; None if the module has none of this name."""
    return info.tensor(info.whole(f"{path}.{parameter}"))


def _cast(tensor: Tensor, path: str, info: ModelInfo) -> Tensor:
    """Return a copy of a layer's tensor in the layer's dtype."""
    own = base_tensor(path, "weight", info)
    return tensor if own is None or not tensor.is_floating_point() else tensor.to(own.dtype)


def _rows(
    peft_config: FileConfig, named: str, rows: Tensor, site: Site, info: ModelInfo
) -> tuple[tuple[int, ...], Tensor]:
    given = peft_config.trainable_token_indices
    if isinstance(given, Mapping):
        found = [ids for name, ids in given.items() if named.endswith(name)]
        given = found[0] if found else None
    if not isinstance(given, list) or rows.dim() != 2 or len(given) != len(rows):
        raise CheckpointError(
            f"{TOKENS}={short(given)} does not fit rows {list(rows.shape)} of {named!r}. {AGAIN}."
        )
    own = base_tensor(site.path, "weight", info)
    # only if no value is rounded
    if own is not None and torch.promote_types(own.dtype, rows.dtype) is own.dtype:
        rows = rows.to(own.dtype)
    order = sorted(range(len(given)), key=given.__getitem__)
    return tuple(given[i] for i in order), rows[order]


def _is_same(table: Tensor, path: str, but: Sequence[int], info: ModelInfo) -> bool:
    """Return whether a table equals the model's, except for some rows."""
    own = base_tensor(path, "weight", info)
    if own is None or own.is_meta or own.shape != table.shape:
        return False
    kept = torch.ones(len(table), dtype=torch.bool)
    kept[[n for n in but if n < len(table)]] = False
    return torch.equal(own.detach().cpu()[kept], table[kept].to(own.dtype))


def _fields_of_extras(extras: Extras, spelling: PeftSpelling, anatomy: Anatomy) -> Fields:
    """Return the fields of our config; `bias` belongs to each config of a union."""
    found: Fields = {}
    if extras.copies:
        layers = [s.path for s in (*anatomy.others, *anatomy)]
        above = {module for path in layers for module in around(path)[:-1]}
        names = short_names([*extras.copies], [*layers, *above])
        found["modules_to_save"] = exactly(extras.copies) if names is None else list(names)
    if extras.rows:
        table = anatomy.own_table
        alike = () if table is None else anatomy.sharing(table)
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


def head_from(
    peft_config: FileConfig, rest: Mapping[str, Tensor], info: ModelInfo
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return metadata and tensors of the head in a file; None if there is none.

    Args:
        peft_config: the config.
        rest: all tensors except the adapter's, by key in the task class.
        info: info of the model to fill.

    Raises:
        CheckpointError: a weight of the base model was also trained, or the head has no equivalent.
    """
    head: dict[str, Tensor] = {}
    trained, own_output = [], False
    for key, tensor in rest.items():
        if ".original_module." in key:
            continue
        name = _plain(key)
        own = _in_base(name, info)
        is_own = name in info.output and is_saved(
            name.rpartition(".")[0], peft_config.modules_to_save
        )
        own_output |= is_own
        is_other = own is not None and not same_values(tensor, own)
        if own is None or is_own or (name in info.output and is_other):
            head[name] = tensor
        # PEFT also saves embeddings that it adapts: ignored if they equal the model's
        elif is_other:
            trained.append(key)
    if trained:
        raise CheckpointError(
            f"weights of the base model differ from those here: {listing(sorted(trained))}. {MERGE}"
        )
    if not head or not info.with_head:
        return None, {}
    if not info.named_heads:
        # tensors that the file lacks keep their values
        kept = {key: info.tensor(key) for key in info.static_head if key not in head}
        head |= {key: tensor.detach() for key, tensor in kept.items() if tensor is not None}
        return {STATIC: info.model_class, **({OWN_OUTPUT: True} if own_output else {})}, head
    # PEFT's files have no labels: use the model's
    task = peft_config.task_type
    if peft_config.base_class is None and task not in TASKS:
        raise CheckpointError(
            f"the file has a head of task_type={task!r}; known ones are {listing(TASKS)}. Write "
            f"{argument('with_head', False, 'load_adapter')}."
        )
    architecture = class_in(peft_config, info) or str(task)
    return info.from_static(architecture, head, info.config.get("label2id"))


def _in_base(key: str, info: ModelInfo) -> Tensor | None:
    """Return the tensor of the base model that a key of any task class names, or None."""
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
