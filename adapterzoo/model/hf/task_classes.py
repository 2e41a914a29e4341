"""transformers' task classes: their heads as named heads and back, and the class for a head.

A head that equals no other type is made from the class itself, without its base model.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoModel, PreTrainedModel
from transformers.utils.generic import find_labels

from adapterzoo.anatomy import input_embeddings_of
from adapterzoo.config import Config
from adapterzoo.errors import ConfigError, listing
from adapterzoo.heads import (
    Backbone,
    HeadConfig,
    InexpressibleError,
    Shapes,
    Static,
    StaticConfig,
    StaticHead,
    TaskHead,
    head_types,
    label_numbers,
)
from adapterzoo.inject.building import plain_state
from adapterzoo.model.state import base_prefix, config_of

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
            f"transformers has no model {name!r}. Write e.g. 'BertForSequenceClassification'."
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
            return [n for n, c in found.items() if c.decoder_inputs_from or not c.scores_vocabulary]
        tags = any(config.token_labels for config in found.values())
        others = {n: c for n, c in head_types.items() if c is not StaticConfig}
        parsers = [n for n, c in others.items() if not c.task_classes]
        return [*found, *(parsers if tags else ())]


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


# about the checkpoint or the labels, not about the computation
_ASIDE = (
    "_name_or_path", "adapters", "architectures", "dtype", "id2label", "label2id", "num_labels",
    "prediction_heads", "quantization_config", "torch_dtype", "transformers_version",
)  # fmt: skip
# the key of these fields in checkpoints
MODEL_CONFIG = "model_config"
_NO_LABELS = {0: "LABEL_0", 1: "LABEL_1"}


def build_task_head(model: Any, config: StaticConfig, backbone: Backbone) -> TaskHead:
    """Return fresh layers of a task class.

    Args:
        model: with named heads.
        config: of the head.
        backbone: gives device and dtype.

    Raises:
        ConfigError: there is no such class, or it has another base model.
    """
    try:
        head = _empty(model, config)
    except InexpressibleError as error:
        raise ConfigError(
            f"StaticConfig(model_class={config.model_class!r}): {error}. Write the name of a task "
            f"class of a {model.backbone_class.__name__}."
        ) from error
    head.to(backbone.dtype)
    if backbone.device is None or backbone.device.type == "meta":
        head.share_again()
        return head
    head.to_empty(device=backbone.device)
    head.share_again()
    for module in head.modules():
        vars(module).pop("_is_hf_initialized", None)
    task: Any = head.around(None)
    task.initialize_weights()
    return head


def _empty(model: Any, config: StaticConfig) -> TaskHead:
    """Return the head on the meta device.

    Raises:
        InexpressibleError: the class does not compute around such a base model.
    """
    cls = task_class(config.model_class)
    values = {k: v for k, v in model.config.to_dict().items() if k not in _ASIDE}
    values |= {"problem_type": None, **copy.deepcopy(dict(config.fields or {}))}
    labels = config.id2label or _NO_LABELS
    values |= {"id2label": labels, "label2id": {label: n for n, label in labels.items()}}
    full = type(model.config).from_dict(values)
    full.return_dict = True
    if config.tie_word_embeddings is not None:
        full.get_text_config(decoder=True).tie_word_embeddings = config.tie_word_embeddings
    task = on_meta(cls, full)
    base = task.base_model
    if base is task:
        raise InexpressibleError(f"{cls.__name__} has no base model below its head")
    if type(base) is not model.backbone_class:
        own = model.backbone_class.__name__
        raise InexpressibleError(f"its base model is a {type(base).__name__}, not a {own}")
    if more := sorted(base.state_dict().keys() - model._backbone.state_dict().keys()):
        raise InexpressibleError(f"its base model has {listing(more, limit=5)}, this one does not")
    name = task.base_model_prefix
    output = task.get_output_embeddings() if input_embeddings_of(model) is not None else None
    path = next((p for p, m in task.named_modules() if m is output), None)
    if path is None or not isinstance(output, nn.Linear):
        return TaskHead(config, task, name, None, False)
    tied = task.all_tied_weights_keys.get(f"{path}.weight", "").startswith(f"{name}.")
    return TaskHead(config, task, name, path, tied)


def static_head(
    model: Any,
    architecture: str,
    tensors: Shapes,
    label2id: Mapping[str, int] | None,
    fields: Mapping[str, Any],
) -> StaticHead:
    """Return the head of a task class as a head of its own type.

    Args:
        model: with named heads.
        architecture: name of the class.
        tensors: names and shapes of the head's tensors; those of unknown names are left out.
        label2id: names of its labels; None if unknown.
        fields: of its config, where it differs from that of the model.

    Raises:
        InexpressibleError: the class does not compute around such a base model, or has other
            tensors.
    """
    cls = task_class(architecture)
    labels = len(label2id or model.config.id2label or _NO_LABELS)
    counted = any(shape[:1] == (labels,) for shape in tensors.values())
    config = StaticConfig(
        model_class=architecture,
        label_names=tuple(find_labels(cls)) or ("labels",),
        num_labels=labels if counted else None,
        label2id=label_numbers(label2id) if label2id and counted else None,
        fields=fields or None,
    )
    head = _empty(model, config)
    theirs = {key: tuple(tensor.shape) for key, tensor in head.state_dict(keep_vars=True).items()}
    keys = {key: head.aliases.get(key, key) for key in tensors if key in theirs}
    tied = {f"{head.output_path}.weight"} if head.is_tied else set()
    missing = theirs.keys() - keys.values() - head.aliases.keys() - tied
    wrong = [key for key in keys if tuple(tensors[key]) != theirs[key]]
    if missing or wrong:
        shown = listing(sorted(missing or wrong), limit=5)
        what = "lacks" if missing else "has tensors of other shapes:"
        raise InexpressibleError(f"{architecture}: the head {what} {shown}")
    return StaticHead(config, keys)


# --- configs ---


def text_config(config: Any) -> Any:
    """Return the config of a model's text part, or the config itself if it has no parts.

    Differs from `config.get_text_config(decoder=True)`, which copies the flat config of an
    encoder–decoder and resets every `decoder_…` field to its default, even
    `decoder_start_token_id`.

    Args:
        config: of a model; configs of other libraries' classes have no parts.
    """
    find = getattr(config, "get_text_config", None)
    text = find(decoder=True) if callable(find) else config
    return config if type(text) is type(config) else text


def config_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a transformers config that a head may depend on, as JSON types."""
    values = {k: v for k, v in config.to_dict().items() if k not in _ASIDE}
    return cast("dict[str, Any]", json.loads(json.dumps(values, default=str)))


