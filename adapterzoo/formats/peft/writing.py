"""Write an adapter as PEFT's config and tensors, exactly or not at all.

`reading` describes how PEFT stores values trained besides an adapter, and adapters of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

from adapterzoo.anatomy import HEAD, Site
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import argument, listing
from adapterzoo.folders.formats import REVISION
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import (
    Checkpoint,
    Place,
    inexpressible,
    places_of,
    shared_tensors,
)
from adapterzoo.heads import head_types
from adapterzoo.methods._copies import TIED, TIED_COPY
from adapterzoo.patterns import around, short_names
from adapterzoo.peft_arguments import ADAPTED_BIASES, PEFT_VERSION
from adapterzoo.spelling import Fields, PeftOutput, PeftPart, PeftSpelling, peft_spellings

from . import tying
from .reading import (
    DELTA,
    FIELD_AT,
    PATTERNS,
    TASKS,
    TOKENS,
    WRAPPED,
    ExportedTask,
    base_tensor,
    by_path,
    classes_for,
    fields_for_extras,
    most_common,
    named_in_peft,
    parameter_of,
    start_of_rows,
    task_of,
)

if TYPE_CHECKING:
    from adapterzoo.model.hf.info import ModelInfo

# names that layers of heads have too: as ends of paths they would match these
_IN_HEADS = """
    classifier decoder dense fc lm_head out_proj pre_classifier proj projector qa_outputs score
    summary vocab_projector vocab_transform
"""

HEADED = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""PEFT's tasks whose adapters have their own head."""


def encoded(checkpoint: Checkpoint, info: ModelInfo) -> tuple[Fields, dict[str, Tensor]]:
    """Return PEFT's config, and all tensors by PEFT's keys.

    Raises:
        CheckpointError: PEFT has no such adapter or head, or layers differ in a field for which
            PEFT has only one value.
    """
    task, head = head_for(checkpoint, info)
    config = AdapterConfig.from_dict(checkpoint.metadata["config"])
    spelling, parts, more = _parts(config, checkpoint.adapter, info)
    modules = info.modules(task.model_class)
    if spelling.shared and len(config.members) > 1:
        count = len(config.members)
        raise inexpressible(f"a file of PEFT has one adapter, not {count} {spelling.peft_type}")
    own, shared = spelling.write_model(
        config.members[0], shared_tensors(checkpoint.adapter), info.anatomy
    )
    tensors = {spelling.shared[name]: tensor for name, tensor in shared.items()}
    fields = {"peft_type": spelling.peft_type, **spelling.fixed, **own}
    fields |= _task_fields(head, modules, task, info)
    fields["revision"] = checkpoint.metadata.get(REVISION)
    head_modules = tuple(fields["modules_to_save"] or ())
    tensors |= {
        f"{spelling.prefix}{key}": tensor
        for key, tensor in head.items()
        if any(key.startswith(f"{path}.") for path in head_modules)
    }
    if not spelling.has_layers:
        # without a task, PEFT only adapts layers
        if task.task_type is None:
            raise inexpressible(
                f"PEFT has {spelling.peft_type} for {listing(TASKS)}, not for a {task.model_class}"
            )
        if task.task_type in HEADED and not head:
            why = f"PEFT loads {spelling.peft_type} into a {task.model_class} only with its head"
            raise inexpressible(why, argument("with_head", True), argument("format", "native"))
        parts = {}
    layers = {name: _output(name, here, spelling, info) for name, here in parts.items()}
    sites = {name: layer.parts[0].placement.site for name, layer in layers.items()}
    owners = {n: _path_in_task(site.path, modules, info, task) for n, site in sites.items()}
    paths = {
        name: f"{owners[name]}.{parameter_of(sites[name])}" if each.is_parameter else owners[name]
        for name, each in layers.items()
    }
    if spelling.has_layers:
        fields |= _target_fields(spelling, layers, paths, modules)
    fields |= _layer_fields(spelling, {paths[name]: layer for name, layer in layers.items()})
    depths = wrapper_depths(sites.values(), [*info.anatomy.weights()])
    for name, layer in layers.items():
        table = dict(spelling.tensors)
        if sites[name].kind == "embedding":
            table |= spelling.embedding_tensors
        wrapped = named_in_peft(sites[name]).removeprefix(sites[name].path.removeprefix(HEAD))
        owner = owners[name] + (wrapped or f".{WRAPPED}" * depths.get(name, 0))
        for parameter, tensor in layer.tensors.items():
            shape = spelling.convolution_shapes.get(parameter)
            if shape is not None and sites[name].kernel:
                tensor = shape.write(tensor, sites[name])
            tensors[f"{spelling.prefix}{owner}.{table[parameter][0]}"] = tensor
        is_tied = layer.parts[0].placement.location == TIED
        for path in info.anatomy.tied if is_tied else ():
            start = f"{spelling.prefix}{_path_in_task(path, modules, info, task)}."
            twin = tying.twin_of(layer.tensors, spelling)
            tensors |= {start + end: tensor for end, tensor in twin.items()}
    locations = {p.placement.location for p in places_of(config, info.anatomy)}
    if not locations.isdisjoint((TIED, TIED_COPY)):
        if info.named_heads:
            raise inexpressible(
                "PEFT ties a table to the output layer of a task class; this model has named heads"
            )
        fields[tying.FIELD] = True
        # PEFT finds the table by these, whatever its name
        fields["target_modules"] += [
            _path_in_task(path, modules, info, task)
            for path in (info.anatomy.tied if TIED in locations else ())
        ]
    found, also = _write_extras(more, spelling, paths, modules, task, info)
    saved = sorted({*head_modules, *found.pop("modules_to_save", ())})
    tensors |= {f"{spelling.prefix}{key}": tensor for key, tensor in also.items()}
    fields |= {**found, "modules_to_save": saved or None}
    if spelling.rows_field:
        # not a field of this class; PEFT loads a head's tensors without it
        del fields["modules_to_save"]
    return fields, tensors


