"""PEFT's classes that code only compares with: of models by task, and of layers with adapters.

A model here is not wrapped, and neither are its layers, so that these classes have no instances of
their own: `isinstance` asks what a model or a layer has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from adapterzoo.contracts import Adapter
from adapterzoo.formats.peft.reading import task_of
from adapterzoo.inject.adapted import Adapted, AdapterDict
from adapterzoo.inject.building import plain_modules
from adapterzoo.methods._copies import LayerCopy, TokenRows
from adapterzoo.model.sharding import class_name
from adapterzoo.spelling import peft_spellings

from .layers import parts_of
from .model import ModelType, PeftModel


def _task_class(name: str, task: str) -> type[Any]:
    """Return PEFT's class of models for a task."""

    def takes(_cls: object, model: object) -> bool:
        return isinstance(model, PeftModel) and task_of(class_name(model)) == task

    return _made(name, takes, (PeftModel,))


def _made(name: str, takes: Any, bases: tuple[type, ...] = ()) -> type[Any]:
    meta: Any = type("_Asked", (ModelType,), {"_takes": takes})
    doc = f"PEFT's `{name}`, to compare with."
    made: type[Any] = meta(name, bases, {"__doc__": doc, "__module__": PeftModel.__module__})
    return made


PeftMixedModel = _made(
    "PeftMixedModel",
    lambda _cls, model: isinstance(model, PeftModel) and bool(vars(model).get("_is_mixed")),
    (PeftModel,),
)

TASK_CLASSES = {
    name: _task_class(name, task)
    for name, task in {
        "PeftModelForCausalLM": "CAUSAL_LM",
        "PeftModelForFeatureExtraction": "FEATURE_EXTRACTION",
        "PeftModelForQuestionAnswering": "QUESTION_ANS",
        "PeftModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
        "PeftModelForSequenceClassification": "SEQ_CLS",
        "PeftModelForTokenClassification": "TOKEN_CLS",
    }.items()
}


# --- layers ---


def _layer_class(name: str, *kinds: type[nn.Module]) -> type[Any]:
    """Return PEFT's class of layers that have an adapter of some kinds."""

    def takes(_cls: object, layer: object) -> bool:
        return any(isinstance(part, kinds) for _, part in parts_of(layer))

    return _made(name, takes)


def _kinds_of(peft_type: str) -> tuple[type[nn.Module], ...]:
    found: Any = (s.config for s in peft_spellings.values() if s.peft_type == peft_type)
    return tuple(c.adapter_class for c in found if getattr(c, "adapter_class", None) is not None)


def _is_copied(module: object) -> bool:
    """Return whether each layer of a module has a copy for some adapter, as those of a head."""
    if not isinstance(module, nn.Module) or isinstance(module, (Adapted, Adapter, AdapterDict)):
        return False
    own = [m for m in (plain for _, plain in plain_modules(module)) if m._parameters]
    copied = LAYER_CLASSES["ModulesToSaveWrapper"]
    return bool(own) and all(isinstance(m, Adapted) and isinstance(m, copied) for m in own)


_LAYERS: Mapping[str, str] = {
    "BOFTLayer": "BOFT", "IA3Layer": "IA3", "LoHaLayer": "LOHA", "LoKrLayer": "LOKR",
    "LoraLayer": "LORA", "MissLayer": "MISS", "OFTLayer": "OFT", "VeraLayer": "VERA",
}  # fmt: skip

LAYER_CLASSES = {
    "BaseTunerLayer": _made(
        "BaseTunerLayer",
        lambda _cls, layer: any(
            isinstance(p, Adapter) and not isinstance(p, (LayerCopy, TokenRows))
            for _, p in parts_of(layer)
        ),
    ),
    "AuxiliaryTrainingWrapper": _layer_class("AuxiliaryTrainingWrapper", LayerCopy, TokenRows),
    # a copy of a static head is a plain layer
    "ModulesToSaveWrapper": _made(
        "ModulesToSaveWrapper",
        lambda _cls, layer: (
            any(isinstance(p, LayerCopy) or not isinstance(p, Adapter) for _, p in parts_of(layer))
            or _is_copied(layer)
        ),
    ),
    "TrainableTokensWrapper": _layer_class("TrainableTokensWrapper", TokenRows),
    **{name: _layer_class(name, *_kinds_of(kind)) for name, kind in _LAYERS.items()},
}
