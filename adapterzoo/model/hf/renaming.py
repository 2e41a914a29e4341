"""Names of modules in older releases of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key


def renamer(model: Any) -> Callable[[str], str]:
    """Return a function from names of modules in older releases to the present names.

    It applies the renamings of transformers' loader for old checkpoints of the base model.

    Args:
        model: a `PreTrainedModel`.
    """
    renamings: list[WeightRenaming] | None = None

    def renamed(name: str) -> str:
        nonlocal renamings
        # on first use only: it walks the whole model, and recent adapters do not need it
        if renamings is None:
            known = get_model_conversion_mapping(model)
            renamings = [renaming for renaming in known if isinstance(renaming, WeightRenaming)]
        # the patterns match keys of tensors: add an end to the path that no pattern matches
        return rename_source_key(f"{name}._", renamings, [])[0].removesuffix("._")

    return renamed
