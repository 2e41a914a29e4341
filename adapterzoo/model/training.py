"""Training: freezing, quantized layers, gradient checkpointing, fingerprints, and the summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from adapterzoo.anatomy.blocks import stored
from adapterzoo.caches import values_kept
from adapterzoo.composition import Composition, Stack, fusions_of, parse
from adapterzoo.errors import StateError, columns, listing
from adapterzoo.formats.fit import digests, fingerprint
from adapterzoo.inject.building import at_hand, plain_modules
from adapterzoo.inject.layers import (
    has_run,
    is_quantized,
    packing_of,
    passes_gradients,
    uncounted,
    unpack_all,
)
from adapterzoo.methods._copies import Table
from adapterzoo.runtime import ActiveState

from . import adapters, sharding
from .activation import refuse_merged, refuse_unfused, replan, set_active
from .heads import copies, tables
from .heads.named import all_tensors
from .hf.guards import refuse_untrained
from .state import (
    DEFAULT_EMBEDDINGS,
    AdaptedModel,
    fusion_modules,
    heads_of,
    modules_of,
    named_tensors,
    own_parameters_of,
    parameters_of,
    tensors_of,
)

# --- what is trained ---


def train_adapter(
    model: AdaptedModel, adapter_setup: object, train_embeddings: bool, gives_heads: bool = True
) -> None:
    """Freeze everything but these adapters and the active heads, and activate them.

    Args:
        model: with adapters.
        adapter_setup: the adapter or composition to train.
        train_embeddings: whether to train the token embeddings too.
        gives_heads: whether an adapter without a copy of a static head gets one; otherwise the
            model's own head stays frozen.

    Raises:
        StateError: the setup names no adapter.
    """
    # a forward of a sharded model may leave parameters whole, which must not reach an optimizer
    sharding.reshard(model)
    setup = parse(adapter_setup)
    if setup is None or not setup.flatten():
        raise StateError("there is no adapter to train. Write add_adapter('my_task') first.")
    names = setup.flatten()
    for name in names:
        model._adapter_state.find(name)
        refuse_merged(model, name)
    # embeddings other than the model's own are trained in place, without a table of the adapter
    is_own = model._adapter_state.embeddings == DEFAULT_EMBEDDINGS
    for name in names if train_embeddings and is_own else ():
        if not copies.tables_of(model, name):
            sharding.refuse_if_sharded(model, "Write it before fully_shard(model).")
        tables.check_table(model, name)
    if gives_heads:
        _check_heads(model, setup)
    refuse_untrained(model, setup, _parameters(model, names, train_embeddings))
    _refuse_without_gradients(model)
    set_active(model, setup)
    for name in names if train_embeddings and is_own else ():
        tables.add_table(model, name)
    parameters = _parameters(model, names, train_embeddings)
    if train_embeddings and not is_own:
        parameters.append(model.get_input_embeddings().weight)
    _train(model, parameters, train_embeddings, gives_heads)


def _parameters(
    model: AdaptedModel, names: Iterable[str], train_embeddings: bool
) -> list[nn.Parameter]:
    modules = (module for name in names for _, module in modules_of(model, name))
    trained = (m for m in modules if train_embeddings or not isinstance(m, Table))
    return [p for module in trained for p in module.parameters()]


def train_fusion(model: AdaptedModel, adapter_setup: object, unfreeze_adapters: bool) -> None:
    """Freeze everything but the fusion layers of a setup and the active heads; activate the setup.

    Raises:
        ConfigError: an adapter of a `Fuse` cannot be fused.
        SiteError: the adapters of a `Fuse` have different sites.
        StateError: the setup has no `Fuse`, or a `Fuse` has no fusion layers, or has those of other
            adapters.
    """
    sharding.reshard(model)
    setup = parse(adapter_setup)
    fuses = fusions_of(setup)
    if setup is None or not fuses:
        raise StateError("there is no fusion in the setup. Write Fuse('a', 'b').")
    for name in setup.flatten():
        model._adapter_state.find(name)
    refuse_unfused(model, setup)
    _check_heads(model, setup)
    names = setup.flatten() if unfreeze_adapters else ()
    trained = [*own_parameters_of(model, names, [fuse.name for fuse in fuses])]
    refuse_untrained(model, setup, trained)
    _refuse_without_gradients(model)
    set_active(model, setup)
    _train(model, trained, False)


def _train(
    model: AdaptedModel,
    trained: Iterable[nn.Parameter],
    train_embeddings: bool,
    gives_heads: bool = True,
) -> None:
    """Set training mode, and make only these parameters and the active heads trainable."""
    module: Any = model
    unpack_all(module)
    freeze(model, True)
    model._adapter_state.trains = True
    heads, count = model._active.default.plan.heads.names, len(model._adapter_state.copies)
    of_copies = list(copies.trained(model, model._active.default.plan.setup, gives_heads))
    if len(model._adapter_state.copies) > count:
        replan(model)
    backbone = {id(p) for p in model._backbone.parameters()}
    outside = [p for p in module.parameters() if id(p) not in backbone]
    for parameter in outside if not model._has_named_heads else ():
        parameter.requires_grad_(False)
    for parameter in (*trained, *of_copies):
        parameter.requires_grad_(True)
    for name, head in heads_of(model).items():
        for parameter in head.parameters():
            if id(parameter) not in backbone:
                parameter.requires_grad_(name in heads)
        layer = head.output_embeddings
        # output layers are trained only with train_embeddings
        if layer is not None and not train_embeddings:
            layer.requires_grad_(False)
    # also keeps the running statistics of frozen norms from changing
    module.train()


def _check_heads(model: AdaptedModel, setup: Composition | None) -> None:
    """Refuse a setup whose adapters would need copies of a static head that cannot be added."""
    owners = copies.owners_of(setup)
    missing = [o for o in owners if o is not None and o not in model._adapter_state.copies]
    if missing and copies.layers_of(model):
        sharding.refuse_if_fixed(model, "Write it before fully_shard(model).")


def hold_statistics(model: AdaptedModel) -> None:
    """Set frozen norms to evaluation mode: in training mode, a forward changes their statistics."""
    for module in model._backbone.modules():
        tracks = isinstance(module, _NormBase) and module.track_running_stats
        if tracks and not any(p.requires_grad for p in module.parameters(recurse=False)):
            module.training = False


@contextmanager
def cached_adapters(model: Any) -> Iterator[None]:
    """Return a context that keeps values computed from weights.

    Raises:
        StateError: the model is in training mode, at the start or in a call within the block.
    """

    def refuse_training(_module: nn.Module, _args: Any) -> None:
        if model.training:
            raise StateError("the model is in training mode. Write model.eval() first.")

    refuse_training(model, ())
    hook = model.register_forward_pre_hook(refuse_training)
    try:
        with values_kept():
            yield
    finally:
        hook.remove()


def freeze(model: AdaptedModel, freezes: bool) -> None:
    """Freeze the base model and all adapters, or make the base model trainable."""
    sharding.reshard(model)
    model._adapter_state.trains = False
    own = set() if freezes else {id(p) for p in own_parameters_of(model)}
    for inactive in tables.inactive_of(model).values() if freezes else ():
        inactive.requires_grad_(False)
    for parameter in (*model._backbone.parameters(), *own_parameters_of(model)):
        # quantized weights have no gradient, even if their dtype is a floating-point one
        may_train = parameter.is_floating_point() and packing_of(parameter) is None
        if freezes or (may_train and id(parameter) not in own):
            parameter.requires_grad_(not freezes)


# --- training as in PEFT ---


def train_alone(model: Any, names: str | Sequence[str], unfreezes: bool = False) -> None:
    """Train only these adapters, with the heads that they have; keep the mode of the model.

    Args:
        model: with adapters.
        names: one adapter, or several that act as a stack.
        unfreezes: whether to train frozen adapters too; otherwise they are only activated.
    """
    setup = names if isinstance(names, str) else Stack(*names)
    was_training = model.training
    each = [names] if isinstance(names, str) else names
    frozen = [n for n in each if not any(p.requires_grad for p in parameters_of(model, n))]
    train_adapter(model, setup, False, gives_heads=False)
    for name in () if unfreezes else frozen:
        require_grad(model, name, False)
    model.train(was_training)


def set_trainable(model: Any, name: str, is_trainable: bool) -> None:
    """Make a loaded adapter trainable or freeze it; a model's first adapter is trained alone."""
    if is_trainable and len(model._adapter_state.records) == 1:
        train_alone(model, name, unfreezes=True)
    else:
        require_grad(model, name, is_trainable)


