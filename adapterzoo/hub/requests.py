"""Requests to the Hub: every failure is a `HubError` that names what was asked for.

Retries, timeouts, the cache and its use without a network are those of `huggingface_hub`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

# transformers raises it for a config; only this package imports huggingface_hub
from huggingface_hub.errors import StrictDataclassError as StrictDataclassError

from adapterzoo.errors import AdapterZooError, HubError, argument

# of the HTTP library under huggingface_hub: httpx for its 1.x, httpx2 for its 2.x
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_SECRET = re.compile(r"hf_\w{6,}|(?<=Bearer )\S+")


@contextlib.contextmanager
def asking(target: str, token: bool | str | None = None) -> Iterator[None]:
    """Turn a failure of the Hub, the network or the cache into a `HubError` without tokens.

    Args:
        target: what is asked, e.g. `"'user/repository'"`.
        token: that of the request.

    Raises:
        HubError: the request failed.
    """
    try:
        yield
        return
    except AdapterZooError:
        raise
    # RuntimeError: from a thread of huggingface_hub; ValueError: no JSON, or a name is not legal
    except (_HTTPError, OSError, RuntimeError, ValueError) as error:
        failure: Exception = error
    if isinstance(failure, LocalEntryNotFoundError) and isinstance(failure.__cause__, Exception):
        # why the Hub was not asked, or what it answered
        failure = failure.__cause__
    reason = " ".join(str(failure).split()) or type(failure).__name__
    tokens = [token if isinstance(token, str) else None, get_token()]
    for secret in {form for text in tokens if text for form in (text, text.strip())}:
        reason = reason.replace(secret, "<token>").replace(repr(secret)[1:-1], "<token>")
    reason = "".join(c for c in _SECRET.sub("<token>", reason) if c.isprintable())
    hint = "Check the network, HF_ENDPOINT and the disk, and try again"
    if isinstance(failure, HFValidationError):
        hint = "Write 'user/repository'"
    elif isinstance(failure, OfflineModeIsEnabled | LocalEntryNotFoundError):
        hint = "Unset HF_HUB_OFFLINE, and try again with a network"
    elif isinstance(failure, HfHubHTTPError) and failure.response.status_code in (401, 403, 404):
        hint = (
            f"Check the name of the folder or repository, and the revision; for what is not public "
            f"write {argument('token', '…')} or run 'hf auth login'"
        )
    # not from the failure, which may show a token
    raise HubError(f"{target}: {reason.rstrip('.')}. {hint}.") from None


def settings() -> dict[str, Any]:
    """Return the endpoint, whether it may be asked, whether a token is stored, and the cache."""
    try:
        has_token = get_token() is not None
    except PermissionError:
        # a token that this user may not read
        has_token = False
    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": has_token,
        "cache": str(constants.HF_HUB_CACHE),
    }
