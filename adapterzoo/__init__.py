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
    from .config import AdapterConfig, ConfigUnion, MultiTaskConfig
    from .errors import AdapterZooError
    from .heads import (
        DependencyParsingHead,
        LMHead,
        MultipleChoiceHead,
        PooledHead,
        PredictionHead,
        QuestionAnsweringHead,
        TaggingHead,
        TaskHead,
    )
    from .hub import AdapterInfo, adapter_info, list_adapters
    from .methods.bottleneck import (
        AdapterPlusConfig,
        BnConfig,
        CompacterConfig,
        CompacterPlusPlusConfig,
        DoubleSeqBnConfig,
        DoubleSeqBnInvConfig,
        NoLanguageAdaptersConfig,
        ParBnConfig,
        SeqBnConfig,
        SeqBnInvConfig,
    )
    from .methods.fusion import (
        AdapterFusionConfig,
        DynamicAdapterFusionConfig,
        StaticAdapterFusionConfig,
    )
    from .methods.ia3 import IA3Config
    from .methods.ln import LNTuningConfig
    from .methods.low_rank import DoRAConfig, DvoRAConfig, LoRAConfig, MTLLoRAConfig, VeraConfig
    from .methods.lycoris import LoHaConfig, LoKrConfig
    from .methods.miss import MissConfig
    from .methods.prompt import PrefixTuningConfig, PromptTuningConfig
    from .methods.reft import DiReftConfig, LoReftConfig, NoReftConfig, ReftConfig
    from .methods.rotation import BOFTConfig, OFTConfig
    from .methods.trainable_tokens import TrainableTokensConfig
    from .methods.unions import MAMConfig, UniPELTConfig
    from .model import AdapterModelMixin, AdapterSetup, init, load_model
    from .trainer import AdapterTrainer, Seq2SeqAdapterTrainer

__version__ = "0.1.0.dev0"

# the module of each public name that is not of a method; imported on first use, so that
# `import adapterzoo` alone does not import torch or transformers
_HOMES = {
    "AdapterConfig": "config",
    "AdapterInfo": "hub",
    "AdapterModelMixin": "model",
    "AdapterSetup": "model",
    "AdapterTrainer": "trainer",
    "AdapterZooError": "errors",
    "AutoAdapterModel": "auto",
    "Average": "composition",
    "BatchSplit": "composition",
    "ConfigUnion": "config",
    "DependencyParsingHead": "heads",
    "Fuse": "composition",
    "LMHead": "heads",
    "MultiTask": "composition",
    "MultiTaskConfig": "config",
    "MultipleChoiceHead": "heads",
    "Parallel": "composition",
    "PooledHead": "heads",
    "PredictionHead": "heads",
    "QuestionAnsweringHead": "heads",
    "Seq2SeqAdapterTrainer": "trainer",
    "Split": "composition",
    "Stack": "composition",
    "TaggingHead": "heads",
    "TaskHead": "heads",
    "adapter_info": "hub",
    "init": "model",
    "list_adapters": "hub",
    "load_model": "model",
}

# names under which code for `adapters` finds things here
_OF_ADAPTERS = {
    "ADAPTERFUSION_CONFIG_MAP": "configuration",
    "ADAPTER_CONFIG_MAP": "configuration",
    "ADAPTER_MODEL_MAPPING": "models",
    "AdapterArguments": "training",
    "AdapterCompositionBlock": "composition",
    "AdapterMethod": "interface",
    "AdapterModelInterface": "interface",
    "AdapterType": "utils",
    "BertStyleMaskedLMHead": "heads",
    "BiaffineParsingHead": "heads",
    "CausalLMHead": "heads",
    "ClassificationHead": "heads",
    "DEFAULT_ADAPTERFUSION_CONFIG": "configuration",
    "DEFAULT_ADAPTER_CONFIG": "configuration",
    "DependencyParsingOutput": "model.heads.outputs",
    "ImageClassificationHead": "heads",
    "ModelAdaptersConfig": "configuration",
    "ModelAdaptersMixin": "model",
    "ModelWithFlexibleHeadsAdaptersMixin": "auto",
    "ModelWithHeadsAdaptersMixin": "model",
    "MultiHeadOutput": "model.heads.outputs",
    "MultiLabelClassificationHead": "heads",
    "Seq2SeqLMHead": "heads",
    "get_adapter_config_hash": "utils",
    "get_adapter_info": "utils",
    "parse_composition": "composition",
    "setup_adapter_training": "training",
    "validate_composition": "composition",
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
    "LNTuningConfig",
    "LoHaConfig",
    "LoKrConfig",
    "LoRAConfig",
    "LoReftConfig",
    "MAMConfig",
    "MTLLoRAConfig",
    "MissConfig",
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
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _OF_ADAPTERS.get(name)
    if home is None and name in __all__:
        home = "methods"
    if home is not None:
        return getattr(importlib.import_module(f".{home}", __name__), name)
    if name.endswith("AdapterModel"):
        # BertAdapterModel and other such classes are made on first use
        return importlib.import_module(".auto", __name__).class_named(name)
    raise AttributeError(f"module 'adapterzoo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OF_ADAPTERS})
