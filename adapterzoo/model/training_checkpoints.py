"""Checkpoints of a training: all adapters, heads, fusions and trained parameters in one folder.

The base model is not in it. `Trainer` writes its own state beside them, last.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME

from adapterzoo.anatomy import without_wrappers
from adapterzoo.composition import Fuse, fusion_key
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.folders.formats import NATIVE_VERSION
from adapterzoo.folders.names import NAMES, Kind
from adapterzoo.formats import files, fit, native
from adapterzoo.formats.checkpoint import Checkpoint

from . import checkpointing, fusion, sharding
from .heads.named import completed, record_of, saved_names
from .heads.tables import expand
from .state import AdaptedModel, fusion_modules, modules_of, named_tensors, own_parameters_of

UNFROZEN = "unfrozen.safetensors"
# adapters in a checkpoint
ADAPTERS = "*/adapter.safetensors"


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, in the order of their steps."""
    numbers = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = []
    for path, number in numbers.items():
        with suppress(CheckpointError):
            if number.isdigit() and state_of(path):
                found.append(path)
    return sorted(found, key=lambda path: int(numbers[path]))


def state_of(folder: Path) -> dict[str, Any]:
    """Return the trainer's state, the last file that is written; it can be long and contain NaN.

    Raises:
        CheckpointError: the checkpoint is incomplete.
    """
    try:
        state: dict[str, Any] = json.loads((folder / TRAINER_STATE_NAME).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{str(folder)!r} has no complete {TRAINER_STATE_NAME}. Write the checkpoint before it."
        ) from error
    return state


def refuse_another(part: Part, folder: Path) -> None:
    """Refuse to write into the checkpoint of another run.

    Raises:
        CheckpointError: it has other adapters too, so that no trainer could resume from it.
    """
    there = {path.parent.name for path in folder.glob(ADAPTERS)}
    if others := sorted(there - {*part.adapters}):
        raise CheckpointError(
            f"{str(folder)!r} holds {listing(others)} of another run. Write another output_dir."
        )


class Part(NamedTuple):
    """The part of a model that a checkpoint holds.

    Attributes:
        adapters: names of adapters.
        heads: names of heads.
        fusions: names of fusions.
        trained: trained parameters by name; those outside adapters, heads and fusions are saved in
            a file of their own.
    """

    adapters: Sequence[str]
    heads: Sequence[str]
    fusions: Sequence[str]
    trained: Mapping[str, nn.Parameter]

    @classmethod
    def whole(cls, model: AdaptedModel) -> Part:
        """Return all adapters, heads, fusions and trained parameters of a model."""
        state, module = model._adapter_state, cast("nn.Module", model)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        return cls([*state.records], [*saved_names(model)], [*state.fusions], trained)


# for an adapter, a head, the layers of a fusion, or the unfrozen parameters: its name in messages,
# the saved tensors, and the model's tensors to fill in place
_Filled: TypeAlias = tuple[str, Mapping[str, Tensor], Mapping[str, Tensor]]


def save_trained(model: AdaptedModel, folder: Path, part: Part | None = None) -> None:
    """Write adapters, heads, fusions and the unfrozen parameters.

    Args:
        model: with adapters.
        folder: created if missing.
        part: the part to write; None: everything.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    part = part or Part.whole(model)
    for name in part.adapters:
        checkpointing.save_adapter(model, folder / name, name, name in part.heads, beside=True)
    for name, own in _apart(part).items():
        checkpointing.save_head(model, folder / own, name)
    for name in part.fusions:
        adapters = model._adapter_state.fusions[name].adapters
        fusion.save(model, folder / name, Fuse(*adapters, name=name))
    sharding.reshard(model)
    if tensors := sharding.gathered(unfrozen(model, part.trained)):
        document = {"format": native.FORMAT, "version": NATIVE_VERSION}
        write = functools.partial(files.write_tensors, folder / UNFROZEN, document, tensors)
        sharding.in_first_process(model, write)


def restore_trained(model: AdaptedModel, folder: Path, part: Part | None = None) -> None:
    """Fill the parameters of the model in place with those that `save_trained` wrote.

    Args:
        model: with the same adapters and heads as when it was saved.
        folder: the folder given to `save_trained`.
        part: the part that was saved; None: everything.

    Raises:
        CheckpointError: adapters, heads, fusions, configs or tensors differ; the model has not
            changed.
    """
    part = part or Part.whole(model)
    writes: list[tuple[Tensor, Tensor]] = []
    # after a forward, some modules hold whole tensors in place of the shards to fill
    sharding.reshard(model)
    free = unfrozen(model, part.trained).values()
    with sharding.gathering(model, _modules(model, part), free):
        for what, saved, own in _filled(model, folder, part):
            try:
                fit.check_fit(sharding.class_name(model), saved, own, None)
            except CheckpointError as error:
                raise CheckpointError(f"{what}: {error}") from error
            writes += [(own[key], tensor) for key, tensor in saved.items()]
    sharding.fill(writes)


def unfrozen(model: AdaptedModel, trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the trained parameters, by name, that belong to no adapter, head or fusion."""
    owned = {id(p) for p in own_parameters_of(model)}
    for name in saved_names(model):
        found = record_of(model, name)
        owned |= {id(t) for t in found.tensors.values()} if found is not None else set()
    return {without_wrappers(name): p for name, p in trained.items() if id(p) not in owned}


