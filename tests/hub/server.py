"""A small Hub on loopback, kept in memory, with faults: its state, how it sends, its large files.

What it answers is in `pages.py`. Large files come from a second server, as from a CDN, which shall
never see a token.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

OWNER, READER = "hf_ownerOwnerOwnerOwner", "hf_readerReaderReader"
USERS = {OWNER: "ann", READER: "bob"}
SAID = {
    401: "Invalid username or password.", 403: "Forbidden", 404: "Not found",
    429: "Too many requests", 500: "Internal error", 503: "Service unavailable",
}  # fmt: skip


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    private: bool = False
    gated: bool = False
    downloads: int = 0
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        # a commit is another one even with the same files
        state = json.dumps([len(self.commits), sorted((k, git(v)) for k, v in files.items())])
        sha = hashlib.sha1(state.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def find(self, revision: str) -> str | None:
        revision = self.branches.get(revision, revision)
        return revision if revision in self.commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Fault:
    """What goes wrong: `kind` at the requests that `where` names, `times` times (None: always).

    `path` is a part of the paths that are meant; empty: all.
    """

    where: str
    kind: str
    times: int | None = None
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""
    path: str = ""


class Hub:
    """The state of the Hub, and its two servers.

    A fault is at one of these: the name of a page's method, `head` and `get` for a file, `body` for
    the content of a large file, `text` for that of a small one, `upload`.
    """

    def __init__(self, pages: type[Base]) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        # of AdapterHub, by base model
        self.indexes: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, str | None]] = []
        self.lock = threading.Lock()
        self._servers = [_serve(self, pages), _serve(self, Cdn)]
        ports = [server.server_address[1] for server in self._servers]
        # by two names: huggingface_hub 1.x takes two ports of one host for one place
        self.url, self.cdn = f"http://127.0.0.1:{ports[0]}", f"http://localhost:{ports[1]}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def repo(self, repo_id: str, files: dict[str, bytes] | None = None, **more: Any) -> Repo:
        self.repos[repo_id] = repo = Repo(**more)
        repo.commit(files or {})
        return repo

    @contextmanager
    def broken(self, *faults: Fault) -> Iterator[None]:
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []

    def fault(self, where: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.where == where and fault.path in path and fault.times != 0:
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return None


def _serve(hub: Hub, handler: type[Base]) -> ThreadingHTTPServer:
    bound = type(handler.__name__, (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Base(BaseHTTPRequestHandler):
    hub: Hub
    bodies = "body"
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            # the client went away
            self.close_connection = True

    def do(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(size)
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        path = parts.path
        with self.hub.lock:
            self.hub.requests.append((self.command, path, self.headers.get("Authorization")))
        self.answer(path)

    # the names by which http.server calls it
    do_GET = do_HEAD = do_POST = do_PUT = do  # noqa: N815

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def refuse(self, status: int, message: str, code: str = "", **headers: str) -> None:
        if code:
            headers["X_Error_Code"] = code
        self.json({"error": message}, status, X_Error_Message=message, **headers)

    def failed(self, where: str) -> bool:
        """Whether a fault has answered in place of the server."""
        fault = self.hub.fault(where, self.path)
        if fault is None:
            return False
        if fault.kind == "status":
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            message = fault.message.replace("{token}", token)
            headers = {key.replace("-", "_"): value for key, value in fault.headers.items()}
            self.refuse(fault.status, message or SAID[fault.status], **headers)
        elif fault.kind == "slow":
            time.sleep(2.5)
            self.close_connection = True
        elif fault.kind == "reset":
            self.reset()
        elif fault.kind == "html":
            self.send(200, b"<html>log in to the hotel's network</html>")
        return True

    def reset(self) -> None:
        """Close the connection at once, with what was sent so far."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def content(self, content: bytes, **headers: str) -> None:
        """A file, or the part of it that is asked for, or what a fault makes of it."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, status, size = 0, 200, len(content)
        if asked:
            start = int(asked[1])
            if start >= size:
                return self.send(416, Content_Range=f"bytes */{size}")
            status = 206
            headers["Content_Range"] = f"bytes {start}-{size - 1}/{size}"
        content = content[start:]
        fault = None if self.command == "HEAD" else self.hub.fault(self.bodies, self.path)
        kind = fault.kind if fault else ""
        if fault is not None and kind == "status":
            return self.refuse(fault.status, SAID[fault.status], **fault.headers)
        if kind == "corrupted":
            content = bytes(byte ^ 0x55 for byte in content)
        elif kind == "truncated":
            content = content[: len(content) // 2]
        elif kind in ("cut", "slow"):
            headers["Content_Length"] = str(len(content))
            content = content[: len(content) // 2]
        self.send(status, content, Accept_Ranges="bytes", **headers)
        if kind == "slow":
            self.wfile.flush()
            time.sleep(2.5)
        if kind in ("cut", "slow"):
            self.connection.close()
            self.close_connection = True
        return None


class Cdn(Base):
    """Large files, by their digest."""

    def answer(self, path: str) -> None:
        oid = path.rpartition("/")[2]
        if self.command == "PUT":
            if self.failed("upload"):
                return None
            if sha256(self.body) != oid:
                return self.refuse(400, "another content than announced")
            self.hub.objects[oid] = self.body
            return self.send(200)
        return self.content(self.hub.objects[oid])
