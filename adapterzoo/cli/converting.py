"""Adapters in another format, and merged into plain transformers models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.heads import HeadConfig
from adapterzoo.model.facts import facts_of
from adapterzoo.model.static_table import is_task

from .checkpoints import Checkpoint
from .models import base_of, config_of, fitted, task_class, with_weights

_NAME = "merged"
_PROBLEMS = {
    "classification": "single_label_classification",
    "multilabel_classification": "multi_label_classification",
}


@dataclass(frozen=True, slots=True)
class Merged:
    """What was written.

    Attributes:
        model_class: of transformers.
        lost_head: type of the adapter's head where that class has none.
    """

    model_class: str
    lost_head: str | None


def convert(
    checkpoint: Checkpoint,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: an adapter, or a head alone.
        folder: made when missing.
        to: name of the format.
        model: base model; None: the one that the checkpoint names.
        name: to give it; None: its own.
        with_head: whether an adapter's head goes with it.

    Raises:
        CheckpointError: the format cannot say it, it does not fit the base model, or the folder
            cannot be written.
    """
    found = fitted(checkpoint, base_of(checkpoint, model), name=name, writes=to)
    if checkpoint.stem == "head":
        found.model.save_head(folder, found.name, format=to)
        return
    meta = checkpoint.document.get("meta")
    meta = meta if isinstance(meta, Mapping) else None
    found.model.save_adapter(folder, found.name, with_head=with_head, meta_dict=meta, format=to)


def merge(
    checkpoint: Checkpoint, base: str, out: str, architecture: str | None, with_head: bool
) -> Merged:
    """Write a plain model with an adapter merged into its weights.

    Args:
        checkpoint: of an adapter.
        base: folder or name on the Hub.
        out: a new folder.
        architecture: class of transformers; None: that of the base model.
        with_head: whether the adapter's head becomes that of the class.

    Raises:
        CheckpointError: the adapter or its head does not fit, or the folder cannot be written.
        ConfigError: there is no such class.
        StateError: the adapter cannot be merged.
    """
    call = checkpoint.call
    _check_new(call, Path(out))
    if checkpoint.stem == "head":
        raise CheckpointError(
            f"{call}: {checkpoint.path!r} holds a head alone, which changes no weight. Write the "
            f"folder of an adapter."
        )
    config = config_of(call, base)
    name = architecture or next(iter(config.architectures or ()), None)
    cls: Any = AutoModel if name is None else task_class(call, name)
    static = name is not None and is_task(name)
    head: Mapping[str, Any] | None = None
    head_tensors: dict[str, Tensor] = {}
    if with_head:
        found = fitted(checkpoint, base, name=_NAME)
        head = found.stored.document.get("head")
        if head is not None and static and "static" not in head:
            facts = facts_of(found.model, call)
            head_tensors = facts.to_static(str(name), head, found.stored.head)
            config = _with_labels(config, HeadConfig.from_dict(head["config"]))
    replaced = head is not None and static
    model = with_weights(
        call, base, cls, config=config, dtype="auto", ignore_mismatched_sizes=replaced
    )
    keys = set(model.state_dict())
    own = replaced and not head_tensors
    model.load_adapter(checkpoint.folder, load_as=_NAME, with_head=own, dtype=model.dtype)
    model.merge_adapter(_NAME)
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in head_tensors.items():
            state[key].copy_(tensor)
    # the adapter stays where it is in memory, and out of the file
    plain = {key: tensor for key, tensor in state.items() if key in keys}
    tokenizer = _tokenizer(base)
    try:
        PreTrainedModel.save_pretrained(model, out, state_dict=plain)
        if tokenizer is not None:
            tokenizer.save_pretrained(out)
    except OSError as error:
        raise CheckpointError(
            f"{call}: {out!r} cannot be written ({error.strerror or error}). Write a folder that "
            f"can be written and has space."
        ) from error
    lost = checkpoint.head_type if with_head and head is not None and not static else None
    return Merged(type(model).__name__, lost)


def _check_new(call: str, out: Path) -> None:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(
            f"{call}: {str(out)!r} is there already. Write a new folder, or empty this one."
        )


def _tokenizer(base: str) -> Any:
    """The tokenizer of a base model; None where it has none."""
    found = cached_file(
        base,
        "tokenizer_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else AutoTokenizer.from_pretrained(base)


def _with_labels(config: Any, head: HeadConfig) -> Any:
    """A base model's config with the classes of a head."""
    count = head.get("num_labels")
    if count is None:
        return config
    labels = head.id2label or {number: f"LABEL_{number}" for number in range(count)}
    config.id2label = labels
    config.label2id = {label: number for number, label in labels.items()}
    problem = _PROBLEMS.get(head.head_type)
    config.problem_type = "regression" if problem and count == 1 else problem
    return config
