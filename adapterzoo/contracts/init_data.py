"""What initial values take from the original weights of a model, and from its inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class LayerData:
    """What the initial values of an adapter take from `init_data` for one layer."""


class OriginalWeight(LayerData):
    """The weight of a quantized layer before its quantization.

    Attributes:
        read: reads it `[d_out, d_in]`, in the dtype that it is stored in.
    """

    def __init__(self, read: Callable[[], Tensor]) -> None:
        """Take the function that reads it."""
        self.read = read


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The layers whose original weights the initial values of a config need.

    Attributes:
        shapes: path of each adapted layer → `(d_out, d_in)`; one that is not quantized needs none.
    """

    shapes: Mapping[str, tuple[int, int]]


class InputStatistics(LayerData, ABC):
    """What initial values take from the inputs of a layer, batch by batch."""

    @abstractmethod
    def update(self, x: Tensor) -> None:
        """Add the inputs `[tokens, d_in]` of one batch, without padding."""


class InputPlan(ABC):
    """The inputs that the initial values of a config need.

    Attributes:
        watched: path of a layer → what collects its inputs.
        skips_unlabeled: whether tokens with the label −100 are left out.
    """

    watched: Mapping[str, InputStatistics]
    skips_unlabeled: bool = False

    @abstractmethod
    def lacking(self, passed: bool) -> frozenset[str]:
        """Return the paths that need another batch; `passed`: all data have been read once."""

    @abstractmethod
    def check(self) -> None:
        """Check after the first pass that the data can be enough.

        Raises:
            ConfigError: no number of passes can be enough.
        """

    @abstractmethod
    def changes(self) -> Mapping[str, Any]:
        """Return the fields of the config that the inputs decide, with their values."""
