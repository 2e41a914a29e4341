"""Functions that run in threads of their own, one at a time, each with its own random numbers.

A `Trainer` is a loop that calls the model. To put the rows of several trainers into one forward
pass, each loop runs as a coroutine: it pauses where it needs the model, and resumes with the
answer. The loops are isolated from each other, so each draws the random numbers that it would draw
alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from adapterzoo.hosts import accelerator_states


class ProcessState:
    """The global state of a process that belongs to one training run.

    It consists of the states of all random number generators, and of the state that accelerate
    shares among its objects: devices, processes and the current step of gradient accumulation.
    """

    def __init__(self) -> None:
        """Copy the current state, without a gradient accumulation in progress."""
        self._random = _random_state()
        self.keep()
        self._kept[-1] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Return a context in which this is the state of the process."""
        outer = _random_state(), [dict(cls._shared_state) for cls in _KEPT]
        _put_random(self._random)
        self.put_back()
        try:
            yield
        finally:
            self._random = _random_state()
            self.keep()
            _put_random(outer[0])
            _put_kept(outer[1])

    def keep(self) -> None:
        """Save accelerate's current state."""
        self._kept = [dict(cls._shared_state) for cls in _KEPT]

    def put_back(self) -> None:
        """Restore accelerate's saved state."""
        _put_kept(self._kept)


_KEPT = accelerator_states()


def _put_kept(kept: list[dict[str, Any]]) -> None:
    for cls, values in zip(_KEPT, kept, strict=True):
        cls._shared_state.clear()
        cls._shared_state.update(values)


def _random_state() -> tuple[Any, ...]:
    """Return the states of the generators of Python, NumPy, torch and CUDA."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def _put_random(state: tuple[Any, ...]) -> None:
    python, numpy, cpu, cuda = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


class Stopped(BaseException):
    """Ends a coroutine from outside; not an error of the function that it runs."""


class _Ended(NamedTuple):
    result: Any
    error: BaseException | None


class Coroutine:
    """A function that runs only while its caller waits for it.

    Attributes:
        request: the request that the function waits for; None before it starts and after it ends.
        result: the value that it has returned.
        is_ended: whether it has ended.
    """

    def __init__(self, run: Callable[[], Any], state: ProcessState) -> None:
        """Store the function; the first `resume` starts it.

        Args:
            run: the function; it calls `wait_for` of this coroutine.
            state: the state of the process while it runs.
        """
        self.request: Any = None
        self.result: Any = None
        self.is_ended = False
        self._run, self._state = run, state
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def resume(self, answer: Any = None) -> None:
        """Run the function until it waits again or ends.

        Args:
            answer: the value that `wait_for` returns in the function, or an exception to raise
                there.

        Raises:
            BaseException: the function raised it.
        """
        with self._state.entered():
            if self._thread is None:
                # newer releases of Python let a thread inherit the context of its creator
                context = contextvars.Context()
                self._thread = threading.Thread(target=context.run, args=(self._body,), daemon=True)
                self._thread.start()
            else:
                self._answers.put(answer)
            request = self._requests.get()
        self.request = None
        if isinstance(request, _Ended):
            self.is_ended, self.result = True, request.result
            self._thread.join()
            if request.error is not None:
                raise request.error
        else:
            self.request = request

    def wait_for(self, request: Any) -> Any:
        """Pause the function until the caller answers, and return the answer.

        Args:
            request: the value that the caller finds in `request`.
        """
        self._requests.put(request)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        """End the function where it waits; its `finally` blocks run."""
        if self._thread is None or self.is_ended:
            return
        try:
            self.resume(Stopped())
        except Stopped:
            return
        if not self.is_ended:
            self.stop()

    def _body(self) -> None:
        try:
            ended = _Ended(self._run(), None)
        except BaseException as error:  # noqa: BLE001 - raised again by `resume`
            ended = _Ended(None, error)
        self._requests.put(ended)
