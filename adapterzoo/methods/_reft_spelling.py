"""ReFT in AdapterHub's files."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import widest
from adapterzoo.errors import CheckpointError
from adapterzoo.spelling import (
    AdapterHubFile,
    AdapterHubSpelling,
    Container,
    Fields,
    Tensors,
    same,
)

_ORIGINAL = "projection.parametrizations.weight.original"
_PREFIX, _SUFFIX = "units.0.", "units.1."
_BASE = "projection.parametrizations.weight.0.base"


def adapterhub(config: type[AdapterConfig]) -> AdapterHubSpelling:
    """Return how AdapterHub spells ReFT."""
    return AdapterHubSpelling(
        config=config,
        architecture=("reft",),
        fields=same(
            "layers", "prefix_positions", "suffix_positions", "r", "orthogonality", "tied_weights",
            "dropout", "non_linearity", "dtype", "output_reft", "init_weights_seed",
        ),
        # read where a file has it
        omitted=("subtract_projection",),
        unsayable=_unsayable,
        read_fields=_read_fields,
        containers=(Container("refts", "block", below="reft_layer", read=_read, write=_write),),
    )  # fmt: skip


def _used(config: AdapterConfig) -> tuple[str, ...]:
    """Return the names of the units that edit tokens."""
    values = config.to_dict()
    if values["tied_weights"]:
        return (_PREFIX,)
    counts = {_PREFIX: values["prefix_positions"], _SUFFIX: values["suffix_positions"]}
    return tuple(unit for unit, count in counts.items() if count)


def _read_fields(fields: Fields, _file: AdapterHubFile) -> Fields:
    """Return the fields of a file; warn if they fit both NoReFT and DiReFT."""
    if not fields.get("orthogonality", True) and "subtract_projection" not in fields:
        warnings.warn(
            "adapter_config.json does not say whether this adapter is NoReFT or DiReFT, which "
            "adapters writes alike: NoReFT is loaded. For DiReFT write "
            "'subtract_projection': false among the fields of 'config' in the file.",
            stacklevel=2,
        )
    return fields


def _unsayable(config: AdapterConfig) -> str | None:
    """Return the reason why a file would be read as that of another method."""
    if config.get("subtract_projection"):
        return None
    return "it has no subtract_projection=False, so that DiReFT would be loaded as NoReFT"


def _units(tensors: Tensors) -> dict[str, Tensors]:
    """Return the tensors by unit, e.g. "units.0."."""
    found: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        unit, number, parameter = name.split(".", 2)
        found.setdefault(f"{unit}.{number}.", {})[parameter] = tensor
    return found


def _read(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    for unit, own in _units(tensors).items():
        if unit not in _used(config):
            continue
        for end in ("weight", "bias"):
            found[f"{unit}source.{end}"] = own.pop(f"learned_source.{end}")
        if _ORIGINAL in own:
            original, base = own.pop(_ORIGINAL), own.pop(_BASE)
            rows = _rows(*(t.to(widest(t.device)) for t in (original, base))).to(original.dtype)
        else:
            rows = own.pop("projection.weight")
        found[f"{unit}projection"] = rows
        # the comparison with the model finds surplus tensors
        found |= {f"{unit}{name}": tensor for name, tensor in own.items()}
    return found


def _rows(original: Tensor, base: Tensor) -> Tensor:
    """Return R `[r, d]` of torch's orthogonal parametrization.

    Raises:
        CheckpointError: the tensors do not fit each other.
    """
    if original.dim() != 2 or base.shape != (original.shape[1],) * 2:
        raise CheckpointError(
            f"the file has a projection of {list(original.shape)} and its base of "
            f"{list(base.shape)}; they are [r, d] and [d, d]. Copy the file again from where it "
            f"was saved."
        )
    below = original.T.tril(-1)  # [d, r]
    scale = original.T.diagonal().int().to(below)  # [r]
    tau = 2 / (1 + below.square().sum(0))  # [r]
    Q = torch.linalg.householder_product(below, tau) * scale  # [d, r]
    rows: Tensor = (base @ Q).T  # [r, d]
    return rows


def _write(tensors: Tensors, config: AdapterConfig) -> Tensors:
    found: Tensors = {}
    units = _units(tensors)
    values = config.to_dict()
    if not values["tied_weights"]:
        # adapters saves unused units too
        any_unit = next(iter(units.values()))
        units = {unit: units.get(unit, any_unit) for unit in (_PREFIX, _SUFFIX)}
    for unit, own in units.items():
        for end in ("weight", "bias"):
            found[f"{unit}learned_source.{end}"] = own[f"source.{end}"]
        if not values["orthogonality"]:
            found[f"{unit}projection.weight"] = own["projection"]
            continue
        R = own["projection"]
        # orthonormal rows as in the forward pass, completed to a basis
        wide = R.to(widest(R.device))
        L = torch.linalg.cholesky(wide @ wide.T)  # [r, r]
        rows = torch.linalg.solve_triangular(L, wide, upper=False)  # [r, d]
        base = torch.linalg.qr(rows.T, mode="complete").Q  # [d, d]
        base[:, : len(R)] = rows.T
        found[f"{unit}{_ORIGINAL}"] = -torch.eye(*R.shape, dtype=R.dtype)
        found[f"{unit}{_BASE}"] = base.to(R.dtype)
    return found
