"""Encoders and decoders whose calls adapters read: their arguments are recorded while they run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from adapterzoo.call import RecordedCall
from adapterzoo.runtime import ActiveState, Frame

from .adapted import Adapted
from .containers import shared_of
from .joining import check_called, entered, ids_in, join, places_in
from .positions import NUMBERS, counted


class AdaptedStack(Adapted):
    """Mixed into the class of an encoder or decoder whose calls adapters read."""

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return a forward with the original signature, which `generate` inspects."""

        @functools.wraps(plain.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return AdaptedStack.forward(self, *args, **kwargs)

        return {"forward": forward}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; its arguments are recorded meanwhile."""
        link = self._link
        if link.path not in link.active.plan.stacks:
            return super().forward(*args, **kwargs)
        call = recorded(self, self._positions, link.active, link.path, args, kwargs)
        with call as (values, named):
            return super().forward(*values, **named)


@contextmanager
def recorded(
    module: nn.Module,
    positions: tuple[str, ...],
    active: ActiveState,
    path: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    with_head: bool = False,
) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Record the arguments of an encoder or decoder for its adapters while it runs.

    The outermost of several such calls makes room for the tokens that adapters add.

    Args:
        module: that is called.
        positions: names of the arguments of its forward that can be given by position.
        active: of the model.
        path: of the module below the base model.
        args: of the call.
        kwargs: of the call.
        with_head: whether the module is a model around the one at the path.

    Yields:
        The arguments to call it with.
    """
    context, plan = active.call, active.plan
    given = {**dict(zip(positions, args, strict=False)), **kwargs}
    joined = context.joined
    is_first = plan.prompts is not None and joined is None
    if plan.prompts is not None and joined is None:
        joined, changed = join(plan.prompts, plan.rows, path, given, context.generation)
        if joined is not None:
            args, kwargs, given = (), changed, changed
    shared = None if path else functools.partial(shared_of, module)
    places = None if joined is None else places_in(joined, path)
    ids = ids_in(given, joined, context)
    outer = context.stacks[-1].call if context.stacks else None
    call = RecordedCall(path, given, context.generation, places, ids, outer)
    context.stacks.append(Frame(call, shared, module, joined))
    try:
        if joined is not None and not with_head and given.get("inputs_embeds") is not None:
            given = entered(module, path, joined, context, given)
            args, kwargs = (), given
        if path in plan.counted and not with_head and NUMBERS in positions:
            args, kwargs = (), counted(given, call.outermost)
        yield args, kwargs
        if is_first and joined is not None:
            check_called(joined)
    finally:
        context.stacks.pop()
        if call.generation is not None:
            call.generation.new = None
