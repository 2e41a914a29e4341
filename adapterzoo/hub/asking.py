"""One question to the Hub: asked again where that may help, its error retold to the user."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from huggingface_hub import constants, get_token
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

# of the configs that transformers reads: for floors above, which do without huggingface_hub
from huggingface_hub.errors import StrictDataclassError as StrictDataclassError

from adapterzoo.errors import HubError

from .settings import offline

T = TypeVar("T")

# the library under huggingface_hub: httpx for its 1.x, httpx2 for its 2.x
_http: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])

# a question without an answer ends in one of these; RuntimeError: what failed in a thread;
# AttributeError and TypeError: what is JSON, but none of the Hub's
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

_PASSING = (408, 429, 500, 502, 503, 504)
# these say that nothing was done; after another status nobody knows
_REFUSED = (429, 503)
_PAUSES = (0.5, 1.0, 2.0)
# no question is asked again after these seconds: huggingface_hub asks several times on its own
_PATIENCE = 20.0

_SECRET = re.compile(r"hf_\w{6,}|(?<=Bearer )\S+")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks the Hub, and for what.

    Attributes:
        call: what the user wrote, for messages.
        repo_id: the repository in question; None for a search.
        revision: branch, tag or commit.
        token: as `huggingface_hub` takes it.
        writes: whether the question changes the repository.
        cached: whether the cache may have the answer.
        no_folder: whether a folder of that name was looked for first, and is not there.
    """

    call: str
    repo_id: str | None = None
    revision: str | None = None
    token: bool | str | None = field(default=None, repr=False)
    writes: bool = False
    cached: bool = False
    no_folder: bool = False

    def ask(self, question: Callable[[], T], once: bool = False) -> T:
        """The answer of the Hub.

        Args:
            question: a call of `huggingface_hub`; may run several times.
            once: whether it must not be done twice: it runs again only where it is certain that
                nothing was done.

        Raises:
            HubError: there is none; the message says what is wrong and what to do.
        """
        start = time.monotonic()
        pauses = iter(_PAUSES)
        while True:
            try:
                return question()
            except _FAILURES as error:
                failure = error
            pause = next(pauses, None)
            wait = None if pause is None else _wait(_root(failure), pause, once)
            if wait is None or time.monotonic() - start + wait > _PATIENCE:
                # not within `except`: the new error would keep the old one, and its token
                raise self.error(failure) from (None if self._leaks(failure) else failure)
            time.sleep(wait)

    def error(self, error: Exception) -> HubError:
        """The error of `huggingface_hub` in the words of the user's call, without any token."""
        return HubError(f"{self.call}: {self._clean(self._retold(_root(error)))}")

    def here(self, message: str) -> str:
        """A message on what the Hub does not have, for those who meant a folder too."""
        return f"there is no such folder here, and {message}" if self.no_folder else message

    def not_kept(self, cache: str) -> str:
        """The message on what is not in a cache where the Hub may not be asked."""
        revision = self.revision or constants.DEFAULT_REVISION
        at = "" if self.repo_id is None else f" at revision {revision!r}"
        return (
            f"{self._what}{at} is not, or not wholly, in the cache {cache!r}, and the Hub "
            f"may not be asked (HF_HUB_OFFLINE=1 or local_files_only=True). Load it once without "
            f"that."
        )

    @property
    def _what(self) -> str:
        return "the Hub" if self.repo_id is None else repr(self.repo_id)

    @property
    def _or_cache(self) -> str:
        """The end of a hint where the cache may help."""
        return ", or set HF_HUB_OFFLINE=1 to use what was loaded before" if self.cached else ""

    def _retold(self, error: Exception) -> str:
        what = self._what
        if isinstance(error, RevisionNotFoundError):
            return (
                f"{what} has no revision {self.revision!r}. Write revision='main', or a branch, "
                f"tag or commit that is there."
            )
        if isinstance(error, GatedRepoError):
            return (
                f"{what} is gated, and you are not on its list. Ask for access at "
                f"{constants.ENDPOINT}/{self.repo_id}, then write token='…' or run "
                f"'hf auth login'."
            )
        if isinstance(error, HfHubHTTPError):
            return self._status(what, error)
        if isinstance(error, LocalTokenNotFoundError):
            return "no token is stored here. Run 'hf auth login', or write token='…'."
        if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
            if self.cached:
                return self.here(self.not_kept(constants.HF_HUB_CACHE))
            return offline(f"nothing can be {'sent to' if self.writes else 'asked of'} {what}")
        if isinstance(error, _http.TimeoutException):
            return (
                f"{constants.ENDPOINT} did not answer in time for {what}. Try again, or set "
                f"HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT to more seconds."
            )
        if isinstance(error, _http.HTTPError):
            return (
                f"the connection to {constants.ENDPOINT} failed for {what} "
                f"({_first_line(error)}). Check the network, HF_ENDPOINT and proxies"
                f"{self._or_cache}."
            )
        if isinstance(error, OSError) and error.errno is not None:
            return (
                f"a file of {what} cannot be kept: {error.strerror} ({error.filename!r}). Make "
                f"room, or write cache_dir='…' or set HF_HOME to a folder that can be written."
            )
        if isinstance(error, OSError) and not isinstance(error, FileMetadataError):
            return f"a file of {what} did not get through whole ({_first_line(error)}). Try again."
        return (
            f"the answer of {constants.ENDPOINT} for {what} cannot be used "
            f"({type(error).__name__}: {_first_line(error)}). Check HF_ENDPOINT, or update with "
            f"pip install -U huggingface_hub."
        )

    def _status(self, what: str, error: HfHubHTTPError) -> str:
        status = int(error.response.status_code)
        said = f" and says {_first_line(error.server_message)!r}" if error.server_message else ""
        answer = f"the Hub answers {status} for {what}{said}: "
        if status == 401:
            return self.here(
                f"{answer}the token is missing or not valid, or the name is wrong: what is private "
                f"is hidden. Check the name; write token='…', or run 'hf auth login'; for what is "
                f"public write token=False."
            )
        if isinstance(error, RepositoryNotFoundError):
            return self.here(
                f"{answer}there is no such repository, or it is private and the token may not see "
                f"it. Check the name; write token='…', or run 'hf auth login'."
            )
        if status == 403:
            right = "write to" if self.writes else "read"
            return (
                f"{answer}the token may not {right} it. Write token='…' with the right to {right} "
                f"it, from {constants.ENDPOINT}/settings/tokens."
            )
        if status == 404:
            return f"{answer}it has no such file. Check name, subfolder and revision."
        if status == 429:
            seconds = _retry_after(error)
            when = "later" if seconds is None else f"in {seconds:g} seconds"
            return (
                f"{answer}too many requests came from here. Try again {when}; with a token more "
                f"are allowed: run 'hf auth login'."
            )
        if status >= 500:
            return f"{answer}it is in trouble. Try again later{self._or_cache}."
        return f"{answer}the request was refused. Check the arguments."

    def _secrets(self) -> list[str]:
        known = [self.token if isinstance(self.token, str) else None, get_token()]
        return [secret for token in known if token for secret in {token, token.strip()} if secret]

    def _clean(self, text: str) -> str:
        for secret in self._secrets():
            text = text.replace(secret, "<token>").replace(repr(secret)[1:-1], "<token>")
        return _SECRET.sub("<token>", text)

    def _leaks(self, error: BaseException) -> bool:
        """Whether the error, or one before it, shows a token."""
        chain: BaseException | None = error
        while chain is not None:
            if self._clean(f"{chain}{chain!r}") != f"{chain}{chain!r}":
                return True
            chain = chain.__cause__ or chain.__context__
        return False


def _root(error: Exception) -> Exception:
    """The first cause that comes from the connection or the Hub; else the last of its causes."""
    chain = error
    while not isinstance(chain, (_http.HTTPError, OfflineModeIsEnabled)):
        if not isinstance(chain.__cause__, Exception):
            break
        chain = chain.__cause__
    return chain


def _wait(error: Exception, pause: float, once: bool) -> float | None:
    """The seconds after which to ask again; None where that cannot help."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code not in (_REFUSED if once else _PASSING):
            return None
        return max(pause, _retry_after(error) or 0.0)
    if isinstance(error, _http.TimeoutException):
        return None
    if once:
        # without a connection nothing was sent; one that broke may have carried everything
        return pause if isinstance(error, _http.ConnectError) else None
    broken = isinstance(error, (_http.NetworkError, _http.RemoteProtocolError))
    short = type(error) is OSError and error.errno is None
    return pause if broken or short else None


def _retry_after(error: HfHubHTTPError) -> float | None:
    text = error.response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else None


def _first_line(error: object) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "".join(c for c in lines[0] if c.isprintable())[:200] if lines else "no message"
