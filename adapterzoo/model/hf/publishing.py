"""Publishing an adapter on the Hub."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from adapterzoo import hub
from adapterzoo.hub.card import card_text, check_card
from adapterzoo.model import checkpointing, sharding
from adapterzoo.model.state import AdaptedModel

from . import setups


def push(
    model: AdaptedModel,
    repo_id: str,
    name: object,
    *,
    datasets_tag: str | None,
    local_path: str | os.PathLike[str] | None,
    adapter_card_kwargs: Mapping[str, Any] | None,
    metrics: Mapping[str, float] | None,
    base_model: str | None,
    commit_message: str | None,
    saving: Mapping[str, Any],
    is_setup: bool = False,
    **options: Any,
) -> str:
    """Publish an adapter, and its head, on the Hub, with a model card.

    Args:
        model: with adapters.
        repo_id: `user/repository`.
        name: of the adapter; or a composition, which is saved as a setup.
        datasets_tag: the dataset that it was trained on.
        local_path: a folder to keep the files in too.
        adapter_card_kwargs: texts for the card.
        metrics: names and values of metrics.
        base_model: the base model's name on the Hub.
        commit_message: first line of the commit.
        saving: arguments of `save_adapter`, or of `setups.save`.
        is_setup: whether a setup is published.
        **options: arguments of `hub.push`.

    Returns:
        The address of the commit, or of the pull request.
    """
    for each in setups.names_in(name) if is_setup else [name]:
        model._adapter_state.find(each)
    sharding.refuse_if_sharded(
        model, "Write save_adapter(folder, …) in all processes, then hub.push(folder, …) in one."
    )
    text = card_text(
        adapter_card_kwargs or {},
        base_model=base_model,
        datasets=() if datasets_tag is None else (datasets_tag,),
        results=dict(metrics or {}),
    )
    check_card(text)
    what = "adapter setup" if is_setup else "adapter"
    message = commit_message or f"Upload {what} {name!r}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if local_path is None else local_path)
        if is_setup:
            setups.save(model, folder, name, **saving)
        else:
            checkpointing.save_adapter(model, folder, str(name), **saving)
        return hub.push(folder, repo_id, text=text, commit_message=message, **options)
