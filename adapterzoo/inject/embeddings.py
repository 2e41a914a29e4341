"""Embedding modules, whose output the tokens of adapters join.

Such a module is called with the model's own tokens, so that their positions, types and norms do not
change; its output gets room for the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from adapterzoo.composition import Joined, evaluate
from adapterzoo.errors import StateError

from .adapted import Adapted, acting
from .views import LayerCall


class AdaptedEmbeddings(Adapted):
    """Mixed into the class of an embedding module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the model's own tokens, and add the tokens of adapters."""
        link = self._link
        active = link.active
        plan, joined = active.plan, active.call.joined
        site = plan.sites.get(link.path)
        if joined is None or site is None or joined.prompts.joins != "embeddings":
            return super().forward(*args, **kwargs)
        if not joined.adds:
            return super(Adapted, self).forward(*args, **kwargs)
        # the first argument is what layers are told apart by: one that is there
        kwargs = dict(sorted(kwargs.items(), key=lambda item: not isinstance(item[1], Tensor)))
        plain = super(Adapted, self).forward
        base = LayerCall(
            self, functools.partial(_own, plain, joined), args, kwargs, None, active.call
        )
        x = args[0] if args else next(iter(kwargs.values()))
        return base.pack(evaluate(*acting(self, site), x, base, plan.rows))


def _own(plain: Callable[..., Any], joined: Joined, *args: Any, **kwargs: Any) -> Any:
    """Return the module's output for the model's own tokens, with room for the others."""

    def cut(value: Any) -> Any:
        wide = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == joined.length
        return joined.own(value) if wide else value

    if joined.is_laid_out:
        out = plain(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})
    else:
        out = plain(*args, **kwargs)
    y = out[0] if isinstance(out, tuple) else out
    if not isinstance(y, Tensor) or y.dim() != 3:
        raise StateError(
            f"the module that embeds returned {list(getattr(y, 'shape', ())) or type(y).__name__}, "
            f"and tokens join [rows, tokens, d]. Write joins='inputs', or another method."
        )
    if not joined.is_laid_out:
        joined.lay_out(y.shape[0], y.shape[1], None, y.device)
    elif y.shape[1] != joined.length - joined.count:
        raise StateError(
            f"the module that embeds returned {list(y.shape)} for {joined.length - joined.count} "
            f"tokens, so that the places of others are not known. Write joins='inputs'."
        )
    wide = joined.extended(y, 0.0)
    return (wide, *out[1:]) if isinstance(out, tuple) else wide
