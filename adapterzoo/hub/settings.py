"""How this machine reaches the Hub: where it is, the cache, whether there is a token."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.utils.tqdm import disable_progress_bars

from adapterzoo.errors import HubError

from .files import nearest


def settings() -> dict[str, Any]:
    """Endpoint, cache and what is known of them, as JSON types; of a token only that there is one.

    Returns:
        "endpoint", "offline", "token", "cache", "cache exists", "cache writable" and "free space"
        in GiB as a text.
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


def refuse_if_offline(call: str, lost: str) -> None:
    """Raise where the Hub may not be asked.

    Args:
        call: what the user wrote, for messages.
        lost: what cannot be done then.

    Raises:
        HubError: `HF_HUB_OFFLINE=1`.
    """
    if constants.HF_HUB_OFFLINE:
        raise HubError(f"{call}: {offline(lost)}")


def offline(lost: str) -> str:
    """The message on what cannot be done where the Hub may not be asked, and no cache helps.

    Args:
        lost: what cannot be done.
    """
    return (
        f"the Hub may not be asked (HF_HUB_OFFLINE=1 or TRANSFORMERS_OFFLINE=1), so {lost}. Unset "
        f"that variable and start again with a network."
    )


def _has_token() -> bool:
    try:
        return get_token() is not None
    except PermissionError:
        # what this user may not read is no token of theirs
        return False


def hide_progress() -> None:
    """Let downloads and uploads of this process show no bars."""
    disable_progress_bars()
