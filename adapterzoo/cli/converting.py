"""The work of `convert` and `merge`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.formats.peft.reading import TASKS, classes_for
from adapterzoo.heads import STATIC, HeadConfig
from adapterzoo.model import init, merging
from adapterzoo.model.conversion import Size, random_inputs
from adapterzoo.model.conversion.certificate import Certificate
from adapterzoo.model.exporting import FORMAT
from adapterzoo.model.heads.plain import class_for
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_classes import is_task, task_class, with_labels
from adapterzoo.model.state import base_prefix
from adapterzoo.serving.export import Export
from adapterzoo.serving.servers import servers
from adapterzoo.spelling import peft_readable

from .checkpoints import CheckpointFolder
from .foreign import add_changes, changes_by_peft
from .models import Fitted, base_of, fitted, load, load_into, on_fitted, tokenizer_of
from .output import note

_NAME = "merged"
_HINT = "To keep it, write --as with a class that has such a head."


class _Target(NamedTuple):
    """What to write.

    Attributes:
        name: class of transformers; None: the base model alone.
        head: description of the adapter's head if it becomes that of the class.
        tensors: the head's tensors by their keys in the class; empty if the keys of the adapter's
            file are the same.
        lost: why the adapter's head is left out; None if it is not.
    """

    name: str | None
    head: Mapping[str, Any] | None = None
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    lost: str | None = None


def convert(
    checkpoint: CheckpointFolder,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: an adapter, or only a head.
        folder: created if it is missing.
        to: name of the format.
        model: base model; None: the one that the checkpoint names.
        name: new name; None: its own.
        with_head: whether to write an adapter's head too.

    Raises:
        CheckpointError: the format cannot express the checkpoint, the checkpoint does not fit the
            base model, or the folder cannot be written.
    """
    base = base_of(checkpoint, model)

    def save(found: Fitted) -> None:
        if checkpoint.kind == "head":
            found.model.save_head(folder, found.name, format=to)
        else:
            found.model.save_adapter(
                folder, found.name, with_head=with_head, meta_dict=checkpoint.meta, format=to
            )

    on_fitted(checkpoint, base, save, name, writes=to)


def convert_method(
    checkpoint: CheckpointFolder,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
    rank: int | None,
    energy: float | None,
    text: str | None,
) -> Certificate:
    """Write a checkpoint as an adapter of another method, in the same format.

    Args:
        checkpoint: checkpoint of an adapter.
        folder: created if it is missing.
        to: name of the method.
        model: base model; None: the one that the checkpoint names.
        name: new name; None: its own.
        with_head: whether to write the adapter's head too.
        rank: maximum rank; None: no maximum.
        energy: share of the squared singular values to keep; None: all.
        text: text on which outputs are compared; None: random inputs.

    Raises:
        CheckpointError: the adapter does not fit the base model; its method exists only in PEFT,
            and a head or a fingerprint is asked for; the format cannot express the result; or the
            folder cannot be written.
        StateError: the adapter does more than change weights.
    """
    base = base_of(checkpoint, model)
    here = {spelling.peft_type for spelling in peft_readable()}
    certificate: Certificate
    if checkpoint.format == "peft" and checkpoint.method not in here:
        # PEFT itself computes the weight changes of a method that only it has; heads are left out
        if checkpoint.pinned is not None:
            raise CheckpointError(
                f"{checkpoint.path!r} has the method {checkpoint.method}, which only PEFT can "
                f"load, so it has no fingerprint. Write it without @{checkpoint.pinned}."
            )
        trained = checkpoint.metadata.get("modules_to_save")
        if trained and with_head:
            raise CheckpointError(
                f"{checkpoint.path!r} has trained copies of {listing(trained)}, which only PEFT "
                f"can load. Write {argument('with_head', False)} to leave them out."
            )
        config = load(AutoConfig, base)
        # the class for the task in PEFT's config, or that of the base model
        task = TASKS.get(str(checkpoint.metadata.get("task_type")), {})
        cls = [*classes_for(task, config.model_type), *(config.architectures or ("AutoModel",))][0]
        plain = load(getattr(transformers, cls), base, dtype=checkpoint.dtype).eval()
        adapted = init(copy.deepcopy(plain)).eval()
        inputs = random_inputs(adapted) if text is None else _inputs(adapted, base, text)
        found = changes_by_peft(
            plain, checkpoint.folder, str(checkpoint.method), inputs, text is not None
        )
        changes, inside = found.changes, base_prefix(adapted)
        if trained:
            changes = {key: value for key, value in changes.items() if key.startswith(inside)}
        name = name or checkpoint.name or Path(checkpoint.path).name
        changed = found._replace(changes=changes)
        certificate = add_changes(adapted, name, changed, to, Size(rank, energy))
        with_head = False
    else:
        own = fitted(checkpoint, base, name)
        adapted, name = own.model, own.name
        compared = None if text is None else _inputs(adapted, base, text)
        certificate = adapted.convert_adapter(
            name, to, rank, energy, new_name=name, overwrite_ok=True, inputs=compared
        )
    adapted.save_adapter(
        folder, name, with_head=with_head, meta_dict=checkpoint.meta, format=checkpoint.format
    )
    return certificate


def _inputs(model: Any, base: str, text: str) -> dict[str, Any]:
    """Return the model's inputs for a text, which a decoder reads too."""
    found = dict(tokenizer_of(base)(text, return_tensors="pt"))
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = found["input_ids"]
    return found


