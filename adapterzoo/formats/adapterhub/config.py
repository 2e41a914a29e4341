"""AdapterHub's configs in our fields, and back, as the spellings of the methods declare."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from adapterzoo.anatomy import Anatomy
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.errors import AdapterZooError, CheckpointError, listing
from adapterzoo.formats.checkpoint import inexpressible, method_of
from adapterzoo.formats.files import AGAIN
from adapterzoo.spelling import AdapterHubFile, AdapterHubSpelling, adapterhub_spellings

# the release whose format is written
VERSION = "adapters.1.3.0"


def joined(members: Sequence[AdapterConfig]) -> AdapterConfig:
    """Return a union of the configs, or the only one."""
    return members[0] if len(members) == 1 else ConfigUnion(*members)


def read_config(metadata: Mapping[str, Any], file: AdapterHubFile) -> AdapterConfig:
    """Return the config in an `adapter_config.json`.

    Raises:
        CheckpointError: there is no such method here, or a value is not legal.
    """
    values = metadata.get("config")
    try:
        if isinstance(values, str):
            config = AdapterConfig.load(values)
            for member in config.members:
                spelling_of(member)
            return config
        if not isinstance(values, Mapping):
            raise CheckpointError(
                f"adapter_config.json has config={values!r}, which is not an object of fields. "
                f"{AGAIN}."
            )
        if values.get("architecture") != ConfigUnion.architecture:
            return _read(values, file)
        members = values.get("configs")
        members = members if isinstance(members, list) else [members]
        return ConfigUnion(*(_read(member, file) for member in members))
    except CheckpointError:
        raise
    except AdapterZooError as error:
        raise CheckpointError(
            f"the config of the checkpoint is not legal; nothing has been loaded. {error}"
        ) from error


def spelling_of(config: AdapterConfig) -> AdapterHubSpelling:
    """Return how AdapterHub spells the method of a config.

    Raises:
        CheckpointError: it does not have the method.
    """
    if config.architecture not in adapterhub_spellings:
        raise unsayable(config, f"{type(config).__name__} is not a method of adapters")
    return adapterhub_spellings[config.architecture]


def added(members: Sequence[AdapterConfig], anatomy: Anatomy) -> list[AdapterConfig]:
    """Return what an adapter of these configs has besides in `adapters`, which no file names."""
    found = (s.added(members, anatomy) for s in adapterhub_spellings.values() if s.added)
    return [config for config in found if config is not None]


def _read(values: object, file: AdapterHubFile) -> AdapterConfig:
    if not isinstance(values, Mapping):
        raise CheckpointError(
            f"the union in adapter_config.json has the member {values!r}, which is not an object. "
            f"{AGAIN}."
        )
    name = values.get("architecture")
    spelling = method_of(
        values,
        "architecture",
        [s for s in adapterhub_spellings.values() if name in s.architecture],
        f"AdapterHub that exist here: {listing(adapterhub_spellings, limit=40)}. Nothing has been "
        f"loaded.",
    )
    dropped = {*spelling.fixed, *spelling.constants, "architecture"}
    fields = {spelling.fields.get(k, str(k)): v for k, v in values.items() if k not in dropped}
    fields = {**spelling.read_fields(fields, file), **spelling.implied}
    return AdapterConfig.from_dict({**fields, "architecture": spelling.config.architecture})


def write_config(config: AdapterConfig) -> dict[str, Any]:
    """Return the config as `adapters` writes it.

    Raises:
        CheckpointError: `adapters` has no such adapter.
    """
    if isinstance(config, ConfigUnion):
        members = [write_config(member) for member in config.configs]
        for (one, written), (other, also) in itertools.combinations(
            zip(config.configs, members, strict=True), 2
        ):
            alike = written.get("architecture") == also.get("architecture")
            everywhere = not (written.get("leave_out") or also.get("leave_out"))
            if alike and everywhere and not spelling_of(one).joins(one, other):
                raise unsayable(
                    config,
                    f"adapters refuses unions of {one!r} and {other!r}, which are one method there",
                )
        return {"architecture": config.architecture, "configs": members}
    spelling = spelling_of(config)
    if (reason := spelling.unsayable(config)) is not None:
        raise unsayable(config, reason)
    values = config.to_dict()
    legal = {**{f.name: _default(f) for f in dataclasses.fields(config)}, **spelling.implied}
    sayable = {*spelling.fields.values(), *spelling.omitted}
    # `to_dict` leaves out fields that only this library has
    wrong = [k for k, v in legal.items() if k not in sayable and values.get(k, v) != v]
    if wrong:
        shown = ", ".join(f"{name}={values[name]!r}" for name in sorted(wrong))
        raise unsayable(config, f"adapters has no {shown}")
    written = {theirs: values[ours] for theirs, ours in spelling.fields.items()}
    written |= {**spelling.fixed, **spelling.constants}
    name = spelling.architecture[0]
    return written if name is None else {"architecture": name, **written}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def unsayable(config: AdapterConfig, why: str) -> CheckpointError:
    """Return the error for a config that AdapterHub's format cannot express."""
    return inexpressible(f"AdapterHub's format cannot express {config!r}: {why}")
