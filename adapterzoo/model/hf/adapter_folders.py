"""Folders of adapters where `from_pretrained` expects a model: the base, then the adapter."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from packaging.version import Version
from transformers import __version__ as _installed
from transformers.integrations import peft as _peft
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file

from adapterzoo import formats, hosts, hub
from adapterzoo.errors import CheckpointError, HubError, in_python, listing, naming
from adapterzoo.folders.formats import Base, base_in, format_of

P = ParamSpec("P")
T = TypeVar("T")


class AdapterFolder(NamedTuple):
    """A folder with an adapter and without a model.

    Attributes:
        path: of the folder.
        name: on the Hub; None for a local folder.
        base: its base model.
        fingerprint: that the adapter must have; None: any.
    """

    path: Path
    name: str | None
    base: Base
    fingerprint: str | None = None


if Version(_installed) < Version("5.24"):
    hosts.transformers_looks_in_folders(_peft)


def find(path: object, options: Mapping[str, Any]) -> AdapterFolder | None:
    """Return the adapter that a path leads to; None if a model is there, or nothing.

    Args:
        path: that `from_pretrained` was given.
        options: its other arguments.

    Raises:
        CheckpointError: the adapter does not name its base model, or sub-folders hold adapters.
    """
    elsewhere = ("subfolder", "config", "state_dict", "gguf_file")
    if not isinstance(path, (str, os.PathLike)) or any(options.get(n) for n in elsewhere):
        return None
    asked = {name: options[name] for name in hub.OPTIONS if name in options}
    path, fingerprint = hub.pinned(path)
    if (folder := _without_model(path, asked)) is None:
        return None
    if (format := format_of(folder, "adapter")) is None:
        if inner := formats.below(folder, "adapter"):
            raise CheckpointError(
                f"{str(path)!r} holds {listing([each.name for each in inner])}. Write "
                f"from_pretrained({str(inner[0])!r})."
            )
        return None
    base = base_in(folder, format)
    if base.name is None:
        raise CheckpointError(
            f"{os.fspath(path)!r} holds an adapter that does not name its base model. Write "
            f"{in_python('load_adapter(…) of its base model', '--model with its base model')}."
        )
    name = None if folder == Path(path) else os.fspath(path)
    return AdapterFolder(folder, name, base, fingerprint)


def or_adapter(from_pretrained: Callable[P, T]) -> Callable[P, T]:
    """Decorate a class method that loads a model: it also loads an adapter with its base model.

    Args:
        from_pretrained: takes the class, a path, and options.
    """

    @functools.wraps(from_pretrained)
    def loading(*args: P.args, **kwargs: P.kwargs) -> T:
        cls: Any = args[0]
        path = args[1] if len(args) > 1 else kwargs.get("pretrained_model_name_or_path")
        found = find(path, kwargs)
        if found is None:
            return from_pretrained(*args, **kwargs)
        options = {k: v for k, v in kwargs.items() if k != "pretrained_model_name_or_path"}
        return cast("T", load(found, cls.from_pretrained, options))

    return cast("Callable[P, T]", loading)


def _without_model(path: str | os.PathLike[str], asked: Mapping[str, Any]) -> Path | None:
    """Return the folder of a path where there is no model; None otherwise."""
    if Path(path).is_dir():
        return None if (Path(path) / CONFIG_NAME).is_file() else Path(path)
    there = cached_file(
        os.fspath(path), CONFIG_NAME, _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False, **asked,
    )  # fmt: skip
    if there is not None:
        return None
    try:
        return hub.resolve(path, **asked)
    except (CheckpointError, HubError):
        # transformers says what is wrong with the name of a model
        return None


def labels_in(folder: Path) -> dict[str, Any]:
    """Return the labels of an adapter's head as arguments of `from_pretrained`, if it has any.

    Args:
        folder: of the adapter.
    """
    head = formats.head_document(folder)
    label2id = (head.get("config") or head).get("label2id")
    if not isinstance(label2id, Mapping):
        return {}
    # the keys of a JSON object may be sorted
    names = dict(sorted((number, name) for name, number in label2id.items()))
    return {"label2id": {name: number for number, name in names.items()}, "id2label": names}


def load(
    found: AdapterFolder,
    load_base: Callable[..., Any],
    options: Mapping[str, Any],
    has_one_head: bool = False,
) -> Any:
    """Return the base model with the adapter, which is active, and with its head.

    Args:
        found: the adapter.
        load_base: loads a model with the methods of adapters by name.
        options: arguments for it; `revision` is that of the adapter. With a `dtype`, both have it.
        has_one_head: whether the model's head is that of its class, which gets the labels of the
            adapter's head, unless the options have others.
    """
    own = {name: value for name, value in options.items() if name != "revision"}
    if found.base.revision:
        own["revision"] = found.base.revision
    if has_one_head and not {"config", "num_labels", "id2label", "label2id"} & own.keys():
        own |= labels_in(found.path)
    call = f"from_pretrained({found.name or str(found.path)!r})"
    with naming(call, takes=frozenset(("dtype", *hub.OPTIONS))):
        loaded = load_base(found.base.name, **own)
        model = loaded[0] if options.get("output_loading_info") else loaded
        load_as = None if found.name is None else Path(found.name).name
        asked = any(options.get(name) is not None for name in ("dtype", "torch_dtype"))
        model.load_adapter(
            found.path, load_as=load_as, set_active=True, dtype=model.dtype if asked else None,
            fingerprint=found.fingerprint,
            # a class such as `BertModel` has no head
            with_head=model._has_named_heads or model._backbone is not model,
        )  # fmt: skip
    return loaded
