"""Adapters at convolutions: the forward of their method, over channels instead of features."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import Tensor

from adapterzoo.contracts import BaseLayer, WeightAdapter


class AtConvolution(WeightAdapter):
    """Mixed into the class of an adapter at a convolution."""

    _plain: type[WeightAdapter]

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the output `[*rows, d_out, *places]` for `x` `[*rows, channels, *space]`."""
        return self.convolved(x, base)

    @property
    def row_options(self) -> None:
        """None: each adapter acts alone on its rows."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the adapter's class: loading creates the subclass again."""
        return _blank, (self._plain,), self.__getstate__()  # type: ignore[no-untyped-call]


@functools.cache
def at_convolution(cls: type[WeightAdapter]) -> type[AtConvolution]:
    """Return the class of an adapter at a convolution; it keeps its name.

    Args:
        cls: class of the adapter.
    """
    members = {"_plain": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return cast("type[AtConvolution]", type(cls.__name__, (AtConvolution, cls), members))


def _blank(cls: type[WeightAdapter]) -> WeightAdapter:
    made = at_convolution(cls)
    return made.__new__(made)
