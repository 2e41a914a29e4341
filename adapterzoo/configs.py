"""What every adapter config shares: strings, dicts, checks, and the union of several.

A config is a frozen, keyword-only dataclass in the file of its method. It says where its adapters
sit (`placements`) and makes one (`build`); nothing else in the library knows what a method is.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import CompositionError, ConfigError, listing
from .fields import ConfigType, construct
from .registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .anatomy import Anatomy, Site
    from .averaging import Combination
    from .contracts import Adapter

DEFAULT_CONFIG = "seq_bn"
# far above any published use; it stops a typo before it allocates
MAX_WIDTH = 65_536

architectures: Registry[Any] = Registry("architecture", decorates="its config class")
"""The `architecture` of a config on disk to its class; without one it is a bottleneck."""

config_strings: Registry[Any] = Registry("config string")
"""The short names, `"lora"`, `"seq_bn"`, …, to the function that makes the config."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One adapter to make: the site that gets it, and the config that makes it.

    Attributes:
        site: where it sits.
        config: what builds it.
        location: under which `get_adapter` shows it, such as "output_adapter"; the site's role
            when empty.
    """

    site: Site
    config: AdapterConfig
    location: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(metaclass=ConfigType):
    """Base of all adapter configs.

    Subclasses are frozen keyword-only dataclasses that check their values in `__post_init__`.
    `architecture` is the name of the method in files; two configs with equal fields are equal.
    `training_fields` are those that say nothing of what a trained adapter computes.
    """

    architecture: ClassVar[str]
    training_fields: ClassVar[frozenset[str]] = frozenset(
        {"dropout", "init_weights", "init_weights_seed", "dtype"}
    )

    @property
    def starts_as_identity(self) -> bool:
        """Whether a fresh adapter leaves the model's output as it was, bit for bit."""
        return True

    @property
    def gradients_are_exact(self) -> bool:
        """Whether autograd gives the derivative of the output for every parameter.

        False for a method that treats a part of its formula as a constant on purpose.
        """
        return True

    @abstractmethod
    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """Every site of the model that gets an adapter.

        Raises:
            SiteError: nothing in the model fits the request, or some block cannot satisfy it.
        """

    @abstractmethod
    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """A fresh adapter for the site, its parameters on the device and of the dtype.

        Raises:
            ConfigError: a value does not fit the site's widths.
        """

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """The configs that make adapters: this one, or those of a union."""
        return (self,)

    def shared(
        self, sites: Sequence[Site], device: torch.device, dtype: torch.dtype
    ) -> nn.Module | None:
        """A module that all layers of the adapter share, found by `base.shared`; None: none.

        It is made, moved, copied, trained and saved once for each adapter.

        Args:
            sites: all that get an adapter of this config, in model order.
            device: where its tensors are made.
            dtype: of its parameters.

        Raises:
            ConfigError: a value does not fit the sites.
        """
        return None

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """The config of the adapter that several become, the first of them where all are alike.

        Args:
            configs: at least one, of this architecture.
            strategy: what is made of the adapters.
            anatomy: of the model.

        Raises:
            CompositionError: what differs between them cannot be combined so.
        """
        strategy.refuse_differing([config.to_dict() for config in configs], cls.training_fields)
        return configs[0]

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON types, with its `architecture`; `from_dict` reads it back."""
        fields = {f.name: _as_json(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"architecture": self.architecture, **fields}

    @classmethod
    def from_dict(cls, values: object) -> AdapterConfig:
        """The config that `to_dict` wrote; called on `AdapterConfig`, finds the class itself.

        Raises:
            ConfigError: a field is unknown, or a value is not legal.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"config={values!r}: a config in a file or a union is an object with fields, not a "
                f"{type(values).__name__}. Write {{'architecture': 'lora', 'r': 8}}."
            )
        fields = dict(values)
        architecture = fields.pop("architecture", None) or "bottleneck"
        if cls is AdapterConfig:
            found: AdapterConfig = architectures.find(architecture, "config")._from_fields(fields)
            return found
        if values.get("architecture") not in (None, cls.architecture):
            raise ConfigError(
                f"{cls.__name__}.from_dict: the dict is a config of {architecture!r}, not of "
                f"{cls.architecture!r}. Write AdapterConfig.from_dict(…)."
            )
        return cls._from_fields(fields)

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> AdapterConfig:
        values = {name: _as_field(value) for name, value in fields.items()}
        return construct(cls, cls.__name__, values)

    def replace(self, **changes: Any) -> Self:
        """The same config with some fields changed.

        Raises:
            ConfigError: a field is unknown, or a value is not legal.
        """
        kept = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return construct(type(self), type(self).__name__, kept | changes)

    @classmethod
    def load(cls, config: AdapterConfig | str | Mapping[str, Any] | None) -> AdapterConfig:
        """Whatever a user may pass as `config=`, as a config.

        Args:
            config: a config; a config string such as `"lora[r=8,alpha=16]"`, several joined by
                `|`; a dict as `to_dict` writes it; None for `"seq_bn"`.

        Raises:
            ConfigError: it is none of these, or a value in it is not legal.
            UnknownNameError: the config string names nothing that is registered.
        """
        if config is None:
            config = DEFAULT_CONFIG
        if isinstance(config, AdapterConfig):
            return config
        if isinstance(config, str):
            return _parse(config)
        if isinstance(config, Mapping):
            return AdapterConfig.from_dict(config)
        raise ConfigError(
            f"config={config!r}: a config is an AdapterConfig, a config string or a dict, not a "
            f"{type(config).__name__}. Write config={DEFAULT_CONFIG!r}."
        )


