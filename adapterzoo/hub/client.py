"""Requests to the Hub, with retries and with errors that say what to do."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants, get_session, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

# transformers raises it for a config; only this package imports huggingface_hub
from huggingface_hub.errors import StrictDataclassError as StrictDataclassError
from huggingface_hub.utils.tqdm import disable_progress_bars

from adapterzoo.errors import HubError, argument

from .files import nearest

T = TypeVar("T")

# the library under huggingface_hub: httpx for its 1.x, httpx2 for its 2.x
_http: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])

# errors of a failed request; RuntimeError: raised in one of its threads; AttributeError, KeyError
# and TypeError: the response is JSON, but not the Hub's
_FAILURES: tuple[type[Exception], ...] = (
    _http.HTTPError,
    _http.StreamError,
    EntryNotFoundError,
    OSError,
    ValueError,
    AttributeError,
    KeyError,
    RuntimeError,
    TypeError,
)

_TEMPORARY = (408, 429, 500, 502, 503, 504)
# after these the Hub has certainly changed nothing
_REFUSED = (429, 503)
_PAUSES = (0.5, 1.0, 2.0)
# seconds after which no request is retried: huggingface_hub retries some itself
_PATIENCE = 20.0

# of an error: the Hub shows no such repository
_MISSING = "shows_no_repository"
_SECRET = re.compile(r"hf_\w{6,}|(?<=Bearer )\S+")


_UNUSABLE = (
    "the answer of {hub} for {repo} cannot be used ({kind}: {reason}). Check HF_ENDPOINT, or "
    "update with pip install -U huggingface_hub."
)
# messages by the status of a response (500 stands for all above), by the class of an error, and by
# name
_MESSAGES: dict[object, str] = {
    401: "{here}{answers}the token is missing or invalid, or the name is wrong: private "
    "repositories are hidden. Check the name; write {token} or run 'hf auth login'; for a public "
    "repository write {no_token}.",
    403: "{answers}the token may not {do} it. Write {token} with a token that may {do} it, from "
    "{hub}/settings/tokens.",
    404: "{answers}it has no such file. Check name, subfolder and revision.",
    429: "{answers}too many requests came from here. Try again {when}, or run 'hf auth login': "
    "users with a token may send more.",
    500: "{answers}it has a problem. Try again later{or_cache}.",
    HfHubHTTPError: "{answers}the request was refused. Check the arguments.",
    RepositoryNotFoundError: "{here}{answers}there is no such repository, or it is private and the "
    "token may not read it. Check the name; write {token} or run 'hf auth login'.",
    RevisionNotFoundError: "{repo} has no revision {revision!r}. Write {main} or another branch, "
    "tag or commit of it.",
    GatedRepoError: "{repo} is gated, and you have no access yet. Ask for it at {hub}/{repo_id}, "
    "then write {token} or run 'hf auth login'.",
    LocalTokenNotFoundError: "no token is stored. Run 'hf auth login' or write {token}.",
    _http.TimeoutException: "{hub} did not answer in time for {repo}. Try again, or set "
    "HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT to more seconds.",
    _http.HTTPError: "the connection to {hub} failed for {repo} ({reason}). Check the network, "
    "HF_ENDPOINT and proxies{or_cache}.",
    FileMetadataError: _UNUSABLE,
    OSError: "a file of {repo} arrived incomplete ({reason}). Try again.",
    Exception: _UNUSABLE,
    "disk": "a file of {repo} cannot be stored: {strerror} ({filename!r}). Make room, write "
    "{cache} or set HF_HOME to a folder that can be written.",
    "offline": "the Hub may not be asked (HF_HUB_OFFLINE=1 or TRANSFORMERS_OFFLINE=1), so {lost}. "
    "Unset that variable and start again with a network.",
    "not cached": "{here}{repo}{at} is not, or not completely, in the cache {cached!r}, and the "
    "Hub may not be asked (HF_HUB_OFFLINE=1 or local_files_only=True). Load it once without that.",
}


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests about one repository, or a search.

    Attributes:
        repo_id: the repository; None for a search.
        revision: branch, tag or commit.
        token: as `huggingface_hub` takes it.
        writes: whether the requests change the repository.
        cached: whether the cache may have the files.
        no_folder: whether there is no local folder of that name, where one was expected.
    """

    repo_id: str | None = None
    revision: str | None = None
    token: bool | str | None = field(default=None, repr=False)
    writes: bool = False
    cached: bool = False
    no_folder: bool = False

    def ask(self, question: Callable[[], T], once: bool = False) -> T:
        """Return the Hub's response.

        Args:
            question: calls `huggingface_hub`; may run several times.
            once: retry only if the Hub has certainly changed nothing.

        Raises:
            HubError: the request failed; the message says why and what to do.
        """
        start = time.monotonic()
        for pause in (*_PAUSES, None):
            try:
                return question()
            except _FAILURES as error:
                failure = _root(error)
            wait = None if pause is None else _wait(failure, pause, once)
            if wait is None or time.monotonic() - start + wait > _PATIENCE:
                break
            time.sleep(wait)
        # outside `except`: the new error must not keep the old one, which may show a token
        raise self._error(failure)

    def not_cached(self, cache: str) -> HubError:
        """Make the error for a file that is not in the cache, in offline mode."""
        return self._hub_error("not cached", cached=cache)

    def _error(self, error: Exception) -> HubError:
        if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
            if self.cached:
                return self.not_cached(constants.HF_HUB_CACHE)
            target = "the Hub" if self.repo_id is None else repr(self.repo_id)
            return self._hub_error(
                "offline",
                lost=f"nothing can be {'sent to' if self.writes else 'asked of'} {target}",
            )
        key: object = next(cls for cls in type(error).__mro__ if cls in _MESSAGES)
        values: dict[str, object] = {"kind": type(error).__name__, "reason": _first_line(error)}
        if isinstance(error, HfHubHTTPError):
            status = int(error.response.status_code)
            if key is HfHubHTTPError or (key is RepositoryNotFoundError and status == 401):
                key = min(status, 500) if min(status, 500) in _MESSAGES else key
            seconds = _retry_after(error)
            values["when"] = "later" if seconds is None else f"in {seconds:g} seconds"
            values["status"] = status
            told = error.server_message
            values["said"] = f" ({_first_line(told)!r})" if told else ""
            if isinstance(error, RepositoryNotFoundError):
                failed = self._hub_error(key, **values)
                setattr(failed, _MISSING, True)
                return failed
        elif key is OSError and isinstance(error, OSError) and error.errno is not None:
            key = "disk"
            values |= {"strerror": error.strerror, "filename": error.filename}
        return self._hub_error(key, **values)

    def _hub_error(self, key: object, **values: object) -> HubError:
        """Make an error from a message; remove every token from it."""
        revision = self.revision or constants.DEFAULT_REVISION
        repo = "the Hub" if self.repo_id is None else repr(self.repo_id)
        known = {
            "repo": repo,
            "answers": f"the Hub answers {values.get('status')} for {repo}{values.get('said')}: ",
            "repo_id": self.repo_id,
            "revision": self.revision,
            "at": "" if self.repo_id is None else f" at revision {revision!r}",
            # the user may have meant a folder
            "here": "there is no such folder here, and " if self.no_folder else "",
            "hub": constants.ENDPOINT,
            "do": "write to" if self.writes else "read",
            "or_cache": ", or set HF_HUB_OFFLINE=1 to use the cache" if self.cached else "",
            "main": argument("revision", "main"),
            "token": argument("token", "…"),
            "no_token": argument("token", False),
            "cache": argument("cache_dir", "…"),
        }
        return HubError(self._clean(_MESSAGES[key].format(**{**known, **values})))

    def _clean(self, text: str) -> str:
        tokens = [self.token if isinstance(self.token, str) else None, get_token()]
        for secret in {form for token in tokens if token for form in (token, token.strip())}:
            text = text.replace(secret, "<token>").replace(repr(secret)[1:-1], "<token>")
        return _SECRET.sub("<token>", text)


