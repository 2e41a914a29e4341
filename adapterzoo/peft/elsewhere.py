"""PEFT's public names that are not here, and what to write instead."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from typing import Any, NoReturn

from adapterzoo.errors import FieldError, listing

_PER_LAYER = "Prefixes are made per layer; leave it out"
_TRAINED = "A prefix is trained from its start. Write PrefixTuningConfig(num_virtual_tokens=…)"
_FROM_DATA = "Write get_peft_model(model, config, init_data=batches)"
_SUMMARY = "Write model.adapter_summary(), or model.get_adapter(name)"
_LORA = "Write model.convert_adapter(name, rank=8)"

_HINTS = {
    "MODEL_TYPE_TO_PEFT_MODEL_MAPPING": "A model keeps its own class. Write PeftModel",
    "PEFT_TYPE_TO_CONFIG_MAPPING": "Write get_peft_config({'peft_type': …})",
    "PEFT_TYPE_TO_MIXED_MODEL_MAPPING": "Write get_peft_model(model, config)",
    "PEFT_TYPE_TO_TUNER_MAPPING": "Write get_peft_model(model, config)",
    "NoMatchingPeftModuleError": "Write adapterzoo.errors.SiteError",
    "PeftError": "Write adapterzoo.errors.AdapterZooError",
    "PeftMixedModel": "A model may have adapters of several methods. Write PeftModel",
    "PeftWarning": "What PEFT warns of is an error. Write adapterzoo.errors.AdapterZooError",
    "TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING": _PER_LAYER,
    "bloom_model_postprocess_past_key_value": _PER_LAYER,
    "compose_cartridge_adapters": "Write model.set_active_adapters(Stack('a', 'b'))",
    "convert_to_lora": _LORA,
    "create_arrow_model": "There is no router. Write model.set_active_adapters(Average('a', 'b'))",
    "find_kappa_target_modules": "Write the names of the layers: target_modules=[…]",
    "get_base_model_state_dict": "Write model.unload().state_dict()",
    "get_eva_state_dict": _FROM_DATA,
    "get_layer_status": _SUMMARY,
    "get_model_status": _SUMMARY,
    "initialize_kv_prefix_from_past_key_values": _TRAINED,
    "initialize_kv_prefix_from_text": _TRAINED,
    "initialize_lora_eva_weights": _FROM_DATA,
    "preprocess_loraga": "Write init_lora_weights='eva' or 'corda' and init_data=batches",
    "prompt_embeddings_from_past_key_values": _TRAINED,
    "save_as_lora": f"{_LORA} and model.save_pretrained(folder)",
    "set_base_model_state_dict": "Write model.load_state_dict(tensors) before get_peft_model(…)",
    "shift_tokens_right": "Models of transformers do it. Write model(…, labels=labels)",
}
_READ = "such adapters are only read from files. To train one write"

NOT_MADE = {
    "AdaLoraConfig": f"{_READ} LoraConfig(…)",
    "CPTConfig": f"{_READ} PromptTuningConfig(…)",
    "CartridgeConfig": f"{_READ} PrefixTuningConfig(…)",
    "LoraModel": "layers are not wrapped. Write get_peft_model(model, LoraConfig(…))",
    "PromptEncoderConfig": f"{_READ} PromptTuningConfig(…)",
}
"""Classes that scripts may import but not call → what to write."""

_OF_LAYERS = "Model", "Encoder", "Embedding", "Init", "Type"


def missing(name: str, known: Iterable[str]) -> str:
    """Return the message on a name that `adapterzoo.peft` does not have.

    Args:
        name: that was asked for.
        known: those that there are.
    """
    there, start = sorted(known), f"adapterzoo.peft has no {name!r}"
    if name in _HINTS:
        return f"{start}. {_HINTS[name]}."
    if name.startswith("PeftModelFor"):
        return f"{start}: a model keeps its own class. Write PeftModel."
    if name.endswith("Config"):
        configs = [each for each in there if each.endswith("Config") and each != "PeftConfig"]
        return (
            f"{start}: there is no such method, or it is only read from files. Methods: "
            f"{listing(configs, limit=40)}. Write one of these; `adapterzoo convert SRC DST --to "
            f"lora` makes LoRA of files of other methods."
        )
    if name.endswith(_OF_LAYERS):
        return f"{start}: layers are not wrapped. Write get_peft_model(model, config)."
    close = difflib.get_close_matches(name, there, 1) or there
    return f"{start}; its names: {listing(close, limit=50)}. Write one of these."


@functools.cache
def not_made(name: str) -> type[Any]:
    """Return a class that can be imported, but has no instances.

    Args:
        name: among `NOT_MADE`.

    Raises:
        FieldError: the class is called.
    """

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise FieldError(f"{name}(…): {NOT_MADE[name]}.")

    doc = f"PEFT's `{name}`: {NOT_MADE[name]}."
    return type(name, (), {"__new__": refuse, "__doc__": doc, "__module__": "adapterzoo.peft"})
