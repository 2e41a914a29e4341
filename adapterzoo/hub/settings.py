"""How this machine reaches the Hub: where it is, the cache, whether there is a token."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.utils.tqdm import disable_progress_bars


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


def nearest(path: Path) -> Path:
    """The path, or of the folders above it the first that is there and that may be looked at.

    Args:
        path: of what may be missing.
    """
    # unlike Path.exists, it raises nothing where a folder above may not be entered
    return next(p for p in (path, *path.absolute().parents) if os.access(p, os.F_OK))


def _has_token() -> bool:
    try:
        return get_token() is not None
    except PermissionError:
        # what this user may not read is no token of theirs
        return False


def hide_progress() -> None:
    """Let downloads and uploads of this process show no bars."""
    disable_progress_bars()