def _root(error: Exception) -> Exception:
    """Return the first cause from the connection or the Hub, else the last cause."""
    chain = error
    while not isinstance(chain, (_http.HTTPError, OfflineModeIsEnabled)):
        if not isinstance(chain.__cause__, Exception):
            break
        chain = chain.__cause__
    return chain


def _wait(error: Exception, pause: float, once: bool) -> float | None:
    """Return the seconds to wait before a retry; None if a retry cannot help."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in (_REFUSED if once else _TEMPORARY):
            return None
        return max(pause, _retry_after(error) or 0.0)
    if isinstance(error, _http.TimeoutException):
        return None
    if once:
        # without a connection nothing was sent; a broken one may have sent everything
        return pause if isinstance(error, _http.ConnectError) else None
    broken = isinstance(error, (_http.NetworkError, _http.RemoteProtocolError))
    incomplete = type(error) is OSError and error.errno is None
    return pause if broken or incomplete else None


def _retry_after(error: HfHubHTTPError) -> float | None:
    text = error.response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None


def _first_line(error: object) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "".join(c for c in lines[0] if c.isprintable())[:200] if lines else "no message"


def says_missing(error: HubError) -> bool:
    """Return whether the Hub has no such repository, as far as the user may know."""
    return getattr(error, _MISSING, False)


def fetch(url: str, limit: int) -> bytes | None:
    """Return what is at a public address; None where there is nothing. No token is sent.

    Args:
        url: of a server other than the Hub.
        limit: in bytes.

    Raises:
        HubError: there is no answer, or it is longer.
    """
    content = bytearray()
    try:
        with get_session().stream(
            "GET", url, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            if response.status_code == 404:
                return None
            response.raise_for_status()
            for part in response.iter_bytes():
                content += part
                if len(content) > limit:
                    raise HubError(f"{url} has more than {limit:,} bytes.")
    except _FAILURES as error:
        if isinstance(error, HubError):
            raise
        reason = _first_line(_root(error))
        raise HubError(f"{url} cannot be read ({reason}). Check the network.") from None
    return bytes(content)


def refuse_if_offline(lost: str) -> None:
    """Raise in offline mode.

    Args:
        lost: what cannot be done, for the message.

    Raises:
        HubError: `HF_HUB_OFFLINE=1`.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(_MESSAGES["offline"].format(lost=lost))


def settings() -> dict[str, Any]:
    """Return the Hub settings of this machine, as JSON types.

    Returns:
        "endpoint", "offline", "token" (whether there is one), "cache", "cache exists",
        "cache writable", and "free space" in GiB as a text.
    """
    cache = Path(constants.HF_HUB_CACHE)
    there = nearest(cache)
    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": _has_token(),
        "cache": str(cache),
        "cache exists": there == cache and cache.is_dir(),
        "cache writable": os.access(there, os.W_OK | os.X_OK),
        "free space": f"{shutil.disk_usage(there).free / 2**30:.1f} GiB",
    }


def _has_token() -> bool:
    try:
        return get_token() is not None
    except PermissionError:
        # a token that this user may not read
        return False


def hide_progress() -> None:
    """Hide the progress bars of downloads and uploads in this process."""
    disable_progress_bars()
