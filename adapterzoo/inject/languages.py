"""Modules that end in language adapters: X-MOD's feed-forward part."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import Tensor

from adapterzoo.composition import evaluate

from .adapted import Adapted, acting
from .views import LayerCall


class AdaptedLanguages(Adapted):
    """Mixed into the class of a module whose language adapters other adapters replace."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; adapters act in its last step."""
        return super(Adapted, self).forward(*args, **kwargs)

    def lang_adapter(self, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the stream after the active adapters, in rows without them after their language's.

        Args:
            lang_ids: number of each row's language.
            hidden_states: the stream, `[rows, tokens, d_model]`.
        """
        link = self._link
        active = link.active
        plain = functools.partial(super().lang_adapter, lang_ids)  # type: ignore[misc]
        site = active.plan.sites.get(link.path)
        if site is None:
            return cast("Tensor", plain(hidden_states))
        residual = active.call.captures.pop(link.path, None)
        base = LayerCall(self, plain, (hidden_states,), {}, residual, active.call)
        return evaluate(*acting(self, site), hidden_states, base, active.plan.rows)
