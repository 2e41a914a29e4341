"""Saving and loading of adapters with their heads, in every format that is known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo import hub
from adapterzoo.checkpoint import folders, formats, native
from adapterzoo.checkpoint.stored import Stored
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import CheckpointError, ConfigError, DuplicateNameError, listing, naming
from adapterzoo.inject.building import (
    build,
    check_layers,
    device_of,
    give_memory,
    inject_path,
    layer_at,
)
from adapterzoo.methods import undrawn

from . import sharding
from .hf.info import facts_of
from .records import Loaded, check_meta, leaving_out, meta_of, name_in, record_of
from .storing_heads import StoringHeadsMixin


class StoringMixin(StoringHeadsMixin):
    """`save_adapter`, `load_adapter` and their relatives."""

    def save_adapter(
        self,
        save_directory: str | os.PathLike[str],
        adapter_name: str,
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
        format: str = "native",
    ) -> None:
        """Save an adapter, and the head of the same name, to a folder.

        After a crash the folder holds the old or the new adapter, in every format. No weight of
        the base model is saved, except where a head shares its output layer with it and
        AdapterHub's format keeps that layer with the head. Of embeddings that were trained with
        the adapter the native format holds the rows that differ from the base model's.

        On a model that `fully_shard` has split this is a collective call: all processes make it,
        the first one writes, and all return when the file is there, or raise the same error. The
        file is that of the whole model.

        Args:
            save_directory: the folder; made when missing.
            adapter_name: which adapter.
            with_head: whether the head that goes with it is saved in the same file: the one of
                the same name, or the only active one; a static head that is no language model.
            meta_dict: JSON values to keep in the checkpoint's `meta`; None: those that the
                adapter was loaded with.
            format: "native"; "adapterhub" for AdapterHub's `adapters`; "peft" for PEFT.

        Raises:
            UnknownNameError: there is no adapter or format of this name.
            ConfigError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written or has an adapter in another format, or
                the format cannot say what this adapter is.
        """
        call = f"save_adapter({adapter_name!r})"
        installed = self._find(adapter_name, call)
        check_meta(call, meta_dict)
        sharding.rest(self)
        embeddings, tensors = self._compact(adapter_name, self._tensors_of(adapter_name))
        head_name = self._head_of(adapter_name)
        record = self._head_record if head_name == adapter_name else self._head_alone
        head = record(head_name) if with_head else None
        if head is not None and format == "native":
            head = self._in_file(head_name, head)
        document = {
            **self._provenance(adapter_name),
            "config": installed.config.to_dict(),
            "head": None if head is None else head.document,
            "meta": dict(installed.meta if meta_dict is None else meta_dict),
        }
        if embeddings is not None:
            document["embeddings"] = embeddings
        stored = Stored(document, tensors, {} if head is None else head.tensors)
        self._write_checkpoint(save_directory, stored, "adapter", format, call)

    def load_adapter(
        self,
        adapter_name_or_path: str | os.PathLike[str],
        *,
        load_as: str | None = None,
        with_head: bool = True,
        leave_out: Iterable[int] | None = None,
        id2label: Mapping[int, str] | None = None,
        set_active: bool = False,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
        version: str | None = None,
        revision: str | None = None,
        source: str | None = None,
        **hub_kwargs: Any,
    ) -> str:
        """Load an adapter, and its head, from a folder or from the Hub.

        The format is recognised: that of this library, AdapterHub's or PEFT's.

        Args:
            adapter_name_or_path: the folder, or `user/repository` on the Hub.
            load_as: name to give it; None: the one it was saved under.
            with_head: whether a head in the checkpoint is loaded, under the adapter's name.
            leave_out: numbers of blocks that shall get no adapter.
            id2label: other labels for the head.
            set_active: whether adapter and head become active.
            overwrite_ok: whether an adapter or head of that name may be replaced.
            dtype: keep parameters in this dtype, DoRA's magnitudes in float32 where it is a half;
                None: that of each layer, and a file in another one is an error.
            version: the same as `revision`.
            revision: branch, tag or commit on the Hub.
            source: "hf" for the Hub, also where there is a folder of that name.
            **hub_kwargs: `cache_dir`, `token`, `local_files_only`, `force_download`, as
                huggingface_hub takes them.

        Returns:
            The adapter's name.

        Raises:
            CheckpointError: the file is missing or damaged, or does not fit the model; the
                message has every difference, and nothing has been loaded.
            ConfigError: a value in the checkpoint or an argument is not legal.
            DuplicateNameError: the name is taken.
            HubError: the files cannot be had from the Hub.
            StateError: the model is sharded.
        """
        call = f"load_adapter({str(adapter_name_or_path)!r})"
        if version is not None and revision not in (None, version):
            raise ConfigError(
                f"{call}: version={version!r} and revision={revision!r} mean the same thing and "
                f"differ. Write revision={revision!r} alone."
            )
        left_out = check_layers(leave_out, len(self.anatomy.blocks), "leave_out")
        with naming(lambda: call):
            folder = hub.resolve(adapter_name_or_path, revision or version, source, **hub_kwargs)
        name = None if folder == Path(adapter_name_or_path) else str(adapter_name_or_path)
        loaded = self._fitting(
            folder, load_as, with_head, left_out, id2label, set_active, overwrite_ok, dtype, name,
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
        hub_name: str | None = None,
    ) -> Loaded:
        """What `load_adapter` reads, checked in every way; the model has not changed."""
        call = f"load_adapter({hub_name or str(path)!r})"
        sharding.refuse_if_sharded(self, call, "Load it before fully_shard(model).")
        stored = formats.read(Path(path), "adapter", facts_of(self, call, with_head))
        name = name_in("load_adapter", load_as, stored, hub_name or path)
        self._refuse_taken(name, call, overwrite_ok, "load_as='another_name'")
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
        return Loaded(name, config, made, meta_of(stored), enter_head)

    def _enter(self, loaded: Loaded, set_active: bool = False) -> None:
        # what may fail comes first
        self._bring_in(loaded.name, loaded.config, loaded.made, set_active, loaded.meta)
        if loaded.enter_head is not None:
            loaded.enter_head()

    def save_all_adapters(
        self,
        save_directory: str | os.PathLike[str],
        with_head: bool = True,
        meta_dict: Mapping[str, Any] | None = None,
        format: str = "native",
    ) -> None:
        """Save each adapter to the sub-folder of its name.

        Args:
            save_directory: the folder of these; made when missing.
            with_head: as in `save_adapter`.
            meta_dict: JSON values for each of them; None: those that each was loaded with.
            format: as in `save_adapter`.

        Raises:
            CheckpointError: a folder cannot be written, or the format cannot say an adapter.
        """
        for name in self.adapters_config:
            self.save_adapter(Path(save_directory) / name, name, with_head, meta_dict, format)

    def load_all_adapters(
        self, save_directory: str | os.PathLike[str], with_head: bool = True
    ) -> list[str]:
        """Load every adapter that `save_all_adapters` wrote.

        Args:
            save_directory: the folder that was given there.
            with_head: whether heads in the checkpoints are loaded, under the adapters' names.

        Returns:
            The names, sorted.

        Raises:
            CheckpointError: there is none, or one does not fit the model; none is loaded then.
            DuplicateNameError: a name is taken, or stands in two folders; none is loaded then.
        """
        call = f"load_all_adapters({str(save_directory)!r})"
        found = []
        for folder in sorted(Path(save_directory).glob("*/")):
            # a hidden one is what a save has not finished, or nobody's adapter
            if folder.name.startswith("."):
                continue
            with folders.reading(call, folder):
                found += [folder] if formats.of(folder, "adapter") else []
        if not found:
            raise CheckpointError(
                f"{call}: no sub-folder holds an adapter. "
                f"Write the folder that save_all_adapters was given."
            )
        loads = [self._fitting(folder, with_head=with_head) for folder in found]
        names = [loaded.name for loaded in loads]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DuplicateNameError(
                f"{call}: two sub-folders hold an adapter {twice[0]!r}. Load them one by one: "
                f"load_adapter(folder, load_as='another_name')."
            )
        for loaded in loads:
            self._enter(loaded)
        return names

    # --- machinery ---

    def _filled(
        self,
        call: str,
        stored: Stored,
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
        # a stranger's config may ask for more memory than there is: compare before any is taken
        paths, tensors = self._expanded(call, stored.document.get("embeddings"), tensors)
        made = self._make(config, torch.device("meta"))
        if both := sorted(made.keys() & {*paths}):
            raise CheckpointError(
                f"{call}: the checkpoint has trained embeddings and an adapter at {listing(both)}. "
                f"Save it again."
            )
        made |= self._make_tables(config, paths, torch.device("meta"))
        skeleton = {
            f"{path}/{key}": tensor
            for path, (module, _) in made.items()
            for key, tensor in module.state_dict(keep_vars=True).items()
        }
        native.check_fit(call, type(self).__name__, tensors, skeleton, dtype)
        by_path: dict[str, dict[str, Tensor]] = {path: {} for path in made}
        for key, tensor in tensors.items():
            path, _, parameter = key.partition("/")
            by_path[path][parameter] = tensor
        for path, (module, placements) in made.items():
            if path in paths[1:]:
                # they share the table of the first
                made[path] = made[paths[0]][0], placements
                continue
            real = self._with_memory(module, path, placements)
            native.fill(real if dtype is None else real.to(dtype), by_path[path])
            made[path] = real, placements
        return config, made

    def _with_memory(self, adapter: Adapter, path: str, placements: list[Placement]) -> Adapter:
        """The adapter, which is on the meta device, as one on that of its layer."""
        layer = layer_at(self._backbone, path)
        if not path:
            return adapter.to_empty(device=device_of(layer))
        if give_memory(adapter, device_of(layer)):
            return adapter
        # a method that draws its values in a way of its own shall not disturb the caller's numbers
        with undrawn(), torch.random.fork_rng(devices=()):
            return build(layer, path, placements, cast("Any", self).dtype)
