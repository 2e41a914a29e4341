"""Activation: compile plans, activate them, and refuse illegal setups.

A plan is a composition compiled for a model: the step of each layer, and the active heads.
It applies to all threads (`set_active`), or to one thread and task inside an `AdapterSetup`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Self, cast

from adapterzoo import inject
from adapterzoo.anatomy import HEAD
from adapterzoo.anatomy.sites import TokenInput
from adapterzoo.anatomy.tree import below
from adapterzoo.composition import (
    Composition,
    Setup,
    Split,
    fusion_key,
    fusions_of,
    parse,
    refuse_merged_unless_stacked,
    without,
)
from adapterzoo.composition.compile import SiteStep, compile_site
from adapterzoo.composition.prompts import Prompts, prompts_of
from adapterzoo.composition.rows import ActiveHeads, parse_heads, parts_of
from adapterzoo.contracts import (
    Adapter,
    AttentionAdapter,
    FusibleAdapter,
    InvertibleAdapter,
    PromptAdapter,
    WeightAdapter,
)
from adapterzoo.errors import (
    AdapterZooError,
    CompositionError,
    ConfigError,
    DuplicateNameError,
    SiteError,
    StateError,
    listing,
    naming,
    unknown_name,
)
from adapterzoo.heads import token_places
from adapterzoo.inject.adapted import adapters_of
from adapterzoo.inject.layers import ExpertAdapters, is_additive
from adapterzoo.runtime import Plan, current_task

from .heads import copies
from .heads.copies import refuse_own_size
from .heads.named import HeadNames, for_setup, show_labels
from .hf.backbone import plain_token
from .hf.guards import refuse_trained
from .state import (
    AdaptedModel,
    AdapterRecord,
    FusionRecord,
    config_of,
    layer_in,
    modules_of,
    own_parameters_of,
    stacks_of,
)

# --- plans ---


def make_plan(
    model: AdaptedModel,
    setup: Composition | None,
    head_setup: HeadNames | ActiveHeads = None,
    skip_layers: tuple[int, ...] = (),
) -> Plan:
    """Compile a composition for a model, without activating it.

    Args:
        model: with adapters.
        setup: the composition to compile.
        head_setup: the heads to use, as a user writes them or checked; None: those named like the
            adapters if there are any, else the active ones.
        skip_layers: numbers of blocks in which no adapter acts.

    Raises:
        CompositionError: one adapter has its own output layer, or rows, which another changes.
        UnknownNameError: an adapter or head is unknown.
    """
    state = model._adapter_state
    names = setup.flatten() if setup is not None else ()
    for name in names:
        state.find(name)
    refuse_unfused(model, setup)
    heads = head_setup
    if not isinstance(heads, ActiveHeads):
        heads = for_setup(model, setup, heads, model._active.heads)
    # a merged adapter acts through the base weights
    acting = [name for name in names if name not in state.merged]
    for name in acting:
        refuse_own_size(model, repr(name), state.records[name].places)
    refuse_mixed(model, state.merged, acting)
    if setup is None:
        return Plan(None, heads, skip_layers=skip_layers)
    present: dict[str, dict[str, Any]] = {}
    for name in acting:
        places = state.records[name].places
        for path, module in modules_of(model, name):
            # a module that layers share has no placement
            if places[path] and places[path][0].site.layer not in skip_layers:
                present.setdefault(path, {})[name] = module
    parts, rows = parts_of(setup)
    refuse_merged_unless_stacked(setup, state.merged)
    splits = any(isinstance(node, Split) for node in setup.nodes())
    for name in acting if splits or len(parts) > 1 else ():
        for path, placements in state.records[name].places.items():
            if any(p.site.is_routed and (splits or p.site.mixture is None) for p in placements):
                raise CompositionError(
                    f"{setup!r}: {name!r} adapts {path!r}, where the "
                    f"{'place' if splits else 'row'} of a token is unknown. Exclude such layers "
                    "(exclude_modules=[…]), or activate one adapter."
                )
    sites: dict[str, SiteStep] = {}
    entry = model.anatomy.entry
    names_of = (fuse.name for fuse in fusions_of(setup))
    first_acts = [n for n in names_of if state.fusions[n].config.entry == "first"]
    for fuse in fusions_of(setup):
        key = fusion_key(fuse.name)
        for path in state.fusions[fuse.name].paths:
            layers = adapters_of(layer_in(model, path))
            # a fusion that is only checked has no layers yet
            if path in present and key in layers:
                present[path][key] = layers[key]
    for path, modules in present.items():
        unfused = first_acts if entry is not None and path == entry.path else []
        step = compile_site(parts, modules, unfused)
        if step is not None:
            sites[path] = step
    for own in (copies.steps_of(model, parts), copies.row_steps(model, parts, acting)):
        if both := sorted(sites.keys() & own.keys()):
            raise CompositionError(
                f"{setup!r}: at {both[0].removeprefix(HEAD)!r} one adapter has its own copy of "
                "the output layer or rows of it, or is tied to the table, and another changes the "
                "layer. Activate one of them."
            )
        sites.update(own)
    captures: dict[str, tuple[str, ...]] = {}
    for source, reader in dict.fromkeys(s for n in acting for s in state.records[n].sources()):
        if reader.removeprefix("+") in sites:
            captures[source] = (*captures.get(source, ()), reader)
    readers = {reader.removeprefix("+") for found in captures.values() for reader in found}
    for path in sites.keys() & {*captures, *readers}:
        # a site that passes its input on, or reads another, does more than its adapter
        sites[path] = replace(sites[path], only=None)
    reads = any(state.records[name].reads_calls for name in acting)
    stacks = frozenset(("", *(path for path, _ in stacks_of(model)))) if reads else frozenset()
    inverts = (
        path
        for path, modules in present.items()
        if path in sites and any(isinstance(m, InvertibleAdapter) for m in modules.values())
    )
    mixtures = {path: m for n in acting for path, m in state.records[n].mixtures.items()}
    plan = Plan(
        setup, heads, sites, captures, skip_layers, rows, stacks, _counted(model, present) & stacks,
        next(inverts, None), _prompts(model, parts, present), mixtures,
    )  # fmt: skip
    return plan.divided(len(parts)) if rows is not None and mixtures else plan


def _counted(model: AdaptedModel, present: Mapping[str, Mapping[str, Adapter]]) -> frozenset[str]:
    """Return the paths of the models with rotary positions in which attentions have prefixes."""
    anatomy, paths = model.anatomy, [path for path, _ in stacks_of(model)]
    with_prefix = {
        site.stack
        for site in anatomy.attentions
        if not site.cross
        and any(
            isinstance(m, AttentionAdapter) and not m.counts_padding
            for m in present.get(site.path, {}).values()
        )
    }
    # the innermost model around a stack numbers its tokens
    found = ([p for p in ("", *paths) if below(stack, p)] for stack in with_prefix & anatomy.rotary)
    return frozenset(max(around, key=len) for around in found)


def check_setup(
    model: AdaptedModel,
    setup: Composition | None,
    skip_layers: tuple[int, ...],
    records: Mapping[str, AdapterRecord] = MappingProxyType({}),
    fusions: Mapping[str, FusionRecord] = MappingProxyType({}),
) -> None:
    """Check that a setup can be active, given adapters or fusions that are not yet in the model.

    Args:
        model: with adapters; does not change.
        setup: the composition to compile.
        skip_layers: numbers of blocks in which no adapter acts.
        records: of the adapters, with their `coming` modules.
        fusions: records of the fusions.

    Raises:
        AdapterZooError: it cannot be active.
    """
    state = model._adapter_state
    before = state.records, state.fusions
    state.records, state.fusions = {**before[0], **records}, {**before[1], **fusions}
    try:
        make_plan(model, setup, [], skip_layers)
    finally:
        state.records, state.fusions = before


def _prompts(
    model: AdaptedModel, parts: tuple[Any, ...], present: Mapping[str, Mapping[str, Adapter]]
) -> Prompts | None:
    """Return the tokens that the adapters of a plan add to sequences; None for none."""
    adapters: dict[str, list[PromptAdapter]] = {}
    for modules in present.values():
        for name, module in modules.items():
            for part in module.modules():
                if isinstance(part, PromptAdapter):
                    adapters.setdefault(name, []).append(part)
    if not adapters:
        return None
    added = prompts_of(parts, adapters)
    joins = dict.fromkeys(adapter.joins for inside in adapters.values() for adapter in inside)
    if len(joins) > 1:
        raise CompositionError(
            f"{listing(adapters)} add tokens at {listing(joins)}. Activate them one by one."
        )
    tokens = cast("TokenInput", model.anatomy.tokens)
    return Prompts(added, next(iter(joins)), tokens, plain_token(config_of(model)), token_places())


def set_active(
    model: AdaptedModel, adapter_setup: object, skip_layers: Iterable[int] | None = None
) -> None:
    """Activate adapters in all threads, and the heads with their names."""
    setup = parse(adapter_setup)
    default = model._active.default
    # not those of the calling thread, which an AdapterSetup may have changed
    heads = for_setup(model, setup, None, default.plan.heads)
    skipped = check_layers(skip_layers, len(model.anatomy.blocks))
    default.plan = make_plan(model, setup, heads, skipped)
    show_labels(model)


def replan(model: AdaptedModel) -> None:
    """Compile the active composition again, without deleted adapters and fusions.

    Raises:
        AdapterZooError: the rest cannot be active; nothing is active then.
    """
    state, plan = model._adapter_state, model._active.default.plan
    # cached plans hold layers
    state.plans.clear()
    names = plan.setup.flatten() if plan.setup is not None else ()
    there = {(name, fusion.adapters) for name, fusion in state.fusions.items()}
    fusions = [fuse.name for fuse in fusions_of(plan.setup) if (fuse.name, fuse.fused) not in there]
    setup = without(plan.setup, [n for n in names if n not in state.records], fusions)
    try:
        model._active.default.plan = make_plan(model, setup, plan.heads, plan.skip_layers)
    except AdapterZooError:
        # no step may name an adapter that was deleted
        model._active.default.plan = Plan(None, plan.heads, skip_layers=plan.skip_layers)
        raise


def check_layers(
    layers: Iterable[int] | None, blocks: int, argument: str = "skip_layers"
) -> tuple[int, ...]:
    """Return the numbers of blocks that a user gave.

    Args:
        layers: None: no block.
        blocks: the number of blocks of the model.
        argument: name of the user's argument.

    Raises:
        ConfigError: they are not a list of block numbers.
    """
    if layers is None:
        return ()
    numbers = tuple(layers)
    if isinstance(layers, str) and argument == "skip_layers":
        raise ConfigError(
            f"skip_layers={layers!r} is not a list of blocks. Write skip_layers=[0, 1], or "
            f"Stack('…', {layers!r}) to activate several adapters."
        )
    if not all(type(n) is int and 0 <= n < blocks for n in numbers):
        raise ConfigError(
            f"{argument}={layers!r}: the blocks are 0 to {blocks - 1}. Write {argument}=[0, 1]."
        )
    return numbers


# --- the shared trunk ---


def share_trunk(model: AdaptedModel, share: bool) -> None:
    """Let the blocks below the first adapter compute equal rows once, or all rows again.

    Raises:
        StateError: the blocks are no modules, or layers with adapters.
    """
    blocks = model.anatomy.blocks
    if share and (not blocks or any(block.output != block.path for block in blocks)):
        why = model.anatomy.reason or "its blocks are not modules of their own"
        raise StateError(f"the model has no blocks to share: {why}. Leave share_trunk out.")
    modules = {block.path: layer_in(model, block.path) for block in blocks}
    if share:
        inject.share_blocks(modules, model._active)
    else:
        inject.unshare_blocks(modules.values())
    model._adapter_state.shares_trunk = share


def shared_blocks(model: AdaptedModel) -> tuple[int, ...]:
    """Return the numbers of the blocks that ran once for equal rows in the last call."""
    trunk = model._active.call.trunk
    paths = () if trunk is None else trunk.blocks
    return tuple(block.layer for block in model.anatomy.blocks if block.path in paths)


# --- what is refused ---


def refuse_used(model: AdaptedModel, name: str) -> None:
    """Refuse to change an adapter that is merged, fused, or active in an `AdapterSetup` here.

    Raises:
        StateError: it is in use.
    """
    refuse_overridden(model, name)
    refuse_merged(model, name)
    using = [n for n, fusion in model._adapter_state.fusions.items() if name in fusion.adapters]
    if using:
        raise StateError(f"{name!r} is fused. Write delete_adapter_fusion({using[0]!r}) first.")


def refuse_taken(
    model: AdaptedModel, name: str, overwrite_ok: bool, rename: str = "another name"
) -> None:
    """Refuse a name that is taken; where it may be replaced, an adapter that is in use.

    Args:
        model: with adapters.
        name: of an adapter that comes.
        overwrite_ok: whether it may be replaced.
        rename: hint how to give another name.

    Raises:
        DuplicateNameError: the name is taken.
    """
    if name not in model._adapter_state.records:
        return
    if not overwrite_ok:
        config = model._adapter_state.records[name].config
        raise DuplicateNameError(
            f"the name {name!r} is taken by {config!r}. Write {rename}, or overwrite_ok=True."
        )
    refuse_used(model, name)


def refuse_overridden(model: AdaptedModel, name: str) -> None:
    """Refuse to change an adapter or fusion that is used elsewhere.

    Raises:
        StateError: it is active in an `AdapterSetup`, or trained by a running Trainer.
    """
    setups = [plan.setup for plan in model._active.overrides if plan.setup]
    if any(name in (*s.flatten(), *(fuse.name for fuse in fusions_of(s))) for s in setups):
        raise StateError(f"{name!r} is active in an AdapterSetup here. Leave the block first.")
    state = model._adapter_state
    adapters, fusions = {name} & state.records.keys(), {name} & state.fusions.keys()
    refuse_trained(model, name, own_parameters_of(model, adapters, fusions))


def refuse_merged(model: AdaptedModel, name: str) -> None:
    """Refuse an adapter that is merged into the base weights.

    Raises:
        StateError: it is merged.
    """
    if name in model._adapter_state.merged:
        raise StateError(f"{name!r} is merged into the base weights. Write reset_adapter() first.")


def refuse_mixed(model: AdaptedModel, merged: Iterable[str], acting: Iterable[str]) -> None:
    """Refuse adapters whose result depends on the order, if some are merged and others are not.

    Raises:
        StateError: an adapter would act on weights that are merged already.
    """
    inside: dict[str, list[Adapter]] = {}
    for name in merged:
        for path, module in modules_of(model, name):
            inside.setdefault(path, []).append(module)
    for name in acting if inside else ():
        for path, module in modules_of(model, name):
            together = [*inside.get(path, ()), module]
            changes_weight = isinstance(module, (WeightAdapter, ExpertAdapters))
            if len(together) > 1 and changes_weight and not all(map(is_additive, together)):
                raise StateError(
                    f"at {path!r} {name!r} would act on weights that hold {listing(merged)}. Write "
                    "set_active_adapters(None) and merge all of them, or reset_adapter()."
                )


def fusible_paths(model: AdaptedModel, names: tuple[str, ...], entry: str = "fused") -> list[str]:
    """Return the paths of the layers where adapters can be fused.

    Args:
        model: with adapters.
        names: of the adapters.
        entry: as in `AdapterFusionConfig`.

    Raises:
        ConfigError: an adapter cannot be fused.
        SiteError: the adapters have different sites.
    """
    paths: list[str] = []
    for name in names:
        places = model._adapter_state.find(name).places
        # what layers share has no place
        own = [(path, module) for path, module in modules_of(model, name) if places[path]]
        if entry == "first":
            own = [pair for pair in own if not isinstance(pair[1], InvertibleAdapter)]
        for path, module in own:
            if not isinstance(module, FusibleAdapter):
                raise ConfigError(
                    f"{name!r} is a {type(module).__name__} at {path!r}, and only bottlenecks are "
                    f"fused. Write add_adapter('another_name', 'seq_bn') and fuse such adapters."
                )
        if name == names[0]:
            paths = [path for path, _ in own]
        elif lost := sorted({path for path, _ in own} ^ {*paths}):
            raise SiteError(
                f"{names[0]!r} and {name!r} have different sites, such as {lost[0]!r}. Fuse "
                "adapters of one placement, or leave_out the other blocks."
            )
    return paths


def refuse_unfused(model: AdaptedModel, setup: Composition | None) -> None:
    """Refuse a setup with a `Fuse` that has no fusion layers.

    Raises:
        ConfigError: an adapter of a `Fuse` cannot be fused.
        SiteError: the adapters of a `Fuse` have different sites.
        StateError: a `Fuse` has no fusion layers, or has those of other adapters.
    """
    fusions = model._adapter_state.fusions
    for fuse in fusions_of(setup):
        found, asked = fusions.get(fuse.name), fuse.fused
        if found is None or found.adapters != asked:
            # what cannot be fused has no fusion layers either
            fusible_paths(model, asked)
            again = "" if found is None else ", overwrite_ok=True"
            raise StateError(
                f"no fusion layers for {fuse!r}. Write add_adapter_fusion({fuse!r}{again})."
            )


# --- `AdapterSetup`: a context with other active adapters and heads, for one thread and task ---

# every model with adapters, so that a setup finds those that have its adapters
_models: weakref.WeakSet[Any] = weakref.WeakSet()
_models_lock = threading.Lock()


def register(model: AdaptedModel) -> None:
    """Let setups find the model for as long as it lives."""
    with _models_lock:
        _models.add(model)


def model_of(active: object) -> Any:
    """Return the model of a state, which the layers of the model share.

    Raises:
        StateError: it is the state of a replica.
    """
    with _models_lock:
        found = next((model for model in _models if model._active is active), None)
    if found is None:
        raise StateError("the layer is one of a replica. Ask the layer of the model itself.")
    return found


def unregister(model: AdaptedModel) -> None:
    """Undo `register`: the model no longer has adapters."""
    with _models_lock:
        _models.discard(model)


class AdapterSetup:
    """A context in which other adapters are active, in the calling thread and task only.

    ```python
    with AdapterSetup(Stack("language", "task"), head_setup="task"):
        output = model(**batch)
    ```

    It applies to every model that has all of its adapters. Asyncio tasks and `asyncio.to_thread`
    started inside inherit it, and so do the threads of DataParallel; other threads and tasks do
    not.
    """

    def __init__(
        self,
        adapter_setup: Setup,
        head_setup: HeadNames = None,
        ignore_empty: bool = False,
        skip_layers: Iterable[int] | None = None,
    ) -> None:
        """Keep the setup; it becomes active when the block is entered.

        Args:
            adapter_setup: a name, a list of names, a composition, or None for the base model.
            head_setup: head, heads or composition of heads to use; None: those named like the
                adapters if there are any, else the active ones.
            ignore_empty: whether a setup that fits no model is accepted.
            skip_layers: numbers of blocks in which no adapter acts (AdapterDrop); they replace
                those of `set_active_adapters`.

        Raises:
            CompositionError: the setup is not a composition, or `head_setup` is one that heads
                cannot have.
        """
        self.adapter_setup: Composition | None = parse(adapter_setup)
        self.head_setup = head_setup
        self._heads = parse_heads(head_setup).names
        self.ignore_empty = ignore_empty
        # validated where the number of blocks is known
        self.skip_layers = None if skip_layers is None else tuple(skip_layers)
        # the contexts to exit, each with the thread and task that entered it
        self._entered: list[tuple[tuple[int, object], ExitStack]] = []

    def __enter__(self) -> Self:
        """Activate the setup.

        Raises:
            ConfigError: a model has no block of a number in `skip_layers`.
            UnknownNameError: no model has all of the named adapters and heads.
        """
        names = self.adapter_setup.flatten() if self.adapter_setup is not None else ()
        # layers of a fusion belong to one model, like the adapters that they fuse
        fusions = {fuse.name for fuse in fusions_of(self.adapter_setup)}
        known: set[str] = set()
        found = False
        with _models_lock:
            models = list(_models)
        with naming(lambda: repr(self)), ExitStack() as stack:
            for model in models:
                adapters, heads = model._adapter_state.records, {*model.known_heads()}
                known |= {*adapters, *heads}
                if not fusions <= {*model._adapter_state.fusions}:
                    continue
                if {*names} <= {*adapters} and {*self._heads} <= heads:
                    skipped = check_layers(self.skip_layers, len(model.anatomy.blocks))
                    plan = make_plan(model, self.adapter_setup, self.head_setup, skipped)
                    stack.enter_context(model._active.entered(plan))
                    found = True
            if not found and not self.ignore_empty:
                if missing := [name for name in (*names, *self._heads) if name not in known]:
                    raise unknown_name(
                        "", "adapter or head", missing[0], known, "adapters and heads"
                    )
                raise StateError(
                    "no single model has all of these adapters, fusions and heads. Add them first, "
                    "or write AdapterSetup(…, ignore_empty=True)."
                )
            self._entered.append((_here(), stack.pop_all()))
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the previous setup.

        Raises:
            StateError: another thread or task entered the block.
        """
        here = _here()
        mine = [i for i, (where, _) in enumerate(self._entered) if where == here]
        if not mine:
            raise StateError(
                f"{self!r}: the block was entered in another thread or task. Write 'with "
                "AdapterSetup(…)' around the call of the model."
            )
        _, stack = self._entered.pop(mine[-1])
        stack.close()

    def __repr__(self) -> str:
        """Show the call, without the arguments that were left out."""
        call = repr(self.adapter_setup)
        if self.head_setup is not None:
            call += f", head_setup={self.head_setup!r}"
        if self.skip_layers is not None:
            call += f", skip_layers={list(self.skip_layers)!r}"
        return f"AdapterSetup({call})"


def _here() -> tuple[int, object]:
    return threading.get_ident(), current_task()
