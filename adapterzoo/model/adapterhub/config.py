"""`model.adapters_config`: the adapters and fusions of a model, as `adapters` shows them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from adapterzoo.composition import Composition
from adapterzoo.config import AdapterConfig, Config
from adapterzoo.methods.fusion import AdapterFusionConfig
from adapterzoo.model.state import AdapterState
from adapterzoo.runtime import ActiveState


class AdaptersConfig(Mapping[str, AdapterConfig]):
    """The adapters of a model: names to configs, in the order of adding. Read-only."""

    def __init__(self, state: AdapterState, active: ActiveState) -> None:
        """Make a live view.

        Args:
            state: the state of the model.
            active: what is active in the model.
        """
        self._state = state
        self._active = active

    def __getitem__(self, name: str) -> AdapterConfig:
        """Return the config of the adapter."""
        return self._state.find(name).config

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._state.records)

    def __len__(self) -> int:
        """Return the number of adapters."""
        return len(self._state.records)

    def __repr__(self) -> str:
        """Show names and configs."""
        return f"AdaptersConfig({dict(self)!r})"

    @property
    def adapters(self) -> dict[str, str]:
        """Names of adapters to keys of `config_map`."""
        return {name: _key(config) for name, config in self.items()}

    @property
    def config_map(self) -> dict[str, AdapterConfig]:
        """The configs of adapters, each once."""
        return {_key(config): config for config in self.values()}

    @property
    def fusions(self) -> dict[str, str]:
        """Names of fusions to keys of `fusion_config_map`."""
        return {name: _key(record.config) for name, record in self._state.fusions.items()}

    @property
    def fusion_config_map(self) -> dict[str, AdapterFusionConfig]:
        """The configs of fusions, each once."""
        return {_key(record.config): record.config for record in self._state.fusions.values()}

    @property
    def fusion_name_map(self) -> dict[str, list[str]]:
        """Names of fusions that have a name of their own, to the adapters that they fuse."""
        found = self._state.fusions.items()
        return {n: [*r.adapters] for n, r in found if n != ",".join(r.adapters)}

    @property
    def active_setup(self) -> Composition | None:
        """The composition that is active outside of any `AdapterSetup`."""
        return self._active.default.plan.setup

    @property
    def skip_layers(self) -> list[int] | None:
        """The blocks in which no adapter acts; None without any."""
        return list(self._active.default.plan.skip_layers) or None

    def get_fusion(
        self, fusion_name: str | Sequence[str]
    ) -> tuple[AdapterFusionConfig, list[str]] | tuple[None, None]:
        """Return the config of a fusion and its adapters; (None, None) if there is none.

        Args:
            fusion_name: its name, or the names of its adapters.
        """
        name = fusion_name if isinstance(fusion_name, str) else ",".join(fusion_name)
        found = self._state.fusions.get(name)
        return (None, None) if found is None else (found.config, list(found.adapters))

    def match(
        self,
        adapter_name: str,
        config_type: type[AdapterConfig],
        layer_idx: int | None = None,
        location_key: str | None = None,
    ) -> AdapterConfig | None:
        """Return the config of an adapter, or the first member of its union, that meets conditions.

        Args:
            adapter_name: the adapter.
            config_type: the class of the config.
            layer_idx: number of a block that the config does not leave out; None for any.
            location_key: a field that is set in the config; None for any.

        Returns:
            The config; None if the adapter is unknown, or has no such config.
        """
        config = self.get(adapter_name)
        for member in () if config is None else config.members:
            is_there = layer_idx not in member.get("leave_out", ())
            has_location = location_key is None or member.get(location_key)
            if isinstance(member, config_type) and is_there and has_location:
                return member
        return None


def _key(config: Config) -> str:
    """Return text that only equal configs share."""
    document: Any = json.dumps(config.to_dict(), sort_keys=True)
    return hashlib.sha1(document.encode(), usedforsecurity=False).hexdigest()[:16]
