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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto import AutoAdapterModel
    from .composition import Average, BatchSplit, Fuse, MultiTask, Parallel, Split, Stack
    from .configs import AdapterConfig, ConfigUnion, MultiTaskConfig
    from .errors import AdapterZooError
    from .heads import (
        DependencyParsingHead,
        LMHead,
        MultipleChoiceHead,
        PooledHead,
        PredictionHead,
        QuestionAnsweringHead,
        TaggingHead,
    )
    from .hub import AdapterInfo, adapter_info, list_adapters
    from .methods.boft import BOFTConfig
    from .methods.bottleneck import (
        AdapterPlusConfig,
        BnConfig,
        DoubleSeqBnConfig,
        DoubleSeqBnInvConfig,
        ParBnConfig,
        SeqBnConfig,
        SeqBnInvConfig,
    )
    from .methods.compacter import CompacterConfig, CompacterPlusPlusConfig
    from .methods.dora import DoRAConfig
    from .methods.dvora import DvoRAConfig
    from .methods.fusion import (
        AdapterFusionConfig,
        DynamicAdapterFusionConfig,
        StaticAdapterFusionConfig,
    )
    from .methods.ia3 import IA3Config
    from .methods.lora import LoRAConfig
    from .methods.mam import MAMConfig
    from .methods.mtl_lora import MTLLoRAConfig
    from .methods.prefix_tuning import PrefixTuningConfig
    from .methods.prompt_tuning import PromptTuningConfig
    from .methods.reft import DiReftConfig, LoReftConfig, NoReftConfig, ReftConfig
    from .methods.unipelt import UniPELTConfig
    from .methods.vera import VeraConfig
    from .model import AdapterModelMixin, AdapterSetup, init, load_model
    from .trainer import AdapterTrainer, Seq2SeqAdapterTrainer

__version__ = "0.1.0.dev0"

# the module of each public name; imported on first use, so that `import adapterzoo` alone does not
# import torch or transformers
_HOMES = {
    "AdapterConfig": "configs",
    "AdapterFusionConfig": "methods.fusion",
    "AdapterInfo": "hub",
    "AdapterModelMixin": "model",
    "AdapterPlusConfig": "methods.bottleneck",
    "AdapterSetup": "model",
    "AdapterTrainer": "trainer",
    "AdapterZooError": "errors",
    "AutoAdapterModel": "auto",
    "Average": "composition",
    "BOFTConfig": "methods.boft",
    "BatchSplit": "composition",
    "BnConfig": "methods.bottleneck",
    "CompacterConfig": "methods.compacter",
    "CompacterPlusPlusConfig": "methods.compacter",
    "ConfigUnion": "configs",
    "DependencyParsingHead": "heads",
    "DiReftConfig": "methods.reft",
    "DoRAConfig": "methods.dora",
    "DoubleSeqBnConfig": "methods.bottleneck",
    "DoubleSeqBnInvConfig": "methods.bottleneck",
    "DvoRAConfig": "methods.dvora",
    "DynamicAdapterFusionConfig": "methods.fusion",
    "Fuse": "composition",
    "IA3Config": "methods.ia3",
    "LMHead": "heads",
    "LoRAConfig": "methods.lora",
    "LoReftConfig": "methods.reft",
    "MAMConfig": "methods.mam",
    "MTLLoRAConfig": "methods.mtl_lora",
    "MultiTask": "composition",
    "MultiTaskConfig": "configs",
    "MultipleChoiceHead": "heads",
    "NoReftConfig": "methods.reft",
    "ParBnConfig": "methods.bottleneck",
    "Parallel": "composition",
    "PooledHead": "heads",
    "PredictionHead": "heads",
    "PrefixTuningConfig": "methods.prefix_tuning",
    "PromptTuningConfig": "methods.prompt_tuning",
    "QuestionAnsweringHead": "heads",
    "ReftConfig": "methods.reft",
    "Seq2SeqAdapterTrainer": "trainer",
    "SeqBnConfig": "methods.bottleneck",
    "SeqBnInvConfig": "methods.bottleneck",
    "Split": "composition",
    "Stack": "composition",
    "StaticAdapterFusionConfig": "methods.fusion",
    "TaggingHead": "heads",
    "UniPELTConfig": "methods.unipelt",
    "VeraConfig": "methods.vera",
    "adapter_info": "hub",
    "init": "model",
    "list_adapters": "hub",
    "load_model": "model",
}

__all__ = [
    "AdapterConfig",
    "AdapterFusionConfig",
    "AdapterInfo",
    "AdapterModelMixin",
    "AdapterPlusConfig",
    "AdapterSetup",
    "AdapterTrainer",
    "AdapterZooError",
    "AutoAdapterModel",
    "Average",
    "BOFTConfig",
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
    "LoRAConfig",
    "LoReftConfig",
    "MAMConfig",
    "MTLLoRAConfig",
    "MultiTask",
    "MultiTaskConfig",
    "MultipleChoiceHead",
    "NoReftConfig",
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
    "UniPELTConfig",
    "VeraConfig",
    "adapter_info",
    "init",
    "list_adapters",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        if name.endswith("AdapterModel"):
            # BertAdapterModel and other such classes are made on first use
            return importlib.import_module(".auto", __name__).class_named(name)
        raise AttributeError(f"module 'adapterzoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
