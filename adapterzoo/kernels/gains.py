"""The smallest gain of a layer, read on the host without waiting for the GPU in each step.

`compose` keeps its output for the backward if the gain is large enough to divide by. The gain is on
the device, so the host reads the smallest one of the step before: each step starts a copy to pinned
memory and checks whether an earlier one has finished.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adapterzoo.caches import ModuleCache

from . import _launch, mode


class SmallestGain(ModuleCache):
    """The smallest |gain| of a site in its latest calls.

    The host waits for the device in the first call, and again after everything that may give the
    weights other values than a training step would: `train`, `eval`, a move or cast,
    `load_state_dict`, a hotswap. Copies, pickles and replicas start empty.

    Nothing is known in compiled or captured code: a captured graph runs again with other weights.
    """

    _memory: _Memory

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.forget()

    def of(self, gain: Tensor) -> float | None:
        """Return the smallest |gain| of this call or of one shortly before; None: unknown.

        Args:
            gain: of this call, `[d_out]`.
        """
        if (
            torch.compiler.is_compiling()
            or type(gain) not in mode.ORIGINAL
            or not gain.numel()
            or _launch.is_captured()
        ):
            return None
        # another thread may clear it meanwhile
        memory = self._memory
        arriving = memory.arriving
        if arriving is not None and arriving.is_there():
            memory.value, arriving = arriving.value(), None
        if arriving is None:
            arriving = Arriving(torch.linalg.vector_norm(gain.detach(), -math.inf), memory.host)
            memory.host = arriving.host
        if memory.value is None:
            memory.value, arriving = arriving.value(), None
        memory.arriving = arriving
        return memory.value

    def empty(self) -> dict[str, Any]:
        """Return the attributes of an empty cache."""
        return {"_memory": _Memory()}


class Arriving:
    """An asynchronous copy of a number to the host.

    Attributes:
        host: where it is copied to; pinned memory if it comes from a GPU.
    """

    def __init__(self, number: Tensor, host: Tensor | None) -> None:
        """Start the copy.

        Args:
            number: a scalar.
            host: memory of an earlier copy of the same device that has arrived; None: new memory.
        """
        self._event = None
        if not number.is_cuda:
            self.host = number
            return
        if host is None or host.dtype is not number.dtype:
            host = torch.empty((), dtype=number.dtype, pin_memory=True)
        self.host = host
        with torch.inference_mode(False):
            self.host.copy_(number, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(number.device))

    def is_there(self) -> bool:
        """Return whether the copy has finished; do not wait."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Wait for the copy and return the number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self.host)


class _Memory:
    """What a `SmallestGain` keeps until it is cleared; another thread may still read it then.

    Attributes:
        value: of the latest copy that has finished; None if none has.
        arriving: the copy that has not finished.
        host: the memory to which copies go.
    """

    def __init__(self) -> None:
        self.value: float | None = None
        self.arriving: Arriving | None = None
        self.host: Tensor | None = None
