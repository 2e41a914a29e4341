"""Download a composition with its adapters, fusions and heads: a folder with sub-folders."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from huggingface_hub import constants

from adapterzoo.checkpoint.setup_files import SETUP
from adapterzoo.errors import HubError, listing, names_call

from .client import Client
from .download import Cache, repository
from .files import wanted
from .repo_ref import RepoRef, locate

_LOG = logging.getLogger(__name__)


@names_call
def resolve_setup(
    adapter_setup_name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    source: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return the folder of an adapter setup; download it to the cache if it is on the Hub.

    Arguments are those of `resolve`, without old ids.

    Raises:
        HubError: the files cannot be downloaded.
    """
    ref = locate(adapter_setup_name_or_path, source)
    if isinstance(ref, Path):
        return ref
    client = Client(ref.repo_id, revision, token, cached=True, no_folder=source is None)
    cache = Cache(client, ref, cache_dir)
    # it is downloaded last: where it is, all the others are
    found = cache.find(SETUP)
    if local_files_only or constants.HF_HUB_OFFLINE:
        if found is None:
            raise client.not_cached(str(cache_dir or constants.HF_HUB_CACHE))
        return found.parent
    try:
        info, files = repository(client, ref.repo_id)
    except HubError as error:
        if found is None:
            raise
        _LOG.warning("%s Using the files in the cache.", error)
        return found.parent
    if info.sha is None or ref.path(SETUP) not in files:
        raise HubError(
            f"{ref.repo_id!r} has no adapter setup: {SETUP} is not among its files "
            f"{listing(sorted(files))}. Write load_adapter({ref.repo_id!r}) for an adapter."
        )
    for below, names in _folders(ref, files).items():
        inner = RepoRef(ref.repo_id, ref.path(below) if below else ref.subfolder)
        for name in wanted(names):
            path = inner.path(name)
            Cache(client, inner, cache_dir).fetch(name, info.sha, files[path], force_download)
    file = cache.fetch(SETUP, info.sha, files[ref.path(SETUP)], force_download)
    cache.remember(SETUP, info.sha)
    return file.parent


def _folders(ref: RepoRef, files: dict[str, str | None]) -> dict[str, list[str]]:
    """Return the names of the files in a folder of a repository and right below it."""
    found: dict[str, list[str]] = {}
    start = f"{ref.subfolder}/" if ref.subfolder else ""
    for path in files:
        below, _, name = path.removeprefix(start).rpartition("/")
        if path.startswith(start) and "/" not in below and not below.startswith("."):
            found.setdefault(below, []).append(name)
    return found
