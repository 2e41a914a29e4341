"""Modules that keep what follows from weights, until these may have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from torch import Tensor, nn


class Forgetting(nn.Module):
    """Keeps something that state dicts and buffers never include.

    `train`, `eval`, every move or cast, and `load_state_dict` clear it. Copies, pickles and
    replicas start empty.
    """

    def forget(self) -> None:
        """Clear what is kept."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """Change the mode and forget."""
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module and forget."""
        self.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args)

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        # a replica shares all attributes but has its own weights
        replica.forget()
        return replica


class Together(Forgetting):
    """Keeps what adapters of one layer compute together; forgotten also when one of them goes.

    Attributes:
        kept: what those of the latest batch keep, closed when it is forgotten; None: nothing.
    """

    kept: Closable | None = None

    def forget(self) -> None:
        """Close what is kept."""
        before, self.kept = self.kept, None
        if before is not None:
            before.close()

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = nn.Module._replicate_for_data_parallel(self)
        # not closed: the original keeps it
        replica.kept = None
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without it: copies and pickles have other weights."""
        state = dict(super().__getstate__())  # type: ignore[no-untyped-call]
        return {**state, "kept": None}


class Closable(Protocol):
    """What must be told that it is not kept any longer."""

    def close(self) -> None:
        """Let go of what it holds."""
