"""Heads in AdapterHub's files: named ones with their config, and those of task classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adapterzoo.errors import AdapterZooError, CheckpointError, listing
from adapterzoo.heads import HeadConfig, head_types

from .formats import Facts
from .tied import is_same


def read_head(
    facts: Facts, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Document and tensors of a head.

    Args:
        facts: of the model.
        document: `head_config.json`.
        tensors: what lies beside it.

    Raises:
        CheckpointError: the head has no equivalent in this model.
    """
    config = document.get("config")
    if config is None:
        return _read_static(facts, document, tensors)
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{facts.call}: head_config.json has config={config!r}, which is no object of fields. "
            f"Write with_head=False, or copy the checkpoint again from where it was saved."
        )
    _refuse_scaled(facts, config)
    start = f"heads.{document.get('name')}"
    # adapters also saves heads whose names begin with this one
    own = {
        key.removeprefix(f"{start}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{start}.") or not key.startswith(start)
    }
    if facts.named_heads:
        config, own = facts.untied(config, own)
    return {"config": dict(config)}, own


def write_head(
    facts: Facts, name: str, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of `head_config.json` beside the common ones, and tensors by AdapterHub's keys.

    Raises:
        CheckpointError: `adapters` has no such head.
    """
    config = document.get("config")
    if not isinstance(config, Mapping):
        labels = facts.config.get("label2id")
        count = len(labels) if isinstance(labels, Mapping) else None
        return {"config": None, "label2id": labels, "num_labels": count}, dict(tensors)
    _check_sayable(facts, config)
    _refuse_scaled(facts, config)
    whole = {**tensors, **facts.tied(document)}
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    return {"config": config}, {f"heads.{name}.{key}": t for key, t in whole.items()}


def _refuse_scaled(facts: Facts, config: Mapping[str, Any]) -> None:
    # seen by comparing outputs: adapters scales for every head but those of whole sequences
    scaled = facts.model_type in ("mt5", "t5") and facts.config.get("tie_word_embeddings")
    if scaled and config.get("head_type") == "question_answering":
        raise CheckpointError(
            f"{facts.call}: in a {facts.model_type} with tied embeddings adapters scales the "
            f"hidden states below a 'question_answering' head, and the same tensors give other "
            f"outputs there than here. Nothing has been done. Write with_head=False."
        )


def _ties_there(facts: Facts) -> bool:
    """Whether `adapters`, with transformers 4, ties the output layers of such a model."""
    # transformers 5 says so of every T5; those of release 1.1, and mT5, have one of their own
    if facts.model_type == "mt5" or facts.config.get("scale_decoder_outputs") is False:
        return False
    return bool(facts.config.get("tie_word_embeddings"))


def _check_sayable(facts: Facts, config: Mapping[str, Any]) -> None:
    try:
        known = HeadConfig.from_dict(config)
    except AdapterZooError as error:
        raise CheckpointError(
            f"{facts.call}: AdapterHub's format has no head of the type "
            f"{config.get('head_type')!r}; it has {listing(sorted(head_types))}. Nothing has been "
            f"written. Write with_head=False or format='native'."
        ) from error
    ours = {f.name for f in dataclasses.fields(known) if "ours" in f.metadata}
    if config.get("tie_word_embeddings") is False and _ties_there(facts):
        raise CheckpointError(
            f"{facts.call}: the head has an output layer of its own, and adapters would write it "
            f"into the embeddings of a {facts.model_type}, which it ties. Nothing has been "
            f"written. Write with_head=False or format='native'."
        )
    ours -= {"tie_word_embeddings"}
    if used := sorted(ours & set(config)):
        shown = ", ".join(f"{field}={config[field]!r}" for field in used)
        raise CheckpointError(
            f"{facts.call}: AdapterHub's format cannot say that the head has {shown}. Nothing has "
            f"been written. Write with_head=False or format='native'."
        )


def _read_static(
    facts: Facts, document: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The head of a task class: for a named head translated, for such a class as it is."""
    theirs = str(document.get("model_class"))
    labels = document.get("label2id")
    if facts.named_heads:
        return facts.from_static(theirs, tensors, labels if isinstance(labels, Mapping) else None)
    static = facts.static_head()
    mine = {key: tensor for key, tensor in tensors.items() if key in static}
    for key, tensor in tensors.items():
        if key in mine:
            continue
        # the layer onto the vocabulary, which adapters saves with every head
        own = facts.tensor(key)
        if own is None:
            mine[key] = tensor
        elif not is_same(tensor, own):
            raise CheckpointError(
                f"{facts.call}: the checkpoint has {key!r}, and the model's own is another; an "
                f"adapter does not replace the output layer of a language model. Write "
                f"with_head=False."
            )
    return {"static": theirs}, mine
