"""What neither names nor shapes of a static head's tensors tell: tables of model families."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterzoo.heads import Backbone

Shapes = Mapping[str, tuple[int, ...]]

_DENSE = re.compile(r"(^|\.)(dense|pre_classifier|vocab_transform|summary)$")
_NORM = re.compile(r"norm$", re.IGNORECASE)

# model types whose `classifier.dense` is followed by config.hidden_act, and not by tanh
_HIDDEN_ACT = frozenset({"big_bird", "convbert", "mra", "nystromformer", "roformer", "yoso"})
# image models by what their one layer looks at
IMAGE_POOLING: Mapping[str, str] = {
    model_type: pooling
    for pooling, model_types in (
        ("cls", "deit vit vit_msn pvt"),
        ("mean", "ijepa levit"),
        (
            "pooler",
            (
                "beit convnext convnextv2 data2vec-vision focalnet mobilevit mobilevitv2 regnet "
                "resnet swin swinv2"
            ),
        ),
    )
    for model_type in model_types.split()
}
_SUMMARIES = {"first": "cls", "last": "last"}
# encoder–decoders whose token classifiers have the encoder only
ENCODER_TAGGING = frozenset({"mt5", "t5", "umt5"})
# fields of a config that change logits in ways that no head here has
STRANGE = ("dim_model_base", "output_multiplier", "unpadded_vocab_size", "use_predict_layer")


class InexpressibleError(Exception):
    """Why a static head has no named equivalent."""


@dataclass(frozen=True, slots=True)
class Static:
    """What is known of a static head.

    Attributes:
        tensors: names and shapes of all that is not the base model's.
        config: dict of the transformers config, its text part on top.
        backbone: the base model.
        pooler: whether the base model's checkpoint has a pooler.
    """

    tensors: Shapes
    config: Mapping[str, Any]
    backbone: Backbone
    pooler: bool

    def module(self, role: str) -> str | None:
        """The path of the "dense" layer, of the "norm", or of the layer that gives the "output".

        Raises:
            InexpressibleError: several layers can be meant.
        """
        paths = [k.removesuffix(".weight") for k in self.tensors if k.endswith(".weight")]
        found = [path for path in paths if _role(path) == role]
        if len(found) > 1:
            raise InexpressibleError(f"it has several layers of one kind: {', '.join(found)}")
        return found[0] if found else None

    def shape(self, path: str) -> tuple[int, ...]:
        """Of the weight of a module."""
        return self.tensors[f"{path}.weight"]

    def has_bias(self, path: str) -> bool:
        """Whether the module has a bias."""
        return f"{path}.bias" in self.tensors


def _role(path: str) -> str:
    if _DENSE.search(path):
        return "dense"
    return "norm" if _NORM.search(path) else "output"


def activation_after(dense: str, config: Mapping[str, Any]) -> str:
    """The activation behind a head's layer, by the layer's path and the transformers config.

    Raises:
        InexpressibleError: nobody has written down what follows this layer.
    """
    named = _ACTIVATIONS.get(dense)
    found = named(config) if named is not None else None
    if not isinstance(found, str):
        raise InexpressibleError(f"it is not known what follows {dense}")
    return found


def _after_classifier(config: Mapping[str, Any]) -> object:
    model_type = config.get("model_type")
    if model_type in _HIDDEN_ACT:
        return config.get("hidden_act")
    return "gelu" if model_type == "electra" else "tanh"


_ACTIVATIONS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "classifier.dense": _after_classifier,
    "classification_head.dense": lambda _: "tanh",
    "pre_classifier": lambda _: "relu",
    "pooler.dense": lambda config: config.get("pooler_hidden_act"),
    "sequence_summary.summary": lambda config: config.get("summary_activation") or "linear",
    "cls.predictions.transform.dense": lambda config: config.get("hidden_act"),
    "predictions.dense": lambda config: config.get("hidden_act"),
    "lm_head.dense": lambda _: "gelu",
    "generator_predictions.dense": lambda _: "gelu",
    "vocab_transform": lambda config: config.get("activation"),
    "head.dense": lambda config: config.get("classifier_activation"),
}


def summary_pooling(config: Mapping[str, Any]) -> str:
    """Which token answers in heads that transformers makes of a `summary_type`.

    Raises:
        InexpressibleError: no head here answers by this one.
    """
    kind = str(config.get("summary_type"))
    if kind not in _SUMMARIES:
        raise InexpressibleError(f"its config says summary_type={kind!r}")
    return _SUMMARIES[kind]


def logit_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a head config for what a transformers config does to the logits."""
    cohere = str(config.get("model_type")).startswith("cohere")
    return {
        "logit_scale": config.get("logit_scale" if cohere else "lm_head_multiplier"),
        "logit_divisor": config.get("logits_scaling"),
        "logit_softcap": config.get("final_logit_softcapping") or config.get("logits_soft_cap"),
    }
