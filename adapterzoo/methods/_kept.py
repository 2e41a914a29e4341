"""A tensor that follows from weights, kept in evaluation for as long as they stay the same.

The norm of DoRA and the folded rotation of BOFT cost more than the layer itself when it is given
few tokens, and in evaluation they are the same in each call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

# a tensor, its version, and which part of its memory is looked at
_Mark = tuple["weakref.ref[Tensor]", tuple[object, ...]]


class Kept(nn.Module):
    """Computes a tensor, or gives the one computed before when nothing it came from has changed.

    It sees changes as autograd sees them, by the version of a tensor: in-place operations,
    optimisers, `load_state_dict`, merging; and new tensors in the place of old ones: `.to`,
    assignments. An in-place change through `.data` is hidden from autograd, and from it.

    Optimisers with `fused=True` give no new version. So `train` and `eval` forget what was kept,
    after a forward with gradients nothing is kept until one of them is called, and never while a
    source has a gradient that an optimiser may be about to use.

    Nothing is kept in training, with gradients, inside of compiled, exported or captured code,
    and in a process group, where FSDP refills the same tensors without a new version.
    """

    def __init__(self) -> None:
        """Keep nothing yet."""
        super().__init__()
        # a buffer moves and replicates with the model; not persistent: no checkpoint has it
        self.register_buffer("value", None, persistent=False)
        self._seen: list[_Mark] | None = None
        self._facts: object = None
        # whether a graph may be waiting for its backward, and a step for its gradients
        self._learns = False

    def get(self, compute: Callable[[], Tensor], *sources: Tensor, facts: object = None) -> Tensor:
        """The tensor.

        Args:
            compute: makes it from the sources and the facts alone.
            sources: parameters, or views of parameters.
            facts: numbers and dtypes that it follows from as well.
        """
        if self._must_not_keep():
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._learns = True
            return compute()
        # before the value: another thread that puts a new one there says so at the end
        seen, known = self._seen, self._facts
        value = self._buffers["value"]
        marks = None if self._learns else _marks(sources)
        if value is not None and known == facts and _are_the_same(marks, seen):
            return value
        # other threads find nothing until both are there
        self._seen = None
        # a tensor made in inference mode could not take part in a later backward
        with torch.inference_mode(False), torch.no_grad():
            value = compute()
        if marks is not None:
            self._buffers["value"], self._facts = value, facts
            self._seen = marks
        return value

    def train(self, mode: bool = True) -> Self:
        """Change the mode; what was computed before it is forgotten."""
        self._buffers["value"] = self._seen = None
        self._learns = False
        return super().train(mode)

    def _must_not_keep(self) -> bool:
        return (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or (dist.is_available() and dist.is_initialized())
            or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Every move and cast of the module: what was computed before it is forgotten."""
        self._buffers["value"] = self._seen = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have other weights and begin with nothing."""
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        return {**state, "_buffers": {"value": None}, "_seen": None, "_facts": None}


def _marks(sources: tuple[Tensor, ...]) -> list[_Mark] | None:
    """What tells whether the sources are still the same; None: nothing can tell."""
    found: list[_Mark] = []
    for source in sources:
        # a view is a new object in each call, what it looks at is not
        whole = source if source._base is None else source._base
        if whole.is_inference() or (whole.is_leaf and whole.grad is not None):
            return None
        try:
            address = source.data_ptr()
        except RuntimeError:
            # the tensors of torch.func's transforms and fake ones have none
            return None
        state = (whole._version, address, source.storage_offset(), source.shape)
        found.append((weakref.ref(whole), state))
    return found


def _are_the_same(now: list[_Mark] | None, before: list[_Mark] | None) -> bool:
    if now is None or before is None:
        return False
    # references compare by the numbers in their tensors
    return all(
        ref() is old() and state == old_state
        for (ref, state), (old, old_state) in zip(now, before, strict=True)
    )
