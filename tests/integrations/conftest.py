"""What accelerate keeps for the process, made anew for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture(autouse=True)
def _one_accelerator() -> Iterator[None]:
    # a trainer of another folder's test may have left its own
    reset()
    yield
    reset()
