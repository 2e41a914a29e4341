"""Fixtures for all tests beside other libraries."""

from __future__ import annotations

import pytest
from datasets import disable_progress_bars, enable_progress_bars


@pytest.fixture(autouse=True)
def quiet_progress():
    disable_progress_bars()
    yield
    enable_progress_bars()
