"""Initial values from data: inputs of a base model's layers, or their original weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from adapterzoo.anatomy import Site
from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.contracts import InputPlan, InputStatistics, LayerData, WeightPlan
from adapterzoo.errors import ConfigError, listing
from adapterzoo.inject.building import layer_at
from adapterzoo.model.setup import AdapterSetup
from adapterzoo.model.state import AdaptedModel

from .original_weights import Source, collected

_PASSES, _IGNORED = 100, -100

InitData: TypeAlias = Iterable[Mapping[str, Any]] | Source | None
"""Batches, each with the arguments of a call; or where the weights before quantization are."""
Collected: TypeAlias = Mapping[str, LayerData]
"""Path of a layer → what its initial values take from the data."""


def fitted(
    model: AdaptedModel, config: AdapterConfig, data: InitData
) -> tuple[AdapterConfig, Collected]:
    """Return the config with what it takes from the data, and what each layer takes from them.

    Args:
        model: with adapters; the base model alone is called, in evaluation mode.
        config: of a new adapter.
        data: as the initial values of the config need them.

    Raises:
        ConfigError: initial values need data and there are none, or too few; or there are some,
            and nothing needs them.
    """
    plans = [member.init_plan(model.anatomy) for member in config.members]
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
    if isinstance(plan, WeightPlan):
        return config, collected(model, plan, data)
    if isinstance(data, (str, Mapping)) or not isinstance(data, Iterable | None):
        raise ConfigError(
            f"init_data is a {type(data).__name__}; it is a list of batches, each with the "
            f"arguments of a call. Write init_data=[batch]."
        )
    if data is None:
        raise ConfigError(
            f"{config!r}: its initial values come from data, and there are none. Write "
            f"init_data=batches beside the config, where a batch has the arguments of a call."
        )
    batches = cast("Iterable[Mapping[str, Any]]", data)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with AdapterSetup(None), torch.no_grad():
            _collect(model, plan, batches)
    finally:
        for module, training in modes.items():
            module.training = training
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
            if not isinstance(batch, Mapping):
                raise ConfigError(
                    f"a batch of init_data is a {type(batch).__name__}, and it is a dict with the "
                    f"arguments of a call. Write {{'input_ids': batch}}."
                )
            _pass(model, {path: plan.watched[path] for path in lacking}, batch, plan)
        if not count:
            raise ConfigError(
                "init_data is empty, or has no more batches: it is read several times. Write a "
                "list of batches or a DataLoader."
            )
        if not plan.lacking(passed=True):
            return
        plan.check()
    left = sorted(plan.lacking(passed=True))
    raise ConfigError(
        f"after {_PASSES} passes the inputs of {listing(left)} have not converged, or there "
        f"were none. Write batches in init_data that reach these layers, or larger ones."
    )


def _pass(
    model: AdaptedModel,
    watched: Mapping[str, InputStatistics],
    batch: Mapping[str, Any],
    plan: InputPlan,
) -> None:
    """Call the model with a batch, and add the inputs of the watched layers."""
    device = next(model.parameters()).device
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    kept = _kept(given, plan.skips_unlabeled, model.config.is_encoder_decoder)
    sites = {site.path: site for site in model.anatomy}
    with ExitStack() as stack:
        for path, own in watched.items():
            mask = kept[_reads_decoder(sites[path])]
            hook = layer_at(model._backbone, path).register_forward_pre_hook(
                _adding(path, own, mask)
            )
            stack.callback(hook.remove)
        cast("Any", model)(**given)


def _adding(
    path: str, own: InputStatistics, kept: Tensor | None
) -> Callable[[Any, tuple[Any, ...]], None]:
    def add(_layer: Any, args: tuple[Any, ...]) -> None:
        x: Tensor = args[0]
        # other inputs than the tokens of the batch, such as those of an encoder, are all read
        fits = kept is not None and x.shape[:-1] == kept.shape
        try:
            own.update(x[kept.to(x.device)] if kept is not None and fits else x.flatten(0, -2))
        except ConfigError as error:
            raise ConfigError(f"at {path!r}: {error}") from error

    return add


def _reads_decoder(site: Site) -> bool:
    """Return whether a layer reads the stream of a decoder with an encoder."""
    from_encoder = site.cross and site.role in ("key", "value")
    return "decoder" in site.path.split(".") and not from_encoder


def _kept(
    batch: Mapping[str, Any], labeled: bool, has_decoder: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens are read `[rows, tokens]`: of the input, and of a decoder; None: all."""
    own = _mask(batch.get("attention_mask"))
    labels = batch.get("labels") if labeled else None
    known = labels != _IGNORED if isinstance(labels, Tensor) and labels.dim() == 2 else None
    if has_decoder:
        return own, known if known is not None else _mask(batch.get("decoder_attention_mask"))
    tokens = batch.get("input_ids")
    # labels of tokens, not of several classes
    if known is not None and isinstance(tokens, Tensor) and known.shape == tokens.shape:
        own = known if own is None else own & known
    return own, own


def _mask(value: object) -> Tensor | None:
    return value.bool() if isinstance(value, Tensor) and value.dim() == 2 else None
