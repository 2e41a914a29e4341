"""From a name to a folder with an adapter's files: fetched, compared with their digests, kept.

The cache is that of `huggingface_hub`. A file enters it whole; one whose content is not what the
Hub's digest says is fetched once more, and else taken out again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

from huggingface_hub import (
    HfApi,
    ModelInfo,
    constants,
    hf_hub_download,
    try_to_load_from_cache,
)

from adapterzoo.errors import HubError, listing

from .asking import Caller
from .files import has_digest, is_complete, is_digest, known_files, wanted
from .places import Place, place_of

_LOG = logging.getLogger(__name__)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(
    adapter_name_or_path: str | os.PathLike[str],
    revision: str | None = None,
    source: str | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    call: str | None = None,
) -> Path:
    """The folder of an adapter: a local one as it is, one of the Hub from the cache or fetched.

    Of a repository only the files of an adapter are fetched. Each is compared with the digest
    that the Hub has of it. Where the Hub cannot be reached or refuses, what is in the cache is
    taken, with a warning in the log; with `HF_HUB_OFFLINE=1` it is not asked at all.

    Args:
        adapter_name_or_path: a folder, `user/repository` or `user/repository/folder`.
        revision: branch, tag or commit; None: the default branch.
        source: `"hf"`: the Hub, even where there is a folder of that name; None: a folder first.
        cache_dir: of `huggingface_hub`; None: its own choice.
        token: a token, True for the stored one, False for none; None: the stored one if any.
        local_files_only: whether only the cache is looked at.
        force_download: whether files that are in the cache are fetched again.
        call: what the user wrote, for messages.

    Returns:
        A folder; for one of the Hub its files are links into the cache, not to be written to.

    Raises:
        CheckpointError: there is no such folder, and the name is none of the Hub's.
        ConfigError: the source is unknown.
        HubError: the files cannot be had; the message says why and what to do.
    """
    call = call or f"load_adapter({os.fspath(adapter_name_or_path)!r})"
    place = place_of(call, adapter_name_or_path, source)
    if isinstance(place, Path):
        return place
    caller = Caller(call, place.repo_id, revision, token, cached=True, no_folder=source is None)
    kept = _Cache(caller, place, cache_dir)
    if local_files_only or constants.HF_HUB_OFFLINE:
        return kept.folder_or_raise()
    found = None if force_download else kept.folder()
    if found is not None and revision is not None and _COMMIT.fullmatch(revision):
        return found
    try:
        commit, digests = _listing(caller, place)
    except HubError as error:
        if found is None:
            raise
        _LOG.warning("%s What is in the cache is used.", error)
        return found
    names = wanted(digests)
    files = [kept.fetch(name, commit, digests[name], force_download) for name in names]
    kept.remember(names[-1], commit)
    return files[-1].parent


def fetch_file(caller: Caller, place: Place, name: str, commit: str, digest: str | None) -> Path:
    """One file of a commit, compared with its digest.

    Raises:
        HubError: it cannot be had.
    """
    return _Cache(caller, place, None).fetch(name, commit, digest, force=False)


def repository(caller: Caller, repo_id: str) -> tuple[ModelInfo, dict[str, str | None]]:
    """What the Hub says of a repository at the caller's revision, and the digest of each file.

    Raises:
        HubError: it says nothing of the kind.
    """
    info = caller.ask(
        lambda: HfApi().model_info(
            repo_id,
            revision=caller.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
            token=caller.token,
        )
    )
    digests = {
        file.rfilename: file.blob_id if file.lfs is None else file.lfs.sha256
        for file in info.siblings or ()
    }
    return info, digests


def _listing(caller: Caller, place: Place) -> tuple[str, dict[str, str | None]]:
    """The commit of a revision, and the digest of each file of the place that an adapter needs."""
    info, files = repository(caller, place.repo_id)
    digests = {name: files[path] for name in known_files() if (path := place.file(name)) in files}
    if info.sha is None or not wanted(digests):
        model = "config.json" in files and not place.subfolder
        hint = (
            f"It is a whole model: write AutoAdapterModel.from_pretrained({place.repo_id!r})."
            if model
            else "Write 'user/repository/folder' for the folder that has them."
        )
        where = f"{place.repo_id}/{place.subfolder}".rstrip("/")
        raise HubError(
            f"{caller.call}: {where!r} has no adapter: none of {listing(known_files(), limit=4)} "
            f"among its files {listing(sorted(files))}. {hint}"
        )
    return info.sha, digests


class _Cache:
    """The files of one place in the cache of `huggingface_hub`."""

    def __init__(
        self, caller: Caller, place: Place, cache_dir: str | os.PathLike[str] | None
    ) -> None:
        self._caller = caller
        self._place = place
        self._dir = None if cache_dir is None else Path(cache_dir)

    def folder(self) -> Path | None:
        """The folder in the cache, where it is whole and its files have their digests."""
        files = {name: f for name in known_files() if (f := self._find(name)) is not None}
        if not is_complete(files):
            return None
        if not all(_is_intact(file, _digest_in_cache(file)) for file in files.values()):
            return None
        return next(iter(files.values())).parent

    def folder_or_raise(self) -> Path:
        """The same.

        Raises:
            HubError: there is none.
        """
        found = self.folder()
        if found is None:
            where = str(self._dir or constants.HF_HUB_CACHE)
            said = self._caller.here(self._caller.not_kept(where))
            raise HubError(f"{self._caller.call}: {said}")
        return found

    def fetch(self, name: str, commit: str, digest: str | None, force: bool) -> Path:
        """A file of a commit, from the cache or the Hub, compared with its digest.

        Raises:
            HubError: it cannot be had; the cache does not hold it then.
        """
        for again in (force, True):
            file = self._download(name, commit, again)
            expected = digest if is_digest(digest) else _digest_in_cache(file)
            if _is_intact(file, expected):
                return file
        _drop(file)
        raise HubError(
            f"{self._caller.call}: {self._place.file(name)!r} of {self._place.repo_id!r} came "
            f"twice with a content that is not the one of its digest {expected}; it was taken out "
            f"of the cache. Check proxies and HF_ENDPOINT, and try again."
        )

    def remember(self, name: str, commit: str) -> None:
        """Let the cache know which commit the revision is, once all files of it are there."""
        revision = self._caller.revision or constants.DEFAULT_REVISION
        known = self._find(name)
        if _COMMIT.fullmatch(revision) or (known is not None and commit in known.parts):
            return
        # the adapter is there; only a later load without a network would miss this
        with contextlib.suppress(HubError):
            self._download(name, revision, False)

    def _find(self, name: str) -> Path | None:
        found = try_to_load_from_cache(
            self._place.repo_id,
            self._place.file(name),
            cache_dir=self._dir,
            revision=self._caller.revision,
        )
        return Path(found) if isinstance(found, str) else None

    def _download(self, name: str, revision: str, force: bool) -> Path:
        file = self._caller.ask(
            lambda: hf_hub_download(
                self._place.repo_id,
                self._place.file(name),
                revision=revision,
                cache_dir=self._dir,
                token=self._caller.token,
                force_download=force,
                etag_timeout=constants.HF_HUB_ETAG_TIMEOUT,
                library_name="adapterzoo",
            )
        )
        return Path(file)


def _is_intact(file: Path, digest: str | None) -> bool:
    return file.is_file() and (digest is None or has_digest(file, digest))


def _blob(file: Path) -> Path | None:
    """The file of the cache that holds the content; None where the system has no links."""
    return file.parent / file.readlink() if file.is_symlink() else None


def _digest_in_cache(file: Path) -> str | None:
    """The digest by which the cache calls a file's content."""
    blob = _blob(file)
    return blob.name if blob is not None and is_digest(blob.name) else None


def _drop(file: Path) -> None:
    blob = _blob(file)
    file.unlink(missing_ok=True)
    if blob is not None:
        blob.unlink(missing_ok=True)
