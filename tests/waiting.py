"""Waits for what another thread or process does."""

from __future__ import annotations

import time


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
