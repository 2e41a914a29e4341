"""Checks of a config as data: repr, dict, and errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator

from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import ConfigError

from ._case import Case, check, require


@check(kinds=("linear",))
def repr_is_a_call(case: Case) -> None:
    """`repr(config)` is a constructor call that gives an equal config."""
    config = case.config
    known = {cls.__name__: cls for cls in _configs()}
    try:
        # the text is our own: the repr of a dataclass
        made = eval(repr(config), {"__builtins__": {}}, known)
    except (NameError, SyntaxError, TypeError) as error:
        require(False, f"{config!r} cannot be evaluated: {error}")
    require(made == config and type(made) is type(config), f"{config!r} gives another config")


@check(kinds=("linear",))
def dict_round_trip(case: Case) -> None:
    """`to_dict` gives JSON types, and `from_dict` makes an equal config from them."""
    config = case.config
    for member in config.configs if isinstance(config, ConfigUnion) else (config,):
        changed = _varied(member)
        for one in (member, changed) if changed else (member,):
            document = one.to_dict()
            try:
                text = json.dumps(document, allow_nan=False)
            except (TypeError, ValueError) as error:
                require(False, f"to_dict() holds more than JSON types: {error}")
            back = AdapterConfig.from_dict(json.loads(text))
            require(back == one, f"{document!r} gives {back!r}")
            require(hash(back) == hash(one), "equal configs have different hashes")
            require(back.architecture == one.architecture, "the architecture differs")
        require(changed != member, "configs that differ are equal")


@check(kinds=("linear",))
def unknown_fields_raise(case: Case) -> None:
    """An unknown field raises a `ConfigError` that names it, however it is given."""
    member = case.config.configs[0] if isinstance(case.config, ConfigUnion) else case.config
    makers: dict[str, Callable[[], AdapterConfig]] = {
        "from_dict": lambda: AdapterConfig.from_dict(member.to_dict() | {"no_such_field": 1}),
        "replace": lambda: member.replace(no_such_field=1),
    }
    for how, make in makers.items():
        try:
            make()
        except ConfigError as error:
            require("no_such_field" in str(error), f"{how}: the message does not name the field")
        else:
            require(False, f"{how}: an unknown field is accepted")


@check(kinds=("linear",))
def config_is_frozen(case: Case) -> None:
    """A config is immutable, and building adapters does not change it."""
    config = case.config
    before = repr(config)
    for field in dataclasses.fields(config):
        try:
            setattr(config, field.name, getattr(config, field.name))
        except dataclasses.FrozenInstanceError:
            continue
        require(False, f"the field {field.name!r} can be assigned")
    case.host("a")
    require(repr(config) == before, "building an adapter changes its config")


def _configs(base: type[AdapterConfig] = AdapterConfig) -> Iterator[type[AdapterConfig]]:
    for cls in base.__subclasses__():
        yield cls
        yield from _configs(cls)


def _varied(config: AdapterConfig) -> AdapterConfig | None:
    """Return a config with one other value; None if no other legal value is found."""
    named = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    for name, value in (
        ("init_weights_seed", 7),
        ("leave_out", (1,)),
        *((name, not value) for name, value in named.items() if isinstance(value, bool)),
        *((name, value / 2) for name, value in named.items() if isinstance(value, float)),
        *((name, value + 1) for name, value in named.items() if type(value) is int),
    ):
        try:
            return config.replace(**{name: value})
        except ConfigError:
            continue
    return None
