"""Named adapters of a model: add, delete, activate, look at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adapterzoo import inject
from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.anatomy import Anatomy, find
from adapterzoo.composition import Composition, parse
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter
from adapterzoo.errors import AdapterZooError, StateError
from adapterzoo.inject.building import (
    at_hand,
    build,
    build_shared,
    check_layers,
    device_of,
    inject_path,
    layer_at,
)
from adapterzoo.names import check_name
from adapterzoo.runtime import ActiveState, Default

from . import static_heads
from .batching import refuse_while_batching
from .installed import AdapterRecord, AdaptersConfig, AdapterState, families_of, is_whole
from .planning import PlanningMixin
from .setup import announce
from .sharding import refuse_if_sharded

# arguments of `forward` that a base model would swallow
_WHOLE = ("adapter_names", "output_adapter_gating_scores", "output_adapter_fusion_attentions")


class AdaptersMixin(PlanningMixin):
    """Adapters by name, for any `PreTrainedModel`. Names and arguments are those of `adapters`."""

    def _start_adapters(self) -> None:
        """Called once, when the model gets these methods."""
        self._active = ActiveState(Default())
        self._adapter_state = AdapterState()
        announce(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled models are models with adapters too."""
        super().__setstate__(state)  # type: ignore[misc]
        announce(self)

    # --- what there is ---

    @property
    def adapters_config(self) -> AdaptersConfig:
        """Names and configs of all adapters."""
        return AdaptersConfig(self._adapter_state.records)

    @property
    def anatomy(self) -> Anatomy:
        """Where adapters can sit in the base model."""
        if self._adapter_state.anatomy is None:
            self._adapter_state.anatomy = find(self._backbone)
        return self._adapter_state.anatomy

    def has_adapters(self) -> bool:
        """Whether there is any adapter."""
        return bool(self._adapter_state.records)

    def known_heads(self) -> tuple[str, ...]:
        """Names of the model's heads; a model without named heads has none."""
        return ()

    @property
    def _backbone(self) -> nn.Module:
        if self._adapter_state.whole is None:
            self._adapter_state.whole = is_whole(cast("nn.Module", self))
        return cast(
            "nn.Module", self if self._adapter_state.whole else cast("Any", self).base_model
        )

    def adapter_modules(self, name: str) -> Iterator[tuple[str, Adapter]]:
        """The modules of an adapter with the paths of their layers, in model order.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        for path in self._find(name, f"adapter_modules({name!r})").places:
            layer = inject.below_wrappers(self._backbone.get_submodule(path))
            yield path, cast("Adapter", layer.adapters[name])

    def get_adapter(self, name: str) -> dict[int, dict[str, nn.Module]]:
        """The modules of an adapter: `{block number: {location: module}}`; −1 is outside blocks.

        Where one location holds several modules they come as a `ModuleList`.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        places = self._find(name, f"get_adapter({name!r})").places
        found: dict[int, dict[str, list[nn.Module]]] = {}
        for path, module in self.adapter_modules(name):
            for placement in places[path]:
                block = found.setdefault(placement.site.layer, {})
                at = block.setdefault(placement.location or str(placement.site.role), [])
                if module not in at:
                    at.append(module)
        return {
            layer: {at: ms[0] if len(ms) == 1 else nn.ModuleList(ms) for at, ms in block.items()}
            for layer, block in found.items()
        }

    # --- add and delete ---

    def add_adapter(
        self,
        adapter_name: str,
        config: AdapterConfig | str | Mapping[str, Any] | None = None,
        overwrite_ok: bool = False,
        set_active: bool = False,
    ) -> None:
        """Add an adapter with fresh parameters, on each layer's device and in its dtype.

        Args:
            adapter_name: its name.
            config: a config, a config string such as "lora[r=8]", or a dict; None: "seq_bn".
            overwrite_ok: whether an adapter of this name may be replaced.
            set_active: whether it becomes the active adapter.

        Raises:
            ConfigError: the name or a value of the config is not legal.
            DuplicateNameError: the name is taken.
            SiteError: the model has no place that the config asks for.
            StateError: the model is sharded.
        """
        call = f"add_adapter({adapter_name!r})"
        check_name("add_adapter", adapter_name)
        refuse_if_sharded(self, call, "Add it before fully_shard(model).")
        loaded = AdapterConfig.load(config)
        self._refuse_taken(adapter_name, call, overwrite_ok)
        made = self._make(loaded)
        for path, (adapter, placements) in made.items():
            if not placements:
                continue
            layer = self._backbone.get_submodule(path)
            with at_hand(layer), torch.no_grad():
                # a model that is being loaded has no values yet, and the file has the adapter's
                if not any(p is not None and p.is_meta for p in layer._parameters.values()):
                    inject.init_from_layer(
                        layer, adapter, self._adapter_state.originals.get(path, {})
                    )
        self._bring_in(adapter_name, loaded, made, set_active)

    def _bring_in(
        self,
        name: str,
        config: AdapterConfig,
        made: Mapping[str, tuple[Adapter, list[Placement]]],
        set_active: bool,
        meta: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Install an adapter, in the place of one of its name; what fails changes nothing.

        Args:
            name: of the adapter.
            config: its config.
            made: path to its module, with its values.
            set_active: whether it becomes the active adapter.
            meta: JSON values that belong to it.

        Raises:
            StateError: it cannot act beside what is merged.
        """
        plan, installed = self._active.default.plan, dict(self._adapter_state.records)
        replaced = installed.get(name)
        old = dict(self.adapter_modules(name)) if replaced is not None else {}
        head, copies = static_heads.layers_with(self, name), dict(self._adapter_state.copies)
        orders = {path: self._order_at(path) for path in old}
        if replaced is not None:
            self._remove(name)
        self._install(name, config, made, meta)
        try:
            if set_active:
                self.set_active_adapters(name)
            else:
                self._replan()
        except AdapterZooError:
            self._remove(name)
            if replaced is not None:
                places = {path: (old[path], list(ps)) for path, ps in replaced.places.items()}
                self._install(name, replaced.config, places, replaced.meta)
            # the order too
            self._reorder(orders)
            static_heads.put_back(self, name, head, copies)
            self._adapter_state.records = installed
            self._active.default.plan = plan
            raise

    def _order_at(self, path: str) -> list[str]:
        """The names of the adapters at a layer, as its state dict has them."""
        return list(cast("Any", self._backbone.get_submodule(path)).adapters)

    def _reorder(self, orders: Mapping[str, list[str]]) -> None:
        """Undo what taking and putting did to the state dict.

        Args:
            orders: path of a layer to what `_order_at` gave.
        """
        for path, order in orders.items():
            adapters = cast("Any", self._backbone.get_submodule(path)).adapters
            adapters._modules = {name: adapters._modules[name] for name in order}

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter; where it was active, what was active beside it stays so.

        Raises:
            UnknownNameError: there is no adapter of this name.
            StateError: it is merged, or active in an `AdapterSetup` of this thread; or the model
                is sharded.
        """
        call = f"delete_adapter({adapter_name!r})"
        self._find(adapter_name, call)
        refuse_if_sharded(self, call, "Write set_active_adapters(None).")
        self._refuse_if_overridden(adapter_name, call)
        self._refuse_if_merged(adapter_name, call)
        self._refuse_if_fused(adapter_name, call)
        self._remove(adapter_name)
        self._replan()

    def _make(
        self, config: AdapterConfig, device: torch.device | None = None
    ) -> dict[str, tuple[Adapter, list[Placement]]]:
        """All modules of a config, before any of them touches the model.

        Args:
            config: of the adapter.
            device: where they are made; None: each on that of its layer.

        Raises:
            StateError: a model inside has adapters that this one does not know.
        """
        for _, part in self._models_inside():
            if isinstance(part, AdaptersMixin) or not inject.belongs(part, self._active):
                raise StateError(
                    f"add_adapter(): the {type(part).__name__} in this {type(self).__name__} has "
                    f"adapters of its own or of another model. Write add_adapter(…) of that one."
                )
        by_path: dict[str, list[Placement]] = {}
        for placement in config.placements(self.anatomy):
            by_path.setdefault(inject_path(placement.site), []).append(placement)
        backbone, dtype = self._backbone, cast("Any", self).dtype
        layers = {path: layer_at(backbone, path) for path in by_path}
        for path, layer in layers.items():
            inject.check_put(layer, path)
        placements = [p for ps in by_path.values() for p in ps]
        first = next(iter(layers.values()))
        at = device or device_of(first)
        shared, sharing = build_shared(config, placements, at, dtype)
        made: dict[str, tuple[Any, list[Placement]]] = {
            path: (build(layers[path], path, ps, dtype, device, sharing), ps)
            for path, ps in by_path.items()
        }
        if shared is not None:
            made[""] = shared, []
        return made

    def _install(
        self,
        name: str,
        config: AdapterConfig,
        made: Mapping[str, tuple[Adapter, list[Placement]]],
        meta: Mapping[str, Any],
    ) -> None:
        places = {path: tuple(ps) for path, (_, ps) in made.items()}
        reads_calls = False
        for adapter, _ in made.values():
            for module in adapter.modules():
                if isinstance(module, Adapter):
                    reads_calls |= module.reads_call or module.shared_key is not None
                    if module.shared_key is not None:
                        module.shared_key = name, module.shared_key[1]
        installed = AdapterRecord(config, places, families_of(places), reads_calls, dict(meta))
        for path, (adapter, _) in made.items():
            if not path:
                inject.put_shared(self._backbone, name, adapter, self._active)
                continue
            layer = layer_at(self._backbone, path)
            inject.put(layer, name, adapter, self._active, path)
        for source, reader in installed.sources():
            module = self._backbone.get_submodule(source)
            inject.capture_input(module, reader, name, self._active, source)
        for around in installed.families:
            inject.capture_input(
                layer_at(self._backbone, around), around, name, self._active, around
            )
        for path, part in self._models_inside():
            inject.capture_input(part, path, name, self._active, path, whole=_WHOLE)
            if reads_calls:
                inject.record_calls(part, name, self._active, path)
        self._adapter_state.records[name] = installed
        self._settle_ties(name)

    def _settle_ties(self, name: str) -> None:
        """Called when an adapter has come or gone: what it shares is listed anew."""

    def _untie(self, name: str) -> None:
        """Called when an adapter goes: what shares its parameters lets go of them."""

    def _models_inside(self) -> Iterator[tuple[str, nn.Module]]:
        """The base model and the models in it, encoders and decoders; not the model itself."""
        if self._adapter_state.models is None:
            modules = self._backbone.named_modules()
            self._adapter_state.models = tuple(
                p for p, m in modules if isinstance(m, PreTrainedModel)
            )
        for path in self._adapter_state.models:
            module = layer_at(self._backbone, path)
            if module is not cast("nn.Module", self):
                yield path, module

    def _remove(self, name: str) -> None:
        self._untie(name)
        installed = self._adapter_state.records.pop(name)
        self._active.forget(name)
        self._adapter_state.plans.clear()
        static_heads.take(self, name)
        for source, reader in installed.sources():
            inject.release_input(self._backbone.get_submodule(source), reader, name)
        for around in installed.families:
            inject.release_input(self._backbone.get_submodule(around), around, name)
        for path, part in self._models_inside():
            inject.release_input(part, path, name)
        for path in installed.places:
            if path:
                inject.take(self._backbone.get_submodule(path), name)
        inject.take_shared(self._backbone, name, self._active)
        self._settle_ties(name)

    # --- activate ---

    @property
    def active_adapters(self) -> Composition | None:
        """What is active for the calling thread, None for the plain base model."""
        return self._active.plan.setup

    @active_adapters.setter
    def active_adapters(self, adapter_setup: object) -> None:
        self.set_active_adapters(adapter_setup)

    def set_active_adapters(
        self, adapter_setup: object, skip_layers: Iterable[int] | None = None
    ) -> None:
        """Choose the adapters of all threads; heads of the same names become active with them.

        Args:
            adapter_setup: a name, a list of names (a `Stack`), a composition, or None.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop).

        Raises:
            CompositionError: it is no composition, or does not fit where the adapters sit.
            ConfigError: the model has no block of a number in `skip_layers`.
            StateError: there are no layers of a fusion, or it does not fit what is merged.
            UnknownNameError: there is no adapter of this name.
        """
        setup = parse(adapter_setup)
        default = self._active.default
        # not those of the calling thread, which an AdapterSetup may have changed
        heads = self._heads_named(setup, default.plan.heads)
        skipped = check_layers(skip_layers, len(self.anatomy.blocks))
        refuse_while_batching(self, f"set_active_adapters({setup!r})")
        default.plan = self.make_plan(setup, list(heads), skipped)

    # --- move ---

    def adapter_to(
        self,
        name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Move or cast an adapter alone, with its own copy of a static head.

        Args:
            name: of the adapter.
            device: None: where each of its parts is.
            dtype: None: what each of its parts has.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        for _, module in self.adapter_modules(name):
            module.to(device=device, dtype=dtype)
        for layer in static_heads.layers_with(self, name).values():
            layer.to(device=device, dtype=dtype)
        # which adapters can act in one call depends on their dtypes
        self._replan()

    def _tensors_of(self, adapter_name: str) -> dict[str, Tensor]:
        """All tensors of an adapter, as checkpoints name them."""
        return {
            f"{path}/{key}": tensor
            for path, module in self.adapter_modules(adapter_name)
            for key, tensor in module.state_dict().items()
        }

    def _parameters_of(self, name: str) -> Iterator[nn.Parameter]:
        modules = dict.fromkeys(module for _, module in self.adapter_modules(name))
        for module in modules:
            yield from module.parameters()
