"""Saving and loading of adapters and their heads, in the native format."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.checkpoint import native
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import (
    CheckpointError,
    ConfigError,
    DuplicateNameError,
    StateError,
    unknown_name,
)
from adapterzoo.methods import undrawn
from adapterzoo.names import check_name

from . import sharding
from .adapters import AdaptersMixin
from .building import inject_path
from .records import HeadRecord, Loaded, check_meta, leaving_out, record_of

ADAPTER_STEM = "adapter"
HEAD_STEM = "head"


class StoringMixin(AdaptersMixin):
    """`save_adapter`, `load_adapter` and their relatives."""

    # --- adapters ---

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str],
        adapter_name: str,
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save an adapter, and the head of the same name, to a folder.

        The file is replaced by one rename: after a crash the folder holds the old or the new
        adapter. It holds no weight of the base model.

        On a model that `fully_shard` has split this is a collective call: all processes make it,
        the first one writes, and all return when the file is there, or raise the same error. The
        file is that of the whole model.

        Args:
            save_directory: the folder; made when missing.
            adapter_name: which adapter.
            with_head: whether the head that goes with it is saved in the same file: the one of
                the same name, or the only active one; a static head that is no language model.
            meta_dict: JSON values to keep in the checkpoint's `meta`.

        Raises:
            UnknownNameError: there is no adapter of this name.
            ConfigError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written.
        """
        call = f"save_adapter({adapter_name!r})"
        installed = self._find(adapter_name, call)
        check_meta(call, meta_dict)
        sharding.rest(self)
        tensors = self._tensors_of(adapter_name)
        head = self._head_record(self._head_of(adapter_name)) if with_head else None
        document = {
            **self._provenance(adapter_name),
            "config": installed.config.to_dict(),
            "head": None if head is None else head.document,
            "meta": dict(meta_dict or {}),
        }
        stored = native.Stored(document, tensors, {} if head is None else head.tensors)
        sharding.save(self, save_directory, ADAPTER_STEM, stored)

    def load_adapter(
        self,
        adapter_name_or_path: str | os.PathLike[str],
        load_as: str | None = None,
        with_head: bool = True,
        leave_out: Iterable[int] | None = None,
        id2label: Mapping[int, str] | None = None,
        set_active: bool = False,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load an adapter, and its head, from a folder that `save_adapter` wrote.

        Args:
            adapter_name_or_path: the folder.
            load_as: name to give it; None: the one it was saved under.
            with_head: whether a head in the checkpoint is loaded, under the adapter's name.
            leave_out: numbers of blocks that shall get no adapter.
            id2label: other labels for the head.
            set_active: whether adapter and head become active.
            overwrite_ok: whether an adapter or head of that name may be replaced.
            dtype: keep parameters in this dtype, DoRA's magnitudes in float32 where it is a half;
                None: that of each layer, and a file in another one is an error.

        Returns:
            The adapter's name.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the model; the
                message has every difference, and nothing has been loaded.
            DuplicateNameError: the name is taken.
            StateError: the model is sharded.
        """
        loaded = self._fitting(
            adapter_name_or_path, load_as, with_head, tuple(leave_out or ()), id2label, set_active,
            overwrite_ok, dtype,
        )  # fmt: skip
        self._enter(loaded, set_active)
        return loaded.name

    def _fitting(
        self,
        path: str | os.PathLike[str],
        load_as: str | None = None,
        with_head: bool = True,
        leave_out: tuple[int, ...] = (),
        id2label: Mapping[int, str] | None = None,
        set_active: bool = False,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Loaded:
        """What `load_adapter` reads, checked in every way; the model has not changed."""
        call = f"load_adapter({str(path)!r})"
        sharding.refuse_if_sharded(self, call, "Load it before fully_shard(model).")
        stored = native.load(Path(path), ADAPTER_STEM)
        name = check_name("load_adapter", load_as or stored.document.get("name"))
        if name in self._zoo.installed:
            if not overwrite_ok:
                raise DuplicateNameError(
                    f"{call}: the model has an adapter {name!r}. Write load_as='another_name' or "
                    f"overwrite_ok=True."
                )
            self._refuse_if_overridden(name, call)
            self._refuse_if_merged(name, call)
            self._refuse_if_fused(name, call)
        config, made = self._filled(call, stored, leave_out, dtype)
        enter_head = None
        if id2label is not None and not (with_head and stored.document.get("head")):
            raise ConfigError(
                f"{call}: id2label={id2label!r} names the labels of a head, and none is loaded. "
                f"Leave id2label out, or load a checkpoint with a head."
            )
        if with_head and stored.document.get("head") is not None:
            record = record_of(call, stored)
            enter_head = self._fitting_head(
                call, record, name, id2label, set_active, overwrite_ok, dtype
            )
        return Loaded(name, config, made, enter_head)

    def _enter(self, loaded: Loaded, set_active: bool = False) -> None:
        if loaded.enter_head is not None:
            loaded.enter_head()
        if loaded.name in self._zoo.installed:
            self._remove(loaded.name)
        self._install(loaded.name, loaded.config, loaded.made)
        if set_active:
            self.set_active_adapters(loaded.name)
        else:
            self._replan()

    def save_all_adapters(
        self,
        save_directory: str | os.PathLike[str],
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Save each adapter to the sub-folder of its name.

        Raises:
            CheckpointError: a folder cannot be written.
        """
        for name in self.adapters_config:
            self.save_adapter(Path(save_directory) / name, name, with_head, meta_dict)

    def load_all_adapters(
        self, save_directory: str | os.PathLike[str], with_head: bool = True
    ) -> list[str]:
        """Load every adapter that `save_all_adapters` wrote.

        Returns:
            The names, sorted.

        Raises:
            CheckpointError: there is none, or one does not fit the model; none is loaded then.
            DuplicateNameError: a name is taken, or stands in two folders; none is loaded then.
        """
        call = f"load_all_adapters({str(save_directory)!r})"
        file = f"{ADAPTER_STEM}.safetensors"
        folders = sorted(p.parent for p in Path(save_directory).glob(f"*/{file}"))
        if not folders:
            raise CheckpointError(
                f"{call}: no sub-folder holds an {file}. "
                f"Write the folder that save_all_adapters was given."
            )
        loads = [self._fitting(folder, with_head=with_head) for folder in folders]
        names = [loaded.name for loaded in loads]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DuplicateNameError(
                f"{call}: two sub-folders hold an adapter {twice[0]!r}. Load them one by one: "
                f"load_adapter(folder, load_as='another_name')."
            )
        for loaded in loads:
            self._enter(loaded)
        return names

    # --- heads ---

    def save_head(
        self, save_directory: str | os.PathLike[str], head_name: str | None = None
    ) -> None:
        """Save a head alone; a collective call where `save_adapter` is one.

        Args:
            save_directory: the folder; made when missing.
            head_name: which head; None: the active one, or the model's static head.

        Raises:
            UnknownNameError: there is no head of this name.
            StateError: it cannot be told which head is meant, or there is none.
            CheckpointError: the folder cannot be written.
        """
        if head_name is not None and head_name not in self.known_heads():
            raise unknown_name(f"save_head({head_name!r})", "head", head_name, self.known_heads())
        name = head_name or self._active_head_name("save_head()")
        sharding.rest(self)
        record = self._head_record(name)
        if record is None:
            raise StateError(
                f"save_head({head_name!r}): this {type(self).__name__} has no head to save. "
                f"Write add_classification_head('my_task') first."
            )
        own_name = name or sharding.class_name(self)
        document = {**self._provenance(own_name), "head": record.document}
        stored = native.Stored(document, {}, record.tensors)
        sharding.save(self, save_directory, HEAD_STEM, stored)

    def save_all_heads(self, save_directory: str | os.PathLike[str]) -> None:
        """Save each head to the sub-folder of its name.

        Raises:
            CheckpointError: a folder cannot be written.
        """
        for name in self.known_heads():
            self.save_head(Path(save_directory) / name, name)

    def load_head(
        self,
        save_directory: str | os.PathLike[str],
        load_as: str | None = None,
        id2label: Mapping[int, str] | None = None,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load a head that `save_head` wrote; it becomes the active one.

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
        stored = native.load(Path(save_directory), HEAD_STEM)
        name = check_name("load_head", load_as or stored.document.get("name"))
        record = record_of(call, stored)
        self._fitting_head(call, record, name, id2label, True, overwrite_ok, dtype)()
        return name

    # --- what a model without named heads does; HeadsMixin has its own ---

    def _head_of(self, adapter_name: str) -> str | None:
        """The head that goes with an adapter; None stands for the static head."""
        return None

    def _active_head_name(self, call: str) -> str | None:
        return None

    def _head_record(self, name: str | None) -> HeadRecord | None:
        tensors = dict(self._static_head())
        return HeadRecord({"static": sharding.class_name(self)}, tensors) if tensors else None

    def _fitting_head(
        self,
        call: str,
        record: HeadRecord,
        name: str,
        id2label: Mapping[int, str] | None,
        set_active: bool,
        overwrite_ok: bool,
        dtype: torch.dtype | None,
    ) -> Callable[[], None]:
        """A head of a checkpoint, checked in every way; what is returned enters it."""
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
        mine = dict(self._static_head())
        native.check_fit(call, type(self).__name__, record.tensors, mine, dtype)

        @torch.no_grad()
        def enter() -> None:
            for key, tensor in record.tensors.items():
                mine[key].copy_(tensor)

        return enter

    def _static_head(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a static head, without those of the language model's output."""
        model = cast("Any", self)
        output = model.get_output_embeddings()
        skip = {id(t) for t in self._backbone.state_dict(keep_vars=True).values()}
        skip |= {id(p) for p in output.parameters()} if output is not None else set()
        # quantised layers make some of their entries anew each time: their names tell
        inside = "" if self._backbone is model else f"{model.base_model_prefix}."
        for key, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in skip and not key.startswith(inside):
                yield key, tensor

    # --- machinery ---

    def _provenance(self, name: str) -> dict[str, Any]:
        config = cast("Any", self).config
        text = (
            config.get_text_config()
            if callable(getattr(config, "get_text_config", None))
            else config
        )
        return {
            "name": name,
            "model_type": config.model_type,
            "model_class": sharding.class_name(self),
            "model_name": getattr(config, "_name_or_path", "") or None,
            "hidden_size": getattr(text, "hidden_size", None),
        }

    def _filled(
        self,
        call: str,
        stored: native.Stored,
        leave_out: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> tuple[AdapterConfig, dict[str, tuple[Adapter, list[Placement]]]]:
        """The adapter's modules with the values of a checkpoint, not yet in the model."""
        document = stored.document.get("config")
        if not isinstance(document, Mapping):
            raise CheckpointError(f"{call}: the checkpoint has no adapter config. Save it again.")
        config = AdapterConfig.from_dict(document)
        tensors = stored.adapter
        if leave_out:
            everywhere = {inject_path(p.site) for p in config.placements(self.anatomy)}
            config = leaving_out(config, leave_out)
            kept = {inject_path(p.site) for p in config.placements(self.anatomy)}
            gone = everywhere - kept
            tensors = {k: t for k, t in tensors.items() if k.partition("/")[0] not in gone}
        # a method that draws its values in a way of its own shall not disturb the caller's numbers
        with undrawn(), torch.random.fork_rng(devices=()):
            made = self._make(config)
        skeleton = {
            f"{path}/{key}": tensor
            for path, (module, _) in made.items()
            for key, tensor in module.state_dict(keep_vars=True).items()
        }
        native.check_fit(call, type(self).__name__, tensors, skeleton, dtype)
        by_path: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            path, _, parameter = key.partition("/")
            by_path.setdefault(path, {})[parameter] = tensor
        for path, (module, _) in made.items():
            native.fill(module if dtype is None else module.to(dtype), by_path.get(path, {}))
        return config, made
