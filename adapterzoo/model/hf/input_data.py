"""Initial values from data: collecting the inputs of a base model's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.contracts import InputPlan, InputStatistics
from adapterzoo.errors import ConfigError, listing
from adapterzoo.inject.building import layer_at
from adapterzoo.model.setup import AdapterSetup
from adapterzoo.model.state import AdaptedModel

_PASSES, _IGNORED = 100, -100

Collected = Mapping[str, InputStatistics]


def fitted(
    model: AdaptedModel, config: AdapterConfig, data: Iterable[Mapping[str, Any]] | None
) -> tuple[AdapterConfig, Collected]:
    """Return the config with what it takes from the inputs of the layers, and these.

    Args:
        model: with adapters; the base model alone is called, in evaluation mode.
        config: of a new adapter.
        data: batches, each with the arguments of a call.

    Raises:
        ConfigError: initial values need data and there are none, or too few; or there are some,
            and nothing needs them.
    """
    plans = [member.input_plan(model.anatomy) for member in config.members]
    plan = next((p for p in plans if p is not None), None)
    if plan is None:
        if data is not None:
            raise ConfigError(
                f"init_data is given, and {config!r} does not need any. Choose initial values that "
                f"do, or leave init_data out."
            )
        return config, {}
    if isinstance(config, ConfigUnion):
        raise ConfigError(
            f"{config!r}: initial values from data are for a config alone, not for one of a union. "
            f"Leave init_weights out, or add its members under names of their own."
        )
    if data is None:
        raise ConfigError(
            f"{config!r}: its initial values come from data, and there are none. Write "
            f"init_data=batches beside the config, where a batch has the arguments of a call."
        )
    training = model.training
    model.eval()
    try:
        with AdapterSetup(None), torch.no_grad():
            _collect(model, plan, data)
    finally:
        model.train(training)
    return config.replace(**plan.changes()), plan.watched


def _collect(model: AdaptedModel, plan: InputPlan, data: Iterable[Mapping[str, Any]]) -> None:
    """Pass the data until no layer needs more of them, and at least once."""
    for number in range(_PASSES):
        passed = number > 0
        count = 0
        for batch in data:
            lacking = plan.lacking(passed)
            if not lacking:
                return
            count += 1
            _pass(model, {path: plan.watched[path] for path in lacking}, batch, plan)
        if not count:
            raise ConfigError(
                "init_data is empty, or has no more batches: it is read several times. Write a "
                "list of batches or a DataLoader."
            )
        if not plan.lacking(passed=True):
            return
    lacking = sorted(plan.lacking(passed=True))
    raise ConfigError(
        f"after {_PASSES} passes the inputs of {listing(lacking)} have not converged, or there "
        f"were none. Write batches in init_data that reach these layers, or larger ones."
    )


def _pass(
    model: AdaptedModel, watched: Collected, batch: Mapping[str, Any], plan: InputPlan
) -> None:
    """Call the model with a batch, and add the inputs of the watched layers."""
    device = next(model.parameters()).device
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    kept = _kept(given, plan.skips_unlabeled)
    with ExitStack() as stack:
        for path, own in watched.items():
            hook = layer_at(model._backbone, path).register_forward_pre_hook(_adding(own, kept))
            stack.callback(hook.remove)
        cast("Any", model)(**given)


def _adding(own: InputStatistics, kept: Tensor | None) -> Callable[[Any, tuple[Any, ...]], None]:
    def add(_layer: Any, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        # other inputs than the tokens of the batch, such as those of an encoder, are all read
        fits = kept is not None and x.shape[:-1] == kept.shape
        own.update(x[kept.to(x.device)] if kept is not None and fits else x.flatten(0, -2))

    return add


def _kept(batch: Mapping[str, Any], labeled: bool) -> Tensor | None:
    """Return which tokens of a batch are read `[rows, tokens]`; None: all."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    kept = None if mask is None or mask.dim() != 2 else mask.bool()
    if labeled and isinstance(labels, Tensor) and labels.dim() == 2:
        own = labels != _IGNORED
        return own if kept is None or kept.shape != own.shape else kept & own
    return kept
