"""Heads in AdapterHub's files: named ones with their config, and those of task classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adapterzoo.errors import AdapterZooError, CheckpointError, argument, listing
from adapterzoo.formats.checkpoint import ModelInfo, inexpressible
from adapterzoo.formats.digest import same_values
from adapterzoo.heads import STATIC, HeadConfig, head_types


def read_head(
    info: ModelInfo, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a head.

    Args:
        info: of the model.
        metadata: `head_config.json`.
        tensors: what lies beside it.

    Raises:
        CheckpointError: the head has no equivalent in this model.
    """
    config = metadata.get("config")
    if config is None:
        return _read_static(info, metadata, tensors)
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"head_config.json has config={config!r}, which is not an object of fields. "
            f"Write "
            f"{argument('with_head', False, 'load_adapter')}, or copy the checkpoint again from "
            f"where it was saved."
        )
    _refuse_quirks(info, config)
    start = f"heads.{metadata.get('name')}"
    # adapters also saves heads whose names begin with this one
    own = {
        key.removeprefix(f"{start}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{start}.") or not key.startswith(start)
    }
    if info.named_heads:
        config, own = info.untied(config, own)
    return {"config": dict(config)}, own


def write_head(
    info: ModelInfo, name: str, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return fields of `head_config.json` beside the common ones, and tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` has no such head.
    """
    config = metadata.get("config")
    if not isinstance(config, Mapping):
        return _task_fields(info.config().get("label2id")), dict(tensors)
    _check_sayable(info, config)
    if config["head_type"] == STATIC:
        own = {"model_class": config["model_class"], **_task_fields(config.get("label2id"))}
        return own, {**tensors, **info.tied(metadata)}
    _refuse_quirks(info, config)
    whole = {**tensors, **info.tied(metadata)}
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    return {"config": config}, {f"heads.{name}.{key}": t for key, t in whole.items()}


def _task_fields(label2id: object) -> dict[str, Any]:
    """Return the fields of the head of a task class."""
    count = len(label2id) if isinstance(label2id, Mapping) else None
    return {"config": None, "label2id": label2id, "num_labels": count}


def _refuse_quirks(info: ModelInfo, config: Mapping[str, Any]) -> None:
    known = head_types.get(str(config.get("head_type")))
    what = None if known is None else known.adapterhub_quirk(info.model_type, info.config())
    if what is not None:
        raise CheckpointError(
            f"in such a {info.model_type} adapters {what} below a {config['head_type']!r} head, "
            f"and the same tensors give other outputs there than here. Nothing has been done. "
            f"Write {argument('with_head', False)}."
        )


def _ties_there(info: ModelInfo) -> bool:
    """Return whether `adapters`, with transformers 4, ties the output layers of such a model."""
    # transformers 5 ties every T5; those of release 1.1, and mT5, have an output layer of their own
    if info.model_type == "mt5" or info.config().get("scale_decoder_outputs") is False:
        return False
    return bool(info.config().get("tie_word_embeddings"))


def _check_sayable(info: ModelInfo, config: Mapping[str, Any]) -> None:
    hints = argument("with_head", False), argument("format", "native")
    try:
        known = HeadConfig.from_dict(config)
    except AdapterZooError as error:
        raise inexpressible(
            f"AdapterHub's format has no head of the type {config.get('head_type')!r}; it has "
            f"{listing(sorted(head_types))}",
            *hints,
        ) from error
    ours = {f.name for f in dataclasses.fields(known) if "ours" in f.metadata}
    if config.get("tie_word_embeddings") is False and _ties_there(info):
        raise inexpressible(
            f"the head has an output layer of its own, and adapters would write it into the "
            f"embeddings of a {info.model_type}, which it ties",
            *hints,
        )
    ours -= {"tie_word_embeddings"}
    if used := sorted(ours & set(config)):
        shown = ", ".join(f"{field}={config[field]!r}" for field in used)
        raise inexpressible(f"AdapterHub's format cannot express a head with {shown}", *hints)


def _read_static(
    info: ModelInfo, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the head of a task class: for a named head translated, for such a class as it is."""
    theirs = str(metadata.get("model_class"))
    labels = metadata.get("label2id")
    if info.named_heads:
        return info.from_static(theirs, tensors, labels if isinstance(labels, Mapping) else None)
    static = info.static_head()
    mine = {key: tensor for key, tensor in tensors.items() if key in static}
    for key, tensor in tensors.items():
        if key in mine:
            continue
        # the layer onto the vocabulary, which adapters saves with every head
        own = info.tensor(key)
        if own is None:
            mine[key] = tensor
        elif not same_values(tensor, own):
            raise CheckpointError(
                f"the checkpoint has {key!r}, and the model's own is another; an "
                f"adapter does not replace the output layer of a language model. Write "
                f"{argument('with_head', False, 'load_adapter')}."
            )
    return {STATIC: theirs}, mine
