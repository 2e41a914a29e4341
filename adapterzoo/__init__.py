"""adapterzoo: named adapters and prediction heads for every model of transformers 5.

```python
from adapterzoo import AutoAdapterModel

model = AutoAdapterModel.from_pretrained("bert-base-uncased")
model.add_adapter("reviews", config="lora[r=8]")
model.add_classification_head("reviews", num_labels=2)
model.train_adapter("reviews")
```
"""

from __future__ import annotations

import importlib
from typing import Any

from .errors import no_attribute as _no_attribute
from .hosts import watch as _watch

__version__ = "0.2.0"

# hosts are told what they need to know of models with adapters
_watch()

# the public names of each module but those of methods; imported on first use, so that
# `import adapterzoo` alone does not import torch or transformers
_HOMES = {
    "auto": ("AdapterModel", "AutoAdapterModel"),
    "composition": (
        "Average", "BatchSplit", "Fuse", "MultiTask", "Parallel", "Split", "Stack",
    ),
    "config": ("AdapterConfig", "ConfigUnion", "MultiTaskConfig"),
    "errors": ("AdapterZooError", "BaseModelWarning"),
    "heads": (
        "DependencyParsingHead", "LMHead", "MultipleChoiceHead", "PooledHead", "PredictionHead",
        "QuestionAnsweringHead", "TaggingHead", "TaskHead",
    ),
    "hub": ("AdapterInfo", "adapter_info", "list_adapters"),
    "model": ("AdapterModelMixin", "AdapterSetup", "init", "load_model"),
    "multi": ("MultiAdapterTrainer", "sweep"),
    "trainer": ("AdapterTrainer", "Seq2SeqAdapterTrainer"),
}  # fmt: skip

# names under which code for `adapters` finds things here
_OF_ADAPTERS = {
    "auto": ("ModelWithFlexibleHeadsAdaptersMixin",),
    "composition": ("AdapterCompositionBlock", "parse_composition", "validate_composition"),
    "configuration": (
        "ADAPTERFUSION_CONFIG_MAP", "ADAPTER_CONFIG_MAP", "DEFAULT_ADAPTERFUSION_CONFIG",
        "DEFAULT_ADAPTER_CONFIG", "ModelAdaptersConfig",
    ),
    "heads": (
        "BertStyleMaskedLMHead", "BiaffineParsingHead", "CausalLMHead", "ClassificationHead",
        "ImageClassificationHead", "MultiLabelClassificationHead", "Seq2SeqLMHead",
    ),
    "interface": ("AdapterMethod", "AdapterModelInterface"),
    "model": ("ModelAdaptersMixin", "ModelWithHeadsAdaptersMixin"),
    "model.heads.outputs": ("DependencyParsingOutput", "MultiHeadOutput"),
    "models": ("ADAPTER_MODEL_MAPPING",),
    "training": ("AdapterArguments", "setup_adapter_training"),
    "utils": ("AdapterType", "get_adapter_config_hash", "get_adapter_info"),
}  # fmt: skip

# modules that are imported when they are asked for, `adapterzoo.peft`
_MODULES = (
    "anatomy", "call", "composition", "config", "configuration", "context", "contracts", "errors",
    "heads", "hub", "interface", "kernels", "loading", "loraplus", "methods", "model", "models",
    "multi", "peft", "serving", "spelling", "testing", "trainer", "training", "utils", "wrappers",
)  # fmt: skip

__all__ = [
    "AdapterConfig",
    "AdapterFusionConfig",
    "AdapterInfo",
    "AdapterModel",
    "AdapterModelMixin",
    "AdapterPlusConfig",
    "AdapterSetup",
    "AdapterTrainer",
    "AdapterZooError",
    "AutoAdapterModel",
    "Average",
    "BOFTConfig",
    "BaseModelWarning",
    "BatchSplit",
    "BnConfig",
    "CompacterConfig",
    "CompacterPlusPlusConfig",
    "ConfigUnion",
    "DependencyParsingHead",
    "DiReftConfig",
    "DoRAConfig",
    "DoubleSeqBnConfig",
    "DoubleSeqBnInvConfig",
    "DvoRAConfig",
    "DynamicAdapterFusionConfig",
    "Fuse",
    "IA3Config",
    "LMHead",
    "LNTuningConfig",
    "LoHaConfig",
    "LoKrConfig",
    "LoRAConfig",
    "LoReftConfig",
    "MAMConfig",
    "MTLLoRAConfig",
    "MissConfig",
    "MultiAdapterTrainer",
    "MultiTask",
    "MultiTaskConfig",
    "MultipleChoiceHead",
    "NoLanguageAdaptersConfig",
    "NoReftConfig",
    "OFTConfig",
    "ParBnConfig",
    "Parallel",
    "PooledHead",
    "PredictionHead",
    "PrefixTuningConfig",
    "PromptTuningConfig",
    "QuestionAnsweringHead",
    "ReftConfig",
    "Seq2SeqAdapterTrainer",
    "SeqBnConfig",
    "SeqBnInvConfig",
    "Split",
    "Stack",
    "StaticAdapterFusionConfig",
    "TaggingHead",
    "TaskHead",
    "TrainableTokensConfig",
    "UniPELTConfig",
    "VeraConfig",
    "adapter_info",
    "init",
    "list_adapters",
    "load_model",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    homes = (*_HOMES.items(), *_OF_ADAPTERS.items(), ("methods", __all__))
    home = next((module for module, names in homes if name in names), None)
    if home is not None:
        return getattr(importlib.import_module(f".{home}", __name__), name)
    if name.endswith("AdapterModel"):
        # BertAdapterModel and other such classes are made on first use
        return importlib.import_module(".auto", __name__).class_named(name)
    raise _no_attribute(__name__, name, __dir__(), _in_peft)


def _in_peft(name: str) -> list[str]:
    is_there = name in dir(importlib.import_module(".peft", __name__))
    return [f"adapterzoo.peft.{name} for PEFT's signature"] if is_there else []


def __dir__() -> list[str]:
    return sorted({"__version__", *__all__, *_MODULES}.union(*_OF_ADAPTERS.values()))
