"""The entries of `meta_dict` beside the fields of AdapterHub's configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapterzoo.errors import CheckpointError, argument, listing

_FIELDS = frozenset(
    ("adapter_names", "config", "hidden_size", "model_class", "model_name", "model_type", "name",
     "version")
)  # fmt: skip


def meta_in(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `meta_dict` entries of a config."""
    return {key: value for key, value in metadata.items() if key not in _FIELDS}


def meta_for(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `meta_dict` entries to write next to the fields of a config.

    Raises:
        CheckpointError: it has a key that is such a field.
    """
    if taken := sorted(_FIELDS & set(meta)):
        raise CheckpointError(
            f"AdapterHub's format keeps meta_dict beside its own fields, and {listing(taken)} are "
            f"among these. Nothing has been written. Rename these keys of meta_dict, or write "
            f"{argument('format', 'native')}."
        )
    return meta