def _parts(
    config: AdapterConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[PeftSpelling, dict[str, list[PeftPart]], list[tuple[Place, Mapping[str, Tensor]]]]:
    """Return the spelling of the method, its adapters by `Site.name`, and what else is trained."""
    more: list[tuple[Place, Mapping[str, Tensor]]] = []
    by_name: dict[str, list[PeftPart]] = {}
    at = fit.by_path(tensors)
    methods: dict[str, PeftSpelling] = {}
    for place in places_of(config, info.anatomy):
        member = place.placement.config
        own = place.own(at)
        if place.placement.location in FIELD_AT:
            more.append((place, own))
            continue
        name = type(member).__name__
        spelling = peft_spellings.get(member.architecture)
        reason: str | None = f"a {name}, which is not a method of PEFT"
        if spelling is not None:
            reason = spelling.unsayable(place.placement)
            methods[member.architecture] = spelling
        if reason is not None or spelling is None:
            raise inexpressible(f"the adapter has {reason}; PEFT has {listing(peft_spellings)}")
        by_name.setdefault(place.placement.site.name, []).append(PeftPart(place.placement, own))
    if not methods:
        first = config.members[0].architecture
        methods = {first: peft_spellings[first]}
    if len(methods) > 1:
        raise inexpressible(
            f"a file of PEFT has one architecture, but this one {listing(sorted(methods))}"
        )
    return next(iter(methods.values())), by_name, more


def _output(
    name: str, parts: Sequence[PeftPart], spelling: PeftSpelling, info: ModelInfo
) -> PeftOutput:
    """Return the adapters of a layer as one adapter of the whole layer."""
    site = parts[0].placement.site
    is_parameter = is_written(site, spelling, info)
    if len(parts) == 1 and site.output_slice is None:
        return PeftOutput(parts, spelling.write(parts[0]), is_parameter)
    if spelling.join is None:
        roles = listing([str(part.placement.site.role) for part in parts])
        raise inexpressible(
            f"at {name!r} {len(parts)} adapters are at parts of the layer ({roles}); PEFT has one"
        )
    tensors = spelling.join(parts, lambda: base_tensor(name, "weight", info))
    return PeftOutput(parts, tensors, is_parameter)


def _layer_fields(spelling: PeftSpelling, layers: Mapping[str, PeftOutput]) -> Fields:
    """Return the fields of PEFT's config that depend on the layers.

    Args:
        spelling: the method's spelling.
        layers: the layers, by path in the task class.
    """
    found: Fields = {}
    if not layers:
        return found
    # these fields are in every file
    arguments = {} if spelling.arguments is None else spelling.arguments.fields
    always = {n: arguments[n].default for n in ("bias", "init_weights") if n in arguments}
    configs = [layer.parts[0].placement.config.to_dict() for layer in layers.values()]
    fields_of = {name: argument.ours for name, argument in spelling.fields.items()}
    known = [always | {n: c[f] for n, f in fields_of.items() if f in c} for c in configs]
    written = spelling.write_layers([*layers.values()], known)
    patterns = {base: (n, PATTERNS[n]) for n, base in spelling.patterns.items()}
    for name in written[0]:
        values = {path: own[name] for path, own in zip(layers, written, strict=True)}
        said = {path: value for path, value in values.items() if value is not None}
        if not said:
            found[name] = spelling.fields[name].default
        elif name in patterns:
            pattern, ours = patterns[name]
            found[name] = most_common(said, configs[0][ours])
            found[pattern] = by_path(said, found[name])
        elif len(distinct := {*said.values()}) > 1:
            raise inexpressible(
                f"layers differ in {name} ({listing(sorted(distinct))}), but PEFT has one value"
            )
        else:
            found[name] = distinct.pop()
    return found


def _target_fields(
    spelling: PeftSpelling,
    layers: Mapping[str, PeftOutput],
    paths: Mapping[str, str],
    modules: Mapping[str, tuple[str, ...]],
) -> Fields:
    """Return the fields that select the adapted layers."""
    weights = [paths[name] for name, layer in layers.items() if layer.is_parameter]
    paths = {name: path for name, path in paths.items() if path not in weights}
    # a whole path matches nothing else
    whole = tuple(sorted({*paths.values()}))
    targets = short_names(whole, modules)
    others = {*_IN_HEADS.split()} - {*whole}
    if targets is None or not others.isdisjoint(targets):
        targets = whole
    chosen = {
        field: {paths[name] for name in paths if among(layers[name].tensors)}
        for field, among in spelling.subsets.items()
    }
    # PEFT compares the names of a subset with ends of paths, even within words
    ends = [{path for path in whole if path.endswith(name)} for name in targets]
    if any(found & own and found - own for found in ends for own in chosen.values()):
        targets = whole
    subsets = {
        field: [name for name in targets if any(path.endswith(name) for path in own)]
        for field, own in chosen.items()
    }
    found: Fields = {**subsets, "target_modules": list(targets)}
    # only where it is needed: not all methods have the field
    if any(layers[name].parts[0].placement.site.transposed for name in paths):
        found["fan_in_fan_out"] = True
    if weights:
        every = [f"{path}.{name}" for path, own in modules.items() for name in own]
        found["target_parameters"] = [*(short_names(weights, every) or sorted(weights))]
    return found


def _task_fields(
    head: Mapping[str, Tensor],
    modules: Mapping[str, tuple[str, ...]],
    task: ExportedTask,
    info: ModelInfo,
) -> Fields:
    """Return the fields that name the model and the task."""
    # PEFT requires the heads of these tasks in the file
    task_type = None if not head and task.task_type in HEADED else task.task_type
    fields: Fields = {
        "auto_mapping": None,
        "base_model_name_or_path": info.model_name,
        "inference_mode": True,
        "modules_to_save": _whole_modules(head, modules, info) or None,
        "peft_version": PEFT_VERSION,
        "task_type": task_type,
    }
    if task_type is None:
        library = getattr(getattr(transformers, task.model_class, None), "__module__", None)
        fields["auto_mapping"] = {"base_model_class": task.model_class, "parent_library": library}
    return fields


def _path_in_task(
    path: str, modules: Mapping[str, tuple[str, ...]], info: ModelInfo, task: ExportedTask
) -> str:
    """Return a layer's path in the task class from its path in the base model."""
    found = next((p for p in (info.whole(path), path) if p in modules), None)
    if found is None:
        why = f"a {task.model_class}, into which PEFT would load the adapter, has no layer {path!r}"
        raise inexpressible(why, argument("format", "native"), argument("with_head", False))
    return found


def _whole_modules(
    head: Mapping[str, Tensor], modules: Mapping[str, tuple[str, ...]], info: ModelInfo
) -> list[str]:
    """Return the paths of a head's modules, each as high up as it is whole.

    Tensors of the head outside them must equal the model's own, and are left out of the file.

    Raises:
        CheckpointError: a tensor is in no whole module and differs from the model's.
    """
    below: dict[str, set[str]] = {}
    for key in head:
        below |= {path: set() for path in around(key)[:-1]}
    for path, own in modules.items():
        for start in below.keys() & around(path):
            below[start] |= {f"{path}.{name}" for name in own}
    whole = [path for path in sorted(below) if path in modules and below[path] <= head.keys()]
    found = [path for path in whole if not any(path.startswith(f"{other}.") for other in whole)]
    written = {key for path in found for key in below[path]}
    rest = {key: tensor for key, tensor in head.items() if key not in written}
    if wrong := sorted(key for key, tensor in rest.items() if not _is_own(key, tensor, info)):
        raise inexpressible(
            f"{listing(wrong)} do not belong to this head alone", argument("with_head", False)
        )
    return found


def _is_own(key: str, tensor: Tensor, info: ModelInfo) -> bool:
    """Return whether a model has a tensor with the same values under this key."""
    own = info.tensor(key)
    return own is tensor or (own is not None and not own.is_meta and fit.same_bits(own, tensor))


def is_written(site: Site, spelling: PeftSpelling, info: ModelInfo) -> bool:
    """Return whether the adapter at a site is written as the adapter of a parameter.

    So is that of a layer with a name that PEFT takes for a former layer of experts.

    Raises:
        CheckpointError: it must be, but PEFT's method has no adapters of parameters.
    """
    if site.is_of_attention:
        return False
    if site.parameter is not None:
        return True
    name = site.path.rpartition(".")[2]
    related = {s.peft_type for s in peft_spellings.values() if s.of_parameters}
    if name not in info.split_experts or spelling.peft_type not in related:
        return False
    if not spelling.of_parameters:
        raise inexpressible(f"PEFT takes {site.path!r} of a {info.model_class} for experts")
    return True


def wrapper_depths(sites: Iterable[Site], order: Sequence[str]) -> dict[str, int]:
    """Return the number of `base_layer` in the keys of each adapted parameter, by `Site.name`.

    Args:
        sites: the adapted sites.
        order: the names of the model's parameters, in its order.
    """
    place = {name: number for number, name in enumerate(order)}
    by_module: dict[str, list[str]] = {}
    named = (s for s in sites if s.parameter is not None and not s.is_of_attention)
    own = {site.name: site.path for site in named}
    for name in sorted(own, key=place.__getitem__, reverse=True):
        by_module.setdefault(own[name], []).append(name)
    return {name: depth for names in by_module.values() for depth, name in enumerate(names)}


def _write_extras(
    places: Sequence[tuple[Place, Mapping[str, Tensor]]],
    spelling: PeftSpelling,
    adapted: Mapping[str, str],
    modules: Mapping[str, tuple[str, ...]],
    task: ExportedTask,
    info: ModelInfo,
) -> tuple[Fields, dict[str, Tensor]]:
    """Return PEFT's fields, and its tensors without the prefix.

    Args:
        places: the places trained besides the adapters, with their tensors by parameter.
        spelling: the method's spelling.
        adapted: path of an adapted layer here → the one in the task class.
        modules: modules of the task class.
        task: the class into which PEFT will load the adapter.
        info: the model's info.

    Raises:
        CheckpointError: PEFT's method has no such field.
    """
    fields: Fields = {}
    tensors: dict[str, Tensor] = {}
    saved: list[str] = []
    tokens: dict[int, tuple[str | None, str, list[int]]] = {}
    for place, values in places:
        path = _path_in_task(place.path, modules, info, task)
        config = place.placement.config.to_dict()
        kind = FIELD_AT[place.placement.location]
        if kind not in fields_for_extras(spelling):
            raise inexpressible(f"PEFT's {spelling.peft_type} has no {kind}, as at {place.path!r}")
        if kind == "modules_to_save":
            saved.append(path)
            start = f"{path}."
            tensors |= {start + n.removeprefix("layer."): t for n, t in values.items()}
            is_tied = place.placement.location == TIED_COPY
            for layer in info.anatomy.tied if is_tied else ():
                name = f"{_path_in_task(layer, modules, info, task)}.weight"
                tensors[name] = values["layer.weight"].clone()
        elif kind == "bias":
            inside = ".base_layer" if place.path in adapted else ""
            tensors[f"{path}{inside}.bias"] = values["own"]
            # a config for all biases lists no layers
            fields["bias"] = "all" if config["paths"] is None else ADAPTED_BIASES
        elif (key := id(place.placement.config)) not in tokens:
            tokens[key] = config["table"], path, list(config["tokens"])
            tensors[path + start_of_rows(spelling) + DELTA] = values["rows"]
            for layer in _sharing(place.path, modules, info) if spelling.rows_field else ():
                # the file has the tensor for each of them
                tensors.setdefault(f"{layer}.{DELTA}", values["rows"].clone())
    if saved:
        names = short_names(saved, modules)
        # PEFT compares endings even within words
        others = [path for path in modules if path not in saved]
        if names is None or any(path.endswith(names) for path in others):
            names = tuple(sorted(saved))
        fields["modules_to_save"] = list(names)
    tables, paths, lists = zip(*tokens.values(), strict=True) if tokens else ((), (), ())
    if tokens and spelling.rows_field:
        if any(ids != lists[0] for ids in lists):
            raise inexpressible(f"PEFT's {spelling.peft_type} has the same tokens in all tables")
        fields |= {spelling.rows_field: lists[0], "target_modules": [*paths]}
    elif tokens:
        fields[TOKENS] = lists[0] if tables == (None,) else dict(zip(paths, lists, strict=True))
    return fields, tensors


def _sharing(path: str, modules: Mapping[str, tuple[str, ...]], info: ModelInfo) -> list[str]:
    """Return the paths in the task class of all modules that share the table at a path."""
    own = base_tensor(path, "weight", info)
    weights = [name for name, tensors in modules.items() if "weight" in tensors]
    return [name for name in weights if info.tensor(f"{name}.weight") is own]


def head_for(checkpoint: Checkpoint, info: ModelInfo) -> tuple[ExportedTask, dict[str, Tensor]]:
    """Return the task class for which an adapter is written, and its head's tensors by key there.

    Raises:
        CheckpointError: PEFT has no such head.
    """
    metadata = checkpoint.metadata.get("head")
    if not info.named_heads:
        return ExportedTask(info.model_class, task_of(info.model_class)), dict(checkpoint.head)
    if metadata is None:
        # a class that generates, else the base model
        encodes = info.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        generating: tuple[tuple[str | None, Mapping[str, Any]], ...] = (
            ("SEQ_2_SEQ_LM", TASKS["SEQ_2_SEQ_LM"]),
            # PEFT's class for the task would require `input_ids`
            (None, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
            ("CAUSAL_LM", {} if encodes else TASKS["CAUSAL_LM"]),
            (None, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
            ("FEATURE_EXTRACTION", TASKS["FEATURE_EXTRACTION"]),
        )
        for task, mapping in generating:
            for cls in classes_for(mapping, info.model_type):
                return ExportedTask(cls, task), {}
        return ExportedTask(info.model_class, None), {}
    config = dict(metadata.get("config") or {})
    if (own := config.get("model_class")) is not None:
        return ExportedTask(own, task_of(own)), info.to_static(own, metadata, checkpoint.head)
    head_type = config.get("head_type")
    known = head_types.get(str(head_type))
    task_type = None if known is None else known.peft_task
    mapping = TASKS.get(str(task_type), {})
    if known is not None and known.peft_classes is not None:
        mapping = getattr(modeling_auto, known.peft_classes)
    model_class = next(classes_for(mapping, info.model_type), None)
    if model_class is None:
        why = f"transformers has no {info.model_type!r} with a {head_type!r} head"
        raise inexpressible(why, argument("with_head", False))
    return ExportedTask(model_class, task_type), info.to_static(
        model_class, metadata, checkpoint.head
    )
