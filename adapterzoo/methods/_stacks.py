"""Stacks of the factors of a mixed batch, kept in evaluation as long as the factors stay the same.

They take as much memory as the factors themselves, at each layer for the adapters of its latest
mixed batch. Another mixed batch, `train`, `eval`, a move or cast, and deleting an adapter of the
layer free them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from adapterzoo.caches import LayerCache
from adapterzoo.contracts import Adapter, BaseLayer
from adapterzoo.kernels.grouped import Groups, grouped_shrink, stacked_down, stacked_up

from ._weight_cache import PLAIN, is_recorded, is_shared


def projected(
    x: Tensor,
    a: Sequence[Tensor],
    adapters: Sequence[Adapter],
    groups: Groups,
    base: BaseLayer,
    dropout: float,
) -> Tensor:
    """Return dropout(x) Aᵀ of each row, `[rows, *tokens, rank]`, with the largest of the ranks.

    Args:
        x: `[rows, *tokens, d_in]`.
        a: the factors of the adapters.
        adapters: of the layer.
        groups: which of them each row takes.
        base: the layer.
        dropout: probability, in training.
    """
    return grouped_shrink(x, kept_down(adapters, a, base), groups, dropout, adapters[0].training)


def kept_down(adapters: Sequence[Adapter], a: Sequence[Tensor], base: BaseLayer) -> Tensor:
    """Return the factors A of the adapters of a layer, `[n, rank, d_in]`.

    In evaluation it is the stack of the batch before if that still holds.
    """
    return _kept("down", lambda: stacked_down(a), a, adapters, base)


def kept_up(adapters: Sequence[Adapter], b: Sequence[Tensor], base: BaseLayer) -> Tensor:
    """Return the factors B of the adapters of a layer, `[n, d_out, rank]`; see `kept_down`."""
    return _kept("up", lambda: stacked_up(b), b, adapters, base)


def _kept(
    slot: str,
    make: Callable[[], Tensor],
    sources: Sequence[Tensor],
    adapters: Sequence[Adapter],
    base: BaseLayer,
) -> Tensor:
    """Return a stack, in evaluation the one of the batch before if it still holds.

    It becomes invalid as in `WeightCache`: after a forward with gradients nothing is kept until the
    mode is set again. The gradients may come from a forward that does not read the stacks: they are
    forgotten as soon as a factor accumulates one, because an optimizer may then write it untracked.
    """
    if adapters[0].training or is_recorded(sources[0]):
        return make()
    cache = base.cache(adapters[0])
    if cache is None:
        return make()
    slots = cache.kept
    if not isinstance(slots, _Slots):
        slots = cache.kept = _Slots()
    if torch.is_grad_enabled() and not slots.learns and any(s.requires_grad for s in sources):
        slots.close()
        slots.clear()
        slots.learns = True
    if torch.is_grad_enabled() or slots.learns:
        return make()
    kept = slots.get(slot)
    if kept is not None and kept.holds(sources):
        return kept.stack
    if kept is not None:
        # another thread may have been here first
        slots.pop(slot, None)
        kept.close()
    stack = make()
    if all(map(_shows_changes, sources)):
        slots[slot] = _Kept(stack, sources, cache)
    return stack


class _Slots(dict[str, "_Kept"]):
    """The stacks of a layer.

    Attributes:
        learns: whether an optimizer step may follow.
    """

    learns = False

    def close(self) -> None:
        """Stop watching their factors."""
        for kept in list(self.values()):
            kept.close()


class _Kept:
    """A stack with the state of its factors."""

    def __init__(self, stack: Tensor, sources: Sequence[Tensor], cache: LayerCache) -> None:
        self.stack, self._stream = stack, _stream(sources[0])
        self._marks = [(source, source._version, source.data_ptr()) for source in sources]
        learned = [source for source in sources if source.requires_grad]
        self._hooks = [
            source.register_post_accumulate_grad_hook(lambda _: cache.forget())
            for source in learned
        ]

    def holds(self, sources: Sequence[Tensor]) -> bool:
        """Return whether it is the stack of these factors, with their present values."""
        marks = self._marks
        if len(sources) != len(marks):
            return False
        for source, (known, version, place) in zip(sources, marks, strict=True):
            if source is not known or source._version != version or source.data_ptr() != place:
                return False
            if source.grad is not None:
                return False
        return self._stream == _stream(sources[0])

    def close(self) -> None:
        """Stop watching the factors."""
        for hook in self._hooks:
            hook.remove()


def _stream(source: Tensor) -> int:
    # another stream may read the stack before it is there
    return torch.cuda.current_stream(source.device).cuda_stream if source.is_cuda else 0


def _shows_changes(source: Tensor) -> bool:
    """Return whether each change of a factor will be noticed."""
    return not (
        type(source) not in PLAIN
        or not source.is_leaf
        or source._base is not None
        or source.is_inference()
        or source.grad is not None
        or is_shared(source)
    )
