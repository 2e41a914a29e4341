"""Saving and loading of heads alone, and of the static head of a transformers class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn

from adapterzoo.checkpoint import formats, native
from adapterzoo.checkpoint.digest import same_bits
from adapterzoo.checkpoint.stored import Stored
from adapterzoo.errors import CheckpointError, ConfigError, StateError, unknown_name

from . import sharding, static_heads
from .hf.info import facts_of
from .records import HeadRecord, name_in, record_of
from .tables import TablesMixin


class StoringHeadsMixin(TablesMixin):
    """`save_head`, `load_head` and `save_all_heads`."""

    _has_named_heads: ClassVar[bool] = False

    def save_head(
        self,
        save_directory: str | os.PathLike[str],
        head_name: str | None = None,
        format: str = "native",
    ) -> None:
        """Save a head alone; a collective call where `save_adapter` is one.

        Args:
            save_directory: the folder; made when missing.
            head_name: which head, or the adapter whose copy of a static head; None: the active
                one, which is the original where the active adapter has no copy.
            format: "native" or "adapterhub".

        Raises:
            UnknownNameError: there is no head or format of this name.
            StateError: it cannot be told which head is meant, or there is none.
            CheckpointError: the folder cannot be written, or the format cannot say it.
        """
        known = self.known_heads() if self._has_named_heads else tuple(self._adapter_state.copies)
        if head_name is not None and head_name not in known:
            raise unknown_name(f"save_head({head_name!r})", "head", head_name, known)
        name = head_name or self._active_head_name("save_head()")
        sharding.rest(self)
        record = self._head_alone(name)
        if record is None:
            raise StateError(
                f"save_head({head_name!r}): this {type(self).__name__} has no head to save. "
                f"Write add_classification_head('my_task') first."
            )
        if format == "native":
            record = self._in_file(name, record)
        own_name = name if name and self._has_named_heads else sharding.class_name(self)
        document = {**self._provenance(own_name), "head": record.document}
        stored = Stored(document, {}, record.tensors)
        self._write_checkpoint(save_directory, stored, "head", format, f"save_head({head_name!r})")

    def save_all_heads(
        self, save_directory: str | os.PathLike[str], format: str = "native"
    ) -> None:
        """Save each head to the sub-folder of its name.

        Args:
            save_directory: the folder of these; made when missing.
            format: "native" or "adapterhub".

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot say a head.
        """
        for name in self.known_heads():
            self.save_head(Path(save_directory) / name, name, format)

    def load_head(
        self,
        save_directory: str | os.PathLike[str],
        load_as: str | None = None,
        id2label: Mapping[int, str] | None = None,
        *,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load a head that `save_head`, or AdapterHub's, wrote; it becomes the active one.

        A static head becomes the active adapter's copy, or the original with no adapter active.

        Args:
            save_directory: the folder.
            load_as: name to give it; None: the one it was saved under.
            id2label: other labels.
            overwrite_ok: whether a head of that name may be replaced.
            dtype: as in `load_adapter`.

        Returns:
            The head's name.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the model.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded.
        """
        call = f"load_head({str(save_directory)!r})"
        sharding.refuse_if_sharded(self, call, "Load it before fully_shard(model).")
        stored = formats.read(Path(save_directory), "head", facts_of(self, call))
        name = name_in("load_head", load_as, stored, save_directory)
        record = record_of(call, stored)
        target = name if self._has_named_heads else self._active_head_name(call)
        self._fitting_head(call, record, target, id2label, True, overwrite_ok, dtype)()
        return name

    def _write_checkpoint(
        self,
        folder: str | os.PathLike[str],
        stored: Stored,
        stem: formats.Stem,
        format: str,
        call: str,
    ) -> None:
        facts = facts_of(self, call)
        if format != "native":
            # these look at weights of the base model, in one process
            hint = "Write format='native', load it into a whole model, and save it from there."
            sharding.refuse_if_sharded(self, call, hint)
        sharding.save(self, stored, lambda s: formats.write(Path(folder), s, stem, format, facts))

    def _provenance(self, name: str) -> dict[str, Any]:
        facts = facts_of(self, "save")
        return {
            "name": name,
            "model_type": facts.model_type,
            "model_class": facts.model_class,
            "model_name": facts.model_name,
            "hidden_size": facts.hidden_size,
        }

    # --- what a model without named heads does; HeadsMixin has its own ---

    def _head_of(self, adapter_name: str) -> str | None:
        """The head that goes with an adapter: of a static head its copy."""
        return adapter_name

    def _active_head_name(self, call: str) -> str | None:
        """Whose copy of the static head answers; None: the original does.

        Raises:
            StateError: different ones answer different rows.
        """
        owners = static_heads.owners_of(self._active.plan.setup)
        found = {o if o in self._adapter_state.copies else None for o in owners}
        if len(found) > 1:
            raise StateError(
                f"{call}: {self._active.plan.setup!r} is active, whose rows have heads of their "
                f"own, so it cannot be told which is meant. Write set_active_adapters('a') first."
            )
        # a head that is loaded becomes a copy of an adapter that has none yet
        return next(iter(owners), None) if len(owners) == 1 else None

    def _head_record(self, name: str | None) -> HeadRecord | None:
        tensors = static_heads.tensors_of(self, name)
        return HeadRecord({"static": sharding.class_name(self)}, tensors) if tensors else None

    def _head_alone(self, name: str | None) -> HeadRecord | None:
        """The record of a head that is saved without the adapter of its name."""
        return self._head_record(name)

    def _in_file(self, name: str | None, record: HeadRecord) -> HeadRecord:
        """The record without what the native format need not hold."""
        return record

    def _fitting_head(
        self,
        call: str,
        record: HeadRecord,
        name: str | None,
        id2label: Mapping[int, str] | None,
        set_active: bool,
        overwrite_ok: bool,
        dtype: torch.dtype | None,
    ) -> Callable[[], None]:
        """A head of a checkpoint, checked in every way; what is returned enters it.

        Args:
            call: what the user wrote, for messages.
            record: of the checkpoint.
            name: of the head; of a static head its owner, None for the original.
            id2label: other labels.
            set_active: whether it becomes the active one.
            overwrite_ok: whether one of the name may be replaced.
            dtype: as in `load_adapter`.
        """
        if "static" not in record.document:
            raise CheckpointError(
                f"{call}: the checkpoint has a named head ({record.document.get('config')}), and "
                f"a {type(self).__name__} has one static head. Write with_head=False, or load into "
                f"AutoAdapterModel.from_pretrained(…)."
            )
        if id2label is not None:
            raise ConfigError(
                f"{call}: id2label names the labels of a named head; this model's static head "
                f"keeps them in model.config.id2label. Leave id2label out."
            )
        mine = static_heads.tensors_of(self, None)
        native.check_fit(call, type(self).__name__, record.tensors, mine, dtype)
        if name is None:
            return lambda: native.fill(cast("nn.Module", self), record.tensors)
        self._refuse_shared(call, record)
        layers = static_heads.made(self)
        for path, layer in layers.items():
            inside = f"{path}."
            own = {
                k.removeprefix(inside): t for k, t in record.tensors.items() if k.startswith(inside)
            }
            native.fill(layer, own)
        return lambda: static_heads.put(self, name, layers)

    def _refuse_shared(self, call: str, record: HeadRecord) -> None:
        """Refuse to change what the heads of all adapters share."""
        for key, tensor in static_heads.rest_of(self).items():
            theirs = record.tensors[key].to(tensor.device, tensor.dtype)
            if not tensor.is_meta and not same_bits(theirs, tensor):
                raise CheckpointError(
                    f"{call}: {key!r} of the checkpoint's head is not that of this "
                    f"{type(self).__name__}, and all adapters share it: it is a tensor of the "
                    f"model itself. Write with_head=False, or load_head(…) with no adapter active."
                )
