"""Export of an adapter to a server, as a LoRA in PEFT's files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from adapterzoo import formats, inject
from adapterzoo.config import DEFAULT_CHANGE_FORM, change_forms
from adapterzoo.errors import ConfigError, StateError, argument, columns, in_python
from adapterzoo.formats.checkpoint import Checkpoint, exported, inexpressible
from adapterzoo.formats.peft import folder_bytes
from adapterzoo.model import base, sharding
from adapterzoo.model.adapters import make
from adapterzoo.model.checkpointing import StrPath, checkpoint_of, whole
from adapterzoo.model.conversion import Size, converted, refuse_other
from adapterzoo.model.conversion.certificate import LayerReport
from adapterzoo.model.exporting import FORMAT, exporters
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.state import AdaptedModel, layer_in, modules_of, named_tensors

from .servers import for_server, reads, servers, unread


@dataclass(frozen=True, slots=True)
class Export:
    """What an export has written.

    Attributes:
        server: the value of `serve=`.
        title: the server's name and version.
        method: the adapter's method.
        rank: rank of all factors in the files.
        layers: the error of each weight if the adapter was converted; empty for a LoRA.
        rounding: ‖ΔW − ΔW'‖ / ‖ΔW‖ of all weights together, with ΔW' in the dtype of the files.
        commands: commands that start the server.
    """

    server: str
    title: str
    method: str
    rank: int
    layers: tuple[LayerReport, ...]
    rounding: float
    commands: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether the files hold the adapter's change up to rounding, without an SVD."""
        return all(layer.is_exact for layer in self.layers)

    def __str__(self) -> str:
        """Return a summary line, and a table of the layers if the adapter was converted."""
        how = "exactly" if self.is_exact else "by SVD"
        said = f"{self.method} for {self.title}, {how}, of rank {self.rank}"
        if self.rounding:
            said += f"; rounding changes it by {self.rounding:.1e} of its norm"
        rows = [
            (each.path, str(each.rank), f"{each.norm:.4g}", f"{each.error:.2e}",
             f"{each.relative:.2e}", "exact" if each.is_exact else "SVD")
            for each in self.layers
        ]  # fmt: skip
        titles = ("layer", "rank", "‖ΔW‖", "error", "relative", "")
        table = columns([titles, *rows], [False, *[True] * 4, False]) if rows else []
        return "\n".join([*table, said])

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {**dataclasses.asdict(self), "exact": self.is_exact}


def export(
    serve: str,
    model: AdaptedModel,
    folder: StrPath,
    name: str,
    with_head: bool,
    meta: Mapping[str, Any] | None,
    size: Size,
    dtype: torch.dtype | None,
) -> Export:
    """Write an adapter in the form that a server reads.

    Args:
        serve: the value of `serve=`.
        model: a model with adapters.
        folder: created if missing.
        name: the adapter's name.
        with_head: whether to save the adapter's head.
        meta: JSON values to save; None: those that the adapter was loaded with.
        size: how much to keep of a change that is not a LoRA; without limits it is refused.
        dtype: dtype of the files; None: that of the adapter.

    Raises:
        CheckpointError: the server cannot read such an adapter; nothing has been written.
        ConfigError: a limit or the dtype is invalid.
        UnknownNameError: the adapter is unknown.
    """
    server = servers[serve]
    size.check()
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(
            f"dtype={dtype} is not a floating-point dtype. Write dtype=torch.bfloat16."
        )
    sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
    info = ModelInfo(model)
    own = [module for _, module in modules_of(model, name)]
    with sharding.gathering(model, own):
        stored = whole(checkpoint_of(model, name, with_head, meta, FORMAT))
        stored.metadata |= base.entries(model, name, with_sample=False)
        method = str(stored.metadata["config"]["architecture"])
        shown = exported(stored, info)
        why, layers = unread(shown, info), tuple[LayerReport, ...]()
        if why is not None or size.rank is not None or size.energy is not None:
            stored, layers = _as_lora(model, name, stored, size, server.title, why)
            shown = exported(stored, info)
        found = for_server(shown, info, server, dtype, _merging(name))
    contents = folder_bytes(found.fields, found.tensors, shown.metadata)
    formats.write(Path(folder), shown, "adapter", FORMAT, info, contents)
    commands = server.commands(
        folder=folder, name=name, base=info.model_name or "BASE", rank=found.rank,
        targets=" ".join(found.fields["target_modules"]), labels=found.labels,
    )  # fmt: skip
    return Export(serve, server.title, method, found.rank, layers, found.rounding, commands)


