"""Download an adapter, or a composition of adapters, through the cache of `huggingface_hub`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePosixPath
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from adapterzoo.errors import HubError, extend, listing, names_call
from adapterzoo.folders.names import KNOWN_FILES, SETUP, is_complete

from .names import RepoRef, is_public_name, locate
from .old_ids import is_old_id, repository_of
from .requests import asking


@names_call
def resolve(
    adapter_name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    source: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    model_name: str | None = None,
    config: object = None,
) -> Path:
    """Return the folder of an adapter; download it to the cache if it is on the Hub.

    Only an adapter's files are downloaded. If the Hub cannot be reached, the cached files are
    used. With `HF_HUB_OFFLINE=1` only the cache is used.

    Args:
        adapter_name_or_path: a folder, `user/repository`, `user/repository/folder`, or an old id
            of AdapterHub such as `sentiment/sst-2@ukp`.
        revision: branch, tag or commit; None: the default branch.
        source: `"hf"`: the Hub, even if a folder of that name exists; `"ah"`: an old id; None: a
            folder first, then the Hub, then an old id.
        cache_dir: cache folder of `huggingface_hub`; None: its default.
        token: a token, True for the stored one, False for none; None: the stored one if any.
        local_files_only: whether to use only the cache.
        force_download: whether to download cached files again.
        model_name: for old ids, the base model's name on the Hub.
        config: for old ids, the config of the adapter; None: the usual one.

    Returns:
        A folder. In the cache its files are links, which must not be written to.

    Raises:
        CheckpointError: there is no such folder, and the name cannot be on the Hub.
        ConfigError: the source is unknown.
        HubError: the files cannot be downloaded; the message says why and what to do.
    """
    options: dict[str, Any] = {
        "revision": revision, "cache_dir": cache_dir, "token": token,
        "local_files_only": local_files_only, "force_download": force_download,
    }  # fmt: skip
    name = os.fspath(adapter_name_or_path)
    is_old = is_old_id(adapter_name_or_path) and not Path(name).is_dir()
    if source == "ah" or (source is None and is_old):
        return _adapter(RepoRef(repository_of(name, model_name, config)), options)
    ref = locate(adapter_name_or_path, source)
    if isinstance(ref, Path):
        return ref
    try:
        return _adapter(ref, options)
    except HubError as error:
        # a name such as "sentiment/sst-2" can be either
        if source is None and not ref.subfolder and is_public_name(model_name):
            with contextlib.suppress(HubError):
                return _adapter(RepoRef(repository_of(name, model_name, config)), options)
        if source is None:
            extend(error, f" There is no folder {name!r} either.")
        raise


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

    A setup is a composition with its adapters, fusions and heads: a folder with sub-folders.
    The arguments are those of `resolve`, without old ids.

    Raises:
        HubError: the files cannot be downloaded.
    """
    files = [SETUP, *KNOWN_FILES, *(f"*/{name}" for name in KNOWN_FILES)]
    return _download(
        locate(adapter_setup_name_or_path, source), files, revision=revision, cache_dir=cache_dir,
        token=token, local_files_only=local_files_only, force_download=force_download,
    )  # fmt: skip


@names_call
def resolve_file(
    adapter_name_or_path: str | os.PathLike[str],
    file: str,
    revision: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
) -> Path:
    """Return the path of one file of an adapter; download it to the cache if it is on the Hub.

    `file` is the file's name; the other arguments are those of `resolve`, without old ids.

    Raises:
        HubError: the file cannot be downloaded.
    """
    folder = _download(
        locate(adapter_name_or_path), [file], revision=revision, cache_dir=cache_dir, token=token,
        local_files_only=local_files_only, force_download=force_download,
    )  # fmt: skip
    return folder / file


def only_commit(model_name: str) -> str | None:
    """Return the commit of a model in the cache of `huggingface_hub`, if there is only one.

    Args:
        model_name: its name on the Hub; a local folder has no known commit.
    """
    if not is_public_name(model_name):
        return None
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model_name, repo_type="model"))
    commits = [file.parent.name for file in folder.glob("snapshots/*/config.json")]
    return commits[0] if len(commits) == 1 else None


def _adapter(ref: RepoRef, options: dict[str, Any]) -> Path:
    """Return the folder of an adapter on the Hub; the options are those of `_download`.

    Raises:
        HubError: the folder cannot be downloaded, or has no adapter.
    """
    folder = _download(ref, KNOWN_FILES, **options)
    there = [name for name in KNOWN_FILES if (folder / name).is_file()]
    if not is_complete(there):
        raise HubError(
            f"'{ref.repo_id}/{ref.subfolder}' has no complete adapter: its files are "
            f"{listing(there)}. Write 'user/repository/folder' for the folder that has one."
        )
    return folder


def _download(ref: Path | RepoRef, names: list[str], **options: Any) -> Path:
    """Return a local folder, or that in the cache with those of the files that a repository has."""
    if isinstance(ref, Path):
        return ref
    with asking(repr(ref.repo_id), options["token"]):
        folder = snapshot_download(
            ref.repo_id,
            allow_patterns=[str(PurePosixPath(ref.subfolder, name)) for name in names],
            etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
            library_name="adapterzoo",
            **options,
        )
    return Path(folder, ref.subfolder)
