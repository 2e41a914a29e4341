"""A pytest plugin: runs PEFT's tests on adapterzoo or on PEFT, and writes a line of JSON for each.

Beside what `peer.plugin` writes, a line has the `methods`: PEFT's config classes among the values
of its parameters. Settings come by environment: PEER_ON, "adapterzoo" or "peft"; PEER_EVERY, a
number n for one in n tests; PEER_HERE, whether to run tests of methods that exist here alone;
PEER_RESULTS, the file that is appended to.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from collections import Counter
from typing import Any

import pytest

from peer import plugin
from peer.of_peft.report import is_of_ours


class _Offline(Counter[str]):
    """The models that PEFT's tests have asked the Hub for: all of them, as all are in the cache."""

    def __contains__(self, name: object) -> bool:
        return True


_methods: dict[str, list[str]] = {}


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["PEER_ON"] == "adapterzoo":
        importlib.import_module("adapterzoo.peft").install()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name, module in sys.modules.items():
        if name.endswith(".testing_utils") and hasattr(module, "_HUB_MODEL_ACCESSES"):
            module._HUB_MODEL_ACCESSES = _Offline()
    # the same tests on both, whatever else can be collected
    every = int(os.environ.get("PEER_EVERY", "1"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]
    for item in items:
        _methods[item.nodeid] = sorted(_configs(item))
    if os.environ.get("PEER_HERE"):
        # tests of methods that only PEFT has say nothing about adapterzoo
        items[:] = [i for i in items if is_of_ours({"id": i.nodeid, "methods": _configs(i)})]


def _configs(item: Any) -> set[str]:
    values = getattr(item, "callspec", None)
    classes = () if values is None else values.params.values()
    named = {value.__name__ for value in classes if isinstance(value, type)}
    return {name for name in named if name.endswith("Config")}


def pytest_runtest_logreport(report: Any) -> None:
    plugin.pytest_runtest_logreport(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    plugin._tests[nodeid]["methods"] = _methods.pop(nodeid, [])
    plugin.pytest_runtest_logfinish(nodeid)