def other_fields(config: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a saved config that differ from a model's, and the kind of its labels.

    Args:
        config: of the model.
        saved: from `config_fields`.
    """
    mine = config_fields(config)
    # the model's has the kind of labels of the active head
    kind = {"problem_type": saved["problem_type"]} if saved.get("problem_type") else {}
    differ = {k: v for k, v in saved.items() if k != "problem_type" and mine.get(k) != v}
    return differ | kind


def head_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a task class that are not those of its base model.

    Args:
        model: of a class of transformers, perhaps with adapters.
    """
    own = plain_state(model)
    start = base_prefix(model)
    inside = {key for key in own if key.startswith(start)}
    if not start:
        # T5's language model holds the parts of the base model, not the base model itself
        if type(config_of(model)) not in MODEL_MAPPING:
            return {}
        inside = {*on_meta(AutoModel.from_config, model.config).state_dict()}
        # a quantized layer has more tensors than a plain one
        layers = {key.rpartition(".")[0] for key in inside} - {""}
        inside |= {key for key in own if key.rpartition(".")[0] in layers}
    shared = {id(tensor) for key, tensor in own.items() if key in inside}
    return {k: t for k, t in own.items() if k not in inside and id(t) not in shared}


def on_meta(cls: Any, config: Any) -> Any:
    """Return a model of a class of transformers on the meta device."""
    config = copy.deepcopy(config)
    # other attention implementations do not support the meta device
    config._attn_implementation = "eager"
    with torch.device("meta"):
        return cls(config)
