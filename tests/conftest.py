"""Tiny models, made once and copied for each test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import tiny_config

from adapterzoo import AutoAdapterModel


@pytest.fixture(scope="session")
def _made() -> dict[tuple[str, int], Any]:
    return {}


@pytest.fixture
def tiny(_made: dict[tuple[str, int], Any]) -> Callable[..., Any]:
    """Makes a model with adapters of a family, always of the same weights for a seed, in eval."""

    def make(family: str = "bert", seed: int = 0) -> Any:
        if (family, seed) not in _made:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(seed)
                model = AutoAdapterModel.from_config(tiny_config(family)).eval()
            _made[family, seed] = model
        return copy.deepcopy(_made[family, seed])

    return make


@pytest.fixture(autouse=True)
def seeded():
    """Whatever a test draws, it draws it in each run and in each order of tests."""
    torch.manual_seed(0)
