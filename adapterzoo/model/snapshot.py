"""Everything trained of a model in one folder, to go back to it: what a training checkpoint is.

Each adapter lies in the sub-folder of its name, with the head of the same name in one file, as
`load_adapter` reads it, embeddings that were trained with it among them; a head of another name
lies in a sub-folder of its own, as `load_head` reads it, and so do the layers of each fusion.
Copies of a static head lie with their adapters and fusions. Parameters of the base model that the
user trains as well are in a file of their own, and the others nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.checkpoint import files, fit, fusions, native
from adapterzoo.checkpoint.formats import Checkpoint
from adapterzoo.composition import Fuse, fusion_key
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import CheckpointError, listing, naming

from .fusing import tensors_of
from .output_layers import with_output

UNFROZEN = "unfrozen.safetensors"


@dataclass(frozen=True, slots=True)
class Part:
    """One adapter, one head, the layers of one fusion or the unfrozen parameters.

    Attributes:
        what: for messages.
        file: tensors that were saved.
        model: tensors of the model, to be filled in place.
    """

    what: str
    file: dict[str, Tensor]
    model: dict[str, Tensor]


def save(model: Any, folder: Path) -> None:
    """Write all adapters, all heads, all fusions and the unfrozen parameters.

    Args:
        model: with adapters.
        folder: made when missing.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    for name in model.adapters_config:
        model.save_adapter(folder / name, name, with_head=name in _heads_of(model))
    for name in _apart(model):
        model.save_head(folder / _folder_of(name), name)
    for name in model._adapter_state.fusions:
        model.save_adapter_fusion(
            folder / name, Fuse(*model._adapter_state.fusions[name].adapters, name=name)
        )
    if tensors := unfrozen(model):
        document = {"format": native.FORMAT, "version": native.VERSION}
        files.write_tensors(folder / UNFROZEN, document, tensors)


def restore(model: Any, folder: Path, call: str) -> None:
    """Fill the parameters that the model has, in place, with those that `save` wrote.

    Args:
        model: with the adapters and heads that it had then.
        folder: as given to `save`.
        call: what the user wrote, for messages.

    Raises:
        CheckpointError: adapters, heads, fusions, configs or tensors differ; nothing has been
            filled.
    """
    parts = list(_parts(model, folder, call))
    for part in parts:
        where = f"{call}, {part.what}"
        with naming(where):
            fit.check_fit(type(model).__name__, part.file, part.model, None)
    with torch.no_grad():
        for part in parts:
            for key, tensor in part.file.items():
                part.model[key].copy_(tensor)


def unfrozen(model: Any) -> dict[str, Tensor]:
    """Parameters by name that are trained and belong to no adapter, no head and no fusion.

    Args:
        model: with adapters.
    """
    kept = {id(p) for name in model.adapters_config for p in model._parameters_of(name)}
    kept |= {id(p) for name in model._adapter_state.fusions for p in model._fusion_parameters(name)}
    for name in _heads_of(model):
        kept |= {id(t) for t in model._head_record(name).tensors.values()}
    return {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in kept}


def has_frozen_matrix(model: Any) -> bool:
    """Whether any matrix of the base model is frozen, embeddings aside.

    Some families have positions that are never trained, so those say nothing.

    Args:
        model: with adapters.
    """
    own = {id(p) for name in model.adapters_config for p in model._parameters_of(name)}
    own |= {id(p) for name in model._adapter_state.fusions for p in model._fusion_parameters(name)}
    return any(
        not p.requires_grad
        for module in model._backbone.modules()
        if not isinstance(module, nn.Embedding)
        for p in module._parameters.values()
        if p is not None and p.dim() > 1 and id(p) not in own
    )


def _heads_of(model: Any) -> tuple[str, ...]:
    """The named heads, or those who have a copy of a static head."""
    return tuple(model.known_heads() if model._has_named_heads else model._adapter_state.copies)


