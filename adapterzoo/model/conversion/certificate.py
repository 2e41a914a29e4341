"""What a conversion has changed: errors of the weights and of the outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from adapterzoo.errors import columns

_TITLES = ("layer", "rank", "‖ΔW‖", "error", "relative", "")


@dataclass(frozen=True, slots=True)
class LayerReport:
    """The conversion of one weight.

    Attributes:
        path: the path of the layer, with its parameter and the role of its part if it has several.
        rank: the rank of the new change.
        norm: ‖ΔW‖, the Frobenius norm of the change.
        error: ‖ΔW − ΔW'‖ with the new change ΔW' as it is stored.
        is_exact: whether ΔW' equals ΔW by algebra, up to rounding; otherwise it is an SVD.
    """

    path: str
    rank: int
    norm: float
    error: float
    is_exact: bool

    @property
    def relative(self) -> float:
        """The error divided by the norm; 0 if nothing changes."""
        return _share(self.error, self.norm)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The result of a conversion; `str` gives a table.

    Attributes:
        adapter: name of the new adapter.
        method: the method of the adapter that was converted.
        to: the method of the new one.
        layers: one report for each weight, in model order.
        inputs: the inputs on which outputs were compared: "given" or "random".
        output_difference: the largest difference of an output, such as the logits, between the
            two adapters on these inputs.
        output_change: the largest difference that the converted adapter makes to the base model.
    """

    adapter: str
    method: str
    to: str
    layers: tuple[LayerReport, ...]
    inputs: str
    output_difference: float
    output_change: float

    @property
    def is_exact(self) -> bool:
        """Whether all layers are exact."""
        return all(layer.is_exact for layer in self.layers)

    @property
    def norm(self) -> float:
        """‖ΔW‖ of all layers together."""
        return math.hypot(*(layer.norm for layer in self.layers))

    @property
    def error(self) -> float:
        """‖ΔW − ΔW'‖ of all layers together."""
        return math.hypot(*(layer.error for layer in self.layers))

    @property
    def relative(self) -> float:
        """The error divided by the norm; 0 if nothing changes."""
        return _share(self.error, self.norm)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "adapter": self.adapter, "method": self.method, "to": self.to,
            "exact": self.is_exact, "norm": self.norm, "error": self.error,
            "relative": self.relative, "inputs": self.inputs,
            "output_difference": self.output_difference, "output_change": self.output_change,
            "layers": [
                {"path": layer.path, "rank": layer.rank, "norm": layer.norm, "error": layer.error,
                 "relative": layer.relative, "exact": layer.is_exact}
                for layer in self.layers
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        """Return a table of the layers, and a line on the outputs."""
        reports: list[tuple[str, str, LayerReport | Certificate]] = [
            *((each.path, str(each.rank), each) for each in self.layers), ("all", "", self)
        ]  # fmt: skip
        rows = [
            (name, rank, f"{of.norm:.4g}", f"{of.error:.2e}", f"{of.relative:.2e}",
             "exact" if of.is_exact else "SVD")
            for name, rank, of in reports
        ]  # fmt: skip
        outputs = (
            f"outputs on {self.inputs} inputs: they differ by at most "
            f"{self.output_difference:.2e}; the adapter changes them by up to "
            f"{self.output_change:.2e}"
        )
        return "\n".join([*columns([_TITLES, *rows], [False, *[True] * 4, False]), outputs])

    __repr__ = __str__


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
