"""Download the files of an adapter, and compare them with the Hub's digests.

The cache is that of `huggingface_hub`, which checks the size of a file but not its content. A file
that differs from its digest is downloaded once more, then removed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from huggingface_hub import HfApi, ModelInfo, constants, hf_hub_download, try_to_load_from_cache

from adapterzoo.errors import HubError, in_python, listing, names_call

from .client import Client, says_missing
from .files import has_digest, is_complete, is_digest, known_files, wanted
from .old_ids import has_index, is_old_id, repository_of
from .repo_ref import RepoRef, locate

_LOG = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# of each file of a repository; None where the Hub gives none
Digests: TypeAlias = dict[str, str | None]


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

    Only the files of an adapter are downloaded, and each is compared with the Hub's digest. If the
    Hub cannot be reached or refuses, the cached files are used and a warning is logged. With
    `HF_HUB_OFFLINE=1` only the cache is used.

    Args:
        adapter_name_or_path: a folder, `user/repository`, `user/repository/folder`, or an old id
            of AdapterHub such as `sentiment/sst-2@ukp`.
        revision: branch, tag or commit; None: the default branch.
        source: `"hf"`: the Hub, even if a folder of that name exists; `"ah"`: an old id; None: a
            folder first, then the Hub, then an old id.
        cache_dir: of `huggingface_hub`; None: its default.
        token: a token, True for the stored one, False for none; None: the stored one if any.
        local_files_only: whether to use the cache only.
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
    again = functools.partial(
        resolve, revision=revision, source="hf", cache_dir=cache_dir, token=token,
        local_files_only=local_files_only, force_download=force_download,
    )  # fmt: skip
    old_id = functools.partial(
        repository_of, os.fspath(adapter_name_or_path), model_name, config, local_files_only
    )
    if source == "ah" or (source is None and _only_old(adapter_name_or_path)):
        return again(old_id())
    ref = locate(adapter_name_or_path, source)
    if isinstance(ref, Path):
        return ref
    client = Client(ref.repo_id, revision, token, cached=True, no_folder=source is None)
    cache = Cache(client, ref, cache_dir)

    def download(commit: str, digests: Digests) -> Path:
        names = wanted(digests)
        files = [cache.fetch(name, commit, digests[name], force_download) for name in names]
        cache.remember(names[-1], commit)
        return files[-1].parent

    try:
        return cache.newest(
            cache.folder(),
            lambda: _listing(client, ref),
            download,
            local_files_only,
            force_download,
        )
    except HubError as error:
        # a name such as "sentiment/sst-2" can be either
        if source == "hf" or ref.subfolder or not says_missing(error) or not has_index(model_name):
            raise
        failure = error
    try:
        repo_id = old_id()
    except HubError as error:
        text = f"{failure} It is not an old id of AdapterHub either: {error}"
        failure.args = (text, *failure.args[1:])
        raise failure from None
    return again(repo_id)


def _only_old(name: object) -> bool:
    """Return whether a name can only be an old id, and no folder has it."""
    return is_old_id(name) and not Path(str(name)).is_dir()


def repository(client: Client, repo_id: str) -> tuple[ModelInfo, Digests]:
    """Return the Hub's facts about a repository at the client's revision, and each file's digest.

    Raises:
        HubError: the Hub does not give them.
    """
    info = client.ask(
        lambda: HfApi().model_info(
            repo_id,
            revision=client.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
            token=client.token,
        )
    )
    digests = {
        file.rfilename: file.blob_id if file.lfs is None else file.lfs.sha256
        for file in info.siblings or ()
    }
    return info, digests


def _listing(client: Client, ref: RepoRef) -> tuple[str, Digests]:
    """Return the commit of a revision, and the digests of the adapter's files there."""
    info, files = repository(client, ref.repo_id)
    digests = {name: files[path] for name in known_files() if (path := ref.path(name)) in files}
    if info.sha is None or not wanted(digests):
        hint = "Write 'user/repository/folder' for the folder that has one."
        if "config.json" in files and not ref.subfolder:
            load = f"AutoAdapterModel.from_pretrained({ref.repo_id!r})"
            hint = f"It is a base model: write {in_python(load, f'--model {ref.repo_id}')}."
        raise HubError(
            f"{f'{ref.repo_id}/{ref.subfolder}'.rstrip('/')!r} has no adapter: none of "
            f"{listing(known_files(), limit=4)} is among its files {listing(sorted(files))}. {hint}"
        )
    return info.sha, digests


