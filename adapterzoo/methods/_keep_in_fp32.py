"""Parameters that stay in float32 when the rest of their module is cast to half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

from torch import Tensor, nn

from adapterzoo.contracts import compute_dtype


class KeepInFP32(nn.Module):
    """A module with parameters that casts to half precision leave in float32.

    Attributes:
        wide: names of these parameters, which are in float32 or float64.
    """

    wide: ClassVar[tuple[str, ...]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module."""

        def kept_wide(t: Tensor) -> Tensor:
            made = fn(t)
            parameters = [self._parameters[name] for name in self.wide]
            if not any(p is not None and (t is p or t is p.grad) for p in parameters):
                return made
            dtype = compute_dtype(made.dtype)
            # the result of the cast is already rounded
            return made if made.dtype is dtype else t.to(made.device, dtype)

        super()._apply(kept_wide, recurse)  # type: ignore[no-untyped-call]
        return self
