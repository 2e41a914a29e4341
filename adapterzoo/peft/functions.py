"""PEFT's functions besides `get_peft_model`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adapterzoo import hub
from adapterzoo.errors import ConfigError, StateError, names_call
from adapterzoo.formats import peft as format_of_peft
from adapterzoo.inject import quantized
from adapterzoo.model import AdapterModelMixin
from adapterzoo.model.peft import in_memory, original_weights, switching

from .configs import PeftConfig, from_values


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
def load_peft_weights(
    model_id: str | os.PathLike[str], device: Any = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Return the tensors in an adapter's folder, by their keys in PEFT's files.

    Args:
        model_id: a folder, or `user/repository`.
        device: to put them on; None: the CPU.
        **kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises:
        CheckpointError: there is no such file.
        FieldError: an argument is unknown.
    """
    revision = kwargs.pop("revision", None)
    folder = hub.resolve(model_id, revision, **hub.checked(kwargs))
    tensors = format_of_peft.tensors_in(folder)
    return {key: tensor.to(device or "cpu") for key, tensor in tensors.items()}


@names_call
def get_peft_config(config_dict: Mapping[str, Any]) -> PeftConfig:
    """Return the config object for a dict of fields.

    Args:
        config_dict: with `peft_type`.

    Raises:
        CheckpointError: there is no such method here.
        FieldError: the method is only read, or there is no such field.
    """
    kind = {"peft_type": config_dict.get("peft_type")}
    return from_values(kind, {k: v for k, v in config_dict.items() if k != "peft_type"})


@names_call
def cast_mixed_precision_params(model: Any, dtype: torch.dtype) -> None:
    """Convert parameters that are trained to float32, and all others to half precision.

    Args:
        model: with adapters.
        dtype: float16 or bfloat16.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and quantized.packing_of(parameter) is None:
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


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
    original_weights.compensate(
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
        # torch's own default, without which it warns
        options = {"use_reentrant": True, **(gradient_checkpointing_kwargs or {})}
        if options["use_reentrant"]:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model
