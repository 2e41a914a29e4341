"""Runs code in a process of its own, which has the real `huggingface_hub` and a Hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import adapterzoo

HERE = Path(__file__).parent
PACKAGE = str(Path(adapterzoo.__file__).parents[1])
# seconds: what is slow in these tests is slow by 2.5
TIMEOUT = "1"
# huggingface_hub's own, in each upload
WARNINGS = ("-W", "error", "-W", "ignore:Use 'content=<...>':DeprecationWarning")


class ClientError(Exception):
    """What a call raised over there."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


class Client:
    """The process; all that it says on its standard error is kept in a file."""

    def __init__(self, home: Path, endpoint: str, **environment: str) -> None:
        self.home = home
        self.log = home / "log.txt"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        names = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DOWNLOAD_TIMEOUT": TIMEOUT,
            "HF_HUB_ETAG_TIMEOUT": TIMEOUT,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            # the protocol of a library of its own, which talks to other servers
            "HF_HUB_DISABLE_XET": "1",
            "OMP_NUM_THREADS": "1",
            # the package under test, wherever this process found it
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE, kept.get("PYTHONPATH", "")])),
            **environment,
        }
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *WARNINGS, HERE / "client.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={k: v for k, v in kept.items() if "proxy" not in k.lower()} | names,
                cwd=home,
            )

    def run(self, code: str, **values: Any) -> Any:
        """What the code leaves in `answer`.

        Raises:
            ClientError: the code raised.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        set_up = "".join(f"{name} = {value!r}\n" for name, value in values.items())
        self._process.stdin.write(json.dumps({"code": set_up + code}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, self.log.read_text()
        reply = json.loads(line)
        if "raised" in reply:
            raise ClientError(reply["raised"], reply["message"], reply["trace"])
        return reply["value"]

    def said(self) -> str:
        """What it has written to its standard error."""
        return self.log.read_text()

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
