"""The fields of PEFT's config classes, and ours of the same meaning: one table for each class.

A method declares its table once. It serves users who give the fields to a config class here,
`LoRAConfig(lora_alpha=16)`, config objects of PEFT, its files, and `adapterzoo.peft`, which makes
classes from it. A field is never ignored: it has a counterpart, or a value that asks for nothing,
or raises an error with a hint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ConfigError, listing

if TYPE_CHECKING:
    from .anatomy import Site

PEFT_VERSION = "0.21.2"
"""The release of PEFT whose names, fields and files these are."""

TASK_TYPES = (
    "SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION",
)  # fmt: skip
"""PEFT's names of tasks."""

classes_of_peft: dict[type[Any], PeftArguments] = {}
"""Our config classes → the fields of PEFT's class for the method."""

# PEFT's methods that do more than change weights → what they do
_INEXPRESSIBLE = {
    "ADAPTION_PROMPT": "adds a gated prompt inside attention",
    "BEFT": "adds to the outputs of layers",
    "LILY": "mixes factors by a router that reads the input",
    "MULTITASK_PROMPT_TUNING": "has a prompt for each of the task_ids that a call gives",
    "POLY": "mixes adapters by the task_ids that a call gives",
    "SHADOW": "runs a second model beside the base model",
    "XLORA": "mixes adapters by a network that reads the input",
}

ADAPTED_BIASES = "lora_only"
"""PEFT's value of `bias` for the biases of the layers that a method adapts."""


@dataclass(frozen=True, slots=True)
class PeftArgument:
    """A field of one of PEFT's config classes.

    Attributes:
        default: PEFT's default.
        ours: our field of the same meaning; None: there is none, and only the default is legal.
        values: PEFT's legal values → ours; None: those of our field.
        hint: what is wrong with other values, and what to write.
        passes: whether texts that are not among `values` are passed on, for our field to check.
        parts: the fields of the config object that this field holds; our field gets those that
            differ from PEFT's defaults. None: it does not hold an object.
        part_class: PEFT's name of the class of that object.
        check: the `config.Check` of its values in a file; None: the field is not read from files.
    """

    default: Any = None
    ours: str | None = None
    values: Mapping[Any, Any] | None = None
    hint: str = "it has no meaning here. Leave it out."
    passes: bool = False
    parts: Mapping[str, PeftArgument] | None = None
    part_class: str = ""
    check: object | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftArguments:
    """One of PEFT's config classes.

    Attributes:
        class_name: its name.
        fields: its own fields; all classes have those of `COMMON`.
        implied: fields of ours that every config object of PEFT implies.
        subsets: fields of ours that name some of the adapted layers → a function that says whether
            a layer is among them, by our config and its site.
        unsayable: from all fields, returns why there is no such adapter here; None: there is.
        peft_type: PEFT's name of the method; `spelled` copies it and `fixed` from the spelling.
        fixed: the fields that tell our class from others of the same type.
    """

    class_name: str
    fields: Mapping[str, PeftArgument]
    implied: Mapping[str, Any] = field(default_factory=dict)
    subsets: Mapping[str, Callable[[Any, Site], bool]] = field(default_factory=dict)
    unsayable: Callable[[Mapping[str, Any]], str | None] = lambda _fields: None
    peft_type: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, values: Mapping[str, Any]) -> bool:
        """Return whether a config with these values is of our class."""
        return all((values.get(k) or False) == (v or False) for k, v in self.fixed.items())


COMMON: Mapping[str, PeftArgument] = {
    "task_type": PeftArgument(
        values=dict.fromkeys(TASK_TYPES),
        hint=f"PEFT has no such task. Write one of {listing(TASK_TYPES)}, or None.",
    ),
    "inference_mode": PeftArgument(
        False, hint="train_adapter(…) decides what is trained. Write inference_mode=False."
    ),
    "peft_type": PeftArgument(hint="the class of the config decides. Leave it out."),
    "auto_mapping": PeftArgument(hint="the model is known. Leave it out."),
    "peft_version": PeftArgument(),
    "base_model_name_or_path": PeftArgument(hint="the model is known. Leave it out."),
    "revision": PeftArgument(hint="load_adapter(…, revision=…) takes it. Leave it out."),
}
"""The fields of every config class of PEFT. `task_type` says of which class the model is."""


