"""What a head reads in one call of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from ._pooling import Pooling


class HeadCall(Protocol):
    """What a head reads in one call of its model, for all rows of the batch or for some.

    Attributes:
        name: of the head in the model.
        given: labels and other arguments of heads, with `attention_mask` and `input_ids` of the
            hidden states.
    """

    @property
    def name(self) -> str: ...

    @property
    def given(self) -> Mapping[str, Any]: ...

    @property
    def base(self) -> Callable[..., Any]:
        """The base model. If it has run already, it returns these outputs."""

    @property
    def at_exit(self) -> Callable[[Tensor], Tensor] | None:
        """The inverse of the invertible adapters, for the input of the last layer; or None."""

    def features(self, pooling: Pooling | None) -> tuple[Tensor, Tensor | None]:
        """Return hidden states `[batch, tokens, d_model]`, or pooled ones, and their mask.

        Args:
            pooling: of the head.
        """

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of the model and of heads that a function takes."""

    def output(self, name: str, loss: Tensor | None, values: Mapping[str, Tensor]) -> Any:
        """Return an output with the fields of the base model's.

        Args:
            name: of its class in `transformers.modeling_outputs`.
            loss: None without labels.
            values: its other fields.
        """
