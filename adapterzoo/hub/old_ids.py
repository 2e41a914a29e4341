"""Ids of AdapterHub's own repository, such as `sentiment/sst-2@ukp`.

That repository is closed, and its adapters are in repositories `AdapterHub/<name>` of the Hub. An
index for each base model, which `adapters` also reads, gives the name:

    {task: {dataset: {"default": address, config's hash: {"default": address,
                                                          "versions": {organization: address}}}}}

The name is the last part of an address; the rest is not used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from huggingface_hub import constants, get_session

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import HubError, argument, listing

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
    """Return whether a name can only be an old id, with "@" and an organization."""
    return isinstance(name, str) and "@" in name and bool(_OLD_ID.fullmatch(name.strip()))


def repository_of(old_id: str, model_name: str | None = None, config: Any = None) -> str:
    """Return the repository of the Hub that has the adapter of an old id.

    Args:
        old_id: `task/dataset@organization`, `task/dataset`, `dataset@organization`, or
            `@organization/name`, which needs no index.
        model_name: the base model, as the Hub names it.
        config: the adapter's config, or its string or dict; None: the usual one.

    Raises:
        ConfigError: the config is invalid.
        HubError: the index cannot be read, has no such adapter, or has several.
    """
    match = _OLD_ID.fullmatch(old_id.strip())
    if match is None:
        raise HubError(f"{old_id!r} is not an id of AdapterHub. Write 'task/dataset@organization'.")
    if match["name"]:
        return f"{OWNER}/{match['name'].partition('.')[0]}"
    address = _address(old_id, match, _index(model_name), config)
    found = f"{OWNER}/{address.rpartition('/')[2].partition('.')[0]}"
    _LOG.warning("%r is now the repository %r of the Hub. Write that name.", old_id, found)
    return found


def _index(model_name: str | None) -> Mapping[str, Any]:
    """Return AdapterHub's index of a base model."""
    public = str(model_name) if is_public_name(model_name) else ""
    # a model may have got an owner on the Hub after it was indexed
    for name in dict.fromkeys([public, public.rpartition("/")[2]] if public else []):
        with asking(f"AdapterHub's index for {model_name!r}"):
            response = get_session().get(
                INDEX.format(quote(name)),
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                follow_redirects=True,
            )
            if response.status_code != 404:
                index: Mapping[str, Any] = response.raise_for_status().json()
                return index
    raise HubError(
        f"AdapterHub has no index for {model_name!r}. Write the repository '{OWNER}/…', or "
        f"{argument('model_name', 'bert-base-uncased')} for another base model."
    )


def _address(old_id: str, asked: re.Match[str], index: Mapping[str, Any], config: object) -> str:
    """Return the adapter's address: the usual one if an id allows several.

    Raises:
        HubError: no adapter matches, or several do.
    """
    entries = {
        f"{task}/{dataset}": entry
        for task, datasets in index.items()
        for dataset, entry in datasets.items()
        if (task, dataset) == (asked["task"], asked["dataset"])
        or (asked["dataset"] is None and asked["task"] in (task, dataset))
    }
    if len(entries) != 1:
        near = [f"{task}/{dataset}" for task, of in index.items() for dataset in of]
        near = [name for name in near if asked["task"] in name.split("/")]
        raise HubError(f"{old_id!r} names {len(entries)} adapters. Write one of {listing(near)}.")
    (entry,) = entries.values()
    by_config = {key: value for key, value in entry.items() if key != "default"}
    usual = entry.get("default")
    if config is not None:
        wanted = get_adapter_config_hash(AdapterConfig.load(config))
        if wanted in by_config:
            by_config, usual = {wanted: by_config[wanted]}, by_config[wanted].get("default")
        else:
            _LOG.warning("%r has no adapter with the requested config.", old_id)
    found = {
        address
        for each in by_config.values()
        for org, address in each["versions"].items()
        if asked["org"] in (None, org)
    }
    if usual is not None and (usual in found or asked["org"] is None):
        return str(usual)
    if len(found) != 1:
        orgs = dict.fromkeys(org for each in by_config.values() for org in each["versions"])
        raise HubError(
            f"AdapterHub has {len(found)} adapters {old_id!r}; there are adapters of "
            f"{listing(orgs)}. Write '{asked['task']}/{asked['dataset']}@organization', or "
            f"{argument('config', 'seq_bn')}."
        )
    return str(found.pop())


# --- the hash of a config ---

# newer fields: they are omitted at these values, so that old hashes stay valid
_NEW_FIELDS: Mapping[str, object] = {
    "phm_layer": True,
    "phm_dim": 4,
    "factorized_phm_W": True,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "factorized_phm_rule": False,
    "phm_c_init": "normal",
    "phm_init_range": 0.0001,
    "learn_phm": True,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "phm_rank": 1,
    "phm_bias": True,
    "init_weights": "bert",
    "scaling": 1.0,
}


def get_adapter_config_hash(
    config: Mapping[str, Any], length: int = 16, ignore_params: Collection[str] = ()
) -> str:
    """Return the hash that `adapters` gives a config.

    Different configs can have the same hash, since fields that are false, and those of Compacter at
    their defaults, are omitted.

    Args:
        config: a config, or the dict in a file of AdapterHub.
        length: number of hexadecimal digits.
        ignore_params: fields to ignore.

    Raises:
        CheckpointError: `adapters` has no such config.
    """
    # imports torch
    from adapterzoo.formats.adapterhub import write_config

    values: Any = write_config(config) if isinstance(config, AdapterConfig) else dict(config)
    if values.get("architecture") == "union" and isinstance(config, AdapterConfig):
        members = enumerate(values["configs"])
        values = {f"{i}.{key}": value for i, member in members for key, value in member.items()}
    kept = _without_false({k: v for k, v in values.items() if k not in ignore_params})
    for name, default in _NEW_FIELDS.items():
        if kept.get(name) == default:
            del kept[name]
    text = json.dumps(kept, sort_keys=True)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:length]


def _without_false(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {key: _without_false(inner) for key, inner in value.items() if inner}
