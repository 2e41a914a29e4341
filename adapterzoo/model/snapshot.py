"""Training checkpoints: all trained parameters of a model in one folder.

Each adapter is in the sub-folder of its name, with its head and trained embeddings in one file, as
`load_adapter` reads it. A head of another name has its own sub-folder, as `load_head` reads it, and
so have the layers of each fusion. Copies of a static head are stored with their adapters and
fusions. Trained parameters of the base model are in a separate file; frozen ones are not saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import without_wrappers
from adapterzoo.composition import Fuse, fusion_key
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.formats import files, fit, native
from adapterzoo.formats.checkpoint import Checkpoint

from . import checkpointing
from .heads import checkpoints as head_files
from .heads.tables import expand
from .hf import fusion_files
from .state import AdaptedModel, fusion_modules, modules_of, named_tensors, own_parameters_of

UNFROZEN = "unfrozen.safetensors"


@dataclass(frozen=True, slots=True)
class Part:
    """One adapter, one head, the layers of one fusion or the unfrozen parameters.

    Attributes:
        what: its name in messages.
        file: the saved tensors.
        model: the tensors of the model to fill in place.
    """

    what: str
    file: dict[str, Tensor]
    model: dict[str, Tensor]


def save(model: AdaptedModel, folder: Path) -> None:
    """Write all adapters, all heads, all fusions and the unfrozen parameters.

    Args:
        model: with adapters.
        folder: created if missing.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    state, heads = model._adapter_state, model._head_strategy.saved_names()
    for name in state.records:
        checkpointing.save_adapter(model, folder / name, name, name in heads, beside=True)
    for name in _apart(model):
        head_files.save(model, folder / _folder_of(name), name)
    for name, fusion in state.fusions.items():
        fusion_files.save(model, folder / name, Fuse(*fusion.adapters, name=name))
    if tensors := unfrozen(model):
        document = {"format": native.FORMAT, "version": native.VERSION}
        files.write_tensors(folder / UNFROZEN, document, tensors)


def restore(model: AdaptedModel, folder: Path) -> None:
    """Fill the parameters of the model in place with those that `save` wrote.

    Args:
        model: with the same adapters and heads as when it was saved.
        folder: the folder given to `save`.

    Raises:
        CheckpointError: adapters, heads, fusions, configs or tensors differ; nothing has been
            filled.
    """
    parts = list(_parts(model, folder))
    for part in parts:
        try:
            fit.check_fit(type(model).__name__, part.file, part.model, None)
        except CheckpointError as error:
            raise CheckpointError(f"{part.what}: {error}") from error
    with torch.no_grad():
        for part in parts:
            for key, tensor in part.file.items():
                part.model[key].copy_(tensor)


def unfrozen(model: AdaptedModel) -> dict[str, Tensor]:
    """Return the trained parameters, by name, that belong to no adapter, head or fusion."""
    strategy = model._head_strategy
    kept = {id(p) for p in own_parameters_of(model)}
    for name in strategy.saved_names():
        record = strategy.record(name)
        kept |= {id(t) for t in record.tensors.values()} if record is not None else set()
    return {
        without_wrappers(name): p
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in kept
    }


def has_frozen_matrix(model: AdaptedModel) -> bool:
    """Return whether any matrix of the base model is frozen, embeddings aside.

    Embeddings do not count: some families have positions that are never trained.
    """
    own = {id(p) for p in own_parameters_of(model)}
    return any(
        not p.requires_grad
        for module in model._backbone.modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
        if p is not None and p.dim() > 1 and id(p) not in own
    )


def _apart(model: AdaptedModel) -> list[str]:
    """Return the heads that are not in an adapter's file, those of fusions included."""
    names = model._head_strategy.saved_names()
    return [name for name in names if name not in model._adapter_state.records]


def _folder_of(head: str) -> str:
    """Return the folder of a head; for a fusion's head, the folder of its layers."""
    return head.removeprefix(fusion_key(""))


def _parts(model: AdaptedModel, folder: Path) -> Iterator[Part]:
    apart, state = _apart(model), model._adapter_state
    for kind, names in (
        ("adapter", list(state.records)),
        ("head", [_folder_of(name) for name in apart]),
        (native.FUSION, list(state.fusions)),
    ):
        there = sorted(path.parent.name for path in folder.glob(f"*/{kind}.safetensors"))
        kinds = "fusions" if kind == native.FUSION else f"{kind}s"
        if there != sorted(names):
            raise CheckpointError(
                f"the checkpoint has the {kinds} {listing(there)}, the model has "
                f"{listing(sorted(names))}; nothing has been loaded. Add or delete {kinds} until "
                f"they are those of the checkpoint."
            )
    heads = model._head_strategy.saved_names()
    for name, record in state.records.items():
        stored = native.load(folder / name, "adapter")
        if (family := stored.metadata.get("model_type")) != model.config.model_type:
            raise CheckpointError(
                f"it was saved from a model of type {family!r}, this one is of type "
                f"{model.config.model_type!r}; nothing has been loaded. Load the model that it "
                f"was saved from."
            )
        saved = AdapterConfig.from_dict(stored.metadata["config"])
        fit.check_same(f"adapter {name!r}", saved, record.config)
        tensors = named_tensors(dict(modules_of(model, name)), keep_vars=True)
        _, in_file = expand(model, stored.metadata.get("embeddings"), stored.adapter)
        yield Part(f"adapter {name!r}", in_file, tensors)
        if name in heads:
            yield _head_part(model, name, stored)
        elif stored.head:
            raise CheckpointError(
                f"the checkpoint has a head of the adapter {name!r}, and the model has none; "
                f"nothing has been loaded. Write train_adapter({name!r}) first."
            )
    for name in apart:
        yield _head_part(model, name, native.load(folder / _folder_of(name), "head"))
    for name, fusion in state.fusions.items():
        stored = native.load(folder / name, native.FUSION)
        fused = stored.metadata["adapter_names"], stored.metadata["config"]
        mine = list(fusion.adapters), fusion.config.to_dict()
        fit.check_same(f"fusion {name!r}", fused, mine)
        layers = named_tensors(dict(fusion_modules(model, name)), keep_vars=True)
        yield Part(f"fusion {name!r}", stored.adapter, layers)
    file = folder / UNFROZEN
    saved_base = native.read(file)[1] if file.is_file() else {}
    yield Part("parameters of the base model that are not frozen", saved_base, unfrozen(model))


def _head_part(model: AdaptedModel, name: str, stored: Checkpoint) -> Part:
    strategy, document = model._head_strategy, stored.metadata.get("head")
    record, saved = strategy.record(name), dict(stored.head)
    if document is not None:
        saved = dict(strategy.completed(name, document, saved))
    return Part(f"head {name!r}", saved, {} if record is None else record.tensors)
