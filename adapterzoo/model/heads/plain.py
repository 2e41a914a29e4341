"""Plain models of transformers made from models with adapters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.errors import CheckpointError, StateError, argument, in_python, listing
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.formats.peft.writing import head_for
from adapterzoo.inject.adapted import set_class
from adapterzoo.inject.building import plain_state
from adapterzoo.model import adapters
from adapterzoo.model.activation import unregister
from adapterzoo.model.adapters import remove_all
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.owned import disown
from adapterzoo.model.hf.task_classes import is_task, on_meta, task_class, with_labels
from adapterzoo.model.state import base_prefix

from . import named, tables


def plain_class(model: Any) -> type[nn.Module] | None:
    """Return the class of the model without adapters; None if it always has them."""
    if model._has_named_heads:
        return cast("type[nn.Module] | None", getattr(type(model), "backbone_class", None))
    return type(model).__dict__.get("_plain_class")


def unloaded(model: Any, change: Callable[[Any], None], architecture: str | None) -> Any:
    """Return a plain model: a new one, or for a static head the same model in its original class.

    Args:
        model: a model with adapters; with named heads, it does not change.
        change: a function that merges or resets the weights of a model.
        architecture: name of the class; None: one that has such a head as the active one.

    Raises:
        StateError: a class is given for a model with a static head, or a pool is open.
    """
    if model._has_named_heads:
        twin = copy.deepcopy(model)
        change(twin)
        # shared weights may have been given to each layer
        return as_plain(twin, *head_to_keep(twin, architecture))
    if model._adapter_state.pool is not None:
        raise StateError("an AdapterPool has slots in the model. Write close() of it first.")
    plain = cast("type[nn.Module]", plain_class(model))
    if architecture is not None:
        raise StateError(f"the model becomes a {plain.__name__} again. Leave architecture out.")
    tables.check_plain(model)
    change(model)
    model._modules.pop(tables.STORE, None)
    adapters.remove_all(model)
    unregister(model)
    disown(model)
    del model._adapter_state, model._active
    set_class(model, plain)
    return model


def weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the plain model by its keys; shared ones once, quantized ones packed.

    Args:
        model: a model whose adapters are merged or inactive.

    Raises:
        CheckpointError: transformers has no class with the active head.
        StateError: several heads are active.
    """
    tensors: Mapping[str, Tensor] = {}
    prefix, inner = "", model
    if model._has_named_heads:
        _, name, tensors = head_to_keep(model, None)
        cls: Any = model.backbone_class if name is None else task_class(name)
        prefix, inner = base_prefix(on_meta(cls, model.config)), model._backbone
    own = {f"{prefix}{k}": t for k, t in plain_state(inner).items() if isinstance(t, nn.Parameter)}
    seen: set[int] = set()
    for key, tensor in {**own, **tensors}.items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            yield key, tensor


def head_to_keep(
    model: Any, architecture: str | None
) -> tuple[str | None, str | None, Mapping[str, Tensor]]:
    """Return the active head's name, a class with such a head, and the head's tensors by key there.

    Without an active head, all three are empty.

    Args:
        model: a model with named heads.
        architecture: name of the class; None: the function finds one.

    Raises:
        CheckpointError: transformers has no such class.
        StateError: several heads are active, or a class is given and none is.
    """
    names = model._active.default.plan.heads.names
    if len(names) > 1:
        raise StateError(
            f"the heads {listing(names)} are active, and a plain model has one. Write "
            f"model.active_head = {names[0]!r}, or None for the base model alone."
        )
    if not names:
        if architecture is not None:
            raise StateError(
                f"no head is active. Write model.active_head = '…'; heads: {listing(model.heads)}."
            )
        return None, None, {}
    record = named.of_named(model, names[0])
    info = ModelInfo(model)
    try:
        if architecture is not None:
            task_class(architecture)
            tensors = info.to_static(architecture, record.document, record.tensors)
            return names[0], architecture, tensors
        own = next(iter(model.config.architectures or ()), None)
        stored = Checkpoint({"head": record.document}, {}, record.tensors)
        return names[0], *class_for(stored, info, own)
    except CheckpointError as error:
        # without the advice about files, which does not apply here
        reason = str(error).replace(f" Write {argument('with_head', False)}.", "")
        raise CheckpointError(
            f"{reason} Write {argument('architecture', '…')} with a class that has such a head"
            f"{in_python(', or model.active_head = None')}."
        ) from error


def class_for(stored: Checkpoint, info: Any, own: str | None) -> tuple[str, Mapping[str, Tensor]]:
    """Return a class with such a head, and the head's tensors by key there.

    Args:
        stored: a checkpoint with the head.
        info: the facts about the model that it belongs to.
        own: the class of the base model's checkpoint, which is tried first.

    Raises:
        CheckpointError: transformers has no such class.
    """
    head = stored.metadata["head"]
    if own is not None and is_task(own):
        # another class may have such a head
        with contextlib.suppress(CheckpointError):
            return own, info.to_static(own, head, stored.head)
    task, tensors = head_for(stored, info)
    return task.model_class, tensors


def as_plain(model: Any, head: str | None, name: str | None, tensors: Mapping[str, Tensor]) -> Any:
    """Return a plain model with the weights of a model with named heads.

    Args:
        model: the model, which loses its adapters.
        head: name of the head to keep; None: no head.
        name: name of the plain model's class; None: the base model's.
        tensors: the tensors of the head, by key in that class.

    Raises:
        CheckpointError: the class has tensors that the model lacks.
    """
    cls: Any = model.backbone_class if name is None else task_class(name)
    config = copy.deepcopy(model.config)
    del config.prediction_heads
    if head is not None:
        config = with_labels(config, named.find(model, head).config)
    remove_all(model)
    with torch.device("meta"):
        empty = cls(config)
    prefix = base_prefix(empty)
    keys = empty.state_dict().keys()
    own = {f"{prefix}{key}": t for key, t in model._backbone.state_dict().items()}
    # the head's tensors stay with the first model
    heads = {key: t.detach().clone() for key, t in tensors.items()}
    state = {key: t for key, t in {**own, **heads}.items() if key in keys}
    plain, info = cls.from_pretrained(
        None, config=config, state_dict=state, dtype=model.dtype, output_loading_info=True,
        attn_implementation=config._attn_implementation,
    )  # fmt: skip
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(
            f"a {cls.__name__} has {listing(missing)}, which this model lacks. Write "
            f"{argument('architecture', '…')} with another class."
        )
    plain.config.name_or_path = model.config.name_or_path
    if plain.can_generate():
        plain.generation_config = copy.deepcopy(model.generation_config)
    return plain.to(model.device).train(model.training)
