"""Named adapters of a model: add, delete, activate, look at them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo import inject
from adapterzoo import methods as _methods  # noqa: F401  registers the config strings
from adapterzoo.anatomy import Anatomy, find
from adapterzoo.composition import (
    Composition,
    RowMap,
    Step,
    compile_rows,
    has_rows,
    has_tokens,
    numbered,
    parse,
    rows_of,
    without,
)
from adapterzoo.configs import AdapterConfig, Placement
from adapterzoo.contracts import Adapter, SharingAdapter
from adapterzoo.errors import AdapterZooError, DuplicateNameError
from adapterzoo.names import check_name
from adapterzoo.selection import Default, Plan, Selection

from .building import at_hand, build, check_layers, inject_path
from .installed import AdaptersConfig, Installed, State, families_of, is_whole
from .refusals import RefusalsMixin
from .setup import announce
from .sharding import refuse_if_sharded


class AdaptersMixin(RefusalsMixin):
    """Adapters by name, for any `PreTrainedModel`. Names and arguments are those of `adapters`."""

    def _start_adapters(self) -> None:
        """Called once, when the model gets these methods."""
        self._selection = Selection(Default())
        self._zoo = State()
        announce(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies and unpickled models are models with adapters too."""
        super().__setstate__(state)  # type: ignore[misc]
        announce(self)

    # --- what there is ---

    @property
    def adapters_config(self) -> AdaptersConfig:
        """Names and configs of all adapters."""
        return AdaptersConfig(self._zoo.installed)

    @property
    def anatomy(self) -> Anatomy:
        """Where adapters can sit in the base model."""
        if self._zoo.anatomy is None:
            self._zoo.anatomy = find(self._backbone)
        return self._zoo.anatomy

    def has_adapters(self) -> bool:
        """Whether there is any adapter."""
        return bool(self._zoo.installed)

    def known_heads(self) -> tuple[str, ...]:
        """Names of the model's heads; a model without named heads has none."""
        return ()

    @property
    def _backbone(self) -> nn.Module:
        if self._zoo.whole is None:
            self._zoo.whole = is_whole(cast("nn.Module", self))
        return cast("nn.Module", self if self._zoo.whole else cast("Any", self).base_model)

    def adapter_modules(self, name: str) -> Iterator[tuple[str, Adapter]]:
        """The modules of an adapter with the paths of their layers, in model order.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        for path in self._find(name, f"adapter_modules({name!r})").places:
            layer = cast("inject.Adapted", self._backbone.get_submodule(path))
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
        if adapter_name in self._zoo.installed:
            if not overwrite_ok:
                raise DuplicateNameError(
                    f"{call}: the name is taken by {self.adapters_config[adapter_name]!r}. Write "
                    f"another name, or add_adapter({adapter_name!r}, …, overwrite_ok=True)."
                )
            self._refuse_if_overridden(adapter_name, call)
            self._refuse_if_merged(adapter_name, call)
            self._refuse_if_fused(adapter_name, call)
        made = self._make(loaded)
        for path, (adapter, _) in made.items():
            layer = self._backbone.get_submodule(path)
            with at_hand(layer), torch.no_grad():
                # a model that is being loaded has no values yet, and the file has the adapter's
                if not any(p is not None and p.is_meta for p in layer._parameters.values()):
                    inject.introduce(layer, adapter, self._zoo.originals.get(path, {}))
        fresh = adapter_name not in self._zoo.installed
        if not fresh:
            self._remove(adapter_name)
        self._install(adapter_name, loaded, made)
        try:
            if set_active:
                self.set_active_adapters(adapter_name)
            else:
                self._replan()
        except AdapterZooError:
            if fresh:
                self._remove(adapter_name)
                self._replan()
            raise

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
        """
        by_path: dict[str, list[Placement]] = {}
        for placement in config.placements(self.anatomy):
            by_path.setdefault(inject_path(placement.site), []).append(placement)
        backbone, dtype = self._backbone, cast("Any", self).dtype
        layers = {path: backbone.get_submodule(path) for path in by_path}
        for path, layer in layers.items():
            inject.check_put(layer, path)
        return {
            path: (build(layers[path], path, ps, dtype, device), ps) for path, ps in by_path.items()
        }

    def _install(
        self,
        name: str,
        config: AdapterConfig,
        made: Mapping[str, tuple[Adapter, list[Placement]]],
    ) -> None:
        places = {path: tuple(ps) for path, (_, ps) in made.items()}
        installed = Installed(config, places, families_of(places))
        for path, (adapter, _) in made.items():
            layer = self._backbone.get_submodule(path)
            inject.put(layer, name, adapter, self._selection, path)
        for source, reader in installed.sources():
            module = self._backbone.get_submodule(source)
            inject.tap(module, reader, name, self._selection, source)
        for around in installed.families:
            inject.tap(self._backbone.get_submodule(around), around, name, self._selection, around)
        self._zoo.installed[name] = installed

    def _remove(self, name: str) -> None:
        installed = self._zoo.installed.pop(name)
        self._zoo.plans.clear()
        for source, reader in installed.sources():
            inject.untap(self._backbone.get_submodule(source), reader, name)
        for around in installed.families:
            inject.untap(self._backbone.get_submodule(around), around, name)
        for path in installed.places:
            inject.take(self._backbone.get_submodule(path), name)

    # --- activate ---

    @property
    def active_adapters(self) -> Composition | None:
        """What is active for the calling thread; None: the plain base model."""
        return self._selection.plan.setup

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
            CompositionError: it is no composition.
            UnknownNameError: there is no adapter of this name.
        """
        setup = parse(adapter_setup)
        default = self._selection.default
        # not those of the calling thread, which an AdapterSetup may have changed
        heads = self._heads_named(setup, default.plan.heads)
        skipped = check_layers(skip_layers, len(self.anatomy.blocks))
        default.plan = self.make_plan(setup, list(heads), skipped)

    def make_plan(
        self,
        setup: Composition | None,
        head_setup: str | list[str] | None = None,
        skip_layers: tuple[int, ...] = (),
    ) -> Plan:
        """Compile a composition for this model; nothing becomes active.

        Args:
            setup: what shall act.
            head_setup: which heads shall answer; None: those named like the adapters where
                there are any, else those that are active now.
            skip_layers: numbers of blocks in which no adapter acts.

        Raises:
            UnknownNameError: there is no adapter or head of this name.
        """
        names = setup.flatten() if setup is not None else ()
        for name in names:
            self._find(name, f"set_active_adapters({setup!r})")
        self._refuse_unfused(setup, f"set_active_adapters({setup!r})")
        heads = self._heads_for(setup, head_setup)
        acting = [name for name in names if name not in self._zoo.merged]
        self._refuse_mixed(self._zoo.merged, acting, f"set_active_adapters({setup!r})")
        if setup is None:
            return Plan(None, heads, skip_layers=skip_layers)
        present: dict[str, dict[str, Adapter]] = {}
        # a merged adapter acts through the base weights
        for name in acting:
            places = self._zoo.installed[name].places
            for path, module in self.adapter_modules(name):
                if places[path][0].site.layer not in skip_layers:
                    present.setdefault(path, {})[name] = module
        rows = None
        parts: tuple[Any, ...] = (setup,)
        if has_rows(setup):
            found, repeats, exact = rows_of(setup)
            parts, index = numbered(found)
            rows = RowMap(index, repeats, exact=exact)
        self._refuse_merged_part(setup, self._zoo.merged, f"set_active_adapters({setup!r})")
        if len(parts) > 1 or has_tokens(setup):
            self._refuse_routed(setup, acting)
        steps: dict[str, Step] = {}
        for path, modules in present.items():
            step = compile_rows(parts, modules, modules.__getitem__)
            if step is not None:
                steps[path] = step
        taps: dict[str, tuple[str, ...]] = {}
        for name in acting:
            for source, reader in self._zoo.installed[name].sources():
                if reader in steps and reader not in taps.get(source, ()):
                    taps[source] = (*taps.get(source, ()), reader)
        families = self._families(acting, steps, present)
        return Plan(setup, heads, steps, taps, families, skip_layers, rows)

    def _families(
        self,
        acting: list[str],
        steps: Mapping[str, Step],
        present: Mapping[str, Mapping[str, Adapter]],
    ) -> dict[str, tuple[tuple[str, tuple[str, ...]], ...]]:
        """The `families` of a plan.

        Args:
            acting: names.
            steps: path to what its adapters do; only those of a chain read the layer's own input.
            present: path to the adapters that act there.
        """
        found: dict[str, dict[str, list[str]]] = {}
        for name in acting:
            for around, paths in self._zoo.installed[name].families.items():
                for path in paths:
                    chain = steps.get(path)
                    acts = isinstance(chain, tuple) and name in chain
                    if acts and isinstance(present[path][name], SharingAdapter):
                        layer = path.rpartition(".")[2]
                        found.setdefault(around, {}).setdefault(layer, []).append(name)
        return {
            around: tuple((layer, tuple(names)) for layer, names in layers.items())
            for around, layers in found.items()
            if len(layers) > 1
        }

    def _heads_for(
        self, setup: Composition | None, head_setup: str | list[str] | None
    ) -> tuple[str, ...]:
        """The heads of a plan; a model without named heads has none."""
        return ()

    def _heads_named(
        self, setup: Composition | None, otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The heads named like the adapters that act last, where there are any."""
        return ()

    def _own_heads(self, parts: tuple[Any, ...]) -> list[str | None]:
        """For each part of a batch the head of its adapter's name, None where there is none."""
        return [None for _ in parts]

    def _heads_of_parts(
        self, parts: tuple[Any, ...], otherwise: tuple[str, ...]
    ) -> tuple[str, ...]:
        """The head of each part of a batch, or the one of all of them."""
        return ()

    def _replan(self) -> None:
        """Compile what is active anew, without the adapters that are gone."""
        self._zoo.plans.clear()
        plan = self._selection.default.plan
        names = plan.setup.flatten() if plan.setup is not None else ()
        setup = without(plan.setup, [n for n in names if n not in self._zoo.installed])
        try:
            self._selection.default.plan = self.make_plan(setup, list(plan.heads), plan.skip_layers)
        except AdapterZooError:
            # no step may name what is gone
            self._selection.default.plan = Plan(None, plan.heads, skip_layers=plan.skip_layers)
            raise

    # --- move ---

    def adapter_to(
        self,
        name: str,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Move or cast an adapter alone.

        Raises:
            UnknownNameError: there is no adapter of this name.
        """
        for _, module in self.adapter_modules(name):
            module.to(device=device, dtype=dtype)
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
        for _, module in self.adapter_modules(name):
            yield from module.parameters()
