"""Heads in PEFT's files: the modules in `modules_to_save`.

A PEFT adapter belongs to a task class of transformers, and has the keys of that class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from adapterzoo.errors import CheckpointError, argument, in_python, listing
from adapterzoo.formats.checkpoint import OWN_OUTPUT, Checkpoint, ModelInfo
from adapterzoo.heads import STATIC, head_types

from .config import CONFIG, MERGE, PeftConfig

TASKS: Mapping[str, Mapping[str, Any]] = {
    "SEQ_CLS": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "TOKEN_CLS": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "QUESTION_ANS": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "CAUSAL_LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "SEQ_2_SEQ_LM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "FEATURE_EXTRACTION": modeling_auto.MODEL_MAPPING_NAMES,
}
"""PEFT's names of tasks → the classes of transformers for them, by type of model."""


@dataclass(frozen=True, slots=True)
class Task:
    """The task class that an exported adapter belongs to.

    Attributes:
        model_class: its name.
        task_type: PEFT's name of the task; None if it has none.
    """

    model_class: str
    task_type: str | None


def head_from(
    theirs: PeftConfig, rest: Mapping[str, Tensor], info: ModelInfo
) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Return metadata and tensors of the head in a file; None if there is none.

    Args:
        theirs: the config.
        rest: all tensors but the adapter's, by key in the task class.
        info: of the model to fill.

    Raises:
        CheckpointError: a weight of the base model was trained too, or the head has no equivalent.
    """
    head: dict[str, Tensor] = {}
    trained, own_output = [], False
    for key, tensor in rest.items():
        if ".original_module." in key:
            continue
        name = key.replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        name = name.replace(".base_layer.", ".")
        own = _base_tensor(name, info)
        is_own = name in info.output() and _is_saved(name, theirs.modules_to_save)
        own_output |= is_own
        if own is None or is_own or (name in info.output() and _is_other(own, tensor)):
            head[name] = tensor
        # PEFT saves adapted embeddings too: ignore them if they equal the model's
        elif _is_other(own, tensor):
            trained.append(key)
    if trained:
        raise CheckpointError(
            f"the file holds weights of the base model that differ from those here: "
            f"{listing(sorted(trained))}; of what PEFT saves whole, only heads can be loaded "
            f"beside an adapter. {MERGE}"
        )
    if not head or not info.with_head:
        return None, {}
    if not info.named_heads:
        # tensors that the file lacks do not change
        kept = {key: info.tensor(key) for key in info.static_head() if key not in head}
        head |= {key: tensor.detach() for key, tensor in kept.items() if tensor is not None}
        return {STATIC: info.model_class, **({OWN_OUTPUT: True} if own_output else {})}, head
    # PEFT's files have no labels: take those of the model
    return info.from_static(_class_of_head(theirs, info), head, info.config().get("label2id"))


def _is_saved(key: str, names: Iterable[str]) -> bool:
    path = key.rpartition(".")[0]
    return any(path == name or path.endswith(f".{name}") for name in names)


def _is_other(own: Tensor, tensor: Tensor) -> bool:
    return own.shape != tensor.shape or not torch.equal(own.detach().cpu(), tensor.to(own.dtype))


def _base_tensor(key: str, info: ModelInfo) -> Tensor | None:
    """Return the tensor of the base model that a key of some task class names."""
    if key in info.static_head():
        return None
    for name in (key, info.renamed(key)):
        for place in (name, f"{info.prefix}.{name}", _below(name, info)):
            found = info.tensor(place)
            if found is not None:
                return found
    return None


def _below(key: str, info: ModelInfo) -> str:
    first, _, below = key.partition(".")
    return f"{info.prefix}.{below}" if info.prefix and first != info.prefix else below


def class_in(theirs: PeftConfig, info: ModelInfo) -> str | None:
    """Return the class of models that a file belongs to; None if it does not say that."""
    if theirs.base_class is not None or theirs.task_type is None:
        return theirs.base_class
    return next(_classes(TASKS.get(theirs.task_type, {}), info), None)


def _class_of_head(theirs: PeftConfig, info: ModelInfo) -> str:
    task = theirs.task_type
    if theirs.base_class is None and (task is None or task not in TASKS):
        raise CheckpointError(
            f"the file has a head, and {CONFIG} says task_type={task!r}, so the "
            f"kind of the head is unknown; legal are {listing(TASKS)}. Write "
            f"{argument('with_head', False, 'load_adapter')}"
            f"{in_python(', or load it into the class of its head after adapterzoo.init(model)')}."
        )
    return class_in(theirs, info) or str(task)


def _classes(mapping: Mapping[str, Any], info: ModelInfo) -> Iterator[str]:
    found = mapping.get(info.model_type)
    yield from (found,) if isinstance(found, str) else found or ()


def head_for(checkpoint: Checkpoint, info: ModelInfo) -> tuple[Task, dict[str, Tensor]]:
    """Return the task class that an adapter is written for, and its head's tensors by key there.

    Raises:
        CheckpointError: PEFT has no such head.
    """
    metadata = checkpoint.metadata.get("head")
    if not info.named_heads:
        return Task(info.model_class, task_of(info.model_class)), dict(checkpoint.head)
    if metadata is None:
        return _without_head(info), {}
    config = dict(metadata.get("config") or {})
    if (own := config.get("model_class")) is not None:
        return Task(own, task_of(own)), info.to_static(own, metadata, checkpoint.head)
    head_type = config.get("head_type")
    known = head_types.get(str(head_type))
    task_type = None if known is None else known.peft_task
    mapping = TASKS.get(str(task_type), {})
    if known is not None and known.peft_classes is not None:
        mapping = getattr(modeling_auto, known.peft_classes)
    model_class = next(iter(_classes(mapping, info)), None)
    if model_class is None:
        raise CheckpointError(
            f"transformers has no class with a {head_type!r} head for "
            f"{info.model_type!r} that PEFT could load this one into. Write "
            f"{argument('with_head', False)}."
        )
    return Task(model_class, task_type), info.to_static(model_class, metadata, checkpoint.head)


def task_of(model_class: str) -> str | None:
    """Return PEFT's name of the task of a class; None if it has none."""
    for task, mapping in TASKS.items():
        classes = (c for v in mapping.values() for c in ((v,) if isinstance(v, str) else v))
        if model_class in set(classes):
            return task
    return None


def _without_head(info: ModelInfo) -> Task:
    """Return the class for adapters without a head: one that generates, else the base model."""
    encodes = info.model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    generating: tuple[tuple[str | None, Mapping[str, Any]], ...] = (
        ("SEQ_2_SEQ_LM", TASKS["SEQ_2_SEQ_LM"]),
        # PEFT's task_type would require `input_ids`
        (None, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
        ("CAUSAL_LM", {} if encodes else TASKS["CAUSAL_LM"]),
        (None, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
        ("FEATURE_EXTRACTION", TASKS["FEATURE_EXTRACTION"]),
    )
    found = [Task(c, task) for task, mapping in generating for c in _classes(mapping, info)]
    return found[0] if found else Task(info.model_class, None)