@architectures.register("union")
@config_strings.register("union")
@dataclass(frozen=True, kw_only=True)
class ConfigUnion(AdapterConfig):
    """Several configs under one adapter name: `ConfigUnion(SeqBnConfig(), LoRAConfig())`."""

    architecture: ClassVar[str] = "union"

    configs: tuple[AdapterConfig, ...] = ()

    def __init__(self, *configs: AdapterConfig) -> None:
        """Join the configs.

        Args:
            configs: two or more, none of them a union; an earlier one acts first where two meet
                at one layer.

        Raises:
            ConfigError: fewer than two, or one is not a plain config.
        """
        wrong = [
            c for c in configs if isinstance(c, ConfigUnion) or not isinstance(c, AdapterConfig)
        ]
        if len(configs) < 2 or wrong:
            raise ConfigError(
                f"ConfigUnion{configs!r}: a union joins two or more configs that are no unions "
                f"themselves. Write ConfigUnion(SeqBnConfig(), LoRAConfig())."
            )
        object.__setattr__(self, "configs", configs)

    @property
    def members(self) -> tuple[AdapterConfig, ...]:
        """The configs that were joined."""
        return self.configs

    @property
    def starts_as_identity(self) -> bool:
        """Whether all members do."""
        return all(config.starts_as_identity for config in self.configs)

    @property
    def gradients_are_exact(self) -> bool:
        """Whether those of all members are."""
        return all(config.gradients_are_exact for config in self.configs)

    def placements(self, anatomy: Anatomy) -> list[Placement]:
        """The placements of all members, in their order."""
        return [placement for config in self.configs for placement in config.placements(anatomy)]

    def build(self, site: Site, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Never used: each placement of a union names the member that builds it."""
        raise ConfigError(
            f"ConfigUnion.build({site.path!r}): a union builds nothing itself; "
            f"write placement.config.build(…)."
        )

    @classmethod
    def combined(
        cls, configs: Sequence[AdapterConfig], strategy: Combination, anatomy: Anatomy
    ) -> AdapterConfig:
        """The union of what the members become, one by one."""
        unions = [config.configs for config in configs if isinstance(config, ConfigUnion)]
        kinds = {tuple(member.architecture for member in members) for members in unions}
        if len(kinds) > 1:
            shown = listing("|".join(kind) for kind in sorted(kinds))
            raise CompositionError(
                f"{strategy.call}: unions are combined member by member, and these are {shown}. "
                f"Add the adapters with the same methods in the same order."
            )
        members = zip(*unions, strict=True)
        return cls(*(type(each[0]).combined(each, strategy, anatomy) for each in members))

    def to_dict(self) -> dict[str, Any]:
        """The members' dicts under `configs`."""
        return {"architecture": "union", "configs": [c.to_dict() for c in self.configs]}

    def replace(self, **changes: Any) -> ConfigUnion:
        """The union with the change made in each member."""
        return ConfigUnion(*(c.replace(**changes) for c in self.configs))

    def __repr__(self) -> str:
        """A constructor call."""
        return f"ConfigUnion({', '.join(map(repr, self.configs))})"

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> ConfigUnion:
        members = fields.pop("configs", [])
        if fields or not isinstance(members, Sequence):
            raise ConfigError(
                f"union config: 'configs' is a list of configs and the only field, got "
                f"configs={members!r} and beside it {listing(fields)}. "
                f"Write {{'architecture': 'union', 'configs': […]}}."
            )
        return cls(*(AdapterConfig.from_dict(c) for c in members))


def require_range(config: AdapterConfig, field: str, low: float, high: float) -> None:
    """Check that a numeric field is a number within `low ≤ value ≤ high`; integers if both are.

    Raises:
        ConfigError: it is not.
    """
    value: Any = getattr(config, field)
    whole = isinstance(low, int) and isinstance(high, int)
    # not isinstance: True is an int
    if type(value) not in ((int,) if whole else (int, float)) or not low <= value <= high:
        what = "a whole number" if whole else "a number"
        near = {f.name: f.default for f in dataclasses.fields(config)}[field]
        if type(value) in (int, float):
            near = low if value < low else high if value > high else near
        raise ConfigError(
            f"{type(config).__name__}({field}={value!r}): {field} is {what} from {low} to {high}. "
            f"Write {field}={near}."
        )


def require_choice(config: AdapterConfig, field: str, legal: Sequence[object]) -> None:
    """Check that a field holds one of the legal values.

    Raises:
        ConfigError: it does not.
    """
    value = getattr(config, field)
    # True == 1: compare types too
    if not any(value == choice and type(value) is type(choice) for choice in legal):
        raise ConfigError(
            f"{type(config).__name__}({field}={value!r}): {field} is one of {listing(legal)}. "
            f"Write {field}={legal[0]!r}."
        )


def require_layers(config: AdapterConfig, field: str) -> None:
    """Check that a field is a tuple of layer numbers; lists become tuples, None the default.

    Raises:
        ConfigError: it is something else.
    """
    value = getattr(config, field)
    if value is None:
        value = {f.name: f.default for f in dataclasses.fields(config)}[field]
        object.__setattr__(config, field, value)
        return
    if isinstance(value, str) or not isinstance(value, Sequence):
        value = (value,) if isinstance(value, int) else None
    numbers = tuple(value) if value is not None else ("?",)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
        raise ConfigError(
            f"{type(config).__name__}({field}={getattr(config, field)!r}): {field} is a list of "
            f"layer numbers from 0. Write {field}=[0, 1]."
        )
    object.__setattr__(config, field, numbers)


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): _as_json(v) for k, v in value.items()}
    return value


