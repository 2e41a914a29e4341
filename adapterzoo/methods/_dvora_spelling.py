"""DVoRA in AdapterHub's files: VeRA with magnitudes."""

from __future__ import annotations

from adapterzoo.configs import AdapterConfig
from adapterzoo.spelling import AdapterHubSpelling, Tensors

from . import _low_rank_adapterhub, _projected_adapterhub


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells DVoRA: as VeRA with `use_dora`."""
    return _projected_adapterhub.spelling(config, "DVoRA", {"use_dora": True}, _read, _write)


def _read(tensors: Tensors, config: AdapterConfig) -> Tensors:
    named = _projected_adapterhub.read(tensors, config)
    return _low_rank_adapterhub.read_magnitudes(named, config)


def _write(tensors: Tensors, config: AdapterConfig) -> Tensors:
    named = _low_rank_adapterhub.write_magnitudes(tensors, config)
    return _projected_adapterhub.write(named, config)
