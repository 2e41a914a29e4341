"""Guards: refuse what would be wrong while others run a model or call a part of it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import nn

from adapterzoo.anatomy import unwrapped
from adapterzoo.errors import StateError, listing

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
                    f"{name}=…: a part of the model ignores this. Write model(…, {name}=…)."
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


# --- transformers' continuous batching: requests in flight keep their adapters ---


MANAGERS: weakref.WeakSet[Any] = weakref.WeakSet()
"""The managers, of `batching.BatchingManager`, of models with adapters.

Changes of a model wait for their requests, or are refused where they would disturb them.
"""


def _managers_of(model: object) -> list[Any]:
    return [manager for manager in list(MANAGERS) if manager.model is model]


def refuse_while_batching(model: object) -> None:
    """Refuse to change the base weights of a model whose requests run, and whose cache has them.

    Raises:
        StateError: a manager of the model runs.
    """
    if any(manager.is_running() for manager in _managers_of(model)):
        raise StateError(
            "continuous batching runs with the base weights, and so does its cache. Write "
            "manager.stop() and manager.destroy() first."
        )


def refuse_in_flight(model: object, name: str) -> None:
    """Refuse to change an adapter or fusion in place that requests in flight use.

    Raises:
        StateError: a request of a manager uses it.
    """
    count = sum(len(manager.requests.using([name])) for manager in _managers_of(model))
    if count:
        raise StateError(
            f"{count} requests of continuous batching use {name!r}. Wait for their results, or "
            "write manager.cancel_request(…)."
        )


@contextmanager
def paused(model: object) -> Iterator[None]:
    """Return a context in which no manager runs a step of the model; requests in flight go on."""
    with ExitStack() as pauses:
        for manager in _managers_of(model):
            # a loop that has ended runs no step
            with suppress(RuntimeError):
                pauses.enter_context(manager.pause())
        yield


@contextmanager
def unused(model: object, names: Collection[str]) -> Iterator[None]:
    """Return a context in which no request uses the adapters, and no manager runs a step.

    It starts when the requests that use them have ended; new ones are refused meanwhile.

    Args:
        model: of the managers.
        names: of adapters that are removed.

    Raises:
        StateError: a request would never end: its manager is paused here, or does not run.
    """
    with ExitStack() as undo:
        for manager in _managers_of(model):
            requests = manager.requests
            with requests.changed:
                if using := requests.using(names):
                    _refuse_endless(manager, names, len(using))
                requests.leaving.update(names)
                undo.callback(requests.leaving.subtract, names)
                while requests.using(names):
                    requests.changed.wait()
                requests.forget(names)
        undo.enter_context(paused(model))
        yield


def _refuse_endless(manager: Any, names: Collection[str], count: int) -> None:
    """Refuse to wait for requests that do not go on."""
    what = f"{count} requests of continuous batching use {listing(names)}, and"
    if not manager.is_running():
        raise StateError(f"{what} their manager does not run. Write manager.start() first.")
    if manager.background_thread_status.is_pause_requested(local=True):
        raise StateError(f"{what} their manager is paused here. Leave the pause first.")
