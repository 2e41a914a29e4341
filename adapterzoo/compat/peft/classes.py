"""PEFT's config classes: their fields as mutable attributes, and their files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from adapterzoo import hub
from adapterzoo import methods as _methods  # noqa: F401  registers the classes
from adapterzoo.errors import CheckpointError, ConfigError, FieldError, listing, names_call
from adapterzoo.folders.names import CONFIG
from adapterzoo.folders.reading import read_json
from adapterzoo.formats import files
from adapterzoo.formats.peft.reading import checked
from adapterzoo.peft_arguments import PEFT_VERSION, TASK_TYPES, classes_of_peft
from adapterzoo.spelling import peft_readable

TaskType = StrEnum("TaskType", {name: name for name in TASK_TYPES})  # type: ignore[misc]
"""PEFT's names of tasks."""

PeftType = StrEnum(  # type: ignore[misc]
    "PeftType", {spelling.peft_type: spelling.peft_type for spelling in peft_readable()}
)
"""PEFT's names of methods, including those that can only be read."""


@dataclass(repr=False)
class PeftConfig:
    """A config of PEFT; `get_peft_model` and `add_adapter` check its values.

    A model keeps the object: later changes to it are saved.
    """

    task_type: Any = None
    peft_type: Any = None
    auto_mapping: Any = None
    peft_version: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False

    # PEFT's name of the method; empty here
    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Fill in the method and PEFT's version.

        Raises:
            ConfigError: there is no such task.
        """
        task = getattr(self.task_type, "value", self.task_type)
        if task is not None and task not in TASK_TYPES:
            raise ConfigError(
                f"{type(self).__name__}(task_type={task!r}): there is no such task. Write one of "
                f"{listing(TASK_TYPES)}."
            )
        for name in ("target_modules", "exclude_modules"):
            if isinstance(names := getattr(self, name, None), list):
                setattr(self, name, set(names))
        self.peft_type = PeftType(self._kind) if self._kind else self.peft_type
        self.peft_version = self.peft_version or PEFT_VERSION

    @property
    def is_prompt_learning(self) -> bool:
        """Whether the method adds tokens, or keys and values."""
        return isinstance(self, PromptLearningConfig)

    @property
    def is_adaption_prompt(self) -> bool:
        """Return False, because there is no such method here."""
        return False

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except those that files do not have."""
        values = dataclasses.asdict(self)
        values.pop("runtime_config", None)
        return values

    @names_call
    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        auto_mapping_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Write `adapter_config.json`.

        Args:
            save_directory: the folder; created if missing.
            auto_mapping_dict: the value of `auto_mapping` in the file; None: the field's.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        document = {name: plain_value(value) for name, value in self.to_dict().items()}
        if auto_mapping_dict is not None:
            document["auto_mapping"] = dict(auto_mapping_dict)
        files.write_all(Path(save_directory), {CONFIG: files.json_bytes(document)})

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        subfolder: str | None = None,
        *,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> PeftConfig:
        """Return the config in a folder, or on the Hub, as an object of its own class.

        Args:
            pretrained_model_name_or_path: a folder, or `user/repository`.
            subfolder: a sub-folder of it.
            trust_remote_code: has no effect, since a config runs no code.
            **kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`; and
                fields to change.

        Raises:
            CheckpointError: the config is missing or damaged, or its method is unknown.
        """
        options = {name: kwargs.pop(name) for name in [*kwargs] if name in hub.OPTIONS}
        given = pretrained_model_name_or_path
        path = given if subfolder is None else Path(given, subfolder)
        values = cls.from_json_file(hub.resolve_file(path, CONFIG, **options))
        if "peft_type" not in values:
            raise CheckpointError(f"{CONFIG} of {path} has no peft_type. Write another folder.")
        return from_values(values, kwargs)

    @classmethod
    def from_json_file(cls, path_json_file: str | os.PathLike[str], **_kwargs: Any) -> Any:
        """Return the values in a file.

        Args:
            path_json_file: the file.
            **_kwargs: ignored, as in PEFT.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        values = read_json(Path(path_json_file))
        values.pop("runtime_config", None)
        return values

    @classmethod
    def from_peft_type(cls, **kwargs: Any) -> PeftConfig:
        """Return the config with some fields, in the class that `peft_type` names.

        Args:
            **kwargs: fields; unknown ones give a warning.

        Raises:
            CheckpointError: there is no such method here.
            FieldError: the method can only be read.
        """
        return from_values({"peft_type": cls._kind or None, **kwargs}, {})

    @classmethod
    def check_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        """Return the fields unchanged; users' subclasses may check them."""
        return kwargs

    def __repr__(self) -> str:
        """Return a constructor call with the fields that are not PEFT's defaults."""
        fresh = type(self)()
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        shown = [f"{n}={v!r}" for n, v in values.items() if v != getattr(fresh, n)]
        return f"{type(self).__name__}({', '.join(shown)})"


class PromptLearningConfig(PeftConfig):
    """Base of the configs of methods that add tokens, or keys and values."""


