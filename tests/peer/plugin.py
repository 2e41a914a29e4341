"""A pytest plugin: runs the peer's tests on adapterzoo and writes one line of JSON for each.

A line has the test's `id`, its `outcome` (passed, failed, skipped), the `seconds` it took, the
reason of a skip, and each of its `failures`: those of its sub-tests, and its own. Its settings
come by environment: PEER_MODE, and PEER_RESULTS, the file that is appended to.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from . import offline, shim

MARKERS = (
    "bottleneck", "compacter", "composition", "config_union", "core", "dora", "embeddings", "heads",
    "ia3", "lora", "mtl_lora", "prefix_tuning", "prompt_tuning", "reft", "slow", "unipelt", "vera",
)  # fmt: skip

_tests: dict[str, dict[str, Any]] = {}


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", f"{marker}: of the peer")
    mode: Any = os.environ.get("PEER_MODE", "strict")
    shim.install(mode)
    offline.install(Path.cwd() / "tests" / "fixtures")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # each generated class is also reachable as `test_class`, the loop's variable
    items[:] = [item for item in items if "::test_class::" not in item.nodeid]


def pytest_runtest_logreport(report: Any) -> None:
    test = _tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0, "failures": []})
    test["seconds"] = round(test["seconds"] + report.duration, 2)
    if report.outcome == "failed":
        test["outcome"] = "failed"
        test["failures"].append(_failure(report))
        return
    # one sub-test that is skipped does not skip its test
    of_test = getattr(report, "context", None) is None
    if report.outcome == "skipped" and test["outcome"] == "passed" and of_test:
        test["outcome"] = "skipped"
        why = report.longrepr
        # of an expected failure it is the failure
        test["why"] = str(why[-1] if isinstance(why, tuple) else why or "")[:1200]


def pytest_runtest_logfinish(nodeid: str) -> None:
    line = {"id": nodeid, **_tests.pop(nodeid)}
    with Path(os.environ["PEER_RESULTS"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _failure(report: Any) -> dict[str, str]:
    """What the rules read: the error, the line of the peer's test that led to it, the sub-test."""
    repr_ = report.longrepr
    crash = getattr(repr_, "reprcrash", None)
    entries = getattr(getattr(repr_, "reprtraceback", None), "reprentries", [])
    frames = [
        (_short(f"{each.reprfileloc.path}:{each.reprfileloc.lineno}"), each.lines)
        for each in entries
        if getattr(each, "reprfileloc", None)
    ]
    lines = [lines for place, lines in frames if place.startswith("tests/") and lines]
    context = getattr(report, "context", None)
    return {
        "subtest": f"{context.msg or ''} {dict(context.kwargs)}"[:300] if context else "",
        "when": report.when,
        "error": (crash.message if crash else str(repr_))[:1200],
        "line": lines[-1][0].strip() if lines else "",
        "frames": " < ".join(place for place, _ in reversed(frames))[:600],
    }


def _short(path: str) -> str:
    return re.sub(r"^.*/(?=(tests|adapterzoo|site-packages)/)", "", path)
