"""transformers' task classes: their heads as named heads and back, and the class for a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from adapterzoo.config_base import Config
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.peft.writing import head_for
from adapterzoo.heads import (
    Backbone,
    HeadConfig,
    InexpressibleError,
    Shapes,
    Static,
    StaticConfig,
    StaticHead,
    head_types,
)

if TYPE_CHECKING:
    from .info import ModelInfo

# --- heads ---


def from_static(
    architecture: str, tensors: Shapes, config: Mapping[str, Any], backbone: Backbone, pooler: bool
) -> StaticHead:
    """Return the head of a task class as a named head.

    Args:
        architecture: name of the transformers class.
        tensors: names and shapes of the head's tensors. If the layer onto the vocabulary is
            missing, it is tied to the embedding.
        config: dict of its config, with the fields of its text part on top.
        backbone: the base model.
        pooler: whether the base model has a pooler.

    Raises:
        InexpressibleError: there is no equivalent.
    """
    task = next((end for end in _tasks() if architecture.endswith(end)), None)
    if task is None:
        known = ", ".join(_tasks())
        raise InexpressibleError(f"{architecture}: none of the tasks that have heads: {known}")
    static = Static(task, tensors, config, backbone, pooler)
    try:
        named = (cls.from_static(static) for cls in head_types.values() if task in cls.task_classes)
        if found := next((head for head in named if head is not None), None):
            return found
    except (InexpressibleError, ConfigError) as error:
        raise InexpressibleError(f"{architecture}: {error}") from error
    raise InexpressibleError(f"{architecture}: no type of named heads equals its head")


def is_task(architecture: str) -> bool:
    """Return whether a transformers class, by its name, is a base model with a head."""
    return architecture.endswith(_tasks())


def has_head(architecture: str, backbone: type) -> bool:
    """Return whether a class of transformers, by its name, may be a base model with a head.

    Args:
        architecture: name of the class; other libraries have classes too.
        backbone: class of the base model.
    """
    cls: Any = getattr(transformers, architecture, None)
    known = isinstance(cls, type) and issubclass(cls, PreTrainedModel)
    return is_task(architecture) or (known and not issubclass(cls, backbone))


def _tasks() -> tuple[str, ...]:
    return tuple(dict.fromkeys(end for cls in head_types.values() for end in cls.task_classes))


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
    # the tensors show whether the last layer is tied
    beside = {"label2id", "dropout_prob", "shift_labels", "tie_word_embeddings"}
    # with a single layer there is nothing between layers
    if fields.get("layers") == 1:
        beside |= {"activation_function", "dense_bias", "layer_norm", "norm_bias", "layer_norm_eps"}
    return {k: v for k, v in fields.items() if k not in beside and v is not None}


# --- classes ---


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


class HeadTypes:
    """A class attribute: the types of heads that transformers has for a family."""

    def __get__(self, model: object, owner: Any) -> list[str]:
        """Return the names of the types; other heads can be added too.

        Args:
            model: a model, or None for its class.
            owner: the class.
        """
        name: str = owner.backbone_class.__name__
        family = name.removesuffix("Model").removesuffix("Encoder")
        found = {
            head_type: config
            for head_type, config in head_types.items()
            if any(hasattr(transformers, f"{family}{end}") for end in config.task_classes)
        }
        if any(config.decoder_inputs_from == "labels" for config in found.values()):
            # the decoder alone is another model
            kept = {
                n: c for n, c in found.items() if c.decoder_inputs_from or not c.scores_vocabulary
            }
            return [*kept]
        tags = any(config.token_labels for config in found.values())
        parsers = (
            name
            for name, config in head_types.items()
            if not config.task_classes and config is not StaticConfig
        )
        return [*found, *(parsers if tags else ())]


def class_for(
    stored: Checkpoint, info: ModelInfo, own: str | None
) -> tuple[str, Mapping[str, Tensor]]:
    """Return a class that has a head, and the head's tensors by key there.

    Args:
        stored: has the head.
        info: of the model that it belongs to.
        own: the class of the base model's checkpoint, which is tried first.

    Raises:
        CheckpointError: transformers has no such class.
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
    """Write the labels of a head to a model's config, and return it.

    Args:
        config: of a transformers model; changed in place.
        head: config of the head.
    """
    if isinstance(head, StaticConfig):
        for name, value in (head.fields or {}).items():
            setattr(config, name, value)
    count = head.get("num_labels")
    if count is None:
        return config
    labels = head.id2label or {number: f"LABEL_{number}" for number in range(count)}
    config.id2label = labels
    config.label2id = {label: number for number, label in labels.items()}
    config.problem_type = head.problem_type
    return config
