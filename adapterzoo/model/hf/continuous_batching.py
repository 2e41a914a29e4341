"""transformers' continuous batching: refuse uses with which its results would be wrong.

A manager runs the model in its own thread, packs the requests of a step into one row, and finds
cache blocks by their tokens alone. So all of its requests use the adapters that are active in all
threads, and these must not change while it has a cache. Everything else is refused.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple, cast

from adapterzoo.caches import values_kept
from adapterzoo.composition import ActiveHeads, Composition
from adapterzoo.contracts import Adapter
from adapterzoo.errors import StateError, naming
from adapterzoo.model.state import AdaptedModel, AdapterRecord, modules_of

# managers → what was active when they were made
_managers: weakref.WeakKeyDictionary[Any, _Active] = weakref.WeakKeyDictionary()


class _Active(NamedTuple):
    """What is active for a manager's requests; its cache is wrong for anything else."""

    setup: Composition | None
    heads: ActiveHeads
    skip_layers: tuple[int, ...]
    merged: tuple[str, ...]
    # an adapter that replaced another of its name has another record
    records: dict[str, AdapterRecord]


def _active_now(model: AdaptedModel) -> _Active:
    plan, state = model._active.default.plan, model._adapter_state
    names = {*(() if plan.setup is None else plan.setup.flatten()), *state.merged}
    records = {name: state.records[name] for name in names}
    return _Active(plan.setup, plan.heads, plan.skip_layers, state.merged, records)


def watch(model: AdaptedModel, manager: Any) -> None:
    """Let a manager refuse requests when other adapters are active than when it was made.

    Raises:
        StateError: the manager was kept from an earlier call, with the cache of other adapters.
    """
    if manager in _managers:
        _refuse_other_cache(manager, model)
        return
    _managers[manager] = _active_now(model)
    manager.add_request = functools.partial(
        _add_request, weakref.ref(manager), weakref.ref(cast("Any", model))
    )
    # the target of the manager's thread
    manager._run_generation_loop = functools.partial(_run, weakref.ref(manager))


def refuse_while_batching(model: AdaptedModel, name: str | None = None) -> None:
    """Refuse to change what a running manager uses.

    Args:
        model: of the managers.
        name: of the adapter that changes; None: the active composition changes.

    Raises:
        StateError: a manager runs with that adapter.
    """
    for manager, active in list(_managers.items()):
        affected = name is None or name in active.records
        if manager.model is model and manager.is_running() and affected:
            raise StateError(
                f"a manager of continuous batching runs, with {active.setup!r}, and its cache "
                f"is of that. Write manager.stop() and manager.destroy(), then this, then "
                f"init_continuous_batching() again."
            )


def refuse_other_than_default(model: AdaptedModel) -> None:
    """Refuse an active composition that a manager's thread cannot use.

    Raises:
        StateError: an `AdapterSetup` is active here, or the composition divides the batch, adds
            tokens to it or reads the prompt of each sequence.
    """
    active = model._active
    held = active.held
    if held is not None and held.rows is not None and held.rows.entered:
        refuse_names(adapter_names=True)
    if held is not None:
        raise StateError(
            f"an AdapterSetup holds, with {held.setup!r}, and continuous batching runs the model "
            f"in a thread of its own, which does not see it. Leave the block and write "
            f"set_active_adapters({held.setup!r}), or write generate(…) in the block."
        )
    plan = active.default.plan
    if plan.rows is not None:
        raise StateError(
            f"{plan.setup!r} is active and divides the batch, and continuous batching has "
            f"requests in place of rows. Write set_active_adapters('a'), or generate(…)."
        )
    if plan.prompts is not None:
        raise StateError(
            f"{plan.setup!r} adds tokens to each sequence, and continuous batching packs requests "
            f"into one. Write generate(…), or set_active_adapters('a') with another method."
        )
    for name in () if plan.setup is None else plan.setup.flatten():
        parts = (part for _, adapter in modules_of(model, name) for part in adapter.modules())
        if any(isinstance(part, Adapter) and part.reads_prompt for part in parts):
            raise StateError(
                f"{name!r} reads the prompt of each sequence (a gate, the positions that it edits, "
                f"or alora_invocation_tokens), and continuous batching packs requests into a row. "
                f"Write generate(…), or set_active_adapters('a') with another adapter."
            )


def refuse_names(**given: Any) -> None:
    """Refuse `adapter_names` and `task_ids`, which transformers would ignore.

    Raises:
        StateError: one is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise StateError(
                f"{name}=…: continuous batching has requests in place of rows, and uses the "
                f"active adapters for all of them. Write set_active_adapters('a') and one call "
                f"for each adapter, or generate(…, {name}=…) without it."
            )


def _refuse_other_cache(manager: Any, model: AdaptedModel) -> None:
    made, now = _managers[manager], _active_now(model)
    if made != now:
        raise StateError(
            f"the manager was made with {made.setup!r} active and its cache is of that; now "
            f"{now.setup!r} is active, or its adapters or heads have changed. Write "
            f"manager.destroy(), or model.destroy_cached_continuous_batching_manager() where it "
            f"was kept, and make a new one."
        )


def _run(manager: weakref.ref[Any], *args: Any, **kwargs: Any) -> Any:
    """Run the loop of a manager; values computed from weights are kept meanwhile."""
    of = cast("Any", manager())
    with values_kept():
        return type(of)._run_generation_loop(of, *args, **kwargs)


def _add_request(
    manager: weakref.ref[Any], model: weakref.ref[Any], *args: Any, **kwargs: Any
) -> Any:
    # the manager that is called keeps itself and its model alive
    of, called = cast("Any", manager()), cast("Any", model())
    rows = {name: kwargs.pop(name, None) for name in ("adapter_names", "task_ids")}
    with naming("add_request()"):
        refuse_names(**rows)
        refuse_other_than_default(called)
        _refuse_other_cache(of, called)
    return type(of).add_request(of, *args, **kwargs)
