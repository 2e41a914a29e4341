"""The heads of transformers' task classes, made from the classes themselves."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers.utils.generic import find_labels

from adapterzoo.anatomy import input_embeddings_of
from adapterzoo.errors import ConfigError, listing
from adapterzoo.heads import (
    Backbone,
    InexpressibleError,
    Shapes,
    StaticConfig,
    StaticHead,
    TaskHead,
    label_numbers,
)

from .task_classes import task_class

# about the checkpoint or the labels, not about the computation
_ASIDE = (
    "_name_or_path", "adapters", "architectures", "dtype", "id2label", "label2id", "num_labels",
    "prediction_heads", "quantization_config", "torch_dtype", "transformers_version",
)  # fmt: skip
# the key of these fields in checkpoints
MODEL_CONFIG = "model_config"
_NO_LABELS = {0: "LABEL_0", 1: "LABEL_1"}


def build(model: Any, config: StaticConfig, backbone: Backbone) -> TaskHead:
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
    with torch.device("meta"):
        task: Any = cls(_config_for(model, config))
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


def _config_for(model: Any, head: StaticConfig) -> Any:
    values = {k: v for k, v in model.config.to_dict().items() if k not in _ASIDE}
    values |= {"problem_type": None, **copy.deepcopy(dict(head.fields or {}))}
    labels = head.id2label or _NO_LABELS
    values |= {"id2label": labels, "label2id": {label: n for n, label in labels.items()}}
    made = type(model.config).from_dict(values)
    made.return_dict = True
    if head.tie_word_embeddings is not None:
        made.get_text_config(decoder=True).tie_word_embeddings = head.tie_word_embeddings
    # other attention implementations do not support the meta device
    made._attn_implementation = "eager"
    return made


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


def saved_fields(config: Any, head: StaticConfig) -> dict[str, Any]:
    """Return what `config_fields` returns for the config of a head."""
    return {**config_fields(config), "problem_type": None, **(head.fields or {})}