def resolved(cls: type[Any], given: Mapping[str, Any]) -> tuple[type[Any], Mapping[str, Any]]:
    """Return the class and the fields that a call means, whose arguments may be PEFT's.

    Args:
        cls: the class that was called.
        given: the arguments of the call.

    Raises:
        ConfigError: an argument of PEFT has a value without a meaning here.
    """
    own = classes_of_peft.get(cls)
    if own is None:
        return cls, given
    words = (COMMON.keys() | own.fields.keys()) - own.fixed.keys() - _names(cls)
    if words.isdisjoint(given):
        return cls, _mapped(own, given)
    chosen = class_of(own.peft_type, {**own.fixed, **given}, cls)
    rest = {k: v for k, v in given.items() if k not in own.fixed or k in _names(chosen)}
    return chosen, translated(chosen, rest)


def class_of(
    peft_type: str, values: Mapping[str, Any], preferred: type[Any] | None = None
) -> type[Any]:
    """Return our config class for the values of one of PEFT's.

    Args:
        peft_type: PEFT's name of the method.
        values: the values of its fields.
        preferred: the class to return if several fit.

    Raises:
        ConfigError: no class fits.
    """
    related = {c: a for c, a in classes_of_peft.items() if a.peft_type == peft_type}
    if found := [c for c, arguments in related.items() if arguments.fits(values)]:
        return max(found, key=lambda c: (c is preferred, len(related[c].fixed)))
    fixed = {name: values.get(name) for arguments in related.values() for name in arguments.fixed}
    shown = "".join(f", {name}={value!r}" for name, value in fixed.items())
    legal = sorted({a.peft_type for a in classes_of_peft.values()})
    raise ConfigError(
        f"peft_type={peft_type!r}{shown}: there is no such method here. Write one of "
        f"{listing(sorted(c.__name__ for c in related) or legal, limit=40)}."
    )


def translated(cls: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our fields for fields of PEFT; names that are not PEFT's are passed on.

    Args:
        cls: our config class.
        given: the fields.

    Raises:
        ConfigError: a value has no meaning here, or two fields mean the same.
    """
    own = classes_of_peft[cls]
    if (why := own.unsayable(given)) is not None:
        raise ConfigError(f"{cls.__name__}: {why}")
    made: dict[str, Any] = {}
    for name, value in _mapped(own, given).items():
        argument = own.fields.get(name) or COMMON.get(name)
        ours: str | None
        if argument is None or argument.ours == name:
            ours, kept = name, value
        elif value is None and argument.default is None:
            continue
        else:
            ours, kept = argument.ours, _value(cls, name, value, argument)
            if ours is None:
                continue
        if ours in made or (ours != name and ours in given):
            raise ConfigError(
                f"{cls.__name__}({name}={value!r}, {ours}=…): the same. Write only {ours}={kept!r}."
            )
        made[ours] = kept
    return made


def _mapped(own: PeftArguments, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields with our values in place of PEFT's, where both names are the same."""
    same = {name: a.values for name, a in own.fields.items() if a.ours == name and a.values}
    changed = {
        name: same[name][value]
        for name, value in given.items()
        if isinstance(value, (bool, str)) and value in same.get(name, {})
    }
    return {**given, **changed} if changed else given


def _value(cls: type[Any], name: str, value: Any, argument: PeftArgument) -> Any:
    """Return our value for a field of PEFT; None if we have no such field and need none."""
    if argument.parts is not None and (value or argument.ours):
        return _options(cls, name, value, argument.parts)
    if isinstance(value, (str, bool)) and value in (argument.values or {}):
        return (argument.values or {})[value]
    # the default, or any other value that is false, has no effect in PEFT
    if argument.ours is None and (value == argument.default or not (value or argument.default)):
        return None
    if argument.ours is not None and argument.values is None:
        return argument.default if value is None else value
    if argument.passes and isinstance(value, str):
        return value
    raise ConfigError(f"{cls.__name__}({name}={value!r}): {argument.hint}")


def _options(
    cls: type[Any], name: str, value: Any, parts: Mapping[str, PeftArgument]
) -> dict[str, Any]:
    """Return our fields for a config object, or its dict, that a field of another one holds."""
    given = value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if not isinstance(given, Mapping) or given.keys() - parts.keys():
        raise ConfigError(
            f"{cls.__name__}({name}={value!r}): there is no such field. Write {name}={{…}} with "
            f"some of {listing(sorted(parts))}."
        )
    made = {}
    for key, option in given.items():
        part = parts[key]
        if part.ours is None:
            _value(cls, f"{name}.{key}", option, part)
        elif option != part.default:
            made[part.ours] = option
    return made


def _names(cls: type[Any]) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def instead(peft_type: object) -> str:
    """Return what messages advise for a file of a method that does not exist here."""
    if (reason := _INEXPRESSIBLE.get(str(peft_type))) is not None:
        return f"{peft_type} {reason}, so it cannot become LoRA. Use it with PEFT."
    return (
        "If it changes only weights of layers, convert it through an installed PEFT: write "
        "adapterzoo convert SRC DST --to lora."
    )
