"""Requests to the Hub: a failure is a `HubError` that says what was requested, without tokens.

Retries, timeouts, the cache, offline use and the reasons in messages are those of
`huggingface_hub`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

from adapterzoo.errors import AdapterZooError, HubError

# errors of the HTTP library under huggingface_hub: httpx for its 1.x, httpx2 for its 2.x
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_SECRET = re.compile(r"hf_\w{6,}|(?<=Bearer )\S+")


@contextlib.contextmanager
def asking(target: str, token: bool | str | None = None) -> Iterator[None]:
    """Turn a failure of the Hub, the network or the cache into a `HubError` without tokens.

    Args:
        target: the requested object, e.g. `"'user/repository'"`.
        token: token of the request.

    Raises:
        HubError: the request failed.
    """
    try:
        yield
        return
    except AdapterZooError:
        raise
    # RuntimeError: from a thread of huggingface_hub; ValueError: not JSON, or an invalid name
    except (_HTTPError, OSError, RuntimeError, ValueError) as error:
        failure: Exception = error
    if isinstance(failure, LocalEntryNotFoundError) and isinstance(failure.__cause__, Exception):
        # says why the Hub was not asked, or what it answered
        failure = failure.__cause__
    reason = " ".join(str(failure).split()) or type(failure).__name__
    for secret in (token, get_token()):
        if isinstance(secret, str) and secret.strip():
            reason = reason.replace(secret.strip(), "<token>")
    # do not chain the failure, which may show a token
    told = _SECRET.sub("<token>", reason).rstrip(".")
    raise HubError(f"{target}: {told}.") from None


def hide_progress() -> None:
    """Show no progress bars of downloads and uploads."""
    disable_progress_bars()


def settings() -> dict[str, Any]:
    """Return the settings of the Hub, and the state of its cache."""
    has_token = False
    # a token may belong to another user
    with contextlib.suppress(PermissionError):
        has_token = get_token() is not None
    cache = Path(constants.HF_HUB_CACHE)
    # unlike Path.exists, os.access does not raise if a parent is inaccessible
    there = next(p for p in (cache, *cache.absolute().parents) if os.access(p, os.F_OK))
    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": has_token,
        "cache": str(cache),
        "cache exists": there == cache and cache.is_dir(),
        "cache writable": os.access(there, os.W_OK | os.X_OK),
        "free space": f"{shutil.disk_usage(there).free / 2**30:.1f} GiB",
    }
