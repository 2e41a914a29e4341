"""PEFT's functions of a model's state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapterzoo.errors import names_call
from adapterzoo.inject import quantized
from adapterzoo.model.peft import in_memory, original_weights, switching


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
        UnknownNameError: the adapter is unknown.
    """
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
        UnknownNameError: the adapter is unknown.
    """
    in_memory.fill(model, adapter_name, peft_model_state_dict)
    return LoadResult([], [])


@names_call
def replace_lora_weights_loftq(
    peft_model: Any,
    model_path: str | os.PathLike[str] | None = None,
    adapter_name: str = switching.DEFAULT,
    callback: Callable[[Any, str], bool] | None = None,
) -> None:
    """Give an adapter of LoRA the values that make up best for the quantization of its layers.

    The base model does not change. PEFT takes a scaling of 1 for granted; here any one does.

    Args:
        peft_model: quantized, with the adapter.
        model_path: a folder, a file of safetensors, or a name on the Hub, with the weights before
            quantization; None: what the model was loaded from.
        adapter_name: the adapter.
        callback: called with the model and the name of each layer after it has got its values;
            with False the layer gets its former ones again.

    Raises:
        ConfigError: no layer is quantized, a weight is missing, or the adapter has no such values.
        StateError: the adapter is merged.
        UnknownNameError: the adapter is unknown.
    """
    original_weights.make_up(
        peft_model,
        adapter_name,
        {"init_weights": "loftq", "init_options": {}},
        model_path,
        callback,
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
