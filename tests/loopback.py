"""The Hub of tests/hub on loopback, with a process that reaches it, for tests of other folders."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "hub"))
try:
    from driver import Client
    from pages import Pages
    from server import OWNER, USERS, Hub
finally:
    sys.path.pop(0)

__all__ = ["OWNER", "USERS", "loopback"]


@contextlib.contextmanager
def loopback(home: Path, token: str = OWNER) -> Iterator[tuple[Hub, Client]]:
    """An empty Hub, and a process with its own home, where the token is stored."""
    hub = Hub(Pages)
    client = Client(home, hub.url)
    (home / "token").write_text(token)
    yield hub, client
    client.close()
    hub.close()
