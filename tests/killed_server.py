"""Kills `adapterzoo serve` and exports with SIGKILL: python tests/killed_server.py --kills 50.

A quarter each: a server that starts, a server with requests in flight, `adapterzoo export` into a
new folder, and `save_adapter(…, serve=…)` over the export of another adapter. Half of the exports
are killed at a random moment, the others before a random step that changes a file, as most of their
time is not spent on files. After each kill, every file that was there before has the same bytes,
and a folder that is written is the old export or the new one, whole, or no server loads it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from killed_saver import STEPS
from served import Server, completed, free_port, is_well, written
from snapshots import stir
from transformers import AutoModelForCausalLM

from adapterzoo import init
from adapterzoo.cli import main as command_line
from adapterzoo.errors import CheckpointError
from adapterzoo.serving import verify

SERVE = "vllm"


def forked(work: Callable[[], object], log: Path) -> int:
    """Do something in a process of its own, which writes to a file what it would print."""
    child = os.fork()
    if not child:
        with log.open("w") as stream:
            for number in (1, 2):
                os.dup2(stream.fileno(), number)
            try:
                work()
            finally:
                os._exit(0)
    return child


def killed(child: int) -> bool:
    """Kill a process; False if it has ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def digests(*folders: Path) -> dict[str, str]:
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --- the server ---


class Forked(Server):
    """A server in a process that has imported everything, so that it starts at once."""

    def __init__(self, folder: Path, args: list[str]) -> None:
        self.port = free_port()
        command = ["serve", str(folder), *args, "--port", str(self.port), "--num-blocks", "128",
                   "--page-size", "8", "--max-batch-tokens", "64"]  # fmt: skip
        self.log = folder.parent / "log.txt"
        self.child = forked(lambda: command_line(command, standalone_mode=False), self.log)

    def is_running(self) -> bool:
        return True


def kill_start(world: World, own: random.Random) -> str:
    """Kill a server between its first step and its first answer."""
    server = Forked(world.base, world.args)
    time.sleep(own.uniform(0, 1.1 * world.start))
    is_ready = False
    with contextlib.suppress(OSError):
        is_ready = server.get("/health")[0] == 200
    assert killed(server.child)
    return "ready" if is_ready else "starting"


def kill_requests(world: World, own: random.Random) -> str:
    """Kill a server while clients wait; the answers until then are right, and there is no more."""
    server = Forked(world.base, world.args)
    server.wait()
    models, found, ends = [*world.wants.items()], Counter[str](), threading.Event()

    def ask(number: int) -> None:
        while not ends.is_set():
            model, (prompt, tokens) = models[number % len(models)]
            try:
                answer = server.complete(model, prompt)
            except Exception:  # noqa: BLE001  of a connection that breaks, in whichever way
                found["broken"] += 1
                return
            assert completed(answer) == tokens
            found["right"] += 1

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        time.sleep(own.uniform(0, 0.5))
        assert killed(server.child)
        time.sleep(0.05)
        ends.set()
        for each in asked:
            each.result()
    return "in flight" if found["broken"] else "between"


# --- exports ---