def _apart(model: Any) -> list[str]:
    """The heads that no adapter has in its file, that of a fusion among them."""
    return [name for name in _heads_of(model) if name not in model.adapters_config]


def _folder_of(head: str) -> str:
    """The head of a fusion lies with its layers."""
    return head.removeprefix(fusion_key(""))


def _parts(model: Any, folder: Path, call: str) -> Iterator[Part]:
    apart = _apart(model)
    fused = model._adapter_state.fusions
    for stem, names in (
        ("adapter", list(model.adapters_config)),
        ("head", [_folder_of(name) for name in apart]),
        (fusions.KIND, list(fused)),
    ):
        there = sorted(path.parent.name for path in folder.glob(f"*/{stem}.safetensors"))
        kinds = "fusions" if stem == fusions.KIND else f"{stem}s"
        if there != sorted(names):
            raise CheckpointError(
                f"{call}: the checkpoint has the {kinds} {listing(there)}, the model has "
                f"{listing(sorted(names))}; nothing has been loaded. Add or delete {kinds} until "
                f"they are those of the checkpoint."
            )
    heads = _heads_of(model)
    for name, config in model.adapters_config.items():
        stored = native.load(folder / name, "adapter")
        if (family := stored.metadata.get("model_type")) != model.config.model_type:
            raise CheckpointError(
                f"{call}: it was saved from a model of type {family!r}, this one is of type "
                f"{model.config.model_type!r}; nothing has been loaded. Load the model that it "
                f"was saved from."
            )
        saved = AdapterConfig.from_dict(stored.metadata["config"])
        if saved != config:
            raise _other_config(call, "adapter", name, saved, config)
        tensors = {
            f"{path}/{key}": tensor
            for path, module in model.adapter_modules(name)
            for key, tensor in module.state_dict(keep_vars=True).items()
        }
        _, saved_tensors = model._expanded(call, stored.metadata.get("embeddings"), stored.adapter)
        yield Part(f"adapter {name!r}", saved_tensors, tensors)
        if name in heads:
            yield _head_part(model, name, stored, call)
        elif stored.head:
            raise CheckpointError(
                f"{call}: the checkpoint has a head of the adapter {name!r}, and the model has "
                f"none; nothing has been loaded. Write train_adapter({name!r}) first."
            )
    for name in apart:
        yield _head_part(model, name, native.load(folder / _folder_of(name), "head"), call)
    for name, fusion in fused.items():
        stored = native.load(folder / name, fusions.KIND)
        # the classes of configs are names for their fields
        saved_fusion, mine = stored.metadata["config"], fusion.config.to_dict()
        names, own = stored.metadata["adapter_names"], list(fusion.adapters)
        if (saved_fusion, names) != (mine, own):
            raise _other_config(call, "fusion", name, (names, saved_fusion), (own, mine))
        yield Part(f"fusion {name!r}", stored.adapter, tensors_of(dict(model.fusion_modules(name))))
    file = folder / UNFROZEN
    saved_base = native.read(file)[1] if file.is_file() else {}
    yield Part("parameters of the base model that are not frozen", saved_base, unfrozen(model))


def _head_part(model: Any, name: str, stored: Checkpoint, call: str) -> Part:
    record = model._head_record(name)
    document = stored.metadata.get("head")
    if model._has_named_heads and document is not None:
        saved, mine = model._config_from(document["config"], call), model.get_head(name).config
        if saved != mine:
            raise _other_config(call, "head", name, saved, mine)
    saved_tensors = stored.head
    if model._has_named_heads and document is not None:
        heads = model.heads
        saved_tensors = with_output(call, heads[name], heads.values(), document, stored.head)
    return Part(f"head {name!r}", saved_tensors, record.tensors)


def _other_config(call: str, kind: str, name: str, saved: Any, mine: Any) -> CheckpointError:
    return CheckpointError(
        f"{call}: the {kind} {name!r} of the checkpoint is {saved!r}, that of the model {mine!r}; "
        f"nothing has been loaded. Add it with the config of the checkpoint."
    )