def plain_value(value: Any) -> Any:
    """Return a value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def from_values(values: Mapping[str, Any], changes: Mapping[str, Any]) -> PeftConfig:
    """Return the object for the values of a file.

    Args:
        values: the file's values.
        changes: fields to change.

    Raises:
        CheckpointError: there is no such method here.
        FieldError: the method can only be read, or there is no field to change.

    Warns:
        UserWarning: the file has unknown fields.
    """
    kind = getattr(given := values.get("peft_type"), "value", given)
    found: type[PeftConfig] | None = PeftConfig if kind is None else None
    found = next((c for c in config_classes().values() if c._kind == kind), found)
    if found is None:
        # raises with the list of known methods
        checked({**values, "peft_type": kind})
        raise FieldError(f"{CONFIG} says peft_type={kind!r}, which cannot be added. Write another.")
    known = {f.name for f in dataclasses.fields(found)}
    # options of the Hub that are left at None
    changes = {name: v for name, v in changes.items() if name in known or v is not None}
    if wrong := sorted(changes.keys() - known):
        raise FieldError(f"{found.__name__}({wrong[0]}=…): there is no such field. Leave it out.")
    if unknown := sorted(values.keys() - known):
        warnings.warn(
            f"Unexpected keyword arguments {unknown} for class {found.__name__}: {CONFIG} has "
            f"fields that are not known here; they are ignored.",
            stacklevel=3,
        )
    rest = {k: v for k, v in values.items() if k in known and k != "peft_type"}
    return found(**{**found.check_kwargs(**rest), **changes})


# the leading fields of a class, after the common ones, in the order of their positions
_FIRST = {
    "BOFTConfig": "boft_block_size boft_block_num boft_n_butterfly_factor target_modules "
    "exclude_modules boft_dropout fan_in_fan_out bias modules_to_save init_weights",
    "IA3Config": "target_modules exclude_modules feedforward_modules fan_in_fan_out",
    "LNTuningConfig": "target_modules exclude_modules modules_to_save",
    "LoHaConfig": "rank_pattern alpha_pattern r alpha rank_dropout module_dropout "
    "use_effective_conv2d target_modules exclude_modules init_weights",
    "LoKrConfig": "rank_pattern alpha_pattern r alpha rank_dropout module_dropout "
    "use_effective_conv2d decompose_both decompose_factor rank_dropout_scale target_modules "
    "exclude_modules init_weights",
    "LoraConfig": "r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias "
    "use_rslora modules_to_save init_lora_weights layers_to_transform layers_pattern rank_pattern "
    "alpha_pattern",
    "MissConfig": "r miss_dropout mini_r target_modules exclude_modules init_weights",
    "OFTConfig": "r oft_block_size module_dropout target_modules fan_in_fan_out bias "
    "exclude_modules init_weights",
    "PrefixTuningConfig": "num_virtual_tokens token_dim num_transformer_submodules "
    "num_attention_heads num_layers modules_to_save",
    "PromptTuningConfig": "num_virtual_tokens token_dim num_transformer_submodules "
    "num_attention_heads num_layers modules_to_save prompt_tuning_init",
    "TrainableTokensConfig": "token_indices target_modules init_weights",
    "VeraConfig": "r target_modules projection_prng_key save_projection vera_dropout d_initial "
    "fan_in_fan_out bias modules_to_save",
}


@dataclasses.dataclass
class LoraRuntimeConfig:
    """Settings of LoRA that are not in files.

    Attributes:
        ephemeral_gpu_offload: must be False: layers stay on their devices.
    """

    ephemeral_gpu_offload: bool = False


@functools.cache
def config_classes() -> dict[str, type[PeftConfig]]:
    """Return PEFT's config classes for the methods that exist here, by name."""
    defaults: dict[str, dict[str, Any]] = {}
    kinds: dict[str, tuple[str, type[PeftConfig]]] = {}
    for arguments in classes_of_peft.values():
        own = defaults.setdefault(arguments.class_name, {})
        # a field that distinguishes our classes is off in PEFT
        own |= dict.fromkeys(arguments.fixed, False)
        own |= {name: argument.default for name, argument in arguments.fields.items()}
        base = PromptLearningConfig if "num_virtual_tokens" in own else PeftConfig
        kinds[arguments.class_name] = arguments.peft_type, base
    found: dict[str, type[PeftConfig]] = {}
    for name, own in defaults.items():
        kind, base = kinds[name]
        members = {
            "__doc__": f"PEFT's `{name}`: its fields as keyword arguments.",
            "__module__": "adapterzoo.peft",
            "_kind": kind,
        }
        first = _FIRST.get(name, "").split()
        if name == "LoraConfig":
            own["runtime_config"] = LoraRuntimeConfig()
        fields = [*first, *(n for n in own if n not in first)]
        made = dataclasses.make_dataclass(
            name, [(n, Any, _with_default(own[n])) for n in fields], bases=(base,),
            namespace=members, repr=False,
        )  # fmt: skip
        found[name] = made
    return found


def _with_default(value: Any) -> Any:
    """Return a field of a dataclass; each object gets its own copy of a dict or list default."""
    return dataclasses.field(default_factory=functools.partial(copy.deepcopy, value))


@functools.cache
def field_classes() -> dict[str, type[Any]]:
    """Return PEFT's classes for field values, by name: options for initial values, and choices.

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
        FieldError: always, when the class is called.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FieldError(f"{name}(…): {NOT_MADE[name]}.")

    doc = f"PEFT's `{name}`: {NOT_MADE[name]}."
    return type(name, (), {"__new__": refuse, "__doc__": doc, "__module__": "adapterzoo.peft"})
