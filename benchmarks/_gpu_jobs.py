"""Work in processes of its own: one that crashes, hangs or is late loses nothing of the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

# after its end, a process may finish what it is measuring
_GRACE = 5.0


@dataclass(frozen=True)
class Job:
    """What a process does.

    Attributes:
        name: for messages.
        run: gives what it finds, piece by piece; everything can be pickled.
    """

    name: str
    run: Callable[[], Iterable[Any]]


@dataclass(frozen=True)
class Ended:
    """The last piece of a job.

    Attributes:
        why: "" if it came to its end, else what stopped it.
        late: whether it was stopped because its time was over.
    """

    why: str = ""
    late: bool = False


def run(
    jobs: Sequence[Job], until: float, together: int, context: BaseContext
) -> Iterator[tuple[Job, Any]]:
    """Run jobs, each in a process of its own.

    Args:
        jobs: in the order in which they start.
        until: value of `time.monotonic` after which no job starts and those that run are stopped.
        together: how many run at a time.
        context: makes the processes.

    Yields:
        A job and a piece that it found, when it is known; the last piece of each is an `Ended`.
    """
    waiting, running = list(jobs), dict[Any, tuple[Job, Any]]()
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < together and now < until:
                job = waiting.pop(0)
                receiver, sender = context.Pipe(duplex=False)
                process: Any = context.Process(target=_work, args=(job, sender))  # type: ignore[attr-defined]
                process.start()
                sender.close()
                running[receiver] = job, process
            if now >= until:
                yield from ((job, Ended("no time left for it", True)) for job in waiting)
                waiting.clear()
            left = until + _GRACE - now
            for pipe in _ready(
                list(running), max(min(left, until - now if waiting else left), 0.0)
            ):
                job, process = running[pipe]
                try:
                    found = pipe.recv()
                except EOFError:
                    process.join()
                    found = Ended(f"its process ended with code {process.exitcode}")
                if isinstance(found, Ended):
                    del running[pipe]
                    pipe.close()
                    process.join()
                yield job, found
            if left <= 0.0:
                yield from (
                    (job, Ended("stopped in its work", True)) for job, _ in running.values()
                )
                return
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _work(job: Job, pipe: Connection) -> None:
    try:
        for found in job.run():
            pipe.send(found)
        pipe.send(Ended())
    except Exception:  # noqa: BLE001  the parent reports any
        pipe.send(Ended(traceback.format_exc()))


def _ready(pipes: list[Any], seconds: float) -> list[Any]:
    """Those that have something to be read, as soon as one has."""
    return wait(pipes, seconds)