def export(
    checkpoint: CheckpointFolder,
    folder: str,
    serve: str,
    model: str | None,
    name: str | None,
    head: bool,
    rank: int | None,
    energy: float | None,
    dtype: str | None,
) -> Export:
    """Write an adapter in the form that a server reads.

    Args:
        checkpoint: checkpoint of an adapter.
        folder: created if it is missing.
        serve: name of the server.
        model: base model; None: the one that the checkpoint names.
        name: name of the adapter on the server; None: its own.
        head: whether to write the adapter's head too.
        rank: maximum rank of the nearest LoRA; None: no maximum.
        energy: share of the squared singular values to keep; None: all.
        dtype: dtype of the files; None: that of the adapter.

    Raises:
        CheckpointError: the server cannot read the adapter, the adapter does not fit the base
            model, or the folder cannot be written.
    """
    base = base_of(checkpoint, model)
    kind = None if dtype is None else getattr(torch, dtype)

    def save(found: Fitted) -> Export:
        # an adapter without a head uses that of the base model, which the server has
        with_head = head and found.stored.metadata.get("head") is not None
        written: Export = found.model.save_adapter(
            folder, found.name, with_head=with_head, meta_dict=checkpoint.meta, format=FORMAT,
            serve=serve, rank=rank, energy=energy, dtype=kind,
        )  # fmt: skip
        return written

    return on_fitted(checkpoint, base, save, name, writes=FORMAT)


def export_merged(
    checkpoint: CheckpointFolder,
    folder: str,
    serve: str,
    model: str | None,
    head: bool,
    max_shard_size: str | None,
) -> dict[str, Any]:
    """Write a whole model with an adapter merged, and return its class and how to serve it.

    Args:
        checkpoint: checkpoint of an adapter.
        folder: a new folder.
        serve: name of the server.
        model: base model; None: the one that the checkpoint names.
        head: whether the adapter's head becomes that of the class.
        max_shard_size: maximum size of a file, such as "5GB"; None: transformers' default.
    """
    base = base_of(checkpoint, model)
    name = merge(checkpoint, base, folder, None, head, max_shard_size)
    lines = [line.format(folder=folder) for line in servers.find(serve).merged]
    return {"server": serve, "class": name, "commands": lines}


def merge(
    checkpoint: CheckpointFolder,
    base: str,
    out: str,
    architecture: str | None,
    with_head: bool,
    max_shard_size: str | None = None,
) -> str:
    """Write a plain model with an adapter merged into its weights; note what it lacks.

    Args:
        checkpoint: checkpoint of an adapter.
        base: folder or name on the Hub.
        out: a new folder.
        architecture: class of transformers; None: that of the base model, or one with the
            adapter's head.
        with_head: whether the adapter's head becomes that of the class.
        max_shard_size: maximum size of a file, such as "5GB"; None: transformers' default.

    Returns:
        The class of transformers.

    Raises:
        CheckpointError: the adapter or its head does not fit, or the folder cannot be written.
        ConfigError: there is no such class.
        StateError: the adapter cannot be merged.
    """
    if architecture is not None:
        task_class(architecture)
    config = load(AutoConfig, base)
    tokenizer = None
    try:
        # without this file, transformers makes up a tokenizer
        cached_file(base, "tokenizer_config.json")
        tokenizer = load(AutoTokenizer, base)
    except OSError:
        note(f"No tokenizer of {base!r} was found; {out!r} has none.")
    own = next(iter(config.architectures or ()), None)
    target = _Target(architecture or own)
    if with_head:
        target = on_fitted(checkpoint, base, lambda found: _target(found, own, architecture), _NAME)
    own_head = target.head is not None and STATIC in target.head
    if target.head is not None and not own_head:
        config = with_labels(config, HeadConfig.from_dict(target.head["config"]))
    cls: Any = AutoModel if target.name is None else task_class(target.name)
    replaced = target.head is not None
    options: dict[str, Any] = {"dtype": "auto", "ignore_mismatched_sizes": replaced}
    model = init(load(cls, base, config=config, **options)).eval()
    keys = set(model.state_dict())
    load_into(checkpoint, model, _NAME, with_head=own_head)
    # layers that share a weight get their own, and the config says so
    with merging.untied_for(model, [_NAME]):
        model.merge_adapter(_NAME)
    state = model.state_dict()
    with torch.no_grad():
        for key, tensor in target.tensors.items():
            state[key].copy_(tensor)
    # the adapter stays in the model, but not in the file
    plain = {key: tensor for key, tensor in state.items() if key in keys}
    shards: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    PreTrainedModel.save_pretrained(model, out, state_dict=plain, **shards)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    if target.lost is not None:
        note(f"The adapter's head has been left out: {target.lost}")
    return type(model).__name__


def _target(found: Fitted, own: str | None, architecture: str | None) -> _Target:
    """Choose the class to write and decide what happens to the adapter's head.

    Args:
        found: the adapter in a model with the base model's structure.
        own: class of the base model.
        architecture: the user's choice.

    Raises:
        CheckpointError: the chosen class has another head.
    """
    name = architecture or own
    head = found.stored.metadata.get("head")
    if head is None:
        return _Target(name)
    if architecture is not None and not is_task(architecture):
        return _Target(name, lost=f"a {name} has no head. {_HINT}")
    if STATIC in head:
        return _Target(architecture or str(head[STATIC]), head)
    info = ModelInfo(found.model)
    if architecture is not None:
        return _Target(name, head, info.to_static(architecture, head, found.stored.head))
    try:
        task, tensors = class_for(found.stored, info, name)
    except CheckpointError as error:
        return _Target(name, lost=f"the class is that of the base model, because {error}")
    return _Target(task, head, tensors)
