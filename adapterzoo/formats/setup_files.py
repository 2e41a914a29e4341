"""`adapter_setup.json`: a composition and its heads, as `adapters` writes them.

{"adapter_setup": {"type": "Stack", "children": [{"type": "single", "children": ["a"]}, …],
                   "kwargs": {…}}, "head_setup": null, true, a name, a list or an object}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from adapterzoo.composition import Composition, from_json, fusions_of
from adapterzoo.errors import CheckpointError, CompositionError, ConfigError
from adapterzoo.folders.names import SETUP
from adapterzoo.folders.reading import AGAIN, read_json
from adapterzoo.names import check_name

from .adapterhub import VERSION
from .files import json_bytes, write_all

HeadSetup: TypeAlias = "bool | str | list[str] | Composition | None"


def write(folder: Path, setup: Composition, heads: HeadSetup) -> None:
    """Write the file; create the folder if missing."""
    document = {
        "adapter_setup": _document(setup),
        "head_setup": _document(heads) if isinstance(heads, Composition) else heads,
        "version": VERSION,
    }
    write_all(folder, {SETUP: json_bytes(document)})


def read(folder: Path) -> tuple[Composition, HeadSetup]:
    """Return the composition and the heads in the file of a folder.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    values = read_json(folder / SETUP, "Write the folder that save_adapter_setup wrote")
    try:
        setup, heads = _composition(values.get("adapter_setup")), values.get("head_setup")
        found = _composition(heads) if isinstance(heads, Mapping) else heads
        # they are names of folders
        for name in (*(setup.flatten() if setup is not None else ()), *names_of(found)):
            check_name(name)
        for fuse in fusions_of(setup):
            check_name(fuse.fusion or "a")
    except (CompositionError, ConfigError, RecursionError, TypeError) as error:
        raise CheckpointError(f"{str(folder / SETUP)!r}: {error} {AGAIN}.") from error
    names = found if isinstance(found, list) else [found]
    listed = all(isinstance(name, str) for name in names)
    if setup is None or not (
        listed or found is None or found is True or isinstance(found, Composition)
    ):
        raise CheckpointError(f"{str(folder / SETUP)!r} holds no composition and heads. {AGAIN}.")
    return setup, found


def names_of(heads: HeadSetup) -> list[str]:
    """Return the names of the heads; empty for True, the head of a task class."""
    if isinstance(heads, Composition):
        return list(heads.flatten())
    if isinstance(heads, str):
        return [heads]
    return list(heads) if isinstance(heads, (list, tuple)) else []


def _document(setup: Composition) -> dict[str, Any]:
    children = [
        _document(child)
        if isinstance(child, Composition)
        else {"type": "single", "children": [child]}
        for child in setup
    ]
    found: dict[str, Any] = {"type": type(setup).__name__, "children": children}
    return {**found, "kwargs": dict(setup.options)} if setup.options else found


def _composition(values: object) -> Composition | None:
    return from_json(_ours(values)) if isinstance(values, Mapping) else None


def _ours(values: Any) -> Any:
    """Return an object of the file as `from_json` reads it."""
    if not isinstance(values, Mapping):
        raise CompositionError(f"{values!r} is not a composition.")
    children, kwargs = values.get("children"), values.get("kwargs") or {}
    if not isinstance(children, list) or not isinstance(kwargs, Mapping):
        raise CompositionError(f"{values!r} is not a composition.")
    if values.get("type") == "single":
        return children[0] if len(children) == 1 else None
    made = [_ours(child) for child in children]
    return {**kwargs, "type": values.get("type"), "children": made}
