"""PEFT's functions of a model's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapterzoo.errors import ConfigError, StateError, names_call
from adapterzoo.inject import quantized
from adapterzoo.model import AdapterModelMixin
from adapterzoo.model.peft import in_memory, switching


class LoadResult(NamedTuple):
    """What did not fit: always nothing, as a difference is an error."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@names_call
def get_peft_model_state_dict(
    model: Any,
    state_dict: Mapping[str, Tensor] | None = None,
    adapter_name: str = switching.DEFAULT,
) -> dict[str, Tensor]:
    """Return the tensors of an adapter, and of its head, by their keys in PEFT's files.

    Args:
        model: with adapters.
        state_dict: must be None.
        adapter_name: the adapter.

    Raises:
        CheckpointError: PEFT has no such adapter.
        ConfigError: a `state_dict` is given.
        StateError: the model has no adapters.
        UnknownNameError: the adapter is unknown.
    """
    _check_model(model)
    return in_memory.tensors_of_peft(model, adapter_name, state_dict)


@names_call
def set_peft_model_state_dict(
    model: Any,
    peft_model_state_dict: Mapping[str, Tensor],
    adapter_name: str = switching.DEFAULT,
) -> LoadResult:
    """Give an adapter, and its head, values that `get_peft_model_state_dict` returned.

    Args:
        model: with adapters.
        peft_model_state_dict: tensors by PEFT's keys.
        adapter_name: the adapter.

    Returns:
        Two empty lists.

    Raises:
        CheckpointError: they are not those of the adapter; nothing has changed then.
        ConfigError: they are not tensors by keys.
        StateError: the model has no adapters.
        UnknownNameError: the adapter is unknown.
    """
    _check_model(model)
    values: object = peft_model_state_dict
    if not isinstance(values, Mapping) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in values.items()
    ):
        raise ConfigError(
            f"peft_model_state_dict, a {type(values).__name__}, does not map PEFT's keys to "
            f"tensors. Write what get_peft_model_state_dict(model) returns."
        )
    in_memory.fill(model, adapter_name, peft_model_state_dict)
    return LoadResult([], [])


def _check_model(model: object) -> None:
    if not isinstance(model, AdapterModelMixin):
        raise StateError(
            f"a {type(model).__name__} has no adapters. Write get_peft_model(model, config)."
        )


@names_call
def prepare_model_for_kbit_training(
    model: Any,
    use_gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Freeze a model, convert its parameters in half precision to float32, and save memory.

    A quantized model gets gradient checkpointing; its quantized weights do not change.

    Args:
        model: of transformers.
        use_gradient_checkpointing: whether a quantized model computes activations again.
        gradient_checkpointing_kwargs: of `gradient_checkpointing_enable`.

    Returns:
        The same object.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        is_plain = quantized.packing_of(parameter) is None
        if is_plain and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    if use_gradient_checkpointing and getattr(model, "is_quantized", False):
        options = dict(gradient_checkpointing_kwargs or {})
        if options.get("use_reentrant", True):
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model
