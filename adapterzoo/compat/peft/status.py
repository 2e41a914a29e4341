"""PEFT's reports on adapters at layers: `get_layer_status` and `get_model_status`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import nn

from adapterzoo.errors import StateError, names_call
from adapterzoo.inject.adapted import Adapted, adapters_of, below_wrappers, plain_class
from adapterzoo.inject.layers import is_quantized
from adapterzoo.model.activation import model_of
from adapterzoo.model.state import is_plain
from adapterzoo.spelling import peft_spellings

from .layers import active_in, merged_in
from .standins import LAYER_CLASSES

T = TypeVar("T")
_IRREGULAR: Literal["irregular"] = "irregular"


@dataclass
class TunerLayerStatus:
    """The adapters of one layer.

    Attributes:
        name: path of the layer.
        module_type: PEFT's method and the class of the layer, "lora.Linear".
        enabled: whether any adapter is active.
        active_adapters: names of the active adapters.
        merged_adapters: names of the merged adapters.
        requires_grad: name of an adapter → whether its parameters are trained.
        available_adapters: names of all adapters of the layer.
        devices: name of an adapter → device types of its tensors.
        quantization_backend: library that quantized the weight; None if unquantized.
    """

    name: str
    module_type: str
    enabled: bool
    active_adapters: list[str]
    merged_adapters: list[str]
    requires_grad: dict[str, bool | Literal["irregular"]]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: str | None


@dataclass
class TunerModelStatus:
    """The adapters of a model; "irregular" if layers differ.

    Attributes:
        base_model_type: class of the model.
        adapter_model_type: PEFT's class for the method of the active adapter.
        peft_types: name of an adapter → PEFT's name of its method.
        trainable_params: number of trained parameters.
        total_params: number of all parameters.
        num_adapter_layers: number of layers with adapters.
        enabled: as for layers, like all other fields.
    """

    base_model_type: str
    adapter_model_type: str
    peft_types: dict[str, str]
    trainable_params: int
    total_params: int
    num_adapter_layers: int
    enabled: bool | Literal["irregular"]
    active_adapters: list[str] | Literal["irregular"]
    merged_adapters: list[str] | Literal["irregular"]
    requires_grad: dict[str, bool | Literal["irregular"]]
    available_adapters: list[str]
    devices: dict[str, list[str]]
    quantization_backend: str | None


def _common(values: Iterable[T]) -> T | Literal["irregular"]:
    """Return the common value."""
    first, *rest = values
    return first if all(value == first for value in rest) else _IRREGULAR


@names_call
def get_layer_status(model: nn.Module) -> list[TunerLayerStatus]:
    """Return the adapters of each layer.

    Args:
        model: a model with adapters.

    Raises:
        StateError: no layer has adapters.
    """
    # as if the model were in a wrapper, as in PEFT
    prefix = "model." if hasattr(type(model), "active_peft_config") else ""
    found = [
        _layer_status(f"{prefix}{path}", below_wrappers(layer))
        for path, layer in model.named_modules()
        if isinstance(
            layer, (LAYER_CLASSES["BaseTunerLayer"], LAYER_CLASSES["ModulesToSaveWrapper"])
        )
    ]
    if not found:
        raise StateError("no layer has an adapter. Write get_peft_model(model, LoraConfig(…)).")
    return found


def _layer_status(path: str, layer: Adapted) -> TunerLayerStatus:
    there = adapters_of(layer)
    own = {name: [*adapter.parameters()] for name, adapter in there.items()}
    tensors = {name: [*ps, *there[name].buffers()] for name, ps in own.items()}
    records, plain = model_of(layer._link.active)._adapter_state.records, plain_class(layer)
    kinds = {_method_of(records[name].config) for name in there if name in records}
    is_copy = not isinstance(layer, LAYER_CLASSES["BaseTunerLayer"])
    kind = "ModulesToSaveWrapper" if is_copy else f"{min(kinds).lower()}.{plain.__name__}"
    weight = layer._parameters.get("weight")
    library = type(weight).__module__.partition(".")[0] if is_quantized(layer) else None
    return TunerLayerStatus(
        name=path,
        module_type=kind,
        enabled=bool(active_in(layer)),
        active_adapters=active_in(layer),
        merged_adapters=merged_in(layer),
        requires_grad={n: _common(p.requires_grad for p in ps) for n, ps in own.items() if ps},
        available_adapters=sorted(there),
        devices={n: sorted({t.device.type for t in ts}) for n, ts in tensors.items()},
        quantization_backend=library,
    )


def _method_of(config: Any) -> str:
    spelling = peft_spellings.get(config.members[0].architecture)
    return type(config).__name__ if spelling is None else spelling.peft_type


def _model_type(config: Any) -> str:
    return type(config).__name__.removesuffix("Config") + "Model"


@names_call
def get_model_status(model: Any) -> TunerModelStatus:
    """Return the adapters of a model.

    Args:
        model: a model with adapters.

    Raises:
        StateError: no layer has adapters.
    """
    layers = get_layer_status(model)
    names = sorted({name for layer in layers for name in layer.available_adapters})
    merged = sorted({name for layer in layers for name in layer.merged_adapters})
    is_mixed = any(
        name in layer.available_adapters and name not in layer.merged_adapters
        for layer in layers
        for name in merged
    )
    is_peft = hasattr(type(model), "active_peft_config")
    configs = dict(model.peft_config) if is_peft else {}
    trained, total = _counts(model)
    active = configs.get(next(iter(layers[0].active_adapters or names)))
    grads = {n: [s.requires_grad[n] for s in layers if n in s.requires_grad] for n in names}
    return TunerModelStatus(
        base_model_type="other" if is_plain(model) and not is_peft else type(model).__name__,
        adapter_model_type="None" if active is None else _model_type(active),
        peft_types={name: str(config.peft_type.value) for name, config in configs.items()},
        trainable_params=trained,
        total_params=total,
        num_adapter_layers=len(layers),
        enabled=_common(layer.enabled for layer in layers),
        active_adapters=_common(layer.active_adapters for layer in layers),
        merged_adapters=_IRREGULAR if is_mixed else merged,
        requires_grad={name: _common(values) for name, values in grads.items() if values},
        available_adapters=names,
        devices={
            name: sorted({kind for s in layers for kind in s.devices.get(name, ())})
            for name in names
        },
        quantization_backend=_common(layer.quantization_backend for layer in layers),
    )


def _counts(model: Any) -> tuple[int, int]:
    if hasattr(model, "get_nb_trainable_parameters"):
        found: tuple[int, int] = model.get_nb_trainable_parameters()
        return found
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)