def require_grad(model: AdaptedModel, name: str, is_trained: bool) -> None:
    """Set `requires_grad` of an adapter and its head."""
    own = [*parameters_of(model, name)]
    own += [p for m in copies.modules_with(model, name) for p in m.parameters()]
    for parameter in own:
        if parameter.is_floating_point():
            parameter.requires_grad_(is_trained)


# --- quantized layers ---


def _refuse_without_gradients(model: AdaptedModel) -> None:
    """Check that gradients pass through quantized layers, in one layer of each class.

    Raises:
        StateError: a layer passes none.
    """
    firsts: dict[type[nn.Module], tuple[str, nn.Module]] = {}
    for path, layer in plain_modules(model._backbone):
        if is_quantized(layer) and not any(map(packing_of, layer._parameters.values())):
            firsts.setdefault(type(layer), (path, layer))
    for path, layer in firsts.values():
        with at_hand(layer):
            # a layer with a sharded weight cannot run alone
            whole = {type(t) for t in stored(layer)} <= {torch.Tensor, nn.Parameter}
            if whole and has_run(layer) and not passes_gradients(layer):
                raise StateError(
                    f"the {type(layer).__name__} at {path!r} is for inference: no gradient passes "
                    "through it, and adapters before it would not learn. Load the model with "
                    "quantization_config=BitsAndBytesConfig(load_in_4bit=True)."
                )


