"""Compositions in folders, with their adapters, heads and fusions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from adapterzoo import hub
from adapterzoo.arguments import one_of
from adapterzoo.composition import Composition, fusions_of, parse
from adapterzoo.errors import AdapterZooError, DuplicateNameError, StateError, unknown_name
from adapterzoo.formats import setup_files
from adapterzoo.formats.setup_files import HeadSetup, names_of
from adapterzoo.model import adapters, checkpointing, fusion
from adapterzoo.model.activation import set_active as activate
from adapterzoo.model.adapterhub import arguments
from adapterzoo.model.heads import checkpoints as head_files
from adapterzoo.model.heads.interface import LoadOptions
from adapterzoo.model.state import AdaptedModel

from . import fusion_files


def names_in(adapter_setup: object) -> list[str]:
    """Return the names of the adapters that a user composes.

    Raises:
        StateError: there is none.
    """
    setup = parse(adapter_setup)
    if setup is None or not setup.flatten():
        raise StateError("there is no adapter in it. Write 'a' or Stack('a', 'b').")
    return list(setup.flatten())


def save(
    model: AdaptedModel,
    folder: str | os.PathLike[str],
    adapter_setup: object,
    head_setup: HeadSetup = None,
    meta: Mapping[str, Any] | None = None,
    format: str = "native",
) -> None:
    """Save a composition with its adapters, heads and fusions.

    Raises:
        UnknownNameError: an adapter, a head or a fusion is unknown.
    """
    folder, state = Path(folder), model._adapter_state
    for name in names_in(adapter_setup):
        state.find(name)
    setup, heads = cast("Composition", parse(adapter_setup)), model._head_strategy.saved_names()
    for fuse in fusions_of(setup):
        state.find_fusion(fuse.name)
    for name in names_of(head_setup):
        if name not in heads:
            raise unknown_name("", "head", name, heads)
    for name in setup.flatten():
        checkpointing.save_adapter(model, folder / name, name, name in heads, meta, format)
    for fuse in fusions_of(setup):
        fusion_files.save(model, folder / fuse.name, fuse, meta, format)
    for name in names_of(head_setup):
        if name not in setup.flatten():
            head_files.save(model, folder / name, name, format)
    if head_setup is True:
        head_files.save(model, folder, None, format)
    # last: where it is, all the others are
    setup_files.write(folder, setup, head_setup)


def load(
    model: AdaptedModel,
    path: str | os.PathLike[str],
    version: str | None,
    revision: str | None,
    source: str | None,
    hub_options: Mapping[str, Any],
    set_active: bool,
    beside: Sequence[Any] = (),
) -> tuple[Composition, HeadSetup]:
    """Load a composition with its adapters, heads and fusions, all or none.

    Raises:
        DuplicateNameError: a name is taken.
    """
    wanted = one_of(version=version, revision=revision)
    folder = hub.resolve_setup(path, wanted, source, **hub_options)
    setup, heads = setup_files.read(folder)
    strategy, state = model._head_strategy, model._adapter_state
    fused = [fuse.name for fuse in fusions_of(setup)]
    if taken := sorted({*fused} & state.fusions.keys()):
        raise DuplicateNameError(
            f"there is a fusion {taken[0]!r}. Write delete_adapter_fusion({taken[0]!r}) first."
        )
    known = {*strategy.names()}
    loads = [
        checkpointing.fitting(model, folder / name, LoadOptions(load_as=name))
        for name in setup.flatten()
    ]
    undo: list[Callable[[], None]] = []
    before = model._active.default.plan
    try:
        for name, enter in loads:
            enter()
            undo.append(lambda name=name: adapters.delete(model, name))  # type: ignore[misc]
        for name in fused:
            fusion_files.load(model, folder / name, LoadOptions())
            undo.append(lambda name=name: fusion.delete(model, name))  # type: ignore[misc]
        # those of adapters came with them
        for name in [n for n in names_of(heads) if n not in setup.flatten()]:
            head_files.load(model, folder / name, LoadOptions(load_as=name))
        enter_head = None
        if heads is True:
            _, enter_head = head_files.fitting(model, folder, LoadOptions(set_active=True))
        if set_active:
            activate(model, setup)
            if strategy.is_named and names_of(heads):
                cast("Any", model).active_head = heads
        arguments.load_weights(LoadOptions(loaders=beside), folder, setup.flatten()[-1])
        # last: the head of a task class is filled in place
        if enter_head is not None:
            enter_head()
    except AdapterZooError:
        for step in reversed(undo):
            step()
        for name in {*strategy.names()} - known:
            model.delete_head(name)
        model._active.default.plan = before
        raise
    return setup, heads
