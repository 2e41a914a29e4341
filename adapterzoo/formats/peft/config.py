"""`adapter_config.json` of PEFT: its method, and its fields, checked.

A file is refused if a field changes what the adapter computes in a way that cannot be reproduced
here. Fields that only matter to PEFT's training, and fields that are off, are ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adapterzoo.errors import CheckpointError, listing
from adapterzoo.fields import Check, Text
from adapterzoo.formats.checkpoint import method_of, short
from adapterzoo.peft_arguments import instead
from adapterzoo.spelling import PeftField, PeftSpelling, peft_readable, peft_spellings

CONFIG = "adapter_config.json"
TOKENS = "trainable_token_indices"
# a hint for every adapter that PEFT can merge
MERGE = (
    "Merge the adapter with PEFT, and load the merged model: "
    "peft_model.merge_and_unload().save_pretrained(…)."
)
_PARAMETERS = "target_parameters"
_INERT = """
    auto_mapping base_model_name_or_path bias exclude_modules fan_in_fan_out inference_mode
    layers_pattern layers_to_transform modules_to_save peft_type peft_version revision
    target_modules task_type trainable_token_indices
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """The facts in a PEFT config, checked.

    Attributes:
        spelling: of the method.
        fields: the fields and flags of the method.
        patterns: by field: regular expressions to numbers.
        task_type: PEFT's name of the task; None if unknown.
        base_class: the class of the model, if PEFT did not know the task.
        modules_to_save: ends of the names of modules that the file has whole.
        target_parameters: ends of the names of parameters that it adapts.
        trainable_token_indices: the tokens whose rows it has, as in the file.
        bias: which biases it has.
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


def checked(metadata: Mapping[str, Any]) -> PeftConfig:
    """Check a PEFT config and return its facts.

    Raises:
        CheckpointError: there is no such method here, or a value is not legal or cannot be
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
    for name, reason in spelling.refused.items():
        if metadata.get(name):
            raise CheckpointError(
                f"{CONFIG} says {name}={short(metadata[name])}: {reason}, which is not reproduced "
                f"here. {MERGE}"
            )
    if (why := spelling.refuse(metadata)) is not None:
        raise CheckpointError(f"{CONFIG}: {why}")
    known = {*_INERT.split()}
    for each in peft_readable():
        known |= {*each.inert, *each.fixed, *each.fields, *each.patterns, *each.subsets}
        known |= {*each.optional.values(), *([_PARAMETERS] if each.of_parameters else ())}
        known |= {each.rows_field}
    if unknown := sorted(k for k, v in metadata.items() if v and k not in known):
        warnings.warn(
            f"{CONFIG} has fields that are not known here: {listing(unknown)}. They are ignored; "
            f"compare the outputs with those of PEFT.",
            stacklevel=2,
        )
    mapping = metadata.get("auto_mapping")
    base_class = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    saved = _listed(metadata, "modules_to_save")
    parameters = _listed(metadata, _PARAMETERS) if spelling.of_parameters else []
    asked = {**spelling.fields, **{flag: PeftField(False) for flag in spelling.optional.values()}}
    return PeftConfig(
        spelling=spelling,
        fields={name: _value(metadata, name, f.default, f.check) for name, f in asked.items()},
        patterns={
            name: _pattern(metadata, name, spelling.fields[base])
            for name, (base, _) in spelling.patterns.items()
        },
        task_type=_value(metadata, "task_type", None, Text()),
        base_class=base_class if isinstance(base_class, str) else None,
        modules_to_save=saved,
        target_parameters=parameters,
        trainable_token_indices=_tokens(metadata, spelling.rows_field or TOKENS),
        bias=_value(metadata, "bias", "none", Text()),
    )


def _value(metadata: Mapping[str, Any], name: str, default: Any, check: Check) -> Any:
    value = metadata.get(name)
    if value is None:
        return default
    if not check.fits(value):
        raise _wrong(name, value, check.legal, default)
    return value


def _pattern(metadata: Mapping[str, Any], name: str, field: PeftField) -> Mapping[str, Any]:
    value = metadata.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping) or not all(map(field.check.fits, value.values())):
        raise _wrong(name, value, f"layer names with {field.check.legal} each", {})
    return value


def _listed(metadata: Mapping[str, Any], field: str) -> list[str]:
    value = metadata.get(field)
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise _wrong(field, value, "a list of names or null", None)
    return names


def _tokens(metadata: Mapping[str, Any], name: str) -> Any:
    """Return the tokens of each table, checked."""
    value = metadata.get(name)
    lists = [*value.values()] if isinstance(value, Mapping) else [] if value is None else [value]
    for ids in lists:
        legal = isinstance(ids, list) and all(type(n) is int and n >= 0 for n in ids)
        if not legal or len({*ids}) < len(ids):
            raise _wrong(name, value, "a list of different token numbers from 0", None)
    return value


def _wrong(name: str, value: object, legal: str, hint: object) -> CheckpointError:
    return CheckpointError(
        f"{CONFIG} says {name}={short(value)}; legal is {legal}. If the tensors are right, write "
        f"{name!r}: {hint} there; else copy the checkpoint again."
    )
