"""Copied beside the tests under test: names what runs for several, and writes down outcomes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CURRENT = "PYTEST_CURRENT_TEST"


def _for_all(place: str) -> Iterator[None]:
    """What runs is for all tests below a file or folder, not for the one that came first."""
    before = os.environ.pop(CURRENT, None)
    os.environ[CURRENT] = f"{place}* (shared)"
    try:
        return (yield)
    finally:
        del os.environ[CURRENT]
        os.environ |= {} if before is None else {CURRENT: before}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Iterator[None]:
    return (yield from _for_all(collector.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    return (yield from _for_all(request.node.nodeid or fixturedef.baseid))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    done = Path(os.environ["MUTATION_LOG"]).with_name("done.txt")
    names = set(done.read_text(encoding="utf-8").splitlines()) if done.exists() else set()
    items[:] = [item for item in items if item.nodeid not in names]


def pytest_runtest_logreport(report: Any) -> None:
    # the workers' reports come to the process that started them
    if "PYTEST_XDIST_WORKER" not in os.environ:
        entry = {"test": report.nodeid, "when": getattr(report, "when", "collect")}
        entry["seconds"] = getattr(report, "duration", 0.0)
        with open(os.environ["MUTATION_LOG"], "a") as log:  # noqa: PTH123  tests replace Path
            log.write(json.dumps({**entry, "outcome": report.outcome}) + "\n")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        pytest_runtest_logreport(report)
