"""The Hub on loopback, and a process that reaches it through the real `huggingface_hub`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import Client
from pages import Pages
from server import OWNER, Hub


@pytest.fixture(scope="session")
def _hub() -> Iterator[Hub]:
    hub = Hub(Pages)
    yield hub
    hub.close()


@pytest.fixture
def hub(_hub: Hub) -> Hub:
    """An empty Hub."""
    _hub.repos.clear()
    _hub.objects.clear()
    _hub.indexes.clear()
    _hub.requests.clear()
    _hub.faults = []
    return _hub


@pytest.fixture(scope="session")
def _client(_hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("home")
    client = Client(home, _hub.url)
    yield client
    client.close()


@pytest.fixture
def client(_client: Client, hub: Hub, tmp_path: Path) -> Client:
    """The process with an empty cache, and the token of the Hub's user `ann` stored."""
    cache = str(tmp_path / "cache")
    (_client.home / "token").write_text(OWNER)
    _client.run("from huggingface_hub import constants; constants.HF_HUB_CACHE = cache",
                cache=cache)  # fmt: skip
    return _client
