r"""`adapter_config.json` of PEFT: its method and its fields, checked; names of layers; tasks.

A file is refused if a field changes what the adapter computes in a way that cannot be reproduced
here. Fields that only matter to PEFT's training, and fields that are off, are ignored.

PEFT matches the keys of `rank_pattern` and `alpha_pattern` by `(.*\.)?(key)$`, and the entries of
a list `target_modules` as ends of paths. Keys from a file are regular expressions that are not
trusted: their search time is bounded before they run.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers.models.auto import modeling_auto

from adapterzoo.config import Check, Text
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.formats.checkpoint import SavedModel, method_of, short
from adapterzoo.patterns import fault
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


_T = TypeVar("_T")

# texts that match themselves, except that a dot matches any character
_PLAIN = re.compile(r"[\w.\-]*")


def values_at(field: str, patterns: Mapping[str, _T], paths: Collection[str]) -> dict[str, _T]:
    """Return the value of the first pattern that matches each path; leave out other paths.

    Args:
        field: of the config, for messages.
        patterns: PEFT's keys to values.
        paths: of layers.

    Raises:
        CheckpointError: a key is not a regular expression.
    """
    whole = {rf"(.*\.)?({pattern})$": pattern for pattern in patterns}
    if (wrong := fault(whole)) is not None:
        raise CheckpointError(
            f"{field} has the key {whole[wrong[0]]!r}: {wrong[1]}. Write names of layers as its "
            f"keys: {{'q_proj': …}}."
        )
    compiled = {pattern: re.compile(expression) for expression, pattern in whole.items()}
    # most keys are names, whose last part excludes most paths without a search
    ends = {p: p.rpartition(".")[2] if _PLAIN.fullmatch(p) else "" for p in patterns}
    found: dict[str, _T] = {}
    for path in paths:
        for pattern, value in patterns.items():
            if path.endswith(ends[pattern]) and compiled[pattern].match(path):
                found[path] = value
                break
    return found


def exactly(paths: Iterable[str]) -> str:
    """Return a regular expression that matches exactly these paths."""
    return f"^(?:{'|'.join(map(re.escape, sorted(paths)))})$"


def most_common(values: Mapping[str, _T], preferred: _T) -> _T:
    """Return the preferred value if any path has it, else the most common one."""
    if preferred in values.values():
        return preferred
    counts: dict[_T, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    return max(counts, key=counts.__getitem__)


def by_name(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return a few keys that give paths their values, except for the default.

    A key is the name of layers that all have one value, or a regular expression for the paths
    that share it.
    """
    names: dict[str, set[_T]] = {}
    for path, value in values.items():
        names.setdefault(path.rpartition(".")[2], set()).add(value)
    keys: dict[str, _T] = {}
    rest: dict[_T, list[str]] = {}
    for path, value in values.items():
        name = path.rpartition(".")[2]
        if value == default:
            continue
        if len(names[name]) == 1:
            keys[re.escape(name)] = value
        else:
            rest.setdefault(value, []).append(path)
    return keys | {exactly(paths): value for value, paths in rest.items()}


def by_path(values: Mapping[str, _T], default: _T) -> dict[str, _T]:
    """Return the same as `by_name`, with names or whole paths as keys, for other readers."""
    keys: dict[str, _T] = {}
    for key, value in by_name(values, default).items():
        if not key.startswith("^"):
            keys[key] = value
            continue
        for path in (p for p, v in values.items() if v == value and re.match(key, p)):
            # the end of another path would name that one too
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
"""PEFT's names of tasks → the classes of transformers for them, by type of model."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task class that an exported adapter belongs to.

    Attributes:
        model_class: its name.
        task_type: PEFT's name of the task; None if it has none.
    """

    model_class: str
    task_type: str | None


def class_in(peft_config: PeftConfig, info: SavedModel) -> str | None:
    """Return the class of models that a file belongs to; None if it does not say that."""
    if peft_config.base_class is not None or peft_config.task_type is None:
        return peft_config.base_class
    return next(classes_for(TASKS.get(peft_config.task_type, {}), info), None)


def classes_for(mapping: Mapping[str, Any], info: SavedModel) -> Iterator[str]:
    """Yield the classes of transformers for a task that a type of model has."""
    found = mapping.get(info.model_type)
    yield from (found,) if isinstance(found, str) else found or ()


def task_of(model_class: str) -> str | None:
    """Return PEFT's name of the task of a class; None if it has none."""
    for task, mapping in TASKS.items():
        classes = (c for v in mapping.values() for c in ((v,) if isinstance(v, str) else v))
        if model_class in set(classes):
            return task
    return None
