"""The heads of transformers' task classes as named heads, and back; head types know how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterzoo import heads
from adapterzoo.config_base import Config
from adapterzoo.errors import ConfigError
from adapterzoo.heads import Backbone, HeadConfig, InexpressibleError, Shapes, Static, StaticHead


def from_static(
    architecture: str, tensors: Shapes, config: Mapping[str, Any], backbone: Backbone, pooler: bool
) -> StaticHead:
    """Return a static head as a named head.

    Args:
        architecture: name of the transformers class.
        tensors: names and shapes of its tensors that are not the base model's. The layer onto the
            vocabulary may be missing: then it is tied to the embedding.
        config: dict of its config; for composite ones with that of the text part on top.
        backbone: the base model.
        pooler: whether the base model has a pooler.

    Raises:
        InexpressibleError: it has no equivalent.
    """
    task = next((end for end in _tasks() if architecture.endswith(end)), None)
    if task is None:
        known = ", ".join(_tasks())
        raise InexpressibleError(f"{architecture}: none of the tasks that have heads: {known}")
    static = Static(task, tensors, config, backbone, pooler)
    try:
        named = (
            cls.from_static(static) for cls in heads.head_types.values() if task in cls.task_classes
        )
        if found := next((head for head in named if head is not None), None):
            return found
    except (InexpressibleError, ConfigError) as error:
        raise InexpressibleError(f"{architecture}: {error}") from error
    raise InexpressibleError(f"{architecture}: no type of named heads has its head")


def is_task(architecture: str) -> bool:
    """Return whether a transformers class, by its name, is a base model with a head."""
    return architecture.endswith(_tasks())


def _tasks() -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(end for cls in heads.head_types.values() for end in cls.task_classes)
    )


def to_static(static: StaticHead, config: HeadConfig) -> Mapping[str, str]:
    """Return the keys of a static head's tensors in a named head that has the same layers.

    Args:
        static: the result of `from_static` for the static head to fill.
        config: of the named head.

    Returns:
        Names in the static head to names in the named head.

    Raises:
        InexpressibleError: the layers differ.
    """
    theirs, mine = (_layers(c) for c in (static.config, config))
    differ = sorted(k for k in theirs.keys() | mine.keys() if theirs.get(k) != mine.get(k))
    if differ:
        pairs = (f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in differ)
        raise InexpressibleError("; ".join(pairs))
    return static.keys


def _layers(config: Config) -> dict[str, Any]:
    fields = config.to_dict()
    # the tensors tell whose weight the last layer has
    beside = {"label2id", "dropout_prob", "shift_labels", "tie_word_embeddings"}
    # a single layer has nothing between layers
    if fields.get("layers") == 1:
        beside |= {"activation_function", "dense_bias", "layer_norm", "norm_bias", "layer_norm_eps"}
    return {k: v for k, v in fields.items() if k not in beside and v is not None}
