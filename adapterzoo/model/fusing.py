"""AdapterFusion: layers that weigh what adapters say; add, delete, train, save, load, look at."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo.checkpoint import fusions, native
from adapterzoo.checkpoint.stored import Stored
from adapterzoo.composition import Fuse, fusion_key, fusions_of, parse, without
from adapterzoo.contracts import FusibleAdapter
from adapterzoo.errors import (
    AdapterZooError,
    CheckpointError,
    CompositionError,
    ConfigError,
    DuplicateNameError,
    SiteError,
    StateError,
    unknown_name,
)
from adapterzoo.inject.quantised import settle
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.names import check_name

from . import sharding, static_heads
from .hf.backbone import text_config
from .hf.info import facts_of
from .installed import FusionRecord
from .records import check_meta
from .refusals import lasts_of
from .storing import StoringMixin
from .training import TrainingMixin

# of the penalty on V, as in adapters
_REGULARIZATION = 0.01


class FusionMixin(StoringMixin, TrainingMixin):
    """Fusion layers by name. Names and arguments are those of `adapters`."""

    def add_adapter_fusion(
        self,
        adapter_names: Fuse | Sequence[str] | str,
        config: AdapterFusionConfig | str | Mapping[str, Any] | None = None,
        name: str | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add the layers that fuse some adapters, one at each place where these sit.

        Args:
            adapter_names: a `Fuse`, the names of the adapters, or these with commas between.
            config: a config, "static", "dynamic" or a dict; None: "dynamic".
            name: of the fusion; None: the names with commas between.
            overwrite_ok: whether a fusion of this name may be replaced.
            set_active: whether it becomes what is active.

        Raises:
            CompositionError: with `set_active`, stacks that do not sit in the same places.
            ConfigError: the config is not legal, or an adapter cannot be fused.
            DuplicateNameError: there is a fusion of this name.
            SiteError: the adapters do not sit in the same places.
            StateError: the model is sharded.
            UnknownNameError: there is no adapter of a name.
        """
        fuse = _fuse(adapter_names, name)
        call = f"add_adapter_fusion({fuse!r})"
        sharding.refuse_if_sharded(self, call, "Add it before fully_shard(model).")
        loaded = AdapterFusionConfig.load("dynamic" if config is None else config)
        if fuse.fusion is not None:
            check_name("add_adapter_fusion", fuse.fusion)
        self._free_fusion(fuse.name, overwrite_ok, call)
        for adapter in fuse.flatten():
            self._find(adapter, call)
        if set_active:
            # what cannot be active shall not be added either
            self._refuse_merged_part(fuse, self._adapter_state.merged, call)
        made = self._make_fusion(lasts_of(fuse), loaded, call)
        self._enter_fusion(fuse, loaded, made, set_active)

    def delete_adapter_fusion(self, adapter_names: Fuse | Sequence[str] | str) -> None:
        """Delete fusion layers; the adapters stay.

        Raises:
            StateError: they are active in an `AdapterSetup` of this thread, or the model is
                sharded.
            UnknownNameError: there is no fusion of this name.
        """
        name = _fuse(adapter_names, None).name
        call = f"delete_adapter_fusion({name!r})"
        self._find_fusion(name, call)
        sharding.refuse_if_sharded(self, call, "Write set_active_adapters(None).")
        self._refuse_overridden_fusion(name, call)
        self._take_fusion(name)

    def train_adapter_fusion(self, adapter_setup: object, unfreeze_adapters: bool = False) -> None:
        """Freeze everything but the fusion layers of a setup and the active heads; activate it.

        Args:
            adapter_setup: a `Fuse`, or a composition with one.
            unfreeze_adapters: whether its adapters are trained as well.

        Raises:
            CompositionError: it is no composition.
            StateError: there is no fusion in it, or it has no layers.
            UnknownNameError: there is no adapter of a name.
        """
        call = f"train_adapter_fusion({adapter_setup!r})"
        sharding.rest(self)
        setup = parse(adapter_setup)
        fuses = fusions_of(setup)
        if setup is None or not fuses:
            raise StateError(f"{call}: there is no fusion in it. Write Fuse('a', 'b').")
        for adapter in setup.flatten():
            self._find(adapter, call)
        self._prepare_heads(setup, call)
        self.set_active_adapters(setup)
        model = cast("nn.Module", self)
        model.train()
        settle(model)
        self.freeze_model(True)
        for fuse in fuses:
            for parameter in self._fusion_parameters(fuse.name):
                parameter.requires_grad_(True)
        for adapter in setup.flatten() if unfreeze_adapters else ():
            for parameter in self._parameters_of(adapter):
                parameter.requires_grad_(True)
        self._train_heads()
        self._hold_statistics()

    def get_fusion_regularization_loss(self) -> Tensor | None:
        """What the trainer adds to the loss so that V stays near the identity.

        None where no fusion that is trained asks for it.
        """
        distances = [
            distance
            for name in self._adapter_state.fusions
            for _, layer in self.fusion_modules(name)
            if layer.value is not None and layer.value.weight.requires_grad
            if (distance := layer.distance()) is not None
        ]
        return _REGULARIZATION * torch.stack(distances).sum() if distances else None

    def fusion_modules(self, name: str) -> Iterator[tuple[str, Fusion]]:
        """The fusion layers of a name with the paths of their places, in model order.

        Raises:
            UnknownNameError: there is no fusion of this name.
        """
        for path in self._find_fusion(name, f"fusion_modules({name!r})").paths:
            layer = cast("inject.Adapted", self._backbone.get_submodule(path))
            yield path, cast("Fusion", layer.adapters[fusion_key(name)])

    # --- save and load ---

    def save_adapter_fusion(
        self,
        save_directory: str | os.PathLike[str],
        adapter_names: Fuse | Sequence[str] | str,
        meta_dict: Mapping[str, Any] | None = None,
        format: str = "native",
    ) -> None:
        """Save fusion layers, without their adapters, to a folder.

        Args:
            save_directory: the folder; made when missing.
            adapter_names: which fusion.
            meta_dict: JSON values to keep in the checkpoint's `meta`.
            format: "native"; "adapterhub" for AdapterHub's `adapters`.

        Raises:
            UnknownNameError: there is no fusion or format of this name.
            ConfigError: `meta_dict` is not JSON.
            CheckpointError: the folder cannot be written, or the format cannot say it.
        """
        name = _fuse(adapter_names, None).name
        call = f"save_adapter_fusion({name!r})"
        found = self._find_fusion(name, call)
        check_meta(call, meta_dict)
        fusions.check_format(call, format)
        sharding.rest(self)
        document = {
            **self._provenance(name),
            "config": found.config.to_dict(),
            "adapter_names": list(found.adapters),
            "meta": dict(meta_dict or {}),
        }
        stored = Stored(document, tensors_of(dict(self.fusion_modules(name))))
        folder, facts = Path(save_directory), facts_of(self, call)
        fused = [self._find(adapter, call).config for adapter in found.adapters]
        sharding.save(self, stored, lambda s: fusions.write(folder, s, format, facts, fused))

    def load_adapter_fusion(
        self,
        adapter_fusion_name_or_path: str | os.PathLike[str],
        load_as: str | None = None,
        *,
        set_active: bool = False,
        overwrite_ok: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Load fusion layers that `save_adapter_fusion`, here or of `adapters`, wrote.

        The adapters that they fuse must be there.

        Args:
            adapter_fusion_name_or_path: the folder.
            load_as: name to give them; None: the one they were saved under.
            set_active: whether the fusion becomes what is active.
            overwrite_ok: whether a fusion of that name may be replaced.
            dtype: keep parameters in this dtype; None: that of the adapters.

        Returns:
            The fusion's name.

        Raises:
            CheckpointError: the file is missing, damaged, or does not fit.
            DuplicateNameError: the name is taken.
            SiteError: the adapters do not sit in the same places.
            UnknownNameError: an adapter that is fused is not there.
        """
        call = f"load_adapter_fusion({str(adapter_fusion_name_or_path)!r})"
        sharding.refuse_if_sharded(self, call, "Load it before fully_shard(model).")
        folder, facts = Path(adapter_fusion_name_or_path), facts_of(self, call)
        stored = fusions.read(folder, facts, lambda name: self._find(name, call).config)
        names, values = stored.document.get("adapter_names"), stored.document.get("config")
        if not isinstance(names, list) or not isinstance(values, Mapping) or not _are_names(names):
            raise CheckpointError(f"{call}: the checkpoint holds no fusion. Save it again.")
        name = load_as or str(stored.document.get("name"))
        fuse = Fuse(*names, name=None if name == ",".join(names) else check_name(call, name))
        self._free_fusion(fuse.name, overwrite_ok, call)
        config = AdapterFusionConfig.load(values)
        with torch.random.fork_rng(devices=()):
            made = self._make_fusion(tuple(names), config, call)
        native.check_fit(call, type(self).__name__, stored.adapter, tensors_of(made), dtype)
        for path, layer in made.items():
            own = {k.partition("/")[2]: t for k, t in stored.adapter.items() if _is_at(k, path)}
            native.fill(layer.to(dtype), own)
        self._enter_fusion(fuse, config, made, set_active)
        return fuse.name

    # --- machinery ---

    def _make_fusion(
        self, names: tuple[str, ...], config: AdapterFusionConfig, call: str
    ) -> dict[str, Fusion]:
        places = {name: list(self._find(name, call).places) for name in names}
        first = places[names[0]]
        for name, paths in places.items():
            if paths != first:
                lost = sorted(set(paths) ^ set(first))
                raise SiteError(
                    f"{call}: {names[0]!r} and {name!r} do not sit in the same places, at "
                    f"{lost[0]!r} is one of them. Fuse adapters of one placement, or leave_out the "
                    f"other blocks."
                )
            for path, module in self.adapter_modules(name):
                if not isinstance(module, FusibleAdapter):
                    raise ConfigError(
                        f"{call}: {name!r} is a {type(module).__name__} at {path!r}, and a fusion "
                        f"weighs what bottlenecks say. Write add_adapter({name!r}, 'seq_bn')."
                    )
        text = text_config(cast("Any", self).config)
        inherited = getattr(text, "attention_probs_dropout_prob", 0.0)
        dropout = inherited if config.dropout_prob is None else config.dropout_prob
        made = {}
        for path, module in self.adapter_modules(names[-1]):
            parameter = next(module.parameters())
            width = self._adapter_state.records[names[-1]].places[path][0].site.d_out
            made[path] = Fusion(config, width, dropout, parameter.device, parameter.dtype)
        return made

    def _enter_fusion(
        self,
        fuse: Fuse,
        config: AdapterFusionConfig,
        made: Mapping[str, Fusion],
        set_active: bool,
    ) -> None:
        """Put fusion layers, in the place of those of their name; what fails changes nothing."""
        before, fusions = self._active.default.plan, dict(self._adapter_state.fusions)
        name, adapters = fuse.name, lasts_of(fuse)
        replaced = dict(self.fusion_modules(name)) if name in fusions else {}
        head = static_heads.layers_with(self, fusion_key(name))
        copies, orders = (
            dict(self._adapter_state.copies),
            {path: self._order_at(path) for path in replaced},
        )
        if name in fusions:
            self._take_fusion(name)
        self._put_fusion(name, made)
        self._adapter_state.fusions[name] = FusionRecord(config, adapters, tuple(made))
        # one that was active and is replaced stays active
        active = fusions_of(before.setup)
        try:
            if set_active:
                self.set_active_adapters(fuse)
            elif any(each.name == name and lasts_of(each) == adapters for each in active):
                plan = self.make_plan(before.setup, list(before.heads), before.skip_layers)
                self._active.default.plan = plan
        except AdapterZooError:
            self._take_fusion(name)
            self._put_fusion(name, replaced)
            self._reorder(orders)
            static_heads.put_back(self, fusion_key(name), head, copies)
            # the order too
            self._adapter_state.fusions = fusions
            self._active.default.plan = before
            raise

    def _put_fusion(self, name: str, layers: Mapping[str, Fusion]) -> None:
        for path, fusion in layers.items():
            layer = self._backbone.get_submodule(path)
            inject.put(layer, fusion_key(name), fusion, self._active, path)

    def _take_fusion(self, name: str) -> None:
        static_heads.take(self, fusion_key(name))
        for path in self._adapter_state.fusions.pop(name).paths:
            inject.take(self._backbone.get_submodule(path), fusion_key(name))
        plan = self._active.default.plan
        if any(fuse.name == name for fuse in fusions_of(plan.setup)):
            setup = without(plan.setup, (), [name])
            self._active.default.plan = self.make_plan(setup, list(plan.heads), plan.skip_layers)

    def _free_fusion(self, name: str, overwrite_ok: bool, call: str) -> None:
        if name not in self._adapter_state.fusions:
            return
        if not overwrite_ok:
            raise DuplicateNameError(
                f"{call}: there is a fusion {name!r}. Write overwrite_ok=True to replace it, or "
                f"delete_adapter_fusion({name!r})."
            )
        self._refuse_overridden_fusion(name, call)

    def _find_fusion(self, name: str, call: str) -> FusionRecord:
        if name not in self._adapter_state.fusions:
            raise unknown_name(call, "fusion", name, self._adapter_state.fusions)
        return self._adapter_state.fusions[name]

    def _refuse_overridden_fusion(self, name: str, call: str) -> None:
        for plan in self._active.overrides:
            if any(fuse.name == name for fuse in fusions_of(plan.setup)):
                raise StateError(
                    f"{call}: {name!r} is active in an AdapterSetup of this thread. Leave the "
                    f"'with AdapterSetup(…)' block first."
                )


def _fuse(names: Fuse | Sequence[str] | str, name: str | None) -> Fuse:
    """What a user may pass as a fusion."""
    if isinstance(names, Fuse):
        return names if name is None else Fuse(*names.children, name=name)
    if not isinstance(names, Iterable):
        raise CompositionError(
            f"Fuse({names!r}): a fusion is of adapters, by their names. Write Fuse('a', 'b')."
        )
    listed = names.split(",") if isinstance(names, str) else list(names)
    return Fuse(*listed, name=name)


def tensors_of(layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of fusion layers by path and key, as their checkpoints name them.

    Args:
        layers: by path.
    """
    return {
        f"{path}/{key}": tensor
        for path, layer in layers.items()
        for key, tensor in layer.state_dict(keep_vars=True).items()
    }


def _are_names(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, str) for value in values)


def _is_at(key: str, path: str) -> bool:
    return key.partition("/")[0] == path
