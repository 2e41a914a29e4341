"""Mixtures of experts in a batch whose rows have different adapters.

Inside the experts, the row of a token is unknown. So the call is divided at the module that still
has the tokens in batch order: its own forward runs once for each kind of rows, with all tokens of
these rows, as if the batch had no others, and the outputs are joined. Each token goes through one
of these calls, with the usual computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapterzoo.composition.compile import is_packed
from adapterzoo.composition.rows import RowLayout, RowMap
from adapterzoo.errors import CompositionError

_VALUES = (bool, int, float, str, torch.dtype, torch.device)


class RoutedRows:
    """The tokens of one call of a module, each of which belongs to a row.

    Attributes:
        layout: layout of the tokens, sorted by the kind of their rows.
    """

    def __init__(
        self, whole: Tensor | None, rows: RowMap | None, numbers: tuple[int, ...], path: str
    ) -> None:
        """Find the row of each token.

        Args:
            whole: `[rows, tokens, …]`, or `[1, tokens, …]` if requests are packed; None if the
                module around the experts has not run.
            rows: the batch's rows; None if the model has not been called.
            numbers: number of the kind of each part of the rows.
            path: the module's path.

        Raises:
            BatchError: the input does not have the rows of the batch.
            CompositionError: the row of a token is unknown.
        """
        self._path = path
        if whole is None or rows is None:
            raise self._refused("was called alone")
        if whole.dim() < 3:
            raise self._refused(f"gets some tokens of an input {list(whole.shape)}")
        if not is_packed(whole, rows):
            # raises BatchError if these are not the rows of the batch
            rows.layout_of(whole)
        self._shape = whole.shape[:2]
        self.layout: RowLayout = rows.grouped(self._shape.numel(), numbers)

    def _refused(self, what: str) -> CompositionError:
        return CompositionError(
            f"rows of a batch: {self._path!r}, which has experts, {what}, so the rows of its "
            "tokens are unknown. Activate one adapter for all rows, or write exclude_modules=[…]."
        )

    def _tokens(self, t: Tensor, shape: Sequence[int]) -> tuple[Tensor, bool] | None:
        """Return a tensor as `[tokens, …]`, and whether it was `[rows, tokens, …]`.

        Args:
            t: an argument or output.
            shape: the numbers of rows and tokens of the call.

        Returns:
            None for a tensor of another shape.
        """
        count = shape[0] * shape[1]
        if t.dim() > 1 and t.shape[0] == count:
            return t, False
        if t.dim() > 1 and tuple(t.shape[:2]) == tuple(shape):
            return t.flatten(0, 1), True
        return None

    def take(self, value: Any, start: int, size: int) -> Any:
        """Return the tokens of some rows from an argument of the call.

        Args:
            value: a tensor `[tokens, …]` or `[rows, tokens, …]`, or a value for all tokens.
            start: the first token, in the order of `layout`.
            size: the number of tokens.

        Raises:
            CompositionError: the argument is something else.
        """
        if value is None or isinstance(value, _VALUES):
            return value
        if not isinstance(value, Tensor):
            raise self._refused(f"got a {type(value).__name__}")
        if value.dim() == 0:
            return value
        found = self._tokens(value, self._shape)
        if found is None:
            raise self._refused(f"got {list(value.shape)} for {list(self._shape)} tokens")
        tokens, by_row = found
        own = self.layout.arranged(tokens).narrow(0, start, size)  # [size, …]
        return own.unflatten(0, self._part(size)) if by_row else own

    def _part(self, size: int) -> tuple[int, int]:
        """Return the rows and tokens of a part."""
        rows, tokens = self._shape
        return (1, size) if rows == 1 else (size // tokens, tokens)

    def join(self, outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Return the output for all tokens.

        Args:
            outputs: the output of each part, in the order of `layout`.
            sizes: the number of tokens of each part.

        Raises:
            CompositionError: an output does not have one value for each token.
        """
        first = outputs[0]
        if first is None:
            return None
        if isinstance(first, (tuple, list)):
            columns = zip(*outputs, strict=True)
            return type(first)(self.join(each, sizes) for each in columns)
        parts = []
        by_row = False
        for output, size in zip(outputs, sizes, strict=True):
            shape = self._part(size)
            found = self._tokens(output, shape) if isinstance(output, Tensor) else None
            if found is None:
                what = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise self._refused(f"returned {what} for {list(shape)} tokens")
            tokens, by_row = found
            parts.append(tokens)
        whole = self.layout.restored(torch.cat(parts))  # [tokens, …]
        return whole.unflatten(0, self._shape) if by_row else whole
