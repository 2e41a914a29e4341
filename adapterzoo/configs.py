"""The base of adapter configs, their registries, and the union of several.

A config is a frozen, keyword-only dataclass in the file of its method. It declares what its
fields may hold (`adapterzoo.fields`), returns the placements of its adapters (`placements`) and
builds each (`build`).
"""

from __future__ import annotations

import copy
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from . import peft_arguments
from .config_base import Config, config_class, defaults
from .errors import CompositionError, ConfigError, FieldError, SiteError, listing
from .fields import naming_checks
from .registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .anatomy import Anatomy, Site
    from .averaging import Combination
    from .contracts import Adapter, InputPlan, WeightPlan

METHODS = "adapterzoo.methods"
"""The package that fills the registries of methods."""

architectures: Registry[Any] = Registry("architecture", "its config class", filled_by=METHODS)
"""The `architecture` of a config on disk → its class."""

config_strings: Registry[Any] = Registry("config string", filled_by=METHODS)
"""The short names that users write → functions that make the configs."""

change_forms: Registry[Any] = Registry("conversion method", filled_by=METHODS)
"""The method → the config class whose adapters can make any change of a weight.

The class has `at_sites_of(config, anatomy)`, `at_layers(paths)` and `of_ranks(ranks)`, and its
adapters are of `contracts.FactoredAdapter`.
"""

DEFAULT_CHANGE_FORM = "lora"

variants: dict[type[Any], Any] = {}
"""The classes that `adapters` has together with others as one class → their `AdapterHubSpelling`.

`LoRAConfig(use_dora=True)` of `adapters` is a config of another class here.
"""

# quoted text in a config string
_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Placement:
    """A site and the config of the adapter that it gets.

    Attributes:
        site: the place of the adapter.
        config: builds the adapter.
        location: its key in `get_adapter`, such as "output_adapter"; if empty, the site's role.
    """

    site: Site
    config: AdapterConfig
    location: str = ""


@config_class
class AdapterConfig(Config):
    """Base of all adapter configs.

    `architecture` is the name of the method in files. `training_fields` are those that do not
    change what a trained adapter computes.
    """

    kind_field: ClassVar[str] = "architecture"
    kinds: ClassVar[Registry[Any] | None] = architectures
    # the peer's oldest files have none
    default_kind: ClassVar[str | None] = "bottleneck"
    strings: ClassVar[Registry[Any]] = config_strings
    default: ClassVar[object] = "seq_bn"

    architecture: ClassVar[str]
    training_fields: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "init_weights", "init_weights_seed", "dtype"}
    )

    @classmethod
    def _resolved(cls, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Return the class that fields of `adapters` or PEFT stand for, and its fields.

        Raises:
            ConfigError: there is no such method.
        """
        found, fields = peft_arguments.resolved(cls, fields)
        return (found, fields) if found is not cls else _variant(cls, fields)

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the config with some fields changed, which may have PEFT's names."""
        if type(self) in peft_arguments.classes_of_peft:
            changes = peft_arguments.translated(type(self), changes)
        return super()._changed(shown, changes)

    @property
    def slot_fields(self) -> frozenset[str]:
        """The fields in which an adapter may differ from the one whose place it takes.

        Zeros make up for smaller sizes, and `Adapter.in_slot` for the rest; sites are compared
        anyway.
        """
        return frozenset()

    def of_rank(self, rank: int) -> Self:
        """Return the config of a slot for adapters of at most this rank; itself if it has none.

        Raises:
            ConfigError: its own rank is larger.
        """
        return self

    @property
    def starts_as_identity(self) -> bool:
        """Whether a fresh adapter leaves the model's output unchanged, bit for bit."""
        return True

    @property
    def gradients_are_exact(self) -> bool:
        """Whether autograd gives the derivative of the output for every parameter.

        False for a method that deliberately treats a part of its formula as a constant.
        """
        return True

    @abstractmethod
    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return every site of the model that gets an adapter.

        Raises:
            SiteError: the model, or one of its blocks, lacks the sites.
        """

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements, and those of what is trained beside the adapters.

        Raises:
            ConfigError: something would be trained in two ways.
            SiteError: the model, or one of its blocks, lacks the sites.
        """
        return self.placements(anatomy)

    @abstractmethod
    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return a fresh adapter for the site, its parameters on the device and of the dtype.

        Raises:
            ConfigError: a value does not fit the site's widths.
        """

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """This config, or the members of a union."""
        return (self,)

    def below(self, prefix: str, anatomy: Anatomy) -> Self:
        """Return the config with names of layers as names below the base model.

        Users name layers as PEFT does, by their paths in the whole model.

        Args:
            prefix: what precedes the paths of the base model, such as "model.".
            anatomy: of the base model.

        Raises:
            ConfigError: the fields would mean other layers than in PEFT.
        """
        changes = {}
        for name, check in naming_checks(type(self)).items():
            given = getattr(self, name)
            if (found := check.below(given, prefix, anatomy)) != given:
                changes[name] = found
        return self.replace(**changes) if changes else self

    def shared(
        self, placements: Sequence[Placement], device: torch.device, dtype: torch.dtype
    ) -> nn.Module | None:
        """Return a module that all layers of the adapter share as `base.shared`; None: none.

        It is made, moved, copied, trained and saved once for each adapter.

        Args:
            placements: all adapters of this config, in model order.
            device: where its tensors are made.
            dtype: of its parameters.

        Raises:
            ConfigError: a value does not fit the placements.
        """
        return None

    @property
    def plain(self) -> AdapterConfig:
        """The config of an equal adapter in the peers' files; see `plain_tensors`."""
        return self

    def plain_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of one place of the adapter of `plain`, by parameter.

        Args:
            tensors: of an adapter of this config, by parameter.
        """
        return tensors

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of one place, by parameter; undoes `plain_tensors`.

        Args:
            tensors: of an adapter of `plain`, by parameter.
        """
        return tensors

    def init_plan(self, anatomy: Anatomy) -> InputPlan | WeightPlan | None:
        """Return which inputs or original weights the initial values need; None: they need none."""
        return None

    @property
    def averages_shared(self) -> bool:
        """Whether shared parameters are averaged; otherwise they must be equal."""
        return False

    def init_from_text(self, shared: nn.Module, embedded: Callable[[str], Tensor]) -> None:
        """Initialize the shared module from a text, if the config asks for it.

        It is called once, for a fresh adapter that is not filled from a file.

        Args:
            shared: made by `shared`.
            embedded: returns the embeddings `[tokens, d]` of a text from the model's table.

        Raises:
            ConfigError: the text has no tokens.
        """

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """Return the config of the adapter that several are combined into.

        Args:
            configs: at least one, of this architecture.
            strategy: how the adapters are combined.
            anatomy: of the model.

        Raises:
            CompositionError: configs that differ in this way cannot be combined.
        """
        strategy.refuse_differing([config.to_dict() for config in configs], cls.training_fields)
        return configs[0]

    @classmethod
    def _parse(cls, text: str) -> Any:
        # quoted text may contain any characters, also the separators of a union
        blank = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)
        bars = [match.start() for match in re.finditer(r"\|(?![^\[]*\])", blank)]
        ends = zip([-1, *bars], [*bars, len(text)], strict=True)
        parse = super()._parse
        parts = [parse(text[bar + 1 : end].strip()) for bar, end in ends]
        members = [member for part in parts for member in part.members]
        return parts[0] if len(parts) == 1 else ConfigUnion(*members)


