"""The work of `info`, `verify` and `report`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adapterzoo import serving
from adapterzoo.errors import CheckpointError, listing
from adapterzoo.folders.names import is_complete
from adapterzoo.formats.files import read_tensors
from adapterzoo.model.checkpointing import fingerprint_of
from adapterzoo.model.report import AdapterReport
from adapterzoo.serving import Proof

from .checkpoints import CheckpointFolder
from .models import fitted, on_fitted


def facts_of(checkpoint: CheckpointFolder, model: str | None) -> dict[str, Any]:
    """Return all facts about a checkpoint, as JSON types.

    Args:
        checkpoint: checkpoint of an adapter or a head.
        model: the base model to compare with; None: only the files are read.

    Raises:
        CheckpointError: the checkpoint does not fit the model, or the model cannot be loaded.
    """
    if model is None:
        return checkpoint.facts()
    found = on_fitted(checkpoint, model, lambda found: found, "compared")
    facts = replace(checkpoint, pinned=None, head=found.stored.metadata.get("head")).facts()
    config = found.stored.metadata.get("config")
    facts["compared_with"] = model
    facts["model_type"] = found.model.config.model_type
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
    tensors = {
        key: tensor
        for file in checkpoint.weights
        for key, tensor in read_tensors(checkpoint.folder / file).items()
    }  # fmt: skip
    # torch.isfinite does not support 8-bit dtypes
    wrong = [k for k, t in tensors.items() if not t.double().isfinite().all()]
    if wrong:
        raise CheckpointError(
            f"NaN or infinite values in {len(wrong)} of {len(tensors)} tensors: "
            f"{listing(wrong)}. Train the adapter again with a smaller learning rate."
        )
    facts = facts_of(checkpoint, model)
    found = facts["fingerprint"]
    if fingerprint not in (None, found):
        raise CheckpointError(
            f"the fingerprint is {found!r}, not {fingerprint!r}. Copy the adapter again."
        )
    return facts


def prove(
    checkpoint: CheckpointFolder,
    server: str,
    model: str,
    original: CheckpointFolder | None,
    converter: str | None,
) -> Proof:
    """Compare what a server computes from a folder with what the adapter computes here.

    Args:
        checkpoint: checkpoint of the folder.
        server: name of the server that reads the folder.
        model: the base model.
        original: checkpoint of the adapter that was exported; None: that of the folder.
        converter: the converter of llama.cpp, which is run; None: its rules are followed instead.

    Raises:
        CheckpointError: a folder or the model cannot be read, or an adapter has a fingerprint
            other than the one the user wrote.
    """
    for each in filter(None, (checkpoint, original)):
        if each.pinned is not None:
            facts_of(each, model)
    adapter = None if original is None else original.folder
    return serving.verify(checkpoint.folder, server, model, adapter, converter=converter)


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
