"""Write an adapter as PEFT's config and tensors, exactly or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, StateError, argument, listing
from adapterzoo.formats.checkpoint import Checkpoint, ModelInfo
from adapterzoo.formats.digest import same_bits
from adapterzoo.formats.places import Place, places_of, shared_tensors
from adapterzoo.patterns import short_names
from adapterzoo.spelling import Fields, PeftOutput, PeftPart, PeftSpelling, peft_spellings

from . import beside, parameters
from .heads import TASKS, Task
from .patterns import by_path, most_common

# names that layers of heads have too: as ends of paths they would match these
_IN_HEADS = """
    classifier decoder dense fc lm_head out_proj pre_classifier proj projector qa_outputs score
    summary vocab_projector vocab_transform
"""
_HEADED = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


def encode_adapter(
    checkpoint: Checkpoint, head: Mapping[str, Tensor], task: Task, info: ModelInfo
) -> tuple[Fields, dict[str, Tensor]]:
    """Return PEFT's config, and all tensors by PEFT's keys.

    Args:
        checkpoint: the adapter.
        head: tensors of its head by key in the task class.
        task: the class into which PEFT will load it.
        info: of the model.

    Raises:
        CheckpointError: PEFT has no such adapter, or its config has one value for a field that
            differs between layers.
    """
    config = AdapterConfig.from_dict(checkpoint.metadata["config"])
    spelling, parts, more = _parts(config, checkpoint.adapter, info)
    modules = info.modules(task.model_class)
    fields, shared = _of_model(spelling, config, checkpoint.adapter, info)
    tensors = {spelling.shared[name]: tensor for name, tensor in shared.items()}
    fields |= _task_fields(head, modules, task, info)
    head_modules = tuple(fields["modules_to_save"] or ())
    tensors |= {
        f"{spelling.prefix}{key}": tensor
        for key, tensor in head.items()
        if any(key.startswith(f"{path}.") for path in head_modules)
    }
    if not spelling.has_layers:
        _check_task(spelling, head, task)
        parts = {}
    layers = {name: _output(name, here, spelling, info) for name, here in parts.items()}
    sites = {name: layer.parts[0].placement.site for name, layer in layers.items()}
    owners = {n: _path_in_task(site.path, modules, info, task) for n, site in sites.items()}
    paths = {
        name: f"{owners[name]}.{parameters.parameter_of(sites[name])}" if each.is_parameter
        else owners[name]
        for name, each in layers.items()
    }  # fmt: skip
    if spelling.has_layers:
        fields |= _target_fields(spelling, layers, paths, modules)
    fields |= _layer_fields(spelling, {paths[name]: layer for name, layer in layers.items()})
    depths = parameters.depths(sites.values(), [*info.anatomy.weights()])
    for name, layer in layers.items():
        table = dict(spelling.tensors)
        if sites[name].kind == "embedding":
            table |= spelling.embedding_tensors
        owner = parameters.wrapped(owners[name], depths.get(name, 0))
        for own, tensor in layer.tensors.items():
            tensors[f"{spelling.prefix}{owner}.{table[own][0]}"] = tensor
    found, also = beside.write(
        more, spelling, paths, modules, lambda path: _path_in_task(path, modules, info, task), info
    )
    saved = sorted({*head_modules, *found.pop("modules_to_save", ())})
    tensors |= {f"{spelling.prefix}{key}": tensor for key, tensor in also.items()}
    fields |= {**found, "modules_to_save": saved or None}
    if spelling.rows_field:
        # not a field of this class; PEFT loads the tensors of a head without it
        del fields["modules_to_save"]
    return fields, tensors


def _of_model(
    spelling: PeftSpelling, config: AdapterConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[Fields, dict[str, Tensor]]:
    """Return the fields and tensors of the whole model."""
    if spelling.shared and len(config.members) > 1:
        raise CheckpointError(
            f"the adapter is a union of {len(config.members)} {spelling.peft_type} adapters, and a "
            f"file of PEFT has one. Write {argument('format', 'native')}."
        )
    fields, shared = spelling.write_model(config.members[0], shared_tensors(tensors), info.anatomy)
    return {"peft_type": spelling.peft_type, **spelling.fixed, **fields}, shared


def _parts(
    config: AdapterConfig, tensors: Mapping[str, Tensor], info: ModelInfo
) -> tuple[PeftSpelling, dict[str, list[PeftPart]], list[tuple[Place, Mapping[str, Tensor]]]]:
    """Return the spelling of the method, its adapters by `Site.name`, and what is beside them."""
    more: list[tuple[Place, Mapping[str, Tensor]]] = []
    by_name: dict[str, list[PeftPart]] = {}
    at: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        at.setdefault(key.partition("/")[0], {})[key] = tensor
    methods: dict[str, PeftSpelling] = {}
    for place in places_of(config, info.anatomy):
        member = place.placement.config
        start = place.key("")
        here = at.get(place.path, {}).items()
        own = {key.removeprefix(start): t for key, t in here if key.startswith(start)}
        if place.placement.location in beside.FIELD_AT:
            more.append((place, own))
            continue
        name = type(member).__name__
        spelling = peft_spellings.get(member.architecture)
        reason: str | None = f"a {name}, which is not a method of PEFT"
        if spelling is not None:
            reason = spelling.unsayable(place.placement)
            methods[member.architecture] = spelling
        if reason is not None or spelling is None:
            raise CheckpointError(
                f"the adapter has {reason}. PEFT's format can express {listing(peft_spellings)}. "
                f"Write {argument('format', 'native')}."
            )
        by_name.setdefault(place.placement.site.name, []).append(PeftPart(place.placement, own))
    if not methods:
        first = config.members[0].architecture
        methods = {first: peft_spellings[first]}
    if len(methods) > 1:
        raise CheckpointError(
            f"the adapter has several architectures ({listing(sorted(methods))}), and a file of "
            f"PEFT has one. Write {argument('format', 'native')}."
        )
    return next(iter(methods.values())), by_name, more


def _output(
    name: str, parts: Sequence[PeftPart], spelling: PeftSpelling, info: ModelInfo
) -> PeftOutput:
    """Return the adapters of a layer as one adapter of the whole layer."""
    site = parts[0].placement.site
    is_parameter = parameters.is_written(site, spelling, info)
    if len(parts) == 1 and site.output_slice is None:
        return PeftOutput(parts, spelling.write(parts[0]), is_parameter)
    if spelling.join is None:
        roles = listing([str(part.placement.site.role) for part in parts])
        raise CheckpointError(
            f"at {name!r} {len(parts)} adapters sit at parts of the layer ({roles}), and PEFT has "
            f"one for the whole layer, which cannot compute the same. Write "
            f"{argument('format', 'native')}, or "
            f"train with target_modules={[name.rpartition('.')[2]]!r}."
        )
    key = f"{info.prefix}.{name}.weight".removeprefix(".")

    def weight() -> Tensor | None:
        found = info.tensor(key)
        if found is not None and found.is_meta:
            raise StateError(
                f"the format needs the values of {key!r}, which is on the meta device. "
                f"Load the model with its weights."
            )
        return found

    return PeftOutput(parts, spelling.join(parts, weight), is_parameter)


def _layer_fields(spelling: PeftSpelling, layers: Mapping[str, PeftOutput]) -> Fields:
    """Return the fields of PEFT's config that depend on the layers.

    Args:
        spelling: of the method.
        layers: by path in the task class.
    """
    found: Fields = {}
    if not layers:
        return found
    for parameter, flag in spelling.optional.items():
        have = {parameter in layer.tensors for layer in layers.values()}
        found[flag] = _same(flag, have)
    written = spelling.write_layers([*layers.values()])
    patterns = {base: (name, ours) for name, (base, ours) in spelling.patterns.items()}
    first = next(iter(layers.values())).parts[0].placement.config.to_dict()
    for name in written[0]:
        values = {path: own[name] for path, own in zip(layers, written, strict=True)}
        said = {path: value for path, value in values.items() if value is not None}
        if not said:
            found[name] = spelling.fields[name].default
        elif name in patterns:
            pattern, ours = patterns[name]
            found[name] = most_common(said, first[ours])
            found[pattern] = by_path(said, found[name])
        else:
            found[name] = _same(name, {*said.values()})
    return found


def _same(name: str, values: set[Any]) -> Any:
    if len(values) > 1:
        raise CheckpointError(
            f"parts of the adapter differ in {name} ({listing(sorted(values))}), and PEFT's config "
            f"has one value for all parts. Write {argument('format', 'native')}."
        )
    return next(iter(values))


def _target_fields(
    spelling: PeftSpelling,
    layers: Mapping[str, PeftOutput],
    paths: Mapping[str, str],
    modules: Mapping[str, tuple[str, ...]],
) -> Fields:
    """Return the fields that select the adapted layers."""
    weights = [paths[name] for name, layer in layers.items() if layer.is_parameter]
    paths = {name: path for name, path in paths.items() if path not in weights}
    # only whole paths match nothing else
    whole = tuple(sorted(paths.values()))
    targets = short_names(paths.values(), modules)
    if targets is None or any(name in _IN_HEADS.split() for name in targets):
        targets = whole
    chosen = {
        field: {paths[name] for name in paths if among(layers[name].tensors)}
        for field, among in spelling.subsets.items()
    }
    # PEFT compares the names of a subset with the ends of paths, even within words
    ends = [{path for path in whole if path.endswith(name)} for name in targets]
    if any(found & own and found - own for found in ends for own in chosen.values()):
        targets = whole
    subsets = {
        field: [name for name in targets if any(path.endswith(name) for path in own)]
        for field, own in chosen.items()
    }
    # not a field of all methods
    found: Fields = {**subsets, "target_modules": list(targets)}
    if any(layers[name].parts[0].placement.site.transposed for name in paths):
        found["fan_in_fan_out"] = True
    if weights:
        every = [f"{path}.{name}" for path, own in modules.items() for name in own]
        found["target_parameters"] = [*(short_names(weights, every) or sorted(weights))]
    return found


def _task_fields(
    head: Mapping[str, Tensor], modules: Mapping[str, tuple[str, ...]], task: Task, info: ModelInfo
) -> Fields:
    """Return the fields that name the model and the task."""
    # PEFT requires the heads of these tasks in the file
    task_type = None if not head and task.task_type in _HEADED else task.task_type
    fields: Fields = {
        "auto_mapping": None,
        "base_model_name_or_path": info.model_name,
        "inference_mode": True,
        "modules_to_save": _whole_modules(head, modules, info) or None,
        "revision": None,
        "task_type": task_type,
    }
    if task_type is None:
        library = getattr(getattr(transformers, task.model_class, None), "__module__", None)
        fields["auto_mapping"] = {"base_model_class": task.model_class, "parent_library": library}
    return fields


def _check_task(spelling: PeftSpelling, head: Mapping[str, Tensor], task: Task) -> None:
    """Raise if PEFT would ignore the adapter: without a task, PEFT only adapts layers."""
    if task.task_type is None:
        raise CheckpointError(
            f"PEFT's {spelling.peft_type} works only in models of its tasks ({listing(TASKS)}), "
            f"and {task.model_class} is not one. Write {argument('format', 'native')}."
        )
    if task.task_type in _HEADED and not head:
        raise CheckpointError(
            f"PEFT loads a {spelling.peft_type} for {task.model_class} only with its head. Write "
            f"{argument('with_head', True)}, or {argument('format', 'native')}."
        )


def _path_in_task(
    path: str, modules: Mapping[str, tuple[str, ...]], info: ModelInfo, task: Task
) -> str:
    """Return the path in the task class of a layer that is at a path in the base model."""
    found = next((p for p in (f"{info.prefix}.{path}", path) if p in modules), None)
    if found is None:
        raise CheckpointError(
            f"a {task.model_class}, for which PEFT would load the adapter, has no layer {path!r}. "
            f"Write {argument('format', 'native')}, or "
            f"{argument('with_head', False)} for the base model."
        )
    return found


def _whole_modules(
    head: Mapping[str, Tensor], modules: Mapping[str, tuple[str, ...]], info: ModelInfo
) -> list[str]:
    """Return the paths of the modules that a head consists of, each as far up as it is whole.

    Tensors of the head in none of them must be the model's own, which a file need not have.

    Raises:
        CheckpointError: a tensor is in no whole module, and differs from the model's.
    """
    below: dict[str, set[str]] = {}
    for key in head:
        parts = key.split(".")
        below |= {".".join(parts[:end]): set() for end in range(1, len(parts))}
    for path, own in modules.items():
        parts = path.split(".")
        for start in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & below.keys():
            below[start] |= {f"{path}.{name}" for name in own}
    whole = [path for path in sorted(below) if path in modules and below[path] <= head.keys()]
    found = [path for path in whole if not any(path.startswith(f"{other}.") for other in whole)]
    written = {key for path in found for key in below[path]}
    rest = {key: tensor for key, tensor in head.items() if key not in written}
    if wrong := sorted(key for key, tensor in rest.items() if not _is_own(key, tensor, info)):
        raise CheckpointError(
            f"PEFT saves the modules of a head whole, and {listing(wrong)} do not belong to this "
            f"head alone. Write {argument('with_head', False)}."
        )
    return found


def _is_own(key: str, tensor: Tensor, info: ModelInfo) -> bool:
    """Return whether a model has a tensor of the same values under this key."""
    own = info.tensor(key)
    return own is tensor or (own is not None and not own.is_meta and same_bits(own, tensor))
