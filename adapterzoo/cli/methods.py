"""The work of `convert` to another method."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import AutoModel

from adapterzoo.errors import CheckpointError, argument, listing
from adapterzoo.formats.peft.config import TASKS
from adapterzoo.model import init
from adapterzoo.model.conversion import Size, add_changes, changes_by_peft, random_inputs
from adapterzoo.model.conversion.certificate import Certificate
from adapterzoo.model.hf.task_classes import task_class
from adapterzoo.model.state import base_prefix
from adapterzoo.spelling import peft_readable

from .checkpoints import CheckpointFolder
from .converting import refuse_to_replace
from .models import base_of, config_of, fitted, plain_model, tokenizer_of


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
    if _is_foreign(checkpoint):
        return _convert_foreign(
            checkpoint, folder, base, to, name, with_head, Size(rank, energy), text
        )
    found = fitted(checkpoint, base, name=name, whole=True)
    inputs = None if text is None else _inputs(found.model, base, text)
    certificate: Certificate = found.model.convert_adapter(
        found.name, to, rank, energy, new_name=found.name, overwrite_ok=True, inputs=inputs
    )
    found.model.save_adapter(
        folder, found.name, with_head=with_head, meta_dict=checkpoint.meta,
        format=checkpoint.format,
    )  # fmt: skip
    return certificate


def _inputs(model: Any, base: str, text: str) -> dict[str, Any]:
    """Return the arguments of a call with a text; a decoder reads it too."""
    found = dict(tokenizer_of(base)(text, return_tensors="pt"))
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = found["input_ids"]
    return found


def _is_foreign(checkpoint: CheckpointFolder) -> bool:
    """Return whether a file of PEFT has a method that does not exist here."""
    types = {spelling.peft_type for spelling in peft_readable()}
    return checkpoint.format == "peft" and checkpoint.method not in types


def _convert_foreign(
    checkpoint: CheckpointFolder,
    folder: str,
    base: str,
    to: str,
    name: str | None,
    with_head: bool,
    size: Size,
    text: str | None,
) -> Certificate:
    """Convert an adapter of a method that only PEFT has.

    Raises:
        CheckpointError: PEFT cannot load it, or it has a head, which is not converted.
    """
    trained = checkpoint.metadata.get("modules_to_save")
    if trained and with_head:
        raise CheckpointError(
            f"{checkpoint.path!r} has {listing(trained)} beside the {checkpoint.method} adapter, "
            f"which only its method could load. Write {argument('with_head', False)} to leave it "
            f"out."
        )
    plain = plain_model(base, _class_in(checkpoint, base), dtype=checkpoint.dtype).eval()
    model = init(copy.deepcopy(plain)).eval()
    inputs = random_inputs(model) if text is None else _inputs(model, base, text)
    found = changes_by_peft(
        plain, checkpoint.folder, str(checkpoint.method), inputs, text is not None
    )
    start = base_prefix(model)
    heads = {k: v for k, v in found.changes.items() if trained and not k.startswith(start)}
    changes = {key: value for key, value in found.changes.items() if key not in heads}
    name = name or checkpoint.name or Path(checkpoint.path).name
    certificate = add_changes(model, name, found._replace(changes=changes), to, size)
    model.save_adapter(
        folder, name, with_head=False, meta_dict=checkpoint.meta, format=checkpoint.format
    )
    return certificate


def _class_in(checkpoint: CheckpointFolder, base: str) -> Any:
    """Return the class of transformers for the task in PEFT's config, or that of the base model."""
    config = config_of(base)
    names = TASKS.get(str(checkpoint.metadata.get("task_type")), {}).get(config.model_type)
    own = next(iter(config.architectures or ()), None)
    name = names[0] if isinstance(names, tuple | list) else names or own
    return AutoModel if name is None else task_class(name)
