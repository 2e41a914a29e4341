"""Search the Hub for adapters, and describe one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelInfo, hf_hub_download

from adapterzoo.errors import ConfigError, names_call, unknown_name
from adapterzoo.folders.names import CONFIG
from adapterzoo.folders.reading import read_json
from adapterzoo.names import one_of

from .old_ids import OWNER, is_old_id, repository_of
from .requests import asking

# the library that wrote an adapter → the tag by which the Hub finds it
LIBRARIES = {"adapterzoo": "adapterzoo", "adapters": "adapter-transformers", "peft": "peft"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """An adapter on the Hub.

    Attributes:
        adapter_id: `user/repository`, as for `load_adapter`.
        model_name: the base model; None if its author does not name it.
        task: the Hub's name of the task, such as `"text-classification"`.
        username: the user or organization that published it.
        source: always `"hf"`.
        library: the library that wrote it: `"adapterzoo"`, `"adapters"` or `"peft"`.
        tags: all tags.
        datasets: names of the training data sets.
        license: name of the license.
        downloads: number of downloads in the last month.
        likes: number of likes.
        private: whether only its owners can see it.
        gated: whether readers must ask for access.
        revision: the commit.
        files: paths in the repository.
        adapter_config: its `adapter_config.json`; None in a search, or if it has none.
    """

    adapter_id: str
    model_name: str | None = None
    task: str | None = None
    username: str | None = None
    source: str = "hf"
    library: str | None = None
    tags: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    license: str | None = None
    downloads: int = 0
    likes: int = 0
    private: bool = False
    gated: bool = False
    revision: str | None = None
    files: tuple[str, ...] = ()
    adapter_config: dict[str, Any] | None = None


@names_call
def list_adapters(
    model_name: str | None = None,
    task: str | None = None,
    *,
    base_model: str | None = None,
    library: str | None = None,
    search: str | None = None,
    author: str | None = None,
    limit: int | None = 100,
    token: bool | str | None = None,
    source: str | None = None,
) -> list[AdapterInfo]:
    """List the Hub's adapters that `load_adapter` can read, the most downloaded first.

    Args:
        model_name: only those for this model, such as `"google-bert/bert-base-uncased"`.
        task: only those for this task of the Hub, such as `"text-classification"`.
        base_model: the same as `model_name`.
        library: only those written by this library: `"adapterzoo"`, `"adapters"` or `"peft"`.
        search: words in the repository's name.
        author: user or organization.
        limit: maximum number; None: all, which may take minutes.
        token: as for `load_adapter`.
        source: `"ah"`: only those from AdapterHub's own repository, whose author is now
            "AdapterHub"; `"hf"` and None: all.

    Raises:
        ConfigError: two arguments contradict each other.
        HubError: the request failed.
        UnknownNameError: the library is unknown.
    """
    if library is not None and library not in LIBRARIES:
        raise unknown_name("", "library", library, LIBRARIES)
    base_model = one_of(base_model=base_model, model_name=model_name)
    if source not in ("ah", "hf", None) or (source == "ah" and author not in (OWNER, None)):
        raise ConfigError(f"source={source!r} has no author={author!r}. Leave one of them out.")
    author = OWNER if source == "ah" else author
    found: dict[str, AdapterInfo] = {}
    for name in LIBRARIES if library is None else [library]:
        # AdapterHub writes the base model only to the config, which the Hub does not search
        by_config = name == "adapters"
        tags = [LIBRARIES[name]]
        if base_model is not None and not by_config:
            tags.append(f"base_model:{base_model}")
        with asking("the Hub", token):
            models = HfApi().list_models(
                filter=tags, pipeline_tag=task, search=search, author=author, sort="downloads",
                full=True, fetch_config=by_config, token=token,
            )  # fmt: skip
            infos = (_info(model, None) for model in models)
            own = (i for i in infos if not by_config or base_model in (None, i.model_name))
            # a repository with two formats is found twice
            found = {info.adapter_id: info for info in itertools.islice(own, limit)} | found
    ranked = sorted(found.values(), key=lambda info: (-info.downloads, info.adapter_id))
    return ranked[:limit]


@names_call
def adapter_info(
    adapter_id: str,
    revision: str | None = None,
    *,
    token: bool | str | None = None,
    source: str | None = None,
    model_name: str | None = None,
    config: object = None,
) -> AdapterInfo:
    """Return a description of one adapter on the Hub, with its config.

    Args:
        adapter_id: `user/repository`, or an old id of AdapterHub.
        revision: branch, tag or commit; None: the default branch.
        token: as for `load_adapter`.
        source: `"ah"`: it is an old id; `"hf"`: it is not; None: decided by its form.
        model_name: for old ids, the base model's name on the Hub.
        config: for old ids, the config of the adapter; None: the usual one.

    Raises:
        CheckpointError: its config is damaged.
        HubError: there is no such repository, access is denied, or the request failed.
    """
    if source == "ah" or (source is None and is_old_id(adapter_id)):
        adapter_id = repository_of(adapter_id, model_name, config)
    document: dict[str, Any] | None = None
    with asking(repr(adapter_id), token):
        model = HfApi(token=token).model_info(adapter_id, revision=revision)
        names = {file.rfilename for file in model.siblings or ()}
        file = None
        if CONFIG in names:
            file = hf_hub_download(adapter_id, CONFIG, revision=model.sha, token=token)
    if file is not None:
        document = read_json(Path(file), "Tell its author")
    return _info(model, document)


def _info(model: ModelInfo, document: dict[str, Any] | None) -> AdapterInfo:
    tags = tuple(model.tags or ())
    card: Any = model.card_data or {}
    # the tags have both "base_model:adapter:x" and "base_model:x"
    tagged = [tag for tag in _tagged(tags, "base_model:") if ":" not in tag]
    parts = [(model.config or {}).get(key) for key in ("adapters", "adapter_transformers")]
    configured = [part.get("model_name") for part in parts if isinstance(part, Mapping)]
    fields = document or {}
    written = [fields.get("model_name"), fields.get("base_model_name_or_path")]
    names = [*tagged, *_several(card.get("base_model")), *configured, *written]
    library = next((name for name, tag in LIBRARIES.items() if tag in tags), None)
    if library is None and model.library_name in LIBRARIES:
        library = model.library_name
    return AdapterInfo(
        adapter_id=model.id,
        model_name=next((name for name in names if isinstance(name, str) and name), None),
        task=model.pipeline_tag,
        username=model.id.partition("/")[0] if "/" in model.id else None,
        library=library,
        tags=tags,
        datasets=_tagged(tags, "dataset:") or _several(card.get("datasets")),
        license=next(iter(_tagged(tags, "license:") or _several(card.get("license"))), None),
        downloads=model.downloads or 0,
        likes=model.likes or 0,
        private=bool(model.private),
        gated=bool(model.gated),
        revision=model.sha,
        files=tuple(file.rfilename for file in model.siblings or ()),
        adapter_config=document,
    )


def _tagged(tags: Any, prefix: str) -> tuple[str, ...]:
    return tuple(tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix))


def _several(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(item for item in values if isinstance(item, str))
