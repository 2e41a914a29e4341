"""Guards: refuse what would be wrong while others run a model or call a part of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, cast

from torch import nn

from adapterzoo.anatomy import unwrapped
from adapterzoo.caches import values_kept
from adapterzoo.composition import Composition
from adapterzoo.composition.rows import ActiveHeads
from adapterzoo.contracts import Adapter
from adapterzoo.errors import StateError, naming
from adapterzoo.model.state import AdaptedModel, AdapterRecord, modules_of

# --- A running Trainer: its optimizer holds the tensors that it was made with ---


# whether this thread changes the model for a moment
_UNDONE: ContextVar[bool] = ContextVar("_UNDONE", default=False)


@contextmanager
def soon_undone() -> Iterator[None]:
    """Return a context for a change that is undone before a running Trainer takes a step."""
    token = _UNDONE.set(True)
    try:
        yield
    finally:
        _UNDONE.reset(token)


def refuse_trained(model: Any, name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to change what the optimizer of a running Trainer holds.

    Raises:
        StateError: it holds parameters of the adapter, fusion or head of this name.
    """
    held = None if _UNDONE.get() else _optimized(model)
    if held and any(id(p) in held for p in parameters):
        raise StateError(f"a running Trainer trains {name!r}. Write it after trainer.train().")


def refuse_untrained(model: Any, setup: object, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to train what the optimizer of a running Trainer does not hold.

    Raises:
        StateError: it does not hold all parameters.
    """
    if is_untrained(model, parameters):
        raise StateError(f"a running Trainer leaves out {setup!r}. Write it after trainer.train().")


def is_untrained(model: Any, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a Trainer is running whose optimizer does not hold all parameters."""
    held = _optimized(model)
    return held is not None and any(id(p) not in held for p in parameters)


def _optimized(model: Any) -> set[int] | None:
    """Return the ids of the parameters in the optimizer of the Trainer that is training the model.

    None where no Trainer runs. A Trainer makes its optimizer once, before the first step.
    """
    trainers: Any = sys.modules.get("transformers.trainer")
    frame = None if trainers is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "train":
            trainer = frame.f_locals.get("self")
            # it will train the model further
            if (
                isinstance(trainer, trainers.Trainer)
                and unwrapped(trainer.model) is model
                and trainer.optimizer is not None
                and not trainer.control.should_training_stop
            ):
                return {id(p) for each in trainer.optimizer.param_groups for p in each["params"]}
        frame = frame.f_back
    return None


# --- Guards of the models inside a model with adapters, such as its encoder ---

# arguments of `forward` that an inner model would take as `**kwargs`
_OF_WHOLE = (
    "adapter_names", "task_ids", "output_adapter_gating_scores", "output_adapter_fusion_attentions",
)  # fmt: skip


class _Guard:
    """A forward pre-hook of an inner model.

    Attributes:
        active: the state of the model with adapters.
    """

    def __init__(self, active: object) -> None:
        self.active = active

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for name in _OF_WHOLE:
            given = kwargs.get(name)
            if given is not None and given is not False:
                raise StateError(
                    f"{type(module).__name__}.forward({name}=…): a part of the model ignores this. "
                    f"Write model(…, {name}=…)."
                )


def guard_of(stack: nn.Module) -> _Guard | None:
    """Return the guard of an inner model; None if it has none."""
    hooks: Mapping[int, Any] = stack._forward_pre_hooks
    return next((hook for hook in hooks.values() if isinstance(hook, _Guard)), None)


def put_guard(stack: nn.Module, active: object) -> None:
    """Guard an inner model, unless it is guarded.

    Args:
        stack: the inner model.
        active: the state of the model with adapters.
    """
    if guard_of(stack) is None:
        stack.register_forward_pre_hook(_Guard(active), with_kwargs=True)


def take_guard(stack: nn.Module) -> None:
    """Remove the guard of an inner model."""
    hooks: dict[int, Any] = stack._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Guard)]:
        del hooks[key], stack._forward_pre_hooks_with_kwargs[key]


# --- transformers' continuous batching ---

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
    # the manager that is called keeps itself and its model alive
    to_manager: Any = weakref.ref(manager)
    to_model: Any = weakref.ref(cast("Any", model))

    def add_request(
        *args: Any, adapter_names: Any = None, task_ids: Any = None, **kwargs: Any
    ) -> Any:
        own = to_manager()
        with naming("add_request()"):
            refuse_names(adapter_names=adapter_names, task_ids=task_ids)
            refuse_other_than_default(to_model())
            _refuse_other_cache(own, to_model())
        return type(own).add_request(own, *args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        own = to_manager()
        with values_kept():
            return type(own)._run_generation_loop(own, *args, **kwargs)

    manager.add_request = add_request
    # the target of the manager's thread
    manager._run_generation_loop = run


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
                f"continuous batching runs with {active.setup!r}, and so does its cache. Write "
                "manager.stop() and manager.destroy() first."
            )


def refuse_other_than_default(model: AdaptedModel) -> None:
    """Refuse an active composition that a manager's thread cannot use.

    Raises:
        StateError: an `AdapterSetup` is active here, or the composition divides the batch, adds
            tokens to it or reads the prompt of each sequence.
    """
    active = model._active
    held = active.local_plan
    if held is not None and held.rows is not None and held.rows.entered:
        refuse_names(adapter_names=True)
    if held is not None:
        raise StateError(
            f"the thread that runs the model does not see an AdapterSetup. Leave the block and "
            f"write set_active_adapters({held.setup!r})."
        )
    plan = active.default.plan
    names = () if plan.setup is None else plan.setup.flatten()
    parts = (p for n in names for _, adapter in modules_of(model, n) for p in adapter.modules())
    reads_prompt = any(isinstance(part, Adapter) and part.reads_prompt for part in parts)
    if plan.rows is not None or plan.prompts is not None or reads_prompt:
        raise StateError(
            f"continuous batching packs requests into one sequence: {plan.setup!r}, which divides "
            "the batch, adds tokens or reads the prompt, would be wrong. Write generate(…)."
        )


def refuse_names(**given: Any) -> None:
    """Refuse `adapter_names` and `task_ids`, which transformers would ignore.

    Raises:
        StateError: one is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise StateError(
                f"{name}=…: continuous batching uses the active adapters for all requests. Write "
                "set_active_adapters('a')."
            )


def _refuse_other_cache(manager: Any, model: AdaptedModel) -> None:
    made, now = _managers[manager], _active_now(model)
    if made != now:
        raise StateError(
            f"the manager was made with {made.setup!r} active; now {now.setup!r} is, or it has "
            "changed. Write model.destroy_cached_continuous_batching_manager()."
        )
