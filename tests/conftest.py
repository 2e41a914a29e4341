"""Tiny models, copied for each test; the order of tests; what each leaves as it found it."""

from __future__ import annotations

import copy
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_config
from packaging.requirements import Requirement

from adapterzoo import AutoAdapterModel
from adapterzoo.config import architectures, config_strings
from adapterzoo.formats.checkpoint import formats
from adapterzoo.heads import head_types
from adapterzoo.methods.fusion import fusion_configs
from adapterzoo.model import activation
from adapterzoo.testing import checks

REGISTRIES = (architectures, checks, config_strings, formats, fusion_configs, head_types)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order", default="forwards", help="of the tests: forwards, reversed, or a number to draw"
    )
    parser.addoption(
        "--part", action="store_true", help="of the sweep: a fixed twentieth of each test's cases"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Divide the tests, and change their order: verdicts stay the same."""
    for item in _more(items):
        item.add_marker(pytest.mark.sweep)
    if config.getoption("part"):
        taken = dict.fromkeys(_part(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in taken])
        items[:] = list(taken)
    order = config.getoption("order")
    if order == "reversed":
        items.reverse()
    elif order != "forwards":
        draw = random.Random(int(order))
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        shuffled = list(files.values())
        draw.shuffle(shuffled)
        for tests in shuffled:
            draw.shuffle(tests)
        items[:] = [item for tests in shuffled for item in tests]


def _more(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases that only the sweep runs: of a `long` test three of four, of others those beyond 12.

    Of these, too, the quick part keeps a fourth.
    """
    for of_one in _by_test(item for item in items if not item.get_closest_marker("sweep")):
        always = 0 if of_one[0].get_closest_marker("long") else 12
        yield from _drawn(of_one)[always + max(len(of_one) - always, 0) // 4 :]


def _part(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """All quick tests, and of each test of the sweep a twentieth of its cases."""
    marks = {item: item.get_closest_marker("sweep") for item in items}
    yield from (item for item, mark in marks.items() if mark is None)
    for of_one in _by_test(i for i, m in marks.items() if m and not m.kwargs.get("whole")):
        yield from _drawn(of_one)[: -(-len(of_one) // 20)]


def _by_test(items: Iterable[pytest.Item]) -> Iterable[list[pytest.Item]]:
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return cases.values()


def _drawn(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases in an order that looks random and is the same everywhere."""
    return sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode()))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that shows something that the oldest supported versions do not have."""
    for mark in item.iter_markers("needs"):
        asked, reason = Requirement(mark.args[0]), mark.args[1]
        if version(asked.name) not in asked.specifier:
            pytest.skip(f"needs {asked}: {reason}")


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
def seeded() -> None:
    """Seed every generator, so that a test draws the same numbers in any order of tests."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """Take back what a test registers, and fail one that changes another global setting."""
    registered = [(registry, dict(registry._entries)) for registry in REGISTRIES]
    models = {id(model) for model in activation._models}
    before = _settings()
    yield
    if "accelerate.state" in sys.modules:
        _forget_accelerator()
    # a setup holds for every model that lives; when one dies, the garbage collector decides
    for model in list(activation._models):
        if id(model) not in models:
            activation.unregister(model)
    for registry, entries in registered:
        registry._entries.clear()
        registry._entries.update(entries)
    after = _settings()
    assert after == before, "a test must restore the global settings that it changes"


def _forget_accelerator() -> None:
    """A trainer leaves what it has found out about the process to the next one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    PartialState._reset_state()


def _settings() -> dict[str, Any]:
    """What one test could leave behind for the next one."""
    ours = {key for key in os.environ if key.startswith(("HF_", "TRITON_", "ADAPTERZOO_"))}
    return {
        "folder": Path.cwd(),
        "environment": {key: os.environ[key] for key in sorted(ours)},
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }
