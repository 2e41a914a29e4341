"""Ids of AdapterHub's own repository, such as `sentiment/sst-2@ukp`.

That repository is closed, and its adapters are in repositories `AdapterHub/<name>` of the Hub. An
index for each base model, the one that `adapters` reads, tells the name:

    {task: {dataset: {"default": address, config's hash: {"default": address,
                                                          "versions": {organization: address}}}}}

The last part of an address is the name. Nothing else of it is used.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants

from adapterzoo.errors import HubError, argument, listing
from adapterzoo.formats.files import MAX_JSON, parse_json

from .client import fetch
from .repo_ref import check_repo_id, is_public_name

_LOG = logging.getLogger(__name__)

INDEX = "https://raw.githubusercontent.com/Adapter-Hub/Hub/master/dist/v2/index/{}.json"
OWNER = "AdapterHub"

_PART = r"[\w.+-]+"
_OLD_ID = re.compile(
    rf"@(?P<owner>{_PART})/(?P<name>{_PART})"
    rf"|(?P<task>{_PART})(?:/(?P<dataset>{_PART}))?(?:@(?P<org>{_PART}))?"
)


def is_old_id(name: object) -> bool:
    """Return whether a name can only be an old id: it has "@" and an organization."""
    return isinstance(name, str) and "@" in name and bool(_OLD_ID.fullmatch(name.strip()))


def has_index(model_name: str | None) -> bool:
    """Return whether AdapterHub can have an index for a base model: its name is public."""
    return model_name is not None and is_public_name(model_name)


def repository_of(
    old_id: str,
    model_name: str | None = None,
    config: object = None,
    local_files_only: bool = False,
) -> str:
    """Return the repository of the Hub that has the adapter of an old id.

    Args:
        old_id: `task/dataset@organization`, `task/dataset`, `dataset@organization`, or
            `@organization/name`, which needs no index.
        model_name: the base model, as the Hub names it.
        config: of the adapter: a config, its string or its dict; None: the usual one.
        local_files_only: whether to use only an index that was read before.

    Raises:
        ConfigError: the config is not legal.
        HubError: the index cannot be read, has no such adapter, or has several.
    """
    match = _OLD_ID.fullmatch(old_id.strip())
    if match is None:
        raise HubError(
            f"{old_id!r} is not an id of AdapterHub. Write 'task/dataset@organization', or the "
            f"repository '{OWNER}/…'."
        )
    if match["name"]:
        return _repository(match["name"])
    if model_name is None or not has_index(model_name):
        raise HubError(
            f"AdapterHub has one index for each base model, and the name of this one is "
            f"{model_name!r}. Write {argument('model_name', 'bert-base-uncased')}."
        )
    parts = match["task"], match["dataset"], match["org"]
    asked = _Asked(old_id, model_name, *parts, None if config is None else _hash(config))
    index = _index(asked, local_files_only or bool(constants.HF_HUB_OFFLINE))
    try:
        found = _repository(_address(asked, index))
    except (AttributeError, KeyError, TypeError) as error:
        raise HubError(
            f"the index of AdapterHub for {model_name!r} is damaged. Write the repository "
            f"'{OWNER}/…'."
        ) from error
    _LOG.warning("%r is the repository %r of the Hub now. Write that name.", old_id, found)
    return found


@dataclass(frozen=True, slots=True)
class _Asked:
    """The parts of an old id, and the hash of the requested config."""

    text: str
    model: str
    task: str
    dataset: str | None
    org: str | None
    config: str | None

    def error(self, what: str, hint: str) -> HubError:
        return HubError(
            f"the index of AdapterHub for {self.model!r} has {what} {self.text!r}. {hint}"
        )


def _hash(config: Any) -> str:
    # importing all methods takes time
    from adapterzoo.configs import AdapterConfig
    from adapterzoo.formats.adapterhub.hashes import get_adapter_config_hash

    found: Any = AdapterConfig.load(config)
    return get_adapter_config_hash(found)


def _repository(address: str) -> str:
    found = f"{OWNER}/{address.rstrip('/').rpartition('/')[2].partition('.')[0]}"
    check_repo_id(found)
    return found


# --- the index ---


def _index(asked: _Asked, offline: bool) -> Mapping[str, Any]:
    """Return the index of a base model: the one at AdapterHub, else the one that was read last."""
    # a model of the index may have got an owner on the Hub since
    names = list(dict.fromkeys([asked.model, asked.model.rpartition("/")[2]]))
    failure = None
    for name in names if not offline else ():
        try:
            text = fetch(INDEX.format(quote(name)), MAX_JSON)
        except HubError as error:
            failure = error
            break
        if text is not None:
            found = _parsed(text, asked)
            _remember(name, text)
            return found
    for name in names if offline or failure is not None else ():
        file = _file(name)
        if file.is_file():
            if failure is not None:
                _LOG.warning("%s Using the index that was read last.", failure)
            return _parsed(file.read_bytes()[: MAX_JSON + 1], asked)
    hint = f"Write the repository '{OWNER}/…'"
    if failure is not None:
        raise HubError(f"{failure} {hint}, which needs no index.")
    if offline:
        raise HubError(
            f"the index of AdapterHub for {asked.model!r} was never read, and no server may be "
            f"asked. {hint}, which needs no index."
        )
    raise HubError(
        f"AdapterHub has no index for {asked.model!r}. {hint}, or "
        f"{argument('model_name', 'bert-base-uncased')} for another base model."
    )


def _parsed(text: bytes, asked: _Asked) -> Mapping[str, Any]:
    try:
        values = parse_json(text)
    except (ValueError, RecursionError) as error:
        values = error
    if not isinstance(values, Mapping):
        raise HubError(
            f"the file read as AdapterHub's index for {asked.model!r} is not an index. Try again, "
            f"or write the repository '{OWNER}/…'."
        )
    return values


def _file(name: str) -> Path:
    return Path(constants.HF_HOME) / "adapterhub-index" / f"{quote(name, safe='')}.json"


def _remember(name: str, text: bytes) -> None:
    file = _file(name)
    # only a later load without a network would miss it
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as stream:
            stream.write(text)
        Path(stream.name).replace(file)


# --- the contents of the index ---


def _address(asked: _Asked, index: Mapping[str, Any]) -> str:
    """Return the address of the adapter.

    Raises:
        HubError: no adapter matches, or several do.
    """
    found = dict(_entries(asked, index))
    if not found:
        known = [f"{task}/{dataset}" for task, of in index.items() for dataset in of]
        near = [name for name in known if asked.task in name.split("/")]
        raise asked.error("no adapter", f"It has {listing(near or sorted(known))}.")
    if len(found) > 1:
        raise asked.error("several adapters", f"Write one of {listing(found)}.")
    entry = next(iter(found.values()))
    configs = {key: value for key, value in entry.items() if key != "default"}
    if asked.config in configs:
        return _version(asked, configs[asked.config])
    usual = entry.get("default")
    if asked.config is not None and (usual is not None or len(configs) == 1):
        _LOG.warning("%r has no adapter of the config that was asked for.", asked.text)
    if usual is not None and asked.org is not None:
        theirs = {v["versions"][asked.org] for v in configs.values() if asked.org in v["versions"]}
        if usual not in theirs and len(theirs) == 1:
            return str(theirs.pop())
        if usual not in theirs:
            what = "several adapters" if theirs else f"no adapter of {asked.org!r} for"
            raise asked.error(what, f"Write {argument('config', 'seq_bn')}.")
    if usual is not None:
        return str(usual)
    if len(configs) == 1:
        return _version(asked, next(iter(configs.values())))
    raise asked.error("several adapters", f"Write {argument('config', 'seq_bn')}.")


def _entries(asked: _Asked, index: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for task, datasets in index.items():
        for dataset, entry in datasets.items():
            named = (task, dataset) == (asked.task, asked.dataset)
            if named or (asked.dataset is None and asked.task in (task, dataset)):
                yield f"{task}/{dataset}", entry


def _version(asked: _Asked, entry: Mapping[str, Any]) -> str:
    versions = entry["versions"]
    if asked.org is not None and asked.org in versions:
        return str(versions[asked.org])
    if asked.org is None and (len(versions) == 1 or "default" in entry):
        return str(entry.get("default") or next(iter(versions.values())))
    raise asked.error(
        f"adapters of {listing(sorted(versions))} only, and not", f"Write @{sorted(versions)[0]}."
    )