class World:
    """Folders of a base model and its adapters; what is written goes into `out`."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "out"
        kept = folder / "kept"
        kept.mkdir()
        self.base, self.args, self.wants = written(kept)
        self.new, self.old = kept / "a", kept / "old"
        self.model = init(AutoModelForCausalLM.from_pretrained(self.base).eval())
        self.model.load_adapter(self.new, load_as="a")
        self.model.add_adapter("old", "lora[r=4]")
        stir(self.model, "old", seed=9, std=0.5)
        self.model.save_adapter(self.old, "old")
        self.kept = kept
        self.before = self.digests()
        begin = time.monotonic()
        server = Forked(self.base, self.args)
        server.wait()
        self.start = time.monotonic() - begin
        assert is_well(server, self.wants)
        assert killed(server.child)
        self.seconds, self.steps = {}, {}
        for write in (self.export, self.save):
            name, begin = write.__name__, time.monotonic()
            child = forked(write, self.kept / "log.txt")
            assert os.waitpid(child, 0)[1] == 0
            self.seconds[name] = time.monotonic() - begin
            assert self.outcome() == "new", (self.kept / "log.txt").read_text()
            self.steps[name] = self.steps_of(write)

    def steps_of(self, write: Callable[[], None]) -> int:
        """How often a process that writes changes a file."""
        steps = []

        def count(event: str, arguments: tuple[object, ...]) -> None:
            if event in STEPS and str(arguments[0]).startswith(str(self.out)):
                steps.append(event)

        def work() -> None:
            sys.addaudithook(count)
            write()
            os._exit(len(steps))

        child = forked(work, self.kept / "log.txt")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def killed_at(self, step: int, write: Callable[[], None]) -> bool:
        """Write in a process that is killed before a step that changes a file; False: it ends."""
        left = itertools.count(step, -1)

        def count(event: str, arguments: tuple[object, ...]) -> None:
            if event in STEPS and str(arguments[0]).startswith(str(self.out)) and not next(left):
                os.kill(os.getpid(), signal.SIGKILL)

        def work() -> None:
            sys.addaudithook(count)
            write()

        child = forked(work, self.kept / "log.txt")
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    def digests(self) -> dict[str, str]:
        """Of every file that nothing may change."""
        found = digests(self.kept)
        return {name: value for name, value in found.items() if not name.endswith("log.txt")}

    def export(self) -> None:
        command = ["export", str(self.new), str(self.out), "--serve", SERVE]
        command_line([*command, "--model", str(self.base)], standalone_mode=False)

    def save(self) -> None:
        self.model.save_adapter(self.out, "a", format="peft", serve=SERVE)

    def outcome(self) -> str:
        """Which adapter a server finds; a mixture of two fails."""
        for adapter, name in ((self.new, "new"), (self.old, "old")):
            try:
                proof = verify(self.out, SERVE, self.base, adapter)
            except CheckpointError as error:
                return "refused" if str(self.out) in str(error) else "not named"
            if proof.is_equal:
                return name
        raise AssertionError(f"neither of two exports: {sorted(self.out.iterdir())}\n{proof}")


def kill_writer(
    world: World, own: random.Random, write: Callable[[], None], legal: set[str]
) -> str:
    """Kill an export, look at its folder, and export again."""
    if own.random() < 0.5:
        was_killed = world.killed_at(own.randrange(world.steps[write.__name__]), write)
    else:
        child = forked(write, world.kept / "log.txt")
        time.sleep(own.uniform(0, 1.1 * world.seconds[write.__name__]))
        was_killed = killed(child)
    found = world.outcome()
    assert found in (legal if was_killed else {"new"}), found
    write()
    assert world.outcome() == "new"
    assert not [*world.out.glob(".*")]
    return found if was_killed else "ended"


def kill_export(world: World, own: random.Random) -> str:
    """Kill `adapterzoo export` into a folder that is not there."""
    shutil.rmtree(world.out, ignore_errors=True)
    return kill_writer(world, own, world.export, {"new", "refused"})


def kill_save(world: World, own: random.Random) -> str:
    """Kill `save_adapter` over the export of another adapter."""
    shutil.rmtree(world.out, ignore_errors=True)
    world.model.save_adapter(world.out, "old", format="peft", serve=SERVE)
    return kill_writer(world, own, world.save, {"new", "old", "refused"})


KINDS = {"start": kill_start, "requests": kill_requests, "export": kill_export, "save": kill_save}


def main() -> None:
    """Print how often each kind of process was killed, and what was found then."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    own, found = random.Random(given.seed), {kind: Counter[str]() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in range(given.kills):
            kind = [*KINDS][number % len(KINDS)]
            # one that ends before it is killed does not count
            while (seen := KINDS[kind](world, own)) == "ended":
                pass
            found[kind][seen] += 1
            assert world.digests() == world.before, f"{kind}, kill {number}: a file has changed"
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
