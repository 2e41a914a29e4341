"""Names of experts' layers in PEFT's config objects, where transformers 5 has parameters.

For some types of models PEFT takes the names that the layers of experts and the router had before
for the parameters that hold their weights now. A parameter of two layers gets twice the rank and
alpha, so that each has its own; other layers of these names are not adapted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from adapterzoo.errors import ConfigError, listing
from adapterzoo.formats.peft.config import exactly
from adapterzoo.model.hf.split_experts import split_experts
from adapterzoo.model.state import AdaptedModel
from adapterzoo.spelling import PeftSpelling

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
                    f"target_modules={shown!r} has {listing(n for n in layers if n in names)} "
                    f"without {listing(missing)}: both are parts of the experts' {parameter!r}. "
                    f"Write both, or target_parameters=[{parameter!r}]."
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
