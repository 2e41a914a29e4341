"""The work of `convert` to another method."""

from __future__ import annotations

from pathlib import Path

from adapterzoo.errors import CheckpointError
from adapterzoo.model.conversion.certificate import Certificate

from .checkpoints import CheckpointFolder
from .converting import refuse_to_replace
from .models import base_of, fitted, tokenizer_of


def convert_method(
    checkpoint: CheckpointFolder,
    folder: str,
    to: str,
    model: str | None,
    name: str | None,
    with_head: bool,
    rank: int | None,
    energy: float | None,
    text: str | None,
) -> Certificate:
    """Write a checkpoint as an adapter of another method, in the same format.

    Args:
        checkpoint: of an adapter.
        folder: created if it is missing.
        to: the method.
        model: base model; None: the one that the checkpoint names.
        name: new name; None: its own.
        with_head: whether to write the adapter's head too.
        rank: the largest rank; None: not limited.
        energy: the share of the squared singular values to keep; None: all.
        text: on which outputs are compared; None: random inputs.

    Raises:
        CheckpointError: it does not fit the base model, the format cannot express the result, or
            the folder cannot be written.
        StateError: the adapter is more than a change of weights.
    """
    if checkpoint.kind == "head":
        raise CheckpointError(
            f"{checkpoint.path!r} holds only a head, which changes no weight. Write the folder of "
            f"an adapter."
        )
    refuse_to_replace(Path(folder), checkpoint.format)
    base = base_of(checkpoint, model)
    inputs = None if text is None else tokenizer_of(base)(text, return_tensors="pt")
    found = fitted(checkpoint, base, name=name, whole=True)
    certificate: Certificate = found.model.convert_adapter(
        found.name, to, rank, energy, new_name=found.name, overwrite_ok=True, inputs=inputs
    )
    found.model.save_adapter(
        folder, found.name, with_head=with_head, meta_dict=checkpoint.meta,
        format=checkpoint.format,
    )  # fmt: skip
    return certificate
