"""PEFT's functions that add an adapter to a model of transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from adapterzoo.errors import ConfigError, names_call
from adapterzoo.model import AdapterModelMixin, init
from adapterzoo.model.hf.init_data import InitData
from adapterzoo.model.peft import switching

from .model import as_peft, plain_on_error, refuse_uninitialized


@names_call
def get_peft_model(
    model: PreTrainedModel,
    peft_config: Any,
    adapter_name: str = switching.DEFAULT,
    autocast_adapter_dtype: bool = True,
    low_cpu_mem_usage: bool = False,
    init_data: InitData = None,
) -> Any:
    """Add an adapter to a model of transformers, which is changed in place, and train it.

    Args:
        model: of transformers; its mode does not change.
        peft_config: a config of PEFT, or of this library.
        adapter_name: to give it.
        autocast_adapter_dtype: whether the adapter has float32 parameters over layers in half
            precision, unless its config has a `dtype`. Copies of layers keep their dtype.
        low_cpu_mem_usage: must be False: an adapter that is trained needs its values.
        init_data: batches, each with the arguments of a call, for `init_lora_weights="eva"` and
            "corda", which PEFT takes in functions of their own; or the weights before quantization
            for "loftq", see `add_adapter`.

    Returns:
        The same object.

    Raises:
        CheckpointError: PEFT's format cannot express what a config of PEFT gives in this model.
        ConfigError: a value of the config has no meaning here, or initial values need data.
        StateError: the model has no adapters of this library, but layers of PEFT.
    """
    refuse_uninitialized(low_cpu_mem_usage)
    if peft_config is None:
        raise ConfigError("peft_config=None: there is no config. Write LoraConfig(r=8).")
    with plain_on_error(model):
        made = as_peft(model)
        made.add_adapter(
            adapter_name, peft_config, init_data=init_data,
            autocast_adapter_dtype=autocast_adapter_dtype,
        )  # fmt: skip
    switching.train(made, adapter_name, not getattr(peft_config, "inference_mode", False))
    return made


@names_call
def inject_adapter_in_model(
    peft_config: Any,
    model: PreTrainedModel,
    adapter_name: str = switching.DEFAULT,
    low_cpu_mem_usage: bool = False,
) -> Any:
    """Add an adapter to a model of transformers, which keeps its own `save_pretrained`.

    Args:
        peft_config: a config of PEFT.
        model: changed in place.
        adapter_name: to give it.
        low_cpu_mem_usage: must be False: an adapter that is trained needs its values.

    Returns:
        The same object.

    Raises:
        ConfigError: a value of the config has no meaning here.
    """
    refuse_uninitialized(low_cpu_mem_usage)
    with plain_on_error(model):
        made: Any = model if isinstance(model, AdapterModelMixin) else init(model)
        made.add_adapter(peft_config, adapter_name=adapter_name)
    return made