def _modules(model: AdaptedModel, part: Part) -> Iterator[nn.Module]:
    """Yield the modules of a part's adapters and fusions."""
    for name in part.adapters:
        yield from (module for _, module in modules_of(model, name))
    for name in part.fusions:
        yield from (layer for _, layer in fusion_modules(model, name))


def has_frozen_matrix(model: AdaptedModel) -> bool:
    """Return whether any matrix of the base model other than an embedding is frozen.

    Embeddings do not count: the position embeddings of some families are never trained.
    """
    own = {id(p) for p in own_parameters_of(model)}
    return any(
        not p.requires_grad
        for module in model._backbone.modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
        if p is not None and len(sharding.shape_of(p)) > 1 and id(p) not in own
    )


def _apart(part: Part) -> dict[str, str]:
    """Return the heads that are not in an adapter's file, with the names of their folders.

    A fusion's head is in the folder of the fusion's layers.
    """
    names = [name for name in part.heads if name not in part.adapters]
    return {name: name.removeprefix(fusion_key("")) for name in names}


def _filled(model: AdaptedModel, folder: Path, part: Part) -> Iterator[_Filled]:
    apart, state = _apart(part), model._adapter_state
    expected: dict[Kind, list[str]] = {
        "adapter": list(part.adapters),
        "head": list(apart.values()),
        native.FUSION: list(part.fusions),
    }
    for kind, names in expected.items():
        there = sorted(path.parent.name for path in folder.glob(f"*/{NAMES[kind].native}"))
        kinds = "fusions" if kind == native.FUSION else f"{kind}s"
        if there != sorted(names):
            raise CheckpointError(
                f"the checkpoint has the {kinds} {listing(there)}, and the model has "
                f"{listing(sorted(names))}. Add or delete {kinds}."
            )
    for name in part.adapters:
        record = state.records[name]
        stored = native.load(folder / name, "adapter")
        if (family := stored.metadata.get("model_type")) != model.config.model_type:
            raise CheckpointError(
                f"it was saved from a model of type {family!r}. Load it into one, not into a "
                f"{model.config.model_type!r}."
            )
        saved = AdapterConfig.from_dict(stored.metadata["config"])
        fit.check_same(f"adapter {name!r}", saved, record.config)
        tensors = named_tensors(dict(modules_of(model, name)), keep_vars=True)
        _, in_file = expand(model, stored.metadata.get("embeddings"), stored.adapter)
        yield f"adapter {name!r}", in_file, tensors
        if name in part.heads:
            yield _head_part(model, name, stored)
        elif stored.head:
            raise CheckpointError(
                f"it has a head {name!r}, the model has none. Write train_adapter({name!r}) first."
            )
    for name, own in apart.items():
        yield _head_part(model, name, native.load(folder / own, "head"))
    for name in part.fusions:
        mine = state.fusions[name]
        stored = native.load(folder / name, native.FUSION)
        saved_fusion = stored.metadata["adapter_names"], stored.metadata["config"]
        own_fusion = list(mine.adapters), mine.config.to_dict()
        fit.check_same(f"fusion {name!r}", saved_fusion, own_fusion)
        layers = named_tensors(dict(fusion_modules(model, name)), keep_vars=True)
        yield f"fusion {name!r}", stored.adapter, layers
    file = folder / UNFROZEN
    saved_base = native.read(file)[1] if file.is_file() else {}
    free = unfrozen(model, part.trained)
    yield "parameters of the base model that are not frozen", saved_base, free


def _head_part(model: AdaptedModel, name: str, stored: Checkpoint) -> _Filled:
    document, record = stored.metadata.get("head"), record_of(model, name)
    saved = stored.head if document is None else completed(model, name, document, stored.head)
    return f"head {name!r}", saved, {} if record is None else record.tensors
