"""Activating, disabling and counting in PEFT's words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from adapterzoo.arguments import one_of
from adapterzoo.composition import Stack
from adapterzoo.configs import AdapterConfig
from adapterzoo.errors import ConfigError, SiteError, StateError, listing
from adapterzoo.model import adapters, merging, training
from adapterzoo.model.activation import make_plan, set_active
from adapterzoo.model.sharding import size_of
from adapterzoo.model.state import AdaptedModel, parameters_of

from . import autocast, configs, in_memory

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT = "default"
"""PEFT's name of an adapter without one."""


def add(
    model: AdaptedModel,
    name: str,
    config: Any,
    overwrite_ok: bool,
    active: bool,
    init_data: Any,
    in_float32: bool,
) -> None:
    """Add an adapter with a config of ours or of PEFT; arguments as of `adapters.add`.

    With `in_float32` its parameters are in float32 over layers in half precision.
    """
    autocast.check(in_float32)
    found = configs.read(model, config) if configs.is_peft(config) else None
    made = AdapterConfig.load(config) if found is None else found.config
    if in_float32:
        made = autocast.widened(model, made)
    check = None
    if found is not None and model._is_saved_for_peft:
        check = functools.partial(in_memory.check_savable, model, name)
    adapters.add(model, name, made, overwrite_ok, active, init_data, check=check)
    if found is not None and found.is_frozen:
        for parameter in parameters_of(model, name):
            parameter.requires_grad_(False)


def supports(model: Any, config: Any) -> bool:
    """Return whether `add` takes a config of ours or of PEFT.

    Raises:
        ConfigError: it is none.
    """
    if not configs.is_peft(config):
        return adapters.supports(model, AdapterConfig.load(config))
    try:
        found = configs.read(model, config).config
    except (ConfigError, SiteError):
        return False
    return adapters.supports(model, found)


def either_order(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate `add_adapter`: let it take arguments as PEFT and transformers have them.

    With the config first, as in transformers, the adapter is trained and active afterwards.

    Args:
        function: the method.
    """

    @functools.wraps(function)
    def add_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = cast("Callable[..., T]", function)
        if "peft_config" in kwargs:
            given = kwargs.pop("peft_config")
            kwargs["config"] = one_of(config=kwargs.get("config"), peft_config=given)
        config = kwargs.pop("adapter_config", None)
        if args and configs.is_peft(args[0]):
            config, args = one_of(adapter_config=config, config=args[0]), args[1:]
        if config is None:
            return call(self, *args, **kwargs)
        given = kwargs.pop("adapter_name", None)
        name = one_of(adapter_name=given, name=args[0] if args else None) or DEFAULT
        result = call(self, name, config, *args[1:], **kwargs)
        train(self, name, thaws=not config.inference_mode)
        return result

    return cast("Callable[P, T]", add_adapter)


def also_named(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a method: let some of its arguments have other names too.

    Args:
        **names: the other name → the argument.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def method(*args: P.args, **kwargs: P.kwargs) -> T:
            given: dict[str, Any] = {}
            for name, value in kwargs.items():
                own = names.get(name, name)
                given[own] = one_of(**{own: given.get(own), name: value})
            return function(*args, **cast("Any", given))

        return cast("Callable[P, T]", method)

    return decorated


def train(model: Any, names: str | Sequence[str], thaws: bool = False) -> None:
    """Train only these adapters, in the mode that the model has.

    Args:
        model: with adapters.
        names: one, or several that act as a stack.
        thaws: whether a frozen one is trained too; otherwise it is only activated.
    """
    setup = names if isinstance(names, str) else Stack(*names)
    was_training = model.training
    each = [names] if isinstance(names, str) else names
    frozen = [n for n in each if not any(p.requires_grad for p in parameters_of(model, n))]
    training.train_adapter(model, setup, False)
    for name in () if thaws else frozen:
        _require_grad(model, name, False)
    model.train(was_training)


def activate(model: AdaptedModel, names: str | Sequence[str], frozen: bool) -> None:
    """Activate adapters; only their parameters get gradients, or none.

    Args:
        model: with adapters.
        names: one, or several that act as a stack.
        frozen: whether theirs get none either.
    """
    each = list_of(model, names)
    set_active(model, each[0] if len(each) == 1 else Stack(*each))
    for name in model._adapter_state.records:
        _require_grad(model, name, name in each and not frozen)


def loaded(model: Any, name: str, is_trainable: bool) -> None:
    """Let an adapter that was loaded be trained, or not."""
    if is_trainable and len(model._adapter_state.records) == 1:
        train(model, name, thaws=True)
    else:
        _require_grad(model, name, is_trainable)


def to_merge(model: AdaptedModel, names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of adapters to merge; None: the active ones that are not merged.

    Raises:
        StateError: an adapter of a list is merged already, or none is active.
    """
    return merging.to_merge(model, None) if names is None else tuple(list_of(model, names))


def _require_grad(model: AdaptedModel, name: str, trained: bool) -> None:
    own = [*parameters_of(model, name)]
    own += [p for m in model._head_strategy.modules_with(name) for p in m.parameters()]
    for parameter in own:
        if parameter.is_floating_point():
            parameter.requires_grad_(trained)


def list_of(model: AdaptedModel, names: str | Sequence[str]) -> list[str]:
    """Return names as a list, after checking that there are adapters of these names.

    Raises:
        ConfigError: there is no name.
        UnknownNameError: an adapter is unknown.
    """
    # anything else is looked for as a name, and not found
    listed = isinstance(names, (list, tuple, set, frozenset))
    each: list[Any] = [*dict.fromkeys(names)] if listed else [names]
    if not each:
        raise ConfigError(
            f"no name is given. Adapters: {listing(model._adapter_state.records)}. Write one."
        )
    for name in each:
        model._adapter_state.find(name)
    return each


# --- without adapters ---


@contextmanager
def disabled(model: AdaptedModel) -> Iterator[None]:
    """Use the base model in the calling thread until the context ends."""
    _refuse_merged(model)
    with model._active.entered(make_plan(model, None)):
        yield


def disable(model: AdaptedModel) -> None:
    """Deactivate all adapters, in all threads, until `enable`.

    Raises:
        StateError: the model has none.
    """
    _refuse_merged(model)
    state, plan = model._adapter_state, model._active.default.plan
    if not state.records:
        raise StateError("the model has no adapter. Write add_adapter('a') first.")
    if plan.setup is not None:
        state.disabled = plan.setup, plan.skip_layers
        set_active(model, None)


def enable(model: AdaptedModel) -> None:
    """Activate what `disable` deactivated; nothing changes if something is active.

    Raises:
        StateError: nothing was disabled.
    """
    state = model._adapter_state
    if model._active.default.plan.setup is not None:
        return
    if state.disabled is None or {*state.disabled[0].flatten()} - state.records.keys():
        raise StateError(
            f"no adapter was disabled, and none is active. Write set_adapter('a'); adapters: "
            f"{listing(state.records)}."
        )
    set_active(model, *state.disabled)
    state.disabled = None


def _refuse_merged(model: AdaptedModel) -> None:
    if merged := model._adapter_state.merged:
        raise StateError(
            f"{listing(merged)} acts through the base weights, as it is merged. Write "
            f"unmerge_adapter() first."
        )


# --- counts ---


def counts(model: Any) -> tuple[int, int]:
    """Return the number of trainable parameters and of all; a quantized weight counts as before."""
    own = [(size_of(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in own if trained), sum(n for n, _ in own)
