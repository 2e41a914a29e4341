"""`adapter_config.json` of PEFT: which method it is of, and its fields, checked.

A file is refused when it says something that changes what the adapter computes and that cannot be
reproduced here. Fields that only matter to PEFT's training, and fields that are off, do not.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adapterzoo.errors import CheckpointError, listing
from adapterzoo.spelling import PeftField, PeftSpelling, peft_spellings

CONFIG = "adapter_config.json"
# what helps with every adapter that PEFT can merge
MERGE = (
    "Merge the adapter with PEFT, and load the merged model: "
    "peft_model.merge_and_unload().save_pretrained(…)."
)
_INERT = """
    auto_mapping base_model_name_or_path bias exclude_modules fan_in_fan_out inference_mode
    layers_pattern layers_to_transform modules_to_save peft_type peft_version revision
    target_modules task_type
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftConfig:
    """What a PEFT config says, checked.

    Attributes:
        spelling: of the method.
        fields: those that the method reads, and its flags.
        patterns: regular expressions to numbers, by the field that has them.
        task_type: PEFT's word for the task; None when unknown.
        base_class: the class of the model, where PEFT did not know the task.
    """

    spelling: PeftSpelling
    fields: Mapping[str, Any]
    patterns: Mapping[str, Mapping[str, Any]]
    task_type: str | None
    base_class: str | None


def checked(metadata: Mapping[str, Any]) -> PeftConfig:
    """Return what the fields of a PEFT config say.

    Raises:
        CheckpointError: there is no such method here, a value is not legal, or says what cannot
            be reproduced.
    """
    spelling = _recognised(metadata)
    for name, reason in spelling.refused.items():
        if metadata.get(name):
            raise CheckpointError(
                f"{CONFIG} says {name}={_short(metadata[name])}: {reason}, which is not reproduced "
                f"here. {MERGE}"
            )
    if (why := spelling.refuse(metadata)) is not None:
        raise CheckpointError(f"{CONFIG}: {why}")
    known = {*_INERT.split()}
    for each in peft_spellings.values():
        known |= {*each.inert, *each.fixed, *each.fields, *each.patterns, *each.subsets}
        known |= {*each.optional.values()}
    if unknown := sorted(k for k, v in metadata.items() if v and k not in known):
        warnings.warn(
            f"{CONFIG} has fields that are not known here: {listing(unknown)}. They are ignored; "
            f"compare the outputs with those of PEFT.",
            stacklevel=2,
        )
    mapping = metadata.get("auto_mapping")
    base_class = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    asked = {**spelling.fields, **{flag: PeftField(False) for flag in spelling.optional.values()}}
    _check_names(metadata)
    return PeftConfig(
        spelling=spelling,
        fields={name: _value(metadata, name, field) for name, field in asked.items()},
        patterns={
            name: _pattern(metadata, name, spelling.fields[base])
            for name, (base, _) in spelling.patterns.items()
        },
        task_type=_text(metadata, "task_type"),
        base_class=base_class if isinstance(base_class, str) else None,
    )


def _recognised(metadata: Mapping[str, Any]) -> PeftSpelling:
    """Return the method that a file is of."""
    peft_type = metadata.get("peft_type")
    named = [s for s in peft_spellings.values() if s.peft_type == peft_type]
    others = [(_differing(spelling, metadata), spelling) for spelling in named]
    found = [spelling for differing, spelling in others if not differing]
    if found:
        return max(found, key=lambda spelling: len(spelling.fixed))
    nearest = min((differing for differing, _ in others), key=len, default=[])
    said = ", ".join(f"{key}={_short(metadata.get(key))}" for key in ("peft_type", *nearest))
    legal = listing(sorted({spelling.peft_type for spelling in peft_spellings.values()}))
    raise CheckpointError(
        f"there is no such method here: {CONFIG} says {said}. Methods of PEFT that exist here: "
        f"{legal} (as {listing(peft_spellings, limit=40)}). {MERGE}"
    )


def _differing(spelling: PeftSpelling, metadata: Mapping[str, Any]) -> list[str]:
    """Return the fields by which a file is not of a method; what is lacking is off."""
    return [
        name
        for name, value in spelling.fixed.items()
        if (metadata.get(name) or False) != (value or False)
    ]


def _value(metadata: Mapping[str, Any], name: str, field: PeftField) -> Any:
    value = metadata.get(name)
    if value is None:
        return field.default
    if not _is_legal(value, field):
        raise _wrong(name, value, _legal(field), field.default)
    return value


def _pattern(metadata: Mapping[str, Any], name: str, field: PeftField) -> Mapping[str, Any]:
    value = metadata.get(name)
    value = {} if value is None else value
    if not isinstance(value, Mapping) or not all(_is_legal(v, field) for v in value.values()):
        raise _wrong(name, value, f"layer names with {_legal(field)} each", {})
    return value


def _text(metadata: Mapping[str, Any], name: str) -> str | None:
    value = metadata.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, value, "a text or null", None)
    return value


def _check_names(metadata: Mapping[str, Any]) -> None:
    value = metadata.get("modules_to_save")
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise _wrong("modules_to_save", value, "a list of names or null", None)


def _is_legal(value: Any, field: PeftField) -> bool:
    if isinstance(field.default, bool):
        return isinstance(value, bool)
    # not isinstance: True is an int; NaN is within nothing
    kinds = (int,) if isinstance(field.default, int) else (int, float)
    return type(value) in kinds and field.low <= value <= field.high


def _legal(field: PeftField) -> str:
    if isinstance(field.default, bool):
        return "true or false"
    what = "a whole number" if isinstance(field.default, int) else "a number"
    return f"{what} from {field.low:.15g} to {field.high:.15g}"


def _wrong(name: str, value: object, legal: str, hint: object) -> CheckpointError:
    return CheckpointError(
        f"{CONFIG} says {name}={_short(value)}; legal is {legal}. If the tensors are right, write "
        f"{name!r}: {hint} there; else copy the checkpoint again."
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
