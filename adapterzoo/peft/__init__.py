"""PEFT's names over models of this library: change the import, and keep the code.

```python
from adapterzoo.peft import LoraConfig, get_peft_model

model = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM"))
model.save_pretrained("folder")  # files that PEFT loads too
```

The model is not wrapped: it keeps its class's methods, and its parameters keep their names. The
classes of configs are made from what the files of methods declare.
"""

from __future__ import annotations

from typing import Any

from adapterzoo import __version__
from adapterzoo.compat.peft.classes import (
    NOT_MADE,
    LoraRuntimeConfig,
    PeftConfig,
    PeftType,
    PromptLearningConfig,
    TaskType,
    config_classes,
    field_classes,
    not_made,
)
from adapterzoo.compat.peft.install import install
from adapterzoo.compat.peft.model import (
    TASK_CLASSES,
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForFeatureExtraction,
    AutoPeftModelForQuestionAnswering,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    PeftMixedModel,
    PeftModel,
    cast_mixed_precision_params,
    convert_to_lora,
    get_base_model_state_dict,
    get_peft_config,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    load_peft_weights,
    prepare_model_for_kbit_training,
    replace_lora_weights_loftq,
    save_as_lora,
    set_base_model_state_dict,
    set_peft_model_state_dict,
)
from adapterzoo.compat.peft.standins import LAYER_CLASSES
from adapterzoo.compat.peft.status import get_layer_status, get_model_status
from adapterzoo.errors import no_attribute

__all__ = [
    "AutoPeftModel",
    "AutoPeftModelForCausalLM",
    "AutoPeftModelForFeatureExtraction",
    "AutoPeftModelForQuestionAnswering",
    "AutoPeftModelForSeq2SeqLM",
    "AutoPeftModelForSequenceClassification",
    "AutoPeftModelForTokenClassification",
    "LoraRuntimeConfig",
    "PeftConfig",
    "PeftMixedModel",
    "PeftModel",
    "PeftType",
    "PromptLearningConfig",
    "TaskType",
    "__version__",
    "cast_mixed_precision_params",
    "convert_to_lora",
    "get_base_model_state_dict",
    "get_layer_status",
    "get_model_status",
    "get_peft_config",
    "get_peft_model",
    "get_peft_model_state_dict",
    "inject_adapter_in_model",
    "install",
    "load_peft_weights",
    "prepare_model_for_kbit_training",
    "replace_lora_weights_loftq",
    "save_as_lora",
    "set_base_model_state_dict",
    "set_peft_model_state_dict",
]


def __getattr__(name: str) -> Any:
    known = {**config_classes(), **field_classes(), **TASK_CLASSES, **LAYER_CLASSES}
    if name in known:
        return known[name]
    if name in NOT_MADE:
        return not_made(name)
    instead = "what docs/from-peft.md shows in its place"
    raise no_attribute(__name__, name, __dir__(), lambda _: [instead])


def __dir__() -> list[str]:
    made = {*config_classes(), *field_classes(), *TASK_CLASSES, *LAYER_CLASSES, *NOT_MADE}
    return sorted({*__all__, *made})
