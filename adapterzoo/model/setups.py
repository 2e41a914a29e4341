"""Compositions in folders, with their adapters, heads and fusions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from adapterzoo import hub
from adapterzoo.composition import Composition, fusions_of, parse
from adapterzoo.errors import DuplicateNameError, StateError, unknown_name
from adapterzoo.formats import setup_files
from adapterzoo.formats.setup_files import HeadSetup, names_of

from . import adapters, checkpointing, fusion, sharding
from .activation import set_active
from .heads.named import saved_names
from .state import AdaptedModel, LoadOptions, heads_of


def composition_of(adapter_setup: object) -> Composition:
    """Return the user's argument as a composition.

    Raises:
        StateError: it has no adapter.
    """
    setup = parse(adapter_setup)
    if setup is None or not setup.flatten():
        raise StateError("the setup has no adapter. Write 'a' or Stack('a', 'b').")
    return setup


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
    setup, heads = composition_of(adapter_setup), saved_names(model)
    for name in setup.flatten():
        state.find(name)
    for fuse in fusions_of(setup):
        state.find_fusion(fuse.name)
    for name in names_of(head_setup):
        if name not in heads:
            raise unknown_name("", "head", name, heads)
    for name in setup.flatten():
        checkpointing.save_adapter(model, folder / name, name, name in heads, meta, format)
    for fuse in fusions_of(setup):
        fusion.save(model, folder / fuse.name, fuse, meta, format)
    for name in names_of(head_setup):
        if name not in setup.flatten():
            checkpointing.save_head(model, folder / name, name, format)
    if head_setup is True:
        checkpointing.save_head(model, folder, None, format)
    # last: a folder with this file is complete
    setup_files.write(folder, setup, head_setup)


def load(model: AdaptedModel, folder: Path, asked: LoadOptions) -> tuple[Composition, HeadSetup]:
    """Load a composition with its adapters, heads and fusions, all or none.

    Raises:
        DuplicateNameError: a name is taken.
    """
    setup, heads = setup_files.read(folder)
    state = model._adapter_state
    fused = [fuse.name for fuse in fusions_of(setup)]
    if taken := sorted({*fused} & state.fusions.keys()):
        raise DuplicateNameError(
            f"there is a fusion {taken[0]!r}. Write delete_adapter_fusion({taken[0]!r}) first."
        )
    known = {*heads_of(model)}
    loads = [
        checkpointing.fitting(model, folder / name, LoadOptions(load_as=name))
        for name in setup.flatten()
    ]
    with ExitStack() as undo:
        undo.callback(setattr, model._active.default, "plan", model._active.default.plan)
        undo.callback(lambda: [model.delete_head(n) for n in {*heads_of(model)} - known])
        for name, enter in loads:
            enter()
            undo.callback(adapters.delete, model, name)
        for name in fused:
            fusion.load(model, folder / name, LoadOptions())
            undo.callback(fusion.delete, model, name)
        # heads of adapters came with these
        for name in [n for n in names_of(heads) if n not in setup.flatten()]:
            checkpointing.load_head(model, folder / name, LoadOptions(load_as=name))
        enter_head = None
        if heads is True:
            _, enter_head = checkpointing.read_head(model, folder, LoadOptions(set_active=True))
        if asked.set_active:
            set_active(model, setup)
            if model._has_named_heads and names_of(heads):
                cast("Any", model).active_head = heads
        asked.load_weights(folder, setup.flatten()[-1])
        # last: the head of a task class is filled in place
        if enter_head is not None:
            enter_head()
        undo.pop_all()
    return setup, heads


# --- publish on the Hub ---


def push(
    model: AdaptedModel,
    repo_id: str,
    name: object,
    *,
    saving: Mapping[str, Any],
    datasets_tag: str | None,
    local_path: str | os.PathLike[str] | None,
    adapter_card_kwargs: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    base_model: str | None,
    commit_message: str | None,
    is_setup: bool = False,
    **options: Any,
) -> str:
    """Publish an adapter and its head, or a composition, on the Hub, with a model card.

    Args:
        model: the model with the adapters.
        repo_id: `user/repository`.
        name: the adapter; or a composition, with `is_setup`.
        saving: arguments of `save_adapter`, or of `save`.
        datasets_tag: the dataset that it was trained on.
        local_path: a folder to keep the files in too.
        adapter_card_kwargs: texts for the card.
        metrics: names and values of metrics.
        base_model: the base model's name on the Hub.
        commit_message: first line of the commit.
        is_setup: whether a composition is published.
        **options: further arguments of `hub.push`.

    Returns:
        The address of the commit, or of the pull request.
    """
    sharding.refuse_if_sharded(
        model, "Write save_adapter(folder, …) in all processes, then hub.push(folder, …) in one."
    )
    words = dict(adapter_card_kwargs or {})
    text = hub.CardText(
        base_model=base_model,
        datasets=() if datasets_tag is None else (datasets_tag,),
        results=dict(metrics or {}),
        # `adapters` has a text under this name
        evaluation=words.pop("results", None),
        **words,
    )
    message = commit_message or f"Upload adapter {'setup ' * is_setup}{name!r}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if local_path is None else local_path)
        if is_setup:
            save(model, folder, name, **saving)
        else:
            checkpointing.save_adapter(model, folder, str(name), **saving)
        return hub.push(folder, repo_id, text=text, commit_message=message, **options)