def _as_field(value: Any) -> Any:
    return tuple(map(_as_field, value)) if isinstance(value, list) else value


_CONFIG_STRING = re.compile(r"(?P<name>[^\[\]|]+)(?:\[(?P<fields>.*)\])?", re.DOTALL)
_QUOTED = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL)


def _parse(text: str) -> AdapterConfig:
    # what stands in quotes may have any signs, the two that divide a union among them
    blank = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), text)
    bars = [match.start() for match in re.finditer(r"\|(?![^\[]*\])", blank)]
    ends = zip([-1, *bars], [*bars, len(text)], strict=True)
    parts = [_parse_one(text[bar + 1 : end].strip()) for bar, end in ends]
    return parts[0] if len(parts) == 1 else ConfigUnion(*parts)


def _parse_one(text: str) -> AdapterConfig:
    match = _CONFIG_STRING.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"config={text!r}: not a config string. Write a name, with fields in brackets if any: "
            f"'lora[r=8,alpha=16]'."
        )
    factory = config_strings.find(match["name"], f"config={text!r}")
    try:
        call = ast.parse(f"f({match['fields'] or ''})", mode="eval").body
        # literal_eval below takes nothing but constants, so no code of the string is run
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else None
        fields = {str(k.arg): ast.literal_eval(k.value) for k in keywords or ()}
    except (SyntaxError, ValueError):
        keywords, fields = None, {}
    if keywords is None or len(fields) < len(keywords):
        raise ConfigError(
            f"config={text!r}: the brackets hold field=value pairs of plain values, each field "
            f"once. Write 'lora[r=8,alpha=16]' or 'lora[attn_matrices=[\"q\",\"k\"]]'."
        )
    config: AdapterConfig = factory()
    kept = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    given = {name: _as_field(value) for name, value in fields.items()}
    return construct(type(config), f"config={text!r}", kept | given)
