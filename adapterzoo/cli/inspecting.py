"""The work of `info`, `verify` and `report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from adapterzoo import hub, serving
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.hub.names import is_complete
from adapterzoo.model.checkpointing import fingerprint_of
from adapterzoo.model.report import AdapterReport
from adapterzoo.serving import Proof

from .checkpoints import open_checkpoint
from .glance import CheckpointFolder
from .models import fitted, on_fitted


def facts_of(checkpoint: CheckpointFolder, model: str | None) -> dict[str, Any]:
    """Return all facts about a checkpoint, as JSON types.

    Args:
        checkpoint: checkpoint of an adapter or a head.
        model: the base model to compare with; None: only the files are read.

    Raises:
        CheckpointError: the checkpoint does not fit the model, or the model cannot be loaded.
    """
    facts = checkpoint.facts()
    if model is None:
        if checkpoint.pinned is not None and checkpoint.fingerprint is None:
            raise CheckpointError(
                f"the fingerprint of {checkpoint.path!r} is not known without its base model. "
                f"Write --model."
            )
        return facts
    found = on_fitted(checkpoint, model, lambda found: found, "compared")
    checkpoint = replace(checkpoint, head=found.stored.metadata.get("head"))
    config = found.stored.metadata.get("config")
    facts["compared_with"] = model
    facts["model_type"] = found.model.config.model_type
    facts["head"] = checkpoint.head_type
    facts["labels"] = checkpoint.labels
    if checkpoint.kind == "adapter" and config is not None:
        facts["method"] = config["architecture"]
        facts["config"] = config
        facts["fingerprint"] = fingerprint_of(found.model, found.stored)
        facts["pinned"] = checkpoint.pin(facts["fingerprint"])
    return facts


def verify(
    checkpoint: CheckpointFolder, model: str | None, fingerprint: str | None
) -> dict[str, Any]:
    """Check that a checkpoint is complete and finite, and return the facts about it.

    Args:
        checkpoint: the checkpoint; reading it has checked the digests of the native format.
        model: the base model to compare with, or None.
        fingerprint: the expected fingerprint, or None.

    Raises:
        CheckpointError: something is wrong.
    """
    if not is_complete(checkpoint.sizes):
        raise CheckpointError(
            f"the adapter or its head is incomplete: there are only {listing(checkpoint.sizes)}. "
            f"Copy it again; to drop a head, delete its tensors and config."
        )
    # torch.isfinite does not support 8-bit dtypes
    wrong = [k for k, t in checkpoint.tensors.items() if not t.double().isfinite().all()]
    if wrong:
        raise CheckpointError(
            f"NaN or infinite values in {len(wrong)} of {len(checkpoint.tensors)} tensors: "
            f"{listing(wrong)}. Train the adapter again with a smaller learning rate."
        )
    facts = facts_of(checkpoint, model)
    found = facts["fingerprint"]
    if fingerprint is not None and checkpoint.kind == "head":
        raise CheckpointError("a head has no fingerprint. Leave out --fingerprint.")
    if fingerprint is not None and found is None:
        raise CheckpointError("the fingerprint is not known without the base model. Write --model.")
    if fingerprint not in (None, found):
        raise CheckpointError(
            f"the fingerprint is {found!r}, not {fingerprint!r}. Copy the adapter again."
        )
    return facts


def prove(
    path: str,
    server: str,
    model: str,
    adapter: str | None,
    revision: str | None,
    converter: str | None,
) -> Proof:
    """Compare what a server computes from a folder with what the adapter computes here.

    Args:
        path: the folder, or `user/repository`.
        server: name of the server that reads the folder.
        model: the base model.
        adapter: the adapter that was exported, folder or `user/repository`; None: that of `path`.
        revision: revision of `path` on the Hub.
        converter: the converter of llama.cpp, which is run; None: its rules are followed instead.

    Raises:
        CheckpointError: a folder or the model cannot be read.
    """
    folder = _folder(path, revision, model)
    original = None if adapter is None else _folder(adapter, None, model)
    return serving.verify(folder, server, model, original, converter=converter)


def _folder(path: str, revision: str | None, model: str) -> Path:
    """Return the folder of an adapter; its fingerprint is checked if the user wrote one.

    Args:
        path: a folder or a name on the Hub.
        revision: branch, tag or commit on the Hub.
        model: the base model.

    Raises:
        CheckpointError: the adapter has another fingerprint.
    """
    if hub.pinned(path)[1] is None:
        return hub.resolve(path, revision)
    checkpoint = open_checkpoint(path, revision)
    facts_of(checkpoint, model)
    return checkpoint.folder


def report_on(checkpoint: CheckpointFolder, model: str) -> AdapterReport:
    """Load an adapter into its base model, with weights, and return the report on it.

    Args:
        checkpoint: checkpoint of an adapter.
        model: the base model, folder or Hub name.

    Raises:
        CheckpointError: the checkpoint holds only a head, it does not fit the model, or the model
            cannot be loaded.
    """
    if checkpoint.kind == "head":
        raise CheckpointError(
            f"{checkpoint.path!r} holds a head without an adapter. Write the folder of an adapter."
        )
    found = fitted(checkpoint, model)
    report: AdapterReport = found.model.adapter_report(found.name)
    return report
