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

from .auto import (
    AutoPeftModel,
    AutoPeftModelForCausalLM,
    AutoPeftModelForFeatureExtraction,
    AutoPeftModelForQuestionAnswering,
    AutoPeftModelForSeq2SeqLM,
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
)
from .configs import PeftConfig, TaskType, config_classes, part_classes
from .functions import (
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
    replace_lora_weights_loftq,
    set_peft_model_state_dict,
)
from .model import PeftModel, get_peft_model

__all__ = [
    "AutoPeftModel",
    "AutoPeftModelForCausalLM",
    "AutoPeftModelForFeatureExtraction",
    "AutoPeftModelForQuestionAnswering",
    "AutoPeftModelForSeq2SeqLM",
    "AutoPeftModelForSequenceClassification",
    "AutoPeftModelForTokenClassification",
    "PeftConfig",
    "PeftModel",
    "TaskType",
    "get_peft_model",
    "get_peft_model_state_dict",
    "prepare_model_for_kbit_training",
    "replace_lora_weights_loftq",
    "set_peft_model_state_dict",
]


def __getattr__(name: str) -> Any:
    found: Any = config_classes().get(name) or part_classes().get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *config_classes(), *part_classes()})
