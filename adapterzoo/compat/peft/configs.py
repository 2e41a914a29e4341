"""Config objects of PEFT as configs here; PEFT itself is never imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from adapterzoo.anatomy import Site
from adapterzoo.config import FLAG, AdapterConfig
from adapterzoo.errors import ConfigError, listing
from adapterzoo.formats.peft.config import exactly, task_of
from adapterzoo.inject.building import plain_modules
from adapterzoo.model.heads.copies import names_of
from adapterzoo.model.hf.info import split_experts
from adapterzoo.model.sharding import class_name
from adapterzoo.model.state import AdaptedModel, base_prefix
from adapterzoo.patterns import Targets, fault, is_named
from adapterzoo.peft_arguments import COMMON, PeftArguments, classes_of_peft, translated
from adapterzoo.spelling import PeftSpelling, peft_spellings

_ALL_LINEAR = "all-linear"
# names of heads that PEFT adds to `modules_to_save` by itself, whether the model has them or not
_SAVED = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
_ADDED = frozenset(name for names in _SAVED.values() for name in names)


@dataclass(frozen=True, slots=True)
class FromPeft:
    """A config of PEFT, translated for a model.

    Attributes:
        config: ours.
        is_frozen: whether the adapter is only used: `inference_mode`.
    """

    config: AdapterConfig
    is_frozen: bool


def read(model: AdaptedModel, config: Any) -> FromPeft:
    """Return our config for one of PEFT, which may depend on the model.

    Without `target_modules` and `target_parameters` the layers are those of the method's default
    roles, fused ones whole.

    Args:
        model: to which the adapter will be added.
        config: an object of PEFT, or its dict.

    Raises:
        ConfigError: there is no such method, or a field has no meaning here.
    """
    values = dict(config if isinstance(config, Mapping) else config.to_dict())
    spelling, arguments = _method(values)
    task = _checked_task(model, values.get("task_type"))
    if "modules_to_save" in values:
        values["modules_to_save"] = _saved(model, values["modules_to_save"], task)
    if values.get("tokenizer_name_or_path") == model.config.name_or_path:
        values.pop("tokenizer_name_or_path", None)
    own = {*arguments.fields}
    values = {n: v for n, v in values.items() if n in own or n not in arguments.fixed}
    if unknown := sorted(n for n, v in values.items() if v and n not in own | COMMON.keys()):
        raise ConfigError(
            f"{arguments.class_name}({unknown[0]}={values[unknown[0]]!r}): there is no such field "
            f"here. Its fields: {listing(sorted(own), limit=40)}. Leave it out."
        )
    fields = {name: value for name, value in values.items() if name in own}
    given = fields.get("target_modules")
    if given == _ALL_LINEAR:
        linear = (
            s
            for s in model.anatomy
            if s.kind == "linear" and s.parameter is None and s.role != "lm_head"
        )
        fields["target_modules"] = names_of(model, linear)
    if spelling.of_parameters:
        # the names are read here before the config checks them
        Targets()(arguments.class_name, "target_modules", given)
        fields = with_experts(model, fields, given, base_prefix(model), spelling)
    numbers = fields.get("layers_to_transform")
    stacks = fields.pop("layers_pattern", None) if numbers is not None else None
    if stacks:
        fields["layers_to_transform"] = None
    made = {**arguments.implied, **translated(spelling.config, fields)}
    found = cast("AdapterConfig", cast("Any", spelling.config)(**made))
    targets = [found.to_dict().get(name) for name in ("target_modules", "target_parameters")]
    if "target_modules" in found.field_names() and not any(targets):
        found = _whole_layers(model, arguments, found)
    if stacks:
        found = _in_stacks(model, found, stacks, numbers)
    is_frozen = values.get("inference_mode", False)
    FLAG(arguments.class_name, "inference_mode", is_frozen, False)
    return FromPeft(found, is_frozen)


def _method(values: Mapping[str, Any]) -> tuple[PeftSpelling, PeftArguments]:
    """Return the method of a config.

    Raises:
        ConfigError: there is none.
    """
    kind = str(getattr(values["peft_type"], "value", values["peft_type"]))
    found = [s for s in peft_spellings.values() if s.peft_type == kind and s.arguments is not None]
    fitting = [s for s in found if not s.differing(values)]
    if not fitting:
        known = sorted({s.peft_type for s in peft_spellings.values() if s.arguments is not None})
        shown = "".join(f", {n}={values.get(n)!r}" for s in found[:1] for n in s.differing(values))
        raise ConfigError(
            f"peft_type={kind!r}{shown}: there is no such method here. Methods of PEFT that can be "
            f"added: {listing(known, limit=40)}. Write a config of one of these."
        )
    spelling = max(fitting, key=lambda s: s.strictness)
    return spelling, classes_of_peft[spelling.config]


def _checked_task(model: AdaptedModel, task: Any) -> Any:
    """Return the name of a task, which is that of the model's class.

    Raises:
        ConfigError: the class has another one.
    """
    asked = getattr(task, "value", task)
    own = None if model._has_named_heads else task_of(class_name(model))
    # a list: values of any type can be looked for in it
    legal = [*(COMMON["task_type"].values or ())]
    if asked is not None and (asked not in legal or own not in (None, asked)):
        kind = f"a {class_name(model)} has {own!r}. Write task_type={own!r}"
        raise ConfigError(
            f"task_type={asked!r}: {kind if asked in legal else COMMON['task_type'].hint}"
            + (", or add the adapter to a model for that task." if asked in legal else "")
        )
    return asked


def _saved(model: AdaptedModel, names: Any, task: str | None) -> Any:
    """Return `modules_to_save` as PEFT completes it for a task, without names of no module."""
    if model._has_named_heads or not (names is None or _are_names(names)):
        return names
    every = [*(names or ()), *(_SAVED.get(task or "", ()))]
    paths = [path for path, _ in plain_modules(cast("nn.Module", model))]
    kept = [n for n in every if n not in _ADDED or any(is_named(path, n) for path in paths)]
    return [*dict.fromkeys(kept)] or None


def _are_names(value: Any) -> bool:
    """Return whether a value is a collection of names."""
    listed = isinstance(value, (list, tuple, set, frozenset))
    return listed and all(isinstance(name, str) for name in value)


def _in_stacks(model: AdaptedModel, config: AdapterConfig, stacks: Any, numbers: Any) -> Any:
    """Return a config that names its layers with these numbers in `layers_pattern`.

    As in PEFT, a layer that is named by its whole path is adapted in any case.

    Raises:
        ConfigError: there is none, or the pattern is not a regular expression.
    """
    patterns, prefix = [stacks] if isinstance(stacks, str) else stacks, base_prefix(model)
    known = [*(path.rpartition(".")[2] for path in model.anatomy.stacks), "layers"]
    expressions, reason = [], "not a name or a list of names"
    if _are_names(patterns):
        expressions = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns]
        _, reason = fault(expressions) or ("", "")
    if reason:
        raise ConfigError(
            f"layers_pattern={stacks!r}: {reason}. Write layers_pattern={known[0]!r}."
        )
    wanted = {numbers} if isinstance(numbers, int) else {*numbers}
    named = config.get("target_modules")
    kept = []
    for placement in config.below(prefix, model.anatomy).placements(model.anatomy):
        path = f"{prefix}{placement.site.path}"
        tried = (re.match(expression, path) for expression in expressions)
        found = next((match for match in tried if match), None)
        # the pattern may have groups of its own, and alternatives without a number
        number = None if found is None else found[found.re.groups]
        is_whole = isinstance(named, tuple) and path in named
        kept += [placement.site] if is_whole or (number and int(number) in wanted) else []
    if not kept:
        raise ConfigError(
            f"layers_pattern={stacks!r}, layers_to_transform={numbers!r}: no layer is in such a "
            f"block. Write the last part of one of {listing(model.anatomy.stacks)}, and numbers "
            "from 0."
        )
    return config.replace(target_modules=names_of(model, kept))


def _whole_layers(
    model: AdaptedModel, arguments: PeftArguments, config: AdapterConfig
) -> AdapterConfig:
    """Return a config that names its layers, if it would adapt parts of fused ones."""
    own = config.below(base_prefix(model), model.anatomy)
    sites: list[Site] = [placement.site for placement in own.placements(model.anatomy)]
    if not any(site.output_slice is not None for site in sites):
        return config
    fields: dict[str, Any] = {"target_modules": names_of(model, sites)}
    for name, among in arguments.subsets.items():
        fields[name] = names_of(model, (site for site in sites if among(own, site)))
    return config.replace(**fields)


# --- Names of experts' layers in PEFT's config objects, where transformers 5 has parameters ---

_ALL_LINEAR = "all-linear"


def with_experts(
    model: AdaptedModel,
    fields: Mapping[str, Any],
    targets: Any,
    prefix: str,
    spelling: PeftSpelling,
) -> dict[str, Any]:
    """Return the fields of a config with the former layers of experts as parameters.

    Args:
        model: to which the adapter will be added.
        fields: of PEFT's config.
        targets: `target_modules` as the user gave it.
        prefix: of the base model's paths in expressions.
        spelling: of the method.

    Raises:
        ConfigError: only some layers of a parameter are named.
    """
    former = split_experts(model.config.model_type)
    names, found = _named(model, targets, former, prefix)
    if not names:
        return dict(fields)
    doubled: dict[str, int] = {}
    for parameter, layers in former.items():
        if missing := [layer for layer in layers if layer not in names]:
            if len(missing) < len(layers):
                shown = targets if isinstance(targets, str) else sorted(targets)
                raise ConfigError(
                    f"target_modules={shown!r} lacks {listing(missing)}, a part of the experts' "
                    f"{parameter!r} too. Write both, or target_parameters=[{parameter!r}]."
                )
        elif len(layers) > 1:
            doubled[rf".*\.{re.escape(parameter)}"] = len(layers)
    taken = {layer for layers in former.values() for layer in layers}
    start = "" if targets == _ALL_LINEAR else prefix
    kept = _without(model, fields["target_modules"], taken, start)
    given = fields.get("target_parameters") or ()
    return {
        **fields,
        "target_modules": kept,
        "target_parameters": [*dict.fromkeys((*given, *found))],
        **{
            pattern: {
                **(fields.get(pattern) or {}),
                **{k: n * fields.get(of, spelling.fields[of].default) for k, n in doubled.items()},
            }
            for pattern, (of, _) in spelling.patterns.items()
        },
    }


def _without(model: AdaptedModel, targets: Any, taken: set[str], prefix: str) -> Any:
    """Return names, or an expression for paths with the prefix, without layers of some names."""
    if not isinstance(targets, str):
        return sorted(name for name in targets if name.rpartition(".")[2] not in taken)
    layers = [s.path for s in model.anatomy if s.parameter is None]
    own = [path for path in layers if re.fullmatch(targets, f"{prefix}{path}")]
    return exactly(left) if (left := [p for p in own if p.rpartition(".")[2] not in taken]) else []


def _named(
    model: AdaptedModel, targets: Any, former: Mapping[str, tuple[str, ...]], prefix: str
) -> tuple[set[str], list[str]]:
    """Return the former layers that a value of `target_modules` names, and their parameters."""
    every = {layer: parameter for parameter, layers in former.items() for layer in layers}
    if not every or not targets:
        return set(), []
    if targets == _ALL_LINEAR:
        return {*every}, [*former]
    if not isinstance(targets, str):
        ends = {str(target).rpartition(".")[2] for target in targets}
        listed = [layer for layer in every if layer in ends]
        return {*listed}, list(dict.fromkeys(every[layer] for layer in listed))
    names: set[str] = set()
    found: dict[str, None] = {}
    for name in model.anatomy.weights():
        for layer, parameter in every.items():
            if name.endswith(f".{parameter}"):
                path = f"{name.removesuffix(parameter)}{layer}"
                if re.fullmatch(targets, f"{prefix}{path}"):
                    names.add(layer)
                    found[name] = None
    return names, [*found]