def _as_lora(
    model: AdaptedModel, name: str, stored: Checkpoint, size: Size, title: str, why: str | None
) -> tuple[Checkpoint, tuple[LayerReport, ...]]:
    """Return a checkpoint with the adapter as a LoRA, and the error of each weight."""
    if next(cast("Any", model).parameters()).is_meta:
        raise StateError(f"converting {name!r} needs the model's weights. Load them.")
    try:
        record, layers = converted(model, name, change_forms.find(DEFAULT_CHANGE_FORM), size)
    except (ConfigError, LookupError, StateError) as error:
        raise inexpressible(f"{title}: only LoRA is read ({why or error})", _without()) from error
    inexact = [layer.path for layer in layers if not layer.is_exact]
    if inexact and size.rank is None and size.energy is None:
        raise inexpressible(
            f"{title}: only LoRA is read, and the change of {inexact[0]!r} is not one ({why})",
            argument("rank", 16),
            argument("energy", 0.99),
        )
    document = {**stored.metadata, "config": record.config.to_dict()}
    tensors = named_tensors(record.coming)
    return dataclasses.replace(stored, metadata=document, adapter=tensors), tuple(layers)


def readers(model: AdaptedModel, name: str) -> dict[str, str]:
    """Return the servers that can be given an adapter, and how: `"exact"` or `"SVD"`.

    The model needs no weights. The answers are those of `export`, with `energy=1.0` for "SVD". A
    bias that the adapter adds is not seen while it is zero, or if there are no weights.

    Args:
        model: a model with adapters.
        name: the adapter's name.
    """
    info, how = ModelInfo(model), "exact"
    stored = checkpoint_of(model, name, False, None, FORMAT)
    if unread(exported(stored, info), info) is not None:
        form = change_forms.find(DEFAULT_CHANGE_FORM)
        try:
            refuse_other(model, name)
            config = form.at_sites_of(model._adapter_state.find(name).config, model.anatomy)
            how = "exact" if _has_factors(model, name) else "SVD"
        except (ConfigError, LookupError, StateError):
            return {}
        lora = make(model, config)
        document = {**stored.metadata, "config": lora.config.to_dict()}
        stored = dataclasses.replace(stored, metadata=document, adapter=named_tensors(lora.coming))
    shown = exported(stored, info)
    return {key: how for key, each in servers.items() if key != "any" and reads(shown, info, each)}


def _has_factors(model: AdaptedModel, name: str) -> bool:
    """Return whether all changes of an adapter have factors that are no larger than the weight."""
    for path, adapter in modules_of(model, name):
        originals = model._adapter_state.originals.get(path, {})
        for _, value, factors in (
            inject.changes(layer_in(model, path), adapter, originals) if path else ()
        ):
            if factors is None or factors[0].shape[-2] > min(value.shape[-2:]):
                return False
    return True


def _merging(name: str) -> str:
    """Return the advice to write a whole model instead."""
    return in_python(f"merge_and_unload([{name!r}]).save_pretrained(…)", "--merge")


def _without() -> str:
    """Return the advice to write the adapter as it is."""
    return in_python("save_adapter(…) without serve", "`adapterzoo convert`")


for _name in servers:
    exporters.register(_name)(functools.partial(export, _name))
