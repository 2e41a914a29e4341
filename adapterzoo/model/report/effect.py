"""The relative change of weights, ‖ΔW‖ / ‖W‖.

The Frobenius norms of the base model's weight W and of the change ΔW that merging would add,
computed layer by layer in float32 (float64 for float64), from the low-rank factors of ΔW if the
method has them. Nothing in the model changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import OutputSlice, Site, shown
from adapterzoo.contracts import Adapter, CopyAdapter, compute_dtype, widest
from adapterzoo.errors import StateError
from adapterzoo.inject.adapted import base_of
from adapterzoo.inject.building import at_hand
from adapterzoo.inject.layers import (
    ExpertAdapters,
    as_matrix,
    changed,
    mergeable,
    packing_of,
    take_slice,
)
from adapterzoo.model.state import AdaptedModel, layer_in, modules_of

# number of entries converted to float64 at a time
_CHUNK = 2**22


def site_path(site: Site) -> str:
    """Return the path of a site's layer, with its parameter and the role of its part."""
    names = shown(site.path), site.parameter, site.role if site.output_slice else None
    return ".".join(name for name in names if name)


def parameter_of(site: Site) -> str:
    """Return the name of the parameter that a site adapts, in the module that holds it."""
    return (site.parameter or "weight").rpartition(".")[2]


@torch.no_grad()
def norms(model: AdaptedModel, name: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield ‖ΔW‖ and ‖W‖ for the path of each site whose weight the adapter changes.

    Args:
        model: with adapters, not sharded.
        name: of the adapter.
    """
    state = model._adapter_state
    for path, module in modules_of(model, name):
        layer, originals = layer_in(model, path), state.originals.get(path, {})
        # skip where the values before merging are lost
        if not path or (name in state.merged and not originals):
            continue
        # skip if the adapter does more than change a weight, or the weight cannot be read
        with suppress(StateError), at_hand(layer):
            for placement in state.records[name].places[path]:
                yield site_path(placement.site), _norms_at(layer, module, originals, placement.site)


def _norms_at(
    layer: nn.Module, adapter: Adapter, originals: Mapping[str, Tensor], site: Site
) -> tuple[float, float]:
    """Return ‖ΔW‖ and ‖W‖ of the part of a layer at a site.

    Raises:
        StateError: the adapter is not a change of a weight.
    """
    if isinstance(adapter, CopyAdapter):
        # all parameters of the copied layer
        names = [n for n, p in layer._parameters.items() if p is not None]
        pairs = [_norms_of(layer, adapter, originals, name, None) for name in names]
        changes, weights = zip(*pairs, strict=True)
        return math.hypot(*changes), math.hypot(*weights)
    name = parameter_of(site)
    if not isinstance(adapter, ExpertAdapters) and mergeable(adapter).keeps_weight:
        name = "bias"
    return _norms_of(layer, adapter, originals, name, site.output_slice)


def _norms_of(
    layer: nn.Module,
    adapter: Adapter,
    originals: Mapping[str, Tensor],
    parameter: str,
    features: OutputSlice | None,
) -> tuple[float, float]:
    """Return ‖ΔW‖ and ‖W‖ of some output features of one parameter."""
    stored = _stored(layer, originals, parameter)
    bias = None if parameter == "bias" else layer._parameters.get("bias")
    # a norm has no matrix
    weight = as_matrix(layer, parameter, stored) if stored.dim() > 1 else None
    base = base_of(layer, weight, bias, kept=originals)
    w = stored.to(compute_dtype(stored.dtype))
    norm = _norm(_part(layer, parameter, w, features))
    own = adapter._modules[parameter] if isinstance(adapter, ExpertAdapters) else adapter
    factors = None
    if parameter != "bias" and weight is not None:
        factors = mergeable(own).low_rank_factors(weight.to(w.dtype), base)
    try:
        if factors is not None:
            a, b = factors
            return _norm_of_product(a, take_slice(b, features, -2)), norm
        change = changed(adapter, parameter, w, base, layer) - w
        return _norm(_part(layer, parameter, change, features)), norm
    # a matrix that cannot be inverted, such as one with NaN
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return math.nan, norm


def _stored(layer: nn.Module, originals: Mapping[str, Tensor], parameter: str) -> Tensor:
    """Return a parameter of the base model in floating point, in the layer's own layout.

    Raises:
        StateError: the parameter cannot be read.
    """
    value = originals.get(parameter, layer._parameters.get(parameter))
    if value is not None and (packing := packing_of(value)) is not None:
        value = packing.read(layer, value)
    if value is None or value.is_meta or not value.is_floating_point():
        raise StateError(f"{type(layer).__name__} has no values of {parameter!r}")
    return value.detach()


def _part(layer: nn.Module, parameter: str, t: Tensor, features: OutputSlice | None) -> Tensor:
    return t if features is None else take_slice(as_matrix(layer, parameter, t), features, -2)


def _norm(t: Tensor) -> float:
    """Return the Frobenius norm in float64, converting some rows at a time."""
    rows = max(1, _CHUNK * len(t) // max(t.numel(), 1))
    wide = (part.to(widest(part.device)) for part in t.split(rows))
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in wide))


def _norm_of_product(a: Tensor, b: Tensor) -> float:
    """Return ‖B A‖ = ‖R_B R_Aᵀ‖ with B = Q_B R_B and Aᵀ = Q_A R_A, without the product B A."""
    if not all(bool(t.isfinite().all()) for t in (a, b)):
        return math.nan
    of_b, of_a = (
        torch.linalg.qr(t.to(widest(t.device)), mode="r").R  # [*experts, <= rank, rank]
        for t in (b, a.mT)
    )
    return _norm(of_b @ of_a.mT)
