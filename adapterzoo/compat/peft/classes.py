"""PEFT's config classes: their fields as attributes, that may be changed, and their files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from adapterzoo import hub
from adapterzoo import methods as _methods  # noqa: F401  registers the classes
from adapterzoo.errors import FieldError, listing, names_call
from adapterzoo.formats import files
from adapterzoo.formats.peft.reading import CONFIG, checked
from adapterzoo.peft_arguments import COMMON, TASK_TYPES, classes_of_peft
from adapterzoo.spelling import peft_readable

TaskType = StrEnum("TaskType", {name: name for name in TASK_TYPES})  # type: ignore[misc]
"""PEFT's names of tasks."""

PeftType = StrEnum(  # type: ignore[misc]
    "PeftType", {spelling.peft_type: spelling.peft_type for spelling in peft_readable()}
)
"""PEFT's names of methods, also of those that are only read."""


class PeftConfig:
    """A config of PEFT; `get_peft_model` and `add_adapter` check its values.

    Attributes:
        peft_type: PEFT's name of the method; empty here.
        defaults: all fields with PEFT's defaults.
    """

    peft_type: ClassVar[str] = ""
    defaults: ClassVar[Mapping[str, Any]] = {
        name: argument.default for name, argument in COMMON.items() if name != "peft_type"
    }

    def __init__(self, **fields: Any) -> None:
        """Take the fields.

        Args:
            **fields: by PEFT's names; others have PEFT's defaults.

        Raises:
            FieldError: PEFT's class has no such field.
        """
        if unknown := sorted(fields.keys() - self.defaults.keys()):
            raise FieldError(
                f"{type(self).__name__}({unknown[0]}={fields[unknown[0]]!r}): there is no such "
                f"field. Write some of {listing(sorted(self.defaults), limit=50)}."
            )
        # a dict among the defaults belongs to one object
        vars(self).update({**copy.deepcopy(dict(self.defaults)), **fields})

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and `peft_type`."""
        return {"peft_type": self.peft_type, **vars(self)}

    @names_call
    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Write `adapter_config.json`.

        Args:
            save_directory: the folder; created if missing.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        document = {"peft_type": self.peft_type, **{k: _plain(v) for k, v in vars(self).items()}}
        files.write_all(Path(save_directory), {CONFIG: files.json_bytes(document)})

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> PeftConfig:
        """Return the config in a folder, or on the Hub, as an object of its own class.

        Args:
            pretrained_model_name_or_path: a folder, or `user/repository`.
            **kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`; and
                fields to change.

        Raises:
            CheckpointError: there is none, it is damaged, or its method is unknown.
        """
        options = {name: kwargs.pop(name) for name in [*kwargs] if name in hub.OPTIONS}
        folder = hub.resolve(pretrained_model_name_or_path, **options)
        values = files.read_json(folder / CONFIG)
        return from_values(values, kwargs)

    def __eq__(self, other: object) -> bool:
        """Return whether class and fields are the same."""
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """Return a constructor call with the fields that are not PEFT's defaults."""
        changed = {k: v for k, v in vars(self).items() if v != self.defaults.get(k)}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def from_values(values: Mapping[str, Any], changes: Mapping[str, Any]) -> PeftConfig:
    """Return the object for the values of a file.

    Raises:
        CheckpointError: there is no such method here.
        FieldError: the method is only read.
    """
    kind = values.get("peft_type")
    found = next((c for c in config_classes().values() if c.peft_type == kind), None)
    if found is None:
        # raises with the methods that there are
        checked(values)
        raise FieldError(f"{CONFIG} says peft_type={kind!r}, which cannot be added. Write another.")
    made = found(**changes)
    # a newer release may have more fields: `add_adapter` refuses those that ask for something
    rest = {k: v for k, v in values.items() if k != "peft_type" and k not in changes}
    vars(made).update(rest)
    return made


@functools.cache
def config_classes() -> dict[str, type[PeftConfig]]:
    """Return PEFT's config classes of the methods that exist here, by name."""
    defaults: dict[str, dict[str, Any]] = {}
    kinds: dict[str, str] = {}
    for arguments in classes_of_peft.values():
        own = defaults.setdefault(arguments.class_name, dict(PeftConfig.defaults))
        # a field that tells our classes apart is off in PEFT
        own |= dict.fromkeys(arguments.fixed, False)
        own |= {name: argument.default for name, argument in arguments.fields.items()}
        kinds[arguments.class_name] = arguments.peft_type
    return {
        name: type(
            name,
            (PeftConfig,),
            {
                "__doc__": f"PEFT's `{name}`: its fields as keyword arguments.",
                "__module__": "adapterzoo.peft",
                "peft_type": PeftType(kinds[name]),
                "defaults": own,
            },
        )
        for name, own in defaults.items()
    }


@functools.cache
def field_classes() -> dict[str, type[Any]]:
    """Return PEFT's classes of values of fields, by name: options of initial values, and choices.

    `eva_config` holds an `EvaConfig`, and `prompt_tuning_init` a `PromptTuningInit`.
    """
    found: dict[str, type[Any]] = {}
    for arguments in classes_of_peft.values():
        for field, argument in arguments.fields.items():
            name = argument.part_class or "".join(word.capitalize() for word in field.split("_"))
            choices = {value: value for value in argument.values or ()}
            if argument.parts is not None:
                fresh = {
                    key: functools.partial(copy.deepcopy, part.default)
                    for key, part in argument.parts.items()
                }
                found[name] = dataclasses.make_dataclass(
                    name,
                    [(k, Any, dataclasses.field(default_factory=f)) for k, f in fresh.items()],
                    namespace={"__doc__": f"PEFT's `{name}`.", "__module__": "adapterzoo.peft"},
                )
            elif choices and all(isinstance(v, str) and v.isupper() for v in choices):
                found[name] = cast("Any", StrEnum)(name, choices)
    return found


# --- PEFT's classes without instances here ---

_READ = "such adapters are only read from files. To train one write"

NOT_MADE = {
    "AdaLoraConfig": f"{_READ} LoraConfig(…)",
    "CPTConfig": f"{_READ} PromptTuningConfig(…)",
    "CartridgeConfig": f"{_READ} PrefixTuningConfig(…)",
    "LoraModel": "layers are not wrapped. Write get_peft_model(model, LoraConfig(…))",
    "PromptEncoderConfig": f"{_READ} PromptTuningConfig(…)",
}
"""Classes that scripts may import but not call → what to write."""


@functools.cache
def not_made(name: str) -> type[Any]:
    """Return a class that can be imported, but has no instances.

    Args:
        name: among `NOT_MADE`.

    Raises:
        FieldError: the class is called.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FieldError(f"{name}(…): {NOT_MADE[name]}.")

    doc = f"PEFT's `{name}`: {NOT_MADE[name]}."
    return type(name, (), {"__new__": refuse, "__doc__": doc, "__module__": "adapterzoo.peft"})
