"""The classes of transformers that have a named head as their own: which one, and its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from adapterzoo.checkpoint.formats import Checkpoint, ModelInfo
from adapterzoo.checkpoint.peft.heads import head_for
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.heads import HeadConfig

from .static_table import is_task


def task_class(name: str) -> type[PreTrainedModel]:
    """Return a class of transformers by its name.

    Args:
        name: such as `BertForSequenceClassification`.

    Raises:
        ConfigError: there is none.
    """
    cls: Any = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ConfigError(
            f"transformers has no model {name!r}. Write the name of a class, such as "
            f"'BertForSequenceClassification'."
        )
    return cls


def class_for(
    stored: Checkpoint, info: ModelInfo, own: str | None
) -> tuple[str, Mapping[str, Tensor]]:
    """Return a class that has a head, and the head's tensors by key there.

    Args:
        stored: has the head.
        info: of the model that it belongs to.
        own: name of the class of the base model's checkpoint, which comes first.

    Raises:
        CheckpointError: transformers has none.
    """
    head = stored.metadata["head"]
    if own is not None and is_task(own):
        try:
            return own, info.to_static(own, head, stored.head)
        except CheckpointError:
            # another class may have such a head
            pass
    task, tensors = head_for(stored, info)
    return task.model_class, tensors


def with_labels(config: Any, head: HeadConfig) -> Any:
    """Return a base model's config, changed to one with the classes of a head.

    Args:
        config: of a model of transformers.
        head: says which classes.
    """
    count = head.get("num_labels")
    if count is None:
        return config
    labels = head.id2label or {number: f"LABEL_{number}" for number in range(count)}
    config.id2label = labels
    config.label2id = {label: number for number, label in labels.items()}
    config.problem_type = head.problem_type
    return config