def dequantize(model: AdaptedModel, run: Callable[[], Any]) -> None:
    """Run transformers' dequantization, and keep the adapters of the layers.

    Args:
        model: with adapters.
        run: transformers' method.
    """
    module: Any = model
    # transformers would misread weights that were reordered for inference
    unpack_all(module)
    modes = {path: each.training for path, each in module.named_modules()}
    packed = [path for path, each in module.named_modules() if is_quantized(each)]
    records = {
        name: dataclasses.replace(record, coming=dict(modules_of(model, name)))
        for name, record in model._adapter_state.records.items()
    }
    for name in records:
        adapters.remove(model, name)
    try:
        run()
        for path in packed:
            module.get_submodule(path).weight.requires_grad_(False)
    finally:
        for path, each in module.named_modules():
            each.training = modes.get(path, each.training)
        for name, record in records.items():
            adapters.install(model, name, record)
    model._adapter_state.anatomy = None


# --- gradient checkpointing: blocks are recomputed in the backward pass ---


def checkpointed(active: ActiveState, checkpoint: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block so that the backward pass recomputes it with the adapters of this forward pass.

    On CUDA, the backward pass runs in threads of its own, which do not see an `AdapterSetup` of the
    thread that ran the forward pass.

    Args:
        active: the active adapters of the model.
        checkpoint: torch's function, with its options.
        run: the block.
        *args: its inputs.
        **kwargs: its inputs by name.

    Returns:
        The output of the block.
    """
    if getattr(checkpoint, "keywords", {}).get("use_reentrant", True) and torch.is_grad_enabled():
        # a reentrant block gets no gradients if none of its inputs requires one, as above frozen
        # layers; transformers handles only token embeddings
        floats = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
        if floats and not any(args[i].requires_grad for i in floats):
            first = floats[0]
            args = (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])
    resume = active.resumable()
    if resume is None:
        return checkpoint(run, *args, **kwargs)

    def run_again(*inputs: Any, **named: Any) -> Any:
        with resume():
            return run(*inputs, **named)

    return checkpoint(run_again, *args, **kwargs)


# --- fingerprints ---


def adapter_fingerprint(model: AdaptedModel, name: str) -> str:
    """Return a digest of an adapter's config and of the exact bits of its tensors."""
    config = model._adapter_state.find(name).config
    sharding.reshard(model)
    with sharding.gathering(model, (module for _, module in modules_of(model, name))):
        return fingerprint(config.to_dict(), sharding.gathered(tensors_of(model, name)))


def verify_replicas(model: AdaptedModel, group: Any) -> None:
    """Check that every process has the same adapters and heads, bit for bit.

    Raises:
        StateError: processes differ.
    """
    sharding.reshard(model)
    configs = {name: record.config for name, record in model._adapter_state.records.items()}
    modules: dict[str, Mapping[str, nn.Module]] = {
        **{name: dict(modules_of(model, name)) for name in configs},
        **{f"fusion {n}": dict(fusion_modules(model, n)) for n in model._adapter_state.fusions},
    }
    with sharding.gathering(model, (module for own in modules.values() for module in own.values())):
        tensors = {
            f"{name}: {key}": tensor
            for name, own in modules.items()
            for key, tensor in named_tensors(own).items()
        }
        for name, table in tables.loaded(model).items() if tables.inactive_of(model) else ():
            tensors[f"embedding {name}"] = table.weight
        whole = sharding.gathered({**tensors, **all_tensors(model)})
        mine = {"configs": repr(configs), **digests(whole)}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    reference, differing = everyone[0], dict[str, list[int]]()
    for rank, found in enumerate(everyone):
        for key in {*reference, *found}:
            if reference.get(key) != found.get(key):
                differing.setdefault(key, []).append(rank)
    if differing:
        shown = [f"{key} (ranks {ranks})" for key, ranks in sorted(differing.items())]
        raise StateError(
            f"{len(differing)} of {len(reference)} entries differ from rank 0: {listing(shown)}. "
            f"Load the adapter from the same checkpoint in every process."
        )


# --- the summary ---

_COLUMNS = ("name", "architecture", "#param", "%param", "active", "train")


def summary(model: AdaptedModel) -> list[dict[str, Any]]:
    """Return a row for each adapter, each fusion and each head, then one for the base model."""
    plan, records = model._active.plan, model._adapter_state.records
    active = () if plan.setup is None else plan.setup.flatten()
    rows: list[dict[str, Any]] = []
    # the parameters that rows above have, so that none counts twice
    ids: set[int] = set()

    def add(name: str, kind: str, own: Iterable[nn.Parameter], is_active: bool) -> dict[str, Any]:
        parameters = list(own)
        ids.update(map(id, parameters))
        trained = all(p.requires_grad for p in parameters)
        size = sum(map(sharding.size_of, parameters))
        row = {"name": name, "architecture": kind, "#param": size, "active": is_active}
        rows.append(row | {"train": trained})
        return rows[-1]

    for name, record in records.items():
        row = add(name, record.config.architecture, parameters_of(model, name), name in active)
        if name in active and plan.skip_layers:
            row["skip_layers"] = list(plan.skip_layers)
        if name in model._adapter_state.merged:
            row["merged"] = True
    fused = [fuse.name for fuse in fusions_of(plan.setup)]
    for name in model._adapter_state.fusions:
        add(name, "fusion", own_parameters_of(model, (), [name]), name in fused)
    base = [p for p in model._backbone.parameters() if id(p) not in ids]
    ids.update(map(id, base))
    for name, kind, modules, is_active in _heads(model, active):
        # a tied output layer is the base model's
        found = dict.fromkeys(p for module in modules for p in module.parameters())
        row = add(name, kind, [p for p in found if id(p) not in ids], is_active)
        if labels := getattr(getattr(modules[0], "config", None), "id2label", None):
            row["labels"] = list(labels.values())
    total = sum(map(sharding.size_of, base)) + _uncounted(model._backbone)
    for row in rows:
        row["%param"] = 100.0 * row["#param"] / total
    trained = any(p.requires_grad for p in base)
    return [*rows, {"name": "Full model", "#param": total, "%param": 100.0, "train": trained}]


def _heads(
    model: AdaptedModel, active: Sequence[str]
) -> Iterator[tuple[str, str, Sequence[nn.Module], bool]]:
    """Yield the name, the kind and the modules of each head, and whether it is active."""
    for name, head in heads_of(model).items():
        yield name, f"{head.config.head_type} head", [head], name in model._active.heads.names
    owners = model._adapter_state.copies
    # an adapter's copy takes the place of the original, and is inside its layers
    for owner in owners:
        layers = [*copies.layers_with(model, owner).values()]
        yield owner, "copy of the head", layers, owner in active
    if own := [*copies.layers_of(model).values()]:
        yield sharding.class_name(model), "head", own, not any(name in owners for name in active)


def _uncounted(model: nn.Module) -> int:
    """Return the number of weights in quantized layers that are not among the parameters."""
    # adapters are never quantized, and have no sizes where ZeRO has partitioned them
    return sum(map(uncounted, {layer for _, layer in plain_modules(model)}))


def headline(model: AdaptedModel) -> str:
    """Return what a model has in one line: adapters, heads, and how much is trained."""
    known, plan, heads = model._adapter_state.records, model._active.plan, heads_of(model)
    parts = [f"adapters: {listing(known)}" + (f", active {plan.setup!r}" if plan.setup else "")]
    if merged := model._adapter_state.merged:
        parts += [f"merged: {listing(merged)}"]
    if heads:
        own = model._active.heads.names
        parts += [f"heads: {listing(heads)}" + (f", active {listing(own)}" if own else "")]
    every = [*cast("nn.Module", model).parameters()]
    trained = sum(sharding.size_of(p) for p in every if p.requires_grad)
    total = sum(map(sharding.size_of, every)) + _uncounted(cast("nn.Module", model))
    parts += [f"trained: {trained:,} of {total:,} parameters"]
    return "; ".join(parts)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of a summary as a table."""
    cells = [_COLUMNS, *([_cell(row, column) for column in _COLUMNS] for row in rows)]
    lines = columns(cells, [column.endswith("param") for column in _COLUMNS])
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cell(row: dict[str, Any], column: str) -> str:
    value = row.get(column, "")
    if column == "architecture" and (labels := row.get("labels")):
        return f"{value}: {listing(labels, limit=4, show=str)}"
    if column == "active" and row.get("merged"):
        return "merged"
    if isinstance(value, bool):
        skipped = row.get("skip_layers", ()) if column == "active" else ()
        where = f", not in blocks {', '.join(map(str, skipped))}" if skipped else ""
        return f"{'yes' if value else 'no'}{where}"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
