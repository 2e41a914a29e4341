"""PEFT's format: `adapter_config.json` with a `peft_type`, and `adapter_model.safetensors`.

LoRA (with rsLoRA, patterns, biases), DoRA and BOFT, with the head as `modules_to_save`. Older
folders hold `adapter_model.bin`, a pickle, which is read as tensors only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from adapterzoo.errors import CheckpointError

from .files import json_bytes, tensor_bytes
from .foreign import fields_of, read_json, read_meta, read_tensors
from .formats import Facts, Stem, formats
from .peft_config import CONFIG, checked
from .peft_heads import head_for, head_from
from .peft_read import adapter_from, sorted_out
from .peft_write import config_for, layers_of, tensors_for
from .stored import Stored

_TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"


class PeftFormat:
    """The format of PEFT, as `formats` sees it."""

    def recognises(self, folder: Path, stem: Stem) -> bool:
        """Whether there are tensors under PEFT's name, or a config that names a method of PEFT."""
        if stem != "adapter":
            return False
        if (folder / _TENSORS).is_file() or (folder / _PICKLE).is_file():
            return True
        return "peft_type" in fields_of(folder / CONFIG)

    def read(self, folder: Path, stem: Stem, facts: Facts) -> Stored:
        """The adapter, and the head where the file has one.

        Raises:
            CheckpointError: a file is missing or damaged, says what cannot be reproduced here, or
                names layers that the model does not have.
        """
        theirs = checked(facts.call, read_json(facts.call, folder / CONFIG))
        layers, rest = sorted_out(_tensors(facts.call, folder), facts)
        config, adapter = adapter_from(theirs, layers, facts)
        head, head_tensors = head_from(theirs, rest, facts)
        document = {
            "name": None,
            "model_type": facts.model_type,
            "config": config.to_dict(),
            "head": head,
            "meta": meta_in(facts.call, folder),
        }
        return Stored(document, adapter, head_tensors)

    def encode(self, stored: Stored, stem: Stem, facts: Facts) -> dict[str, bytes]:
        """The config and the tensors.

        Raises:
            CheckpointError: PEFT has no such adapter or head.
        """
        if stem != "adapter":
            raise CheckpointError(
                f"{facts.call}: PEFT's format has no heads without an adapter. Write "
                f"save_adapter(…, format='peft'), or save_head(…) in another format."
            )
        task, head = head_for(stored, facts)
        layers = layers_of(stored, facts)
        config, places = config_for(layers, head, task, facts)
        tensors = tensors_for(layers, places, facts) | head
        whole = {f"base_model.model.{key}": tensor for key, tensor in tensors.items()}
        written = tensor_bytes(whole, meta=stored.document.get("meta"))
        return {_TENSORS: written, CONFIG: json_bytes(config)}

    def owned(self, stem: Stem) -> tuple[str, ...]:
        """The files that PEFT would read."""
        return (_TENSORS, _PICKLE, CONFIG) if stem == "adapter" else ()


formats.register("peft")(PeftFormat())


def meta_in(call: str, folder: Path) -> dict[str, Any]:
    """What `meta_dict` said when the folder was saved here: PEFT keeps nothing of the kind.

    Raises:
        CheckpointError: the file with the tensors is damaged.
    """
    file = folder / _TENSORS
    return read_meta(call, file) if file.is_file() else {}


def _tensors(call: str, folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder, on the CPU."""
    for name in (_TENSORS, _PICKLE):
        if (folder / name).is_file():
            return read_tensors(call, folder / name)
    raise CheckpointError(
        f"{call}: there is {CONFIG}, but neither {_TENSORS} nor {_PICKLE} beside it. Copy the "
        f"checkpoint again from where it was saved."
    )
