"""Modules that keep values computed from weights, and the caches of a model's earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from torch import Tensor, nn

CACHES = ("cache", "past_key_values", "cache_params")
"""A model's argument for the keys, values and states of earlier tokens: one of these names."""


def cached_tokens(given: Mapping[str, Any]) -> int | None:
    """Return the number of tokens in the cache among the arguments of a call, 0 without a cache.

    Returns:
        None if the cache is a state that does not count its tokens, as Mamba's.
    """
    cache = next((c for name in CACHES if (c := given.get(name)) is not None), None)
    if cache is None:
        return 0
    linear = getattr(cache, "is_linear", ())
    counts = hasattr(cache, "get_seq_length") and not (linear and all(linear))
    return int(cache.get_seq_length()) if counts else None


class ModuleCache(nn.Module):
    """Base of the modules that keep values which state dicts and buffers never include.

    `train`, `eval`, every move or cast, and `load_state_dict` clear it. Copies, pickles and
    replicas start empty.
    """

    def empty(self) -> dict[str, Any]:
        """Return the attributes of an empty cache."""
        raise NotImplementedError

    def forget(self) -> None:
        """Clear the cache."""
        vars(self).update(self.empty())

    def train(self, mode: bool = True) -> Self:
        """Change the mode and clear the cache."""
        self.forget()
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the module and clear the cache."""
        self.forget()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.forget()
        super()._load_from_state_dict(*args)

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        # a replica shares all attributes but has its own weights
        vars(replica).update(replica.empty())
        return replica

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of an empty cache: copies and pickles have other weights."""
        return {**super().__getstate__(), **self.empty()}  # type: ignore[no-untyped-call]
