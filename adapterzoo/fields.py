"""The former place of names that are in `adapterzoo.config` now."""

from __future__ import annotations

from .config import *  # noqa: F403
