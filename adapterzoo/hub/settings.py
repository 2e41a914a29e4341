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
    there = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": get_token() is not None,
        "cache": str(cache),
        "cache exists": cache.is_dir(),
        "cache writable": os.access(there, os.W_OK),
        "free space": f"{shutil.disk_usage(there).free / 2**30:.1f} GiB",
    }


def hide_progress() -> None:
    """Let downloads and uploads of this process show no bars."""
    disable_progress_bars()
