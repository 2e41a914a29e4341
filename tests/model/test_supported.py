"""`supports_adapter` answers what `add_adapter` does."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from snapshots import state
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import adapterzoo
from adapterzoo import BOFTConfig, LoRAConfig, LoReftConfig, MissConfig, OFTConfig
from adapterzoo.config import config_strings
from adapterzoo.errors import AdapterZooError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def llama(width: int) -> Any:
    """A model whose layers are as wide as that, and twice."""
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=1, **shape))


def bert() -> Any:
    shape = {"hidden_size": 36, "intermediate_size": 60, "num_attention_heads": 4}
    return BertForSequenceClassification(BertConfig(vocab_size=99, num_hidden_layers=1, **shape))


def resnet() -> Any:
    shape: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    return ResNetForImageClassification(ResNetConfig(**shape))


MODELS = {
    "llama 32": lambda: llama(32), "llama 40": lambda: llama(40), "llama 96": lambda: llama(96),
    "bert": bert, "resnet": resnet,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "oft": OFTConfig(oft_block_size=32),
    "boft": BOFTConfig(boft_block_size=10),
    "miss": MissConfig(r=36),
    "reft": LoReftConfig(r=36),
    "layers": LoRAConfig(layers_to_transform=[1]),
    "left out": LoRAConfig(leave_out=[3]),
    "a copy": LoRAConfig(modules_to_save=["nothing"]),
    "rows": LoRAConfig(trainable_token_indices=[99]),
    "a pattern": LoRAConfig(rank_pattern={"nothing": 4}),
    "of PEFT": peft.LoraConfig(r=4, target_modules=["q_proj", "query"]),
    "of PEFT, elsewhere": peft.LoraConfig(r=4, target_modules=["nothing"]),
}


def asked() -> dict[str, Any]:
    """Every config string, and configs whose values do not fit all models."""
    return {name: name for name in config_strings if name != "union"} | CONFIGS


@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_what_add_adapter_does(name):
    wrong, said = [], set()
    for case, config in asked().items():
        model = adapterzoo.init(MODELS[name]())
        before = state(model)
        says = model.supports_adapter(config)
        assert state(model) == before
        try:
            model.add_adapter("a", config)
            does = True
        except AdapterZooError:
            does = False
        said.add(says)
        wrong += [(case, says)] if says is not does else []
    assert not wrong
    assert said == ({False} if name == "resnet" else {True, False})
