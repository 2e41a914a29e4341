"""Download a composition with its adapters, fusions and heads: a folder with sub-folders."""

from __future__ import annotations

import os
from pathlib import Path

from adapterzoo.errors import HubError, listing, names_call
from adapterzoo.formats.setup_files import SETUP

from .client import Client
from .download import Cache, Digests, are_intact, repository
from .files import wanted
from .repo_ref import RepoRef, locate


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
    last = cache.find(SETUP)
    files = [] if last is None else [*last.parent.glob("*.*"), *last.parent.glob("*/*.*")]
    cached = last.parent if last is not None and are_intact(files) else None

    def list_files() -> tuple[str, Digests]:
        info, files = repository(client, ref.repo_id)
        if info.sha is None or ref.path(SETUP) not in files:
            raise HubError(
                f"{ref.repo_id!r} has no adapter setup: {SETUP} is not among its files "
                f"{listing(sorted(files))}. Write load_adapter({ref.repo_id!r}) for an adapter."
            )
        return info.sha, files

    def download(commit: str, files: Digests) -> Path:
        for below, names in _folders(ref, files).items():
            inner = RepoRef(ref.repo_id, ref.path(below) if below else ref.subfolder)
            for name in wanted(names):
                digest = files[inner.path(name)]
                Cache(client, inner, cache_dir).fetch(name, commit, digest, force_download)
        file = cache.fetch(SETUP, commit, files[ref.path(SETUP)], force_download)
        cache.remember(SETUP, commit)
        return file.parent

    return cache.newest(cached, list_files, download, local_files_only, force_download)


def _folders(ref: RepoRef, files: Digests) -> dict[str, list[str]]:
    """Return the names of the files in a folder of a repository and right below it."""
    found: dict[str, list[str]] = {}
    start = f"{ref.subfolder}/" if ref.subfolder else ""
    for path in files:
        below, _, name = path.removeprefix(start).rpartition("/")
        if path.startswith(start) and "/" not in below and not below.startswith("."):
            found.setdefault(below, []).append(name)
    return found