class Cache:
    """The files of one reference in the cache of `huggingface_hub`."""

    def __init__(
        self, client: Client, ref: RepoRef, cache_dir: str | os.PathLike[str] | None = None
    ) -> None:
        """Keep the arguments.

        Args:
            client: downloads what is missing.
            ref: the folder on the Hub.
            cache_dir: of `huggingface_hub`; None: its default.
        """
        self._client = client
        self._ref = ref
        self._dir = None if cache_dir is None else Path(cache_dir)

    def newest(
        self,
        cached: Path | None,
        list_files: Callable[[], tuple[str, Digests]],
        download: Callable[[str, Digests], Path],
        local_files_only: bool,
        force_download: bool,
    ) -> Path:
        """Return the folder of the revision, from the Hub if it can be asked.

        Args:
            cached: the folder in the cache, if it is complete.
            list_files: return the commit of the revision, and the digests of the files.
            download: download the files of a commit, and return their folder.
            local_files_only: whether to use the cache only.
            force_download: whether to download cached files again.

        Raises:
            HubError: the Hub cannot be asked and the cache lacks the folder, or a download fails.
        """
        revision = self._client.revision
        if local_files_only or constants.HF_HUB_OFFLINE:
            if cached is None:
                raise self._client.not_cached(str(self._dir or constants.HF_HUB_CACHE))
            return cached
        if force_download:
            cached = None
        if cached is not None and revision is not None and _COMMIT.fullmatch(revision):
            return cached
        try:
            commit, digests = list_files()
        except HubError as error:
            if cached is None:
                raise
            _LOG.warning("%s Using the files in the cache.", error)
            return cached
        return download(commit, digests)

    def folder(self) -> Path | None:
        """Return the folder in the cache if it is complete and its files have their digests."""
        files = {name: f for name in known_files() if (f := self.find(name)) is not None}
        if not is_complete(files):
            return None
        return next(iter(files.values())).parent if are_intact(files.values()) else None

    def fetch(self, name: str, commit: str, digest: str | None, force: bool = False) -> Path:
        """Return a file of a commit, from the cache or the Hub, compared with its digest.

        Raises:
            HubError: it is not in the cache and cannot be downloaded.
        """
        for again in (force, True):
            file = self._download(name, commit, again)
            expected = digest if is_digest(digest) else _digest_in_cache(file)
            if _is_intact(file, expected):
                return file
        _drop(file)
        raise HubError(
            f"{self._ref.path(name)!r} of {self._ref.repo_id!r} arrived twice with another content "
            f"than its digest {expected}; it has been removed from the cache. Check proxies and "
            f"HF_ENDPOINT, and try again."
        )

    def remember(self, name: str, commit: str) -> None:
        """Record in the cache which commit the revision is, once all its files are there."""
        revision = self._client.revision or constants.DEFAULT_REVISION
        known = self.find(name)
        if _COMMIT.fullmatch(revision) or (known is not None and commit in known.parts):
            return
        # ignore failures: only a later load in offline mode needs this
        with contextlib.suppress(HubError):
            self._download(name, revision, False)

    def find(self, name: str) -> Path | None:
        """Return a file of the revision in the cache; None if it is not there."""
        found = try_to_load_from_cache(
            self._ref.repo_id,
            self._ref.path(name),
            cache_dir=self._dir,
            revision=self._client.revision,
        )
        return Path(found) if isinstance(found, str) else None

    def _download(self, name: str, revision: str, force: bool) -> Path:
        file = self._client.ask(
            lambda: hf_hub_download(
                self._ref.repo_id,
                self._ref.path(name),
                revision=revision,
                cache_dir=self._dir,
                token=self._client.token,
                force_download=force,
                etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
                library_name="adapterzoo",
            )
        )
        return Path(file)


def are_intact(files: Iterable[Path]) -> bool:
    """Return whether files in the cache have their digests."""
    return all(_is_intact(file, _digest_in_cache(file)) for file in files)


def _is_intact(file: Path, digest: str | None) -> bool:
    return file.is_file() and (digest is None or has_digest(file, digest))


def _blob(file: Path) -> Path | None:
    """Return the cache's file with the content; None if the system has no links."""
    return file.parent / file.readlink() if file.is_symlink() else None


def _digest_in_cache(file: Path) -> str | None:
    """Return the digest of a file, which is its name in the cache."""
    blob = _blob(file)
    return blob.name if blob is not None and is_digest(blob.name) else None


def _drop(file: Path) -> None:
    blob = _blob(file)
    file.unlink(missing_ok=True)
    if blob is not None:
        blob.unlink(missing_ok=True)
