"""Prefixes in attention modules: those that use transformers' interface, and others.

An attention module looks up its function by the name in its config and passes itself to it. While
a prefix is active, the module reads a view of its config that names our function, which puts the
prefix before the keys and values and calls the function in the config. Neither the config nor the
masks of the model change. `inline` handles modules that compute their scores themselves.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapterzoo.anatomy.attentions import is_inline
from adapterzoo.anatomy.positions import RELATIVE_BIAS
from adapterzoo.composition import prefix_of
from adapterzoo.contracts import Prefix
from adapterzoo.errors import CompositionError, StateError
from adapterzoo.masks import first_attended

from .adapted import Adapted, acting, plain_class
from .inline import causal_mask, extended, fit, with_prefix
from .views import LayerCall

# of the function below, in transformers' table
_NAME = "adapterzoo_prefix"
_SUPPORTED = ("eager", "sdpa")


class _Config:
    """The view of a config that an attention module with a prefix reads."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def _attn_implementation(self) -> str:
        return _NAME

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class AdaptedAttention(Adapted):
    """Mixed into the class of an attention module that has prefixes."""

    # whether the module computes its scores itself
    _is_inline: bool = False

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return a `config` attribute for modules that look up their function by its name."""
        if is_inline(plain):
            return {"_is_inline": True}
        return {"config": property(_read_config, _write_config)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the prefix before its keys and values."""
        link = self._link
        active = link.active
        plan = active.plan
        site = plan.sites.get(link.path)
        if site is None:
            return super().forward(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        step, adapters = acting(self, site)
        base = LayerCall(self, super(Adapted, self).forward, args, kwargs, context=active.call)
        forward = super(Adapted, self).forward
        if self._is_inline:
            prefix = prefix_of(step, adapters, x, base, plan.rows)
            return with_prefix(plain_class(self), prefix, forward, args, kwargs)
        implementation = vars(self)["config"]._attn_implementation
        if implementation not in _SUPPORTED:
            raise StateError(
                f"attn_implementation={implementation!r}: its function does not accept a mask that "
                f"shows a prefix. Load the model with attn_implementation='sdpa' or 'eager', or "
                f"write model.set_attn_implementation('sdpa')."
            )
        active.call.prefixes.append((self, prefix_of(step, adapters, x, base, plan.rows)))
        try:
            return forward(*args, **kwargs)
        finally:
            active.call.prefixes.pop()


def _read_config(self: AdaptedAttention) -> Any:
    config, running = vars(self)["config"], self._link.active.call.prefixes
    return _Config(config) if running and running[-1][0] is self else config


def _write_config(self: AdaptedAttention, value: Any) -> None:
    vars(self)["config"] = value


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """Compute attention with the prefix of the calling module.

    Args:
        module: the attention.
        query: `[rows, heads, queries, width]`.
        key: `[rows, kv_heads, keys, width]`, including those in the cache.
        value: `[rows, kv_heads, keys, value_width]`.
        attention_mask: `[rows or 1, heads or 1, queries, keys]`, bool or added to the scores.
        **kwargs: as transformers passes them.
    """
    prefix = module._link.active.call.prefixes[-1][1]
    name = vars(module)["config"]._attn_implementation
    own: Any = getattr(sys.modules[plain_class(module).__module__], "eager_attention_forward", None)
    run = ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
    rows, queries, keys = key.shape[0], query.shape[2], key.shape[2]
    if prefix.keys.shape[1] != key.shape[1] or prefix.keys.shape[3] != key.shape[3]:
        raise StateError(
            f"{plain_class(module).__name__}: its keys are {list(key.shape)}, but the prefix was "
            f"made for {prefix.keys.shape[1]} heads of {prefix.keys.shape[3]} features."
        )
    window, length = kwargs.get("sliding_window"), prefix.keys.shape[2]
    if prefix.in_window and window is not None and length + keys > window:
        raise StateError(
            f"{keys} tokens after a prefix of {length}: with positions='shifted' a sliding window "
            f"of {window} hides the prefix from the last of them: this is not supported. Give the "
            f"model at most {max(window - length, 0)} tokens."
        )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", name == "sdpa") if causal is None else causal
    if attention_mask is None and causal and queries > 1 and name == "sdpa":
        attention_mask = causal_mask(query, keys)
    mask = extended(attention_mask, prefix, rows, queries, keys, query.dtype)
    bias = kwargs.get("position_bias")
    if bias is not None:
        kwargs["position_bias"] = _bias(module, bias, attention_mask, prefix, queries, keys)
    key = torch.cat([fit(prefix.keys, key), key], 2)  # [rows, kv_heads, length + keys, width]
    value = torch.cat([fit(prefix.values, value), value], 2)  # [rows, kv_heads, …, value_width]
    return run(module, query, key, value, mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)


def _bias(
    module: Any, bias: Tensor, mask: Tensor | None, prefix: Prefix, queries: int, keys: int
) -> Tensor:
    """Return a relative position bias with columns for the prefix.

    The prefix stands right before the first token that a query attends to, so that padding before
    the tokens of a row changes no distance.

    Args:
        module: the attention.
        bias: of the tokens, `[rows or 1, heads, queries, keys]`.
        mask: of the tokens, `[rows or 1, heads or 1, queries or 1, keys]`; None: nothing is masked.
        prefix: the keys and values.
        queries: number of tokens of the call.
        keys: number of keys, including those in the cache and its empty places.

    Returns:
        `[rows or 1, heads, queries, length + keys]`.
    """
    length = prefix.keys.shape[2]
    owner = None if prefix.distances is None else _bias_owner(module)
    if owner is None:
        return pad(bias, (length, 0))
    past = module._link.active.call.stack.cached
    if prefix.distances == "shifted":
        if prefix.mask is not None and not bool(prefix.mask.all()):
            raise CompositionError(
                "rows of a batch: their prefixes have different lengths, which shift the distances "
                "between tokens. Call the model with the rows of one prefix at a time."
            )
        return cast("Tensor", owner.compute_bias(queries, length + keys, bias.device, past)).to(
            bias
        )
    # from the last of so many tokens, all others are behind: column d is that of distance d
    farthest = length + keys
    by_distance = owner.compute_bias(1, farthest + 1, bias.device, farthest)[0, :, 0].flip(-1)
    at = torch.arange(past, past + queries, device=bias.device)
    if mask is not None:
        at = at - first_attended(mask)  # [rows or 1, queries]
    # key p of the prefix is `length − p` before the first token
    before = torch.arange(length, 0, -1, device=bias.device)
    distances = at.view(-1, queries, 1) + before  # [rows or 1, queries, length]
    own = by_distance[:, distances.clamp(0, farthest)]  # [heads, rows or 1, queries, length]
    own = own.transpose(0, 1).to(bias)  # [rows or 1, heads, queries, length]
    rows = max(own.shape[0], bias.shape[0])
    return torch.cat([t.expand(rows, -1, -1, -1) for t in (own, bias)], -1)


def _bias_owner(module: Any) -> Any:
    """Return the module that computes the stack's relative position bias; None if none does."""
    has_one = getattr(module, RELATIVE_BIAS, None)
    if has_one is None or has_one:
        return module if has_one else None
    inside = module._link.active.call.stacks[-1].module.modules()
    return next((m for m in inside if getattr(m, RELATIVE_BIAS, False)), None)
