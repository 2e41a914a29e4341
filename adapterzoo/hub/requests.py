"""Requests to the Hub: a failure is a `HubError` that says what was asked, without tokens.

Retries, timeouts, the cache, its use without a network, and what a message says are those of
`huggingface_hub`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from huggingface_hub import get_token
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from adapterzoo.errors import AdapterZooError, HubError

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
    for secret in (token, get_token()):
        if isinstance(secret, str) and secret.strip():
            reason = reason.replace(secret.strip(), "<token>")
    # not from the failure, which may show a token
    raise HubError(f"{target}: {_SECRET.sub('<token>', reason)}") from None
