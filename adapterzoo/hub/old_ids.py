"""Ids of AdapterHub's own repository, such as `sentiment/sst-2@ukp`.

That repository is closed, and its adapters are in repositories `AdapterHub/<name>` of the Hub. An
index for each base model, the one that `adapters` reads, tells the name:

    {task: {dataset: {"default": address, config's hash: {"default": address,
                                                          "versions": {organization: address}}}}}

The last part of an address is the name. Nothing else of it is used.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, get_session

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import HubError, argument, listing
from adapterzoo.formats.adapterhub.adapters import get_adapter_config_hash

from .names import is_public_name
from .requests import asking

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
    config: Any = None,
) -> str:
    """Return the repository of the Hub that has the adapter of an old id.

    Args:
        old_id: `task/dataset@organization`, `task/dataset`, `dataset@organization`, or
            `@organization/name`, which needs no index.
        model_name: the base model, as the Hub names it.
        config: of the adapter: a config, its string or its dict; None: the usual one.

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
    asked = _Asked(old_id, model_name, match["task"], match["dataset"], match["org"], None)
    if config is not None:
        asked = replace(asked, config=get_adapter_config_hash(AdapterConfig.load(config)))
    index = _index(asked)
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


def _repository(address: str) -> str:
    return f"{OWNER}/{address.rstrip('/').rpartition('/')[2].partition('.')[0]}"


def _index(asked: _Asked) -> Mapping[str, Any]:
    """Return AdapterHub's index of a base model."""
    # a model of the index may have got an owner on the Hub since
    for name in dict.fromkeys([asked.model, asked.model.rpartition("/")[2]]):
        with asking(f"AdapterHub's index for {asked.model!r} ('{OWNER}/…' would need no index)"):
            response = get_session().get(
                INDEX.format(quote(name)),
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=True,
            )
            if response.status_code == 404:
                continue
            index = response.raise_for_status().json()
        if isinstance(index, Mapping):
            return index
    raise HubError(
        f"AdapterHub has no index for {asked.model!r}. Write the repository '{OWNER}/…', or "
        f"{argument('model_name', 'bert-base-uncased')} for another base model."
    )


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
