"""The activations between the layers of transformers' task classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .task_classes import InexpressibleError

# model types whose `classifier.dense` is followed by config.hidden_act instead of tanh
_HIDDEN_ACT = frozenset({"big_bird", "convbert", "mra", "nystromformer", "roformer", "yoso"})


def activation_after(dense: str, config: Mapping[str, Any]) -> str:
    """Return the activation after a head's layer, by its path and the transformers config.

    Raises:
        InexpressibleError: it is unknown.
    """
    named = _ACTIVATIONS.get(dense)
    found = named(config) if named is not None else None
    if not isinstance(found, str):
        raise InexpressibleError(f"the activation behind {dense} is unknown")
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
