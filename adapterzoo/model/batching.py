"""transformers' continuous batching: what its thread and its prefix cache cannot tell apart.

A manager runs the model in a thread of its own, packs the requests of a step into one row, and
finds cache blocks by their tokens alone. So the adapters that are active for all threads answer all
of its requests, and stay the same for as long as it has a cache. Everything else is refused.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, cast

from adapterzoo.errors import StateError

if TYPE_CHECKING:
    from .adapters import AdaptersMixin

# managers to what was active when they were made
_managers: weakref.WeakKeyDictionary[Any, _Active] = weakref.WeakKeyDictionary()


class _Active:
    """What answers the requests of a manager."""

    def __init__(self, model: AdaptersMixin) -> None:
        plan, zoo = model._active.default.plan, model._adapter_state
        names = () if plan.setup is None else plan.setup.flatten()
        self.setup = plan.setup
        self.names = {*names, *zoo.merged}
        self._facts = plan.setup, plan.heads, plan.skip_layers, zoo.merged
        # an adapter that has replaced one of its name is another one
        self._installed = [zoo.records[name] for name in sorted(self.names)]

    def differs(self, other: _Active) -> bool:
        """Whether a cache of the one is wrong for the other."""
        pairs = zip(self._installed, other._installed, strict=False)
        return self._facts != other._facts or any(a is not b for a, b in pairs)


class BatchesContinuously:
    """`generate_batch` and its managers; stands before transformers' own in a class's bases."""

    def generate_batch(self, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        """As `generate_batch` of transformers, with the adapters that are active for all threads.

        Args:
            *args: as `generate_batch` of transformers takes them.
            adapter_names: not supported; it is refused, where transformers would ignore it.
            **kwargs: as `generate_batch` of transformers takes them.

        Raises:
            StateError: there are names, an `AdapterSetup` holds, the active composition divides
                the batch, or a manager that was kept has the cache of other adapters.
        """
        _refuse_names(adapter_names, "generate_batch")
        refuse_other_than_default(cast("Any", self), "generate_batch()")
        return cast("Any", super()).generate_batch(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As `init_continuous_batching` of transformers; the manager answers with these adapters.

        Args:
            *args: as transformers takes them.
            **kwargs: the same.

        Raises:
            StateError: as `generate_batch`.
        """
        call, model = "init_continuous_batching()", cast("Any", self)
        refuse_other_than_default(model, call)
        manager = cast("Any", super()).init_continuous_batching(*args, **kwargs)
        if manager in _managers:
            # it was kept for the next call, with its cache
            _refuse_other_cache(manager, model, call)
            return manager
        _managers[manager] = _Active(model)
        manager.add_request = functools.partial(
            _add_request, weakref.ref(manager), weakref.ref(model)
        )
        return manager


def refuse_while_batching(model: AdaptersMixin, call: str, name: str | None = None) -> None:
    """Refuse to change what a manager's thread runs.

    Args:
        model: whose managers are looked at.
        call: what the user wrote, for messages.
        name: of the adapter that changes; None: what is active changes.

    Raises:
        StateError: a manager runs, with that adapter.
    """
    for manager, active in list(_managers.items()):
        affected = name is None or name in active.names
        if manager.model is model and manager.is_running() and affected:
            raise StateError(
                f"{call}: a manager of continuous batching runs, with {active.setup!r}, and its "
                f"cache is of that. Write manager.stop() and manager.destroy(), then this, then "
                f"init_continuous_batching() again."
            )


def refuse_other_than_default(model: AdaptersMixin, call: str) -> None:
    """Refuse what the thread of a manager would not see.

    Args:
        model: that is called.
        call: what the user wrote, for messages.

    Raises:
        StateError: something else than the default holds here, or it divides the batch.
    """
    selection = model._active
    held = selection.held
    if held is not None and held.rows is not None and held.rows.entered:
        _refuse_names(True, "generate")
    if held is not None:
        raise StateError(
            f"{call}: an AdapterSetup holds, with {held.setup!r}, and continuous batching runs the "
            f"model in a thread of its own, which does not see it. Leave the block and write "
            f"set_active_adapters({held.setup!r}), or write generate(…) in the block."
        )
    plan = selection.default.plan
    if plan.rows is not None:
        raise StateError(
            f"{call}: {plan.setup!r} is active and divides the batch, and continuous batching has "
            f"requests in place of rows. Write set_active_adapters('a'), or generate(…)."
        )


def _refuse_names(adapter_names: Any, call: str) -> None:
    if adapter_names is not None:
        raise StateError(
            f"{call}(adapter_names=…): continuous batching has requests in place of rows, and "
            f"answers all of them with the active adapters. Write set_active_adapters('a') and "
            f"one call for each adapter, or generate(…, adapter_names=…) without it."
        )


def _refuse_other_cache(manager: Any, model: AdaptersMixin, call: str) -> None:
    made, now = _managers[manager], _Active(model)
    if made.differs(now):
        raise StateError(
            f"{call}: the manager was made with {made.setup!r} active and its cache is of that; "
            f"now {now.setup!r} is active, or its adapters or heads have changed. Write "
            f"manager.destroy(), or model.destroy_cached_continuous_batching_manager() where it "
            f"was kept, and make a new one."
        )


def _add_request(
    manager: weakref.ref[Any], model: weakref.ref[Any], *args: Any, **kwargs: Any
) -> Any:
    # the manager that is called keeps itself and its model alive
    of, called = cast("Any", manager()), cast("Any", model())
    _refuse_names(kwargs.pop("adapter_names", None), "add_request")
    refuse_other_than_default(called, "add_request()")
    _refuse_other_cache(of, called, "add_request()")
    return type(of).add_request(of, *args, **kwargs)
