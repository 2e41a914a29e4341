"""AdapterFusion: add, delete, save and load fusion layers; record values of gates and fusions."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from adapterzoo import formats, inject
from adapterzoo.composition import Composition, Fuse, fusion_key, fusions_of, parse
from adapterzoo.errors import CheckpointError, CompositionError, DuplicateNameError
from adapterzoo.folders.formats import format_of
from adapterzoo.formats import fit
from adapterzoo.formats.checkpoint import Checkpoint
from adapterzoo.methods._parts import Gate
from adapterzoo.methods.fusion import AdapterFusionConfig, Fusion
from adapterzoo.names import check_name

from . import checkpointing, sharding
from .activation import check_setup, fusible_paths, refuse_overridden, replan, set_active
from .heads import copies
from .hf.guards import paused, refuse_in_flight
from .hf.info import ModelInfo, provenance
from .hf.task_classes import text_config
from .sharding import refuse_if_fixed
from .state import (
    AdaptedModel,
    FusionRecord,
    LoadOptions,
    config_of,
    fusion_modules,
    layer_in,
    modules_of,
    named_tensors,
)

# weight of the penalty on V, as in adapters
_REGULARIZATION = 0.01

FuseArgument: TypeAlias = "Fuse | Sequence[str] | str"

# --- add and delete ---


def add(
    model: AdaptedModel,
    adapter_names: FuseArgument,
    config: AdapterFusionConfig | str | Mapping[str, Any] | None = None,
    name: str | None = None,
    overwrite_ok: bool = False,
    active: bool = False,
) -> None:
    """Add layers that fuse several adapters, one at each of their sites."""
    fuse = as_fuse(adapter_names, name)
    refuse_if_fixed(model, "Add it before fully_shard(model).")
    loaded = AdapterFusionConfig.load("dynamic" if config is None else config)
    if fuse.fusion is not None:
        check_name(fuse.fusion)
    check_free(model, fuse.name, overwrite_ok)
    for adapter in fuse.flatten():
        model._adapter_state.find(adapter)
    enter(model, fuse, loaded, make(model, fuse.fused, loaded), active)


def delete(model: AdaptedModel, adapter_names: FuseArgument) -> None:
    """Delete fusion layers; the adapters stay."""
    name = as_fuse(adapter_names, None).name
    model._adapter_state.find_fusion(name)
    refuse_if_fixed(model, "Write set_active_adapters(None).")
    refuse_overridden(model, name)
    refuse_in_flight(model, name)
    with paused(model):
        _take(model, name)
        replan(model)


def as_fuse(names: FuseArgument, name: str | None) -> Fuse:
    """Return the user's argument as a `Fuse`.

    Args:
        names: a `Fuse`, names of adapters, or the names joined by commas.
        name: the name of the fusion; None: the names joined by commas.

    Raises:
        CompositionError: they are not names.
    """
    if isinstance(names, Fuse):
        return names if name is None else Fuse(*names.children, name=name)
    if not isinstance(names, Iterable):
        raise CompositionError(
            f"Fuse({names!r}): a fusion takes names of adapters. Write Fuse('a', 'b')."
        )
    listed = names.split(",") if isinstance(names, str) else list(names)
    return Fuse(*listed, name=name)


def check_free(model: AdaptedModel, name: str, overwrite_ok: bool) -> None:
    """Check that a fusion may be added under a name.

    Raises:
        DuplicateNameError: the name is taken.
    """
    if name in model._adapter_state.fusions:
        if not overwrite_ok:
            raise DuplicateNameError(f"there is a fusion {name!r}. Write overwrite_ok=True.")
        refuse_overridden(model, name)
        refuse_in_flight(model, name)


def make(
    model: AdaptedModel, names: tuple[str, ...], config: AdapterFusionConfig
) -> dict[str, Fusion]:
    """Make the layers that fuse several adapters; the model does not change.

    Args:
        model: the model with the adapters.
        names: the names of the adapters.
        config: the config of the fusion.

    Raises:
        ConfigError: an adapter cannot be fused.
        SiteError: the adapters have different sites.
    """
    paths = fusible_paths(model, names, config.entry)
    text = text_config(config_of(model))
    inherited = getattr(text, "attention_probs_dropout_prob", 0.0)
    dropout = inherited if config.dropout_prob is None else config.dropout_prob
    made, last = {}, dict(modules_of(model, names[-1]))
    places = model._adapter_state.find(names[-1]).places
    for path in paths:
        # a bottleneck that shares all its parameters has none at its layers
        parameter = next(p for at in (path, "") for p in last[at].parameters())
        width = places[path][0].site.d_out
        made[path] = Fusion(config, width, dropout, parameter.device, parameter.dtype)
    return made


def enter(
    model: AdaptedModel,
    fuse: Fuse,
    config: AdapterFusionConfig,
    made: Mapping[str, Fusion],
    active: bool,
) -> None:
    """Install fusion layers, replacing those of their name; on failure nothing changes.

    Args:
        model: the model with the adapters.
        fuse: the names of the fusion and its adapters.
        config: the config of the fusion.
        made: its layers by path.
        active: whether to activate the fusion.
    """
    fusions, name = model._adapter_state.fusions, fuse.name
    record = FusionRecord(config, fuse.fused, tuple(made))
    if active:
        check_setup(model, fuse, (), fusions={name: record})
    with paused(model):
        if name in fusions:
            _take(model, name)
        for path, layer in made.items():
            at = layer_in(model, path)
            inject.put(at, fusion_key(name), layer, model._active, path)
        fusions[name] = record
        # an active fusion that is replaced stays active
        replan(model)
        if active:
            set_active(model, fuse)


def _take(model: AdaptedModel, name: str) -> None:
    model._active.forget(name, is_fusion=True)
    copies.take(model, fusion_key(name))
    for path in model._adapter_state.fusions.pop(name).paths:
        inject.take(layer_in(model, path), fusion_key(name))


def regularization_loss(model: AdaptedModel) -> Tensor | None:
    """Return the penalty that keeps V near the identity.

    None if no fusion that is active and trained has one.
    """
    distances = [
        distance
        for fuse in fusions_of(model._active.plan.setup)
        for _, layer in fusion_modules(model, fuse.name)
        if layer.value is not None and layer.value.weight.requires_grad
        if (distance := layer.distance()) is not None
    ]
    return _REGULARIZATION * torch.stack(distances).sum() if distances else None


# --- files ---


def save(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    adapter_names: FuseArgument,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
    with_head: bool | str = False,
) -> None:
    """Save fusion layers, without their adapters, to a folder."""
    name = as_fuse(adapter_names, None).name
    found = model._adapter_state.find_fusion(name)
    formats.formats.find(format)
    sharding.reshard(model)
    document = {
        **provenance(model, name),
        "config": found.config.to_dict(),
        "adapter_names": list(found.adapters),
        "meta": dict(meta or {}),
    }
    layers = dict(fusion_modules(model, name))
    if with_head:
        # first: a format without such a head refuses it before anything is written
        head_name = with_head if isinstance(with_head, str) else name
        checkpointing.save_head(model, folder, head_name, format)
    with sharding.gathering(model, layers.values()):
        stored = Checkpoint(document, named_tensors(layers, keep_vars=True))
        checkpointing.write(model, folder, stored, "adapter_fusion", format)


def load(model: AdaptedModel, folder: str | os.PathLike[str], asked: LoadOptions) -> str:
    """Load fusion layers; the model must have the adapters that they fuse.

    Raises:
        CheckpointError: the file holds no fusion.
        UnknownNameError: the model lacks one of the adapters.
    """
    refuse_if_fixed(model, "Load it before fully_shard(model).")
    folder = Path(folder)
    info = ModelInfo(model)
    stored = formats.read(folder, "adapter_fusion", info)
    names, values = stored.metadata.get("adapter_names"), stored.metadata.get("config")
    listed = names if isinstance(names, list) else []
    if not (listed and all(isinstance(n, str) for n in listed) and isinstance(values, Mapping)):
        raise CheckpointError("the checkpoint holds no fusion. Save it again.")
    info.fused_configs(listed)
    name = asked.load_as or str(stored.metadata.get("name"))
    fuse = Fuse(*listed, name=None if name == ",".join(listed) else check_name(name))
    asked, warn = asked.overwriting(fuse.name, fusion=model._adapter_state.fusions)
    check_free(model, fuse.name, bool(asked.overwrite_ok))
    config = AdapterFusionConfig.load(values)
    with torch.random.fork_rng(devices=()):
        made = make(model, tuple(listed), config)
    fits = named_tensors(made, keep_vars=True)
    fit.check_fit(type(model).__name__, stored.adapter, fits, asked.dtype)
    by_path = fit.by_path(stored.adapter)
    for path, layer in made.items():
        fit.fill(layer.to(asked.dtype), by_path.get(path, {}))
    enter_head = None
    if asked.with_head and format_of(folder, "head") is not None:
        _, enter_head = checkpointing.read_head(model, folder, asked)
    enter(model, fuse, config, made, asked.set_active)
    if enter_head is not None:
        enter_head()
    warn()
    asked.report()
    asked.load_weights(folder, fuse.name)
    return fuse.name


# --- values of gates and fusions ---

Scores: TypeAlias = dict[str, dict[int, dict[str, Tensor]]]
"""Name of an adapter or fusion → block number → location → values of its gate or fusion."""

_Watched: TypeAlias = tuple[tuple[str, int, str], nn.Module, Callable[[Any], Tensor]]


def recorded(
    model: AdaptedModel,
    run: Callable[[], Any],
    adapter_names: Sequence[Any] | None,
    gates: bool,
    fusions: bool,
) -> Any:
    """Return the output of a call with the values of its gates and fusions.

    Args:
        model: the model that is called.
        run: makes the call.
        adapter_names: the argument of the call; None: not given.
        gates: whether the output gets `adapter_gating_scores`.
        fusions: whether the output gets `adapter_fusion_attentions`.

    Returns:
        The output; a tuple gets the two, in this order, at its end.
    """
    if adapter_names is None:
        acting = [model._active.plan.setup]
        by_rows = model._active.plan.rows is not None
    else:
        # the call itself refuses invalid names, and lists that do not fit the batch
        listed = adapter_names if isinstance(adapter_names, Sequence) else ()
        acting, by_rows = [parse(name) for name in listed], True
    watched: dict[str, Iterable[_Watched]] = {}
    if gates:
        watched["adapter_gating_scores"] = _gates_of(model, acting)
    if fusions:
        watched["adapter_fusion_attentions"] = _fusions_of(model, acting)
    thread = threading.get_ident()
    calls: dict[str, dict[tuple[str, int, str], list[Tensor]]] = {field: {} for field in watched}

    def keep(kept: list[Tensor], read: Any, _module: nn.Module, _args: Any, out: Any) -> None:
        if threading.get_ident() == thread:
            kept.append(read(out).detach())

    with ExitStack() as stack:
        for field, modules in watched.items():
            for place, module, read in modules:
                hook = functools.partial(keep, calls[field].setdefault(place, []), read)
                stack.callback(module.register_forward_hook(hook).remove)
        outputs = run()
    found: dict[str, Scores] = {field: {} for field in watched}
    for field, kept in calls.items():
        # a skipped block has no calls
        for (name, block, location), tensors in ((at, ts) for at, ts in kept.items() if ts):
            # by rows, each call has other rows of the batch; otherwise each gives a column
            joined = torch.cat(tensors, 0 if by_rows else -1)  # [batch, …]
            if joined.dim() == 2 and joined.shape[1] == 1:
                joined = joined.squeeze(1)  # [batch]
            found[field].setdefault(name, {}).setdefault(block, {})[location] = joined
    if isinstance(outputs, tuple):
        return (*outputs, *found.values())
    for field, scores in found.items():
        outputs[field] = scores
    return outputs


def _gates_of(model: AdaptedModel, acting: Iterable[Composition | None]) -> Iterator[_Watched]:
    names = dict.fromkeys(n for setup in acting if setup is not None for n in setup.flatten())
    # names that the call refuses have no gates
    for name in (n for n in names if n in model._adapter_state.records):
        for path, module in modules_of(model, name):
            placements = model._adapter_state.records[name].places[path]
            # the parts of a layer are in the order of its placements
            parts = list(module.children()) if len(placements) > 1 else [module]
            for placement, part in zip(placements, parts, strict=False):
                at = name, placement.site.layer, placement.location or str(placement.site.role)
                for gate in part.modules():
                    if isinstance(gate, Gate):
                        yield at, gate.decided, lambda open: open.flatten(1)  # [batch, 1]


def _fusions_of(model: AdaptedModel, acting: Iterable[Composition | None]) -> Iterator[_Watched]:
    for fuse in {fuse.name: fuse for setup in acting for fuse in fusions_of(setup)}.values():
        if fuse.name not in model._adapter_state.fusions:
            continue
        places = model._adapter_state.records[fuse.fused[-1]].places
        for path, layer in fusion_modules(model, fuse.name):
            at = fuse.name, places[path][0].site.layer, places[path][0].location
            yield at, layer, lambda out: out[1]  # [batch, tokens, adapters]