def _variant(cls: Any, fields: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the class that fields of `adapters` stand for, and its fields."""
    own = variants.get(cls)
    if own is None:
        return cls, fields
    group = {c: v for c, v in variants.items() if v.architecture[0] == own.architecture[0]}
    default = defaults(cls)
    extra = {n for v in group.values() for n in v.identifying} & fields.keys() - default.keys()
    if not extra:
        return cls, fields
    values = {**own.fixed, **default, **fields}
    found = [c for c, variant in group.items() if not variant.differing(values)]
    if all(own.fixed[name] == fields[name] for name in extra & own.fixed.keys()):
        found.append(cls)
    if not found:
        shown = ", ".join(f"{name}={fields[name]!r}" for name in sorted(extra))
        raise ConfigError(
            f"{cls.__name__}({shown}): there is no method with these fields. Methods are "
            f"{listing(sorted(c.__name__ for c in group))}. Write one of these configs."
        )
    chosen: Any = max(found, key=lambda c: group[c].strictness)
    variant, legal = group[chosen], defaults(chosen)
    # the fields that identify the method have been read
    read = {**variant.fixed, **variant.constants, **(default if chosen is not cls else {})}
    kept = {n: v for n, v in fields.items() if n in legal or n not in read or read[n] != v}
    if chosen is cls:
        return cls, kept
    # fields that were not given have the values of the class that was called, except those of
    # training: each method has initial values of its own
    same = {n: v for n, v in default.items() if n in legal.keys() - chosen.training_fields}
    given = {n: v for n, v in kept.items() if n not in default or default[n] != v}
    return chosen, {**same, **variant.as_another, **given}


def check_blocks(anatomy: Anatomy, config: str) -> None:
    """Check that a model has transformer blocks.

    Args:
        anatomy: of the model.
        config: the name of the config that needs them.

    Raises:
        SiteError: it has none.
    """
    if not anatomy.blocks:
        raise SiteError(
            f"{config}: this model has no transformer blocks: {anatomy.reason}. Use a method with "
            f"target_modules, such as LoRAConfig(target_modules=[…])."
        )


@config_class
class MultiTaskConfig(AdapterConfig):
    """Base of the configs of methods for several tasks, which can share parameters.

    Attributes:
        shareable: the parameters of each layer that `share_parameters` shares.
    """

    shareable: ClassVar[tuple[str, ...]] = ()


@architectures.register("union")
@config_strings.register("union")
@config_class
class ConfigUnion(AdapterConfig):
    """Several configs under one adapter name: `ConfigUnion(config, other_config)`."""

    architecture: ClassVar[str] = "union"

    configs: tuple[AdapterConfig, ...] = ()

    def __init__(self, *configs: AdapterConfig) -> None:
        """Join the configs.

        Args:
            configs: two or more; of a union, its members. If two adapt one layer, the earlier acts
                first.

        Raises:
            ConfigError: fewer than two, or one is not a config.
        """
        known = all(isinstance(config, AdapterConfig) for config in configs)
        members = [member for config in configs for member in config.members] if known else []
        if len(members) < 2:
            raise FieldError(
                f"ConfigUnion{configs!r}: a union joins two or more configs. "
                f"Write ConfigUnion(config, other_config)."
            )
        # adapters are told apart by the config object that makes them
        distinct = {id(member): member for member in members}
        each = [distinct.pop(id(c)) if id(c) in distinct else copy.copy(c) for c in members]
        object.__setattr__(self, "configs", tuple(each))

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """The joined configs."""
        return self.configs

    def below(self, prefix: str, anatomy: Anatomy) -> Self:
        """Return the union of the members with names below the base model."""
        found = [config.below(prefix, anatomy) for config in self.configs]
        same = all(one is other for one, other in zip(found, self.configs, strict=True))
        return self if same else type(self)(*found)

    @property
    def starts_as_identity(self) -> bool:
        """Whether all members start as the identity."""
        return all(config.starts_as_identity for config in self.configs)

    @property
    def gradients_are_exact(self) -> bool:
        """Whether the gradients of all members are exact."""
        return all(config.gradients_are_exact for config in self.configs)

    def of_rank(self, rank: int) -> Self:
        """Return the union of the configs for slots of a rank."""
        return type(self)(*(config.of_rank(rank) for config in self.configs))

    @property
    def plain(self) -> AdapterConfig:
        """The union of what the members are in files of the peers."""
        return ConfigUnion(*(config.plain for config in self.configs))

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return the placements of all members, in their order."""
        return [placement for config in self.configs for placement in config.placements(anatomy)]

    def all_placements(self, anatomy: Anatomy) -> list[Placement]:
        """Return those of all members, in their order."""
        return [p for config in self.configs for p in config.all_placements(anatomy)]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Raise: each placement of a union names the member that builds it."""
        raise ConfigError(
            f"ConfigUnion.build({site.path!r}): a union builds nothing itself. "
            f"Write placement.config.build(…)."
        )

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """Return the union of the members' combinations."""
        unions = [config.configs for config in configs if isinstance(config, ConfigUnion)]
        kinds = {tuple(member.architecture for member in members) for members in unions}
        if len(kinds) > 1:
            shown = listing("|".join(kind) for kind in sorted(kinds))
            raise CompositionError(
                f"unions are combined member by member, but these are {shown}. "
                f"Add the adapters with the same methods in the same order."
            )
        members = zip(*unions, strict=True)
        return cls(*(type(each[0]).combined(each, strategy, anatomy) for each in members))

    def field_names(self) -> tuple[str, ...]:
        """Return the names of the members' fields, "0.r" for `r` of the first."""
        return tuple(f"{i}.{name}" for i, c in enumerate(self.configs) for name in c.field_names())

    def __getitem__(self, key: str | int) -> Any:
        """Return a member by its number, a field of one by `"0.r"`, or a field of the union.

        Raises:
            UnknownNameError: there is no such field.
            IndexError: there is no such member.
        """
        if isinstance(key, int):
            return self.configs[key]
        if key in ("architecture", "configs"):
            return getattr(self, key)
        if key not in self.field_names():
            return super().__getitem__(key)
        number, _, name = key.partition(".")
        return self.configs[int(number)][name]

    def to_dict(self) -> dict[str, Any]:
        """Return the members' dicts under `configs`."""
        return {"architecture": "union", "configs": [c.to_dict() for c in self.configs]}

    def _changed(self, shown: str, changes: Mapping[str, Any]) -> Self:
        """Return the union with the changes in each member."""
        return type(self)(*(c._changed(shown, changes) for c in self.configs))

    def __repr__(self) -> str:
        """Return a constructor call."""
        return f"{type(self).__name__}({', '.join(map(repr, self.configs))})"

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        members = fields.pop("configs", [])
        if fields or not isinstance(members, Sequence):
            raise ConfigError(
                f"union config: 'configs' is a list and the only field, got configs={members!r} "
                f"and {listing(fields)}. Write {{'architecture': 'union', 'configs': […]}}."
            )
        return cls(*(AdapterConfig.from_dict(c) for c in members))
