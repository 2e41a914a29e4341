"""Prefixes in attention modules, with and without transformers' attention interface.

An attention module looks up its function by the name in its config and passes itself to it. While
a prefix is active, the module reads a view of its config that names our function, which puts the
prefix before the keys and values and calls the function in the config. Neither the config nor the
masks of the model change.

Other modules compute their scores themselves: a product of queries and keys, changes of the scores,
a softmax over keys, and a product with values. `PrefixMode` follows these operations while the
attention runs: scores `[…, queries, keys]` have a companion `[…, queries, length]` with the scores
of the prefix. Values for each key (masks, position biases) apply only to tokens; everything else
applies to both. ALiBi, a bias that is linear in the position (Press et al. 2022, arXiv:2108.12409),
has its own companion.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from adapterzoo.anatomy.inputs import ALIBI, RELATIVE_BIAS, is_inline
from adapterzoo.composition.compile import prefix_of
from adapterzoo.contracts import Prefix
from adapterzoo.errors import CompositionError, StateError
from adapterzoo.masks import first_attended

from .adapted import Adapted, acting, plain_class
from .layers import LayerCall

_PRODUCTS = {"matmul", "__matmul__", "bmm"}
# functions that change each score: biases and masks with a value for each token do not affect a
# prefix
_CHANGES = {"mul", "div", "true_divide", "add", "sub", "masked_fill", "where", "max", "maximum"}
_CHANGES |= {f"{name}_" for name in _CHANGES} | {
    f"__{kind}{name}__" for kind in ("", "r", "i") for name in ("mul", "truediv", "add", "sub")
}
_CASTS = {"to", "float", "type", "type_as", "contiguous", "clone", "clamp"}
_SHAPES = {"view", "reshape"}
_JOINT = {"softmax", "dropout"}
# functions of scores that return scores
_LOOKS = {"__get__", "size", "dim", "numel", "amax", "expand_as", "reshape_as"}


class PrefixMode(TorchFunctionMode):
    """While active, add a prefix to the first softmax attention that is computed.

    Attributes:
        has_acted: whether a product with the values of the prefix was computed.
    """

    def __init__(
        self, prefix: Prefix, name: str, bias: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Start to wait for the first product of queries and keys.

        Args:
            prefix: the keys and values.
            name: the attention's name, for messages.
            bias: maps the scores of tokens to their bias and to that of the prefix.
        """
        super().__init__()
        self._prefix = prefix
        self._name = name
        # scores or biases of tokens, each with those of the prefix
        self._scores = [] if bias is None else [bias]
        self._has_started = self.has_acted = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function; apply the same to the prefix's scores as to those of tokens."""
        kwargs = dict(kwargs or {})
        if self.has_acted:
            return func(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            self.has_acted = True
            return _scaled_dot_product(self._prefix, *args, **kwargs)
        name = func.__name__
        if not self._has_started and name in _PRODUCTS:
            out = func(*args, **kwargs)
            self._start(out, *args[:2])
            return out
        if not self._has_started and name == "baddbmm":
            out = func(*args, **kwargs)
            given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
            self._start(out, given["batch1"], given["batch2"], given.get("alpha", 1))
            bias = self._prefix_scores(given["input"])
            if self._has_started and bias is not None:
                product = cast("Tensor", self._prefix_scores(out))
                self._keep(out, product + given.get("beta", 1) * bias)
            return out
        prefixed = next((b for a in args if (b := self._prefix_scores(a)) is not None), None)
        if prefixed is None:
            return func(*args, **kwargs)
        if name in _PRODUCTS and self._prefix_scores(args[0]) is not None:
            self.has_acted = True
            return func(*args, **kwargs) + prefixed @ fit(self._prefix.values, args[1])
        if name in _LOOKS:
            return func(*args, **kwargs)
        if name in _JOINT:
            # over all keys
            joint = func(torch.cat([args[0], prefixed], -1), *args[1:], **kwargs)
            return self._keep(*joint.split((args[0].shape[-1], prefixed.shape[-1]), -1))
        out = func(*args, **kwargs)
        return self._keep(out, self._changed(func, args, kwargs, prefixed))

    def _prefix_scores(self, t: Any) -> Tensor | None:
        return next((prefixed for scores, prefixed in self._scores if scores is t), None)

    def _keep(self, scores: Tensor, prefixed: Tensor) -> Tensor:
        if self._prefix_scores(scores) is None:
            self._scores.append((scores, prefixed))
        else:
            self._scores = [(s, prefixed if s is scores else b) for s, b in self._scores]
        return scores

    def _start(self, scores: Tensor, query: Tensor, keys: Tensor, alpha: float = 1) -> None:
        """Start at `alpha · query @ keys`, if the product is one, with heads and rows first."""
        width = self._prefix.keys.shape[-1]
        if query.dim() == keys.dim() > 2 and query.shape[-1] == keys.shape[-2] == width:
            own = fit(self._prefix.keys, keys.transpose(-1, -2)).transpose(-1, -2)
            self._scores.append((scores, self._hidden(alpha * (query @ own), keys)))
            self._has_started = True

    def _hidden(self, scores: Tensor, keys: Tensor) -> Tensor:
        """Return the scores of the prefix, with padding masked."""
        mask = self._prefix.mask
        if mask is None:
            return scores
        heads = keys.shape[1] if keys.dim() > 3 else self._prefix.keys.shape[1]
        rows = math.prod(keys.shape[:-2]) // heads
        mask = mask.repeat_interleave(rows // mask.shape[0], 0)  # [rows, length]
        mask = mask[:, None, None].expand(-1, heads, -1, -1)  # [rows, heads, 1, length]
        shape = (*keys.shape[:-2], 1, mask.shape[-1])
        return scores.masked_fill(~mask.reshape(shape), torch.finfo(scores.dtype).min)

    def _changed(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        prefixed: Tensor,
    ) -> Tensor:
        """Return the scores of the prefix after a change of the tokens' scores."""
        name = func.__name__
        own = [a if (b := self._prefix_scores(a)) is None else b for a in args]
        keys = next(a for a in args if self._prefix_scores(a) is not None).shape[-1]
        others = [
            a for a in args if isinstance(a, Tensor) and self._prefix_scores(a) is None and a.dim()
        ]
        by_keys = any(t.shape[-1] == keys for t in others)
        if name in _SHAPES:
            sizes = args[1] if isinstance(args[1], Sequence) else args[1:]
            if sizes[-1] in (keys, -1):
                return cast("Tensor", func(prefixed, *sizes[:-1], prefixed.shape[-1]))
        elif name in _CHANGES and by_keys:
            return prefixed
        elif name in _CHANGES | _CASTS:
            return cast("Tensor", func(*own, **kwargs))
        raise StateError(
            f"{self._name}: its scores go through {name!r}, which does not support a prefix. Use "
            f"a method at layers, such as LoRAConfig()."
        )


def _alibi(cls: type[nn.Module], prefix: Prefix, bias: Tensor) -> Tensor:
    """Return the bias of a prefix, whose key p is at position p − length.

    Args:
        cls: class of the attention.
        prefix: its keys and values.
        bias: bias for the tokens, `[rows · heads, 1, keys]`.

    Returns:
        `[rows · heads, 1, length]`.
    """
    heads, length = prefix.keys.shape[1:3]
    seen = torch.ones(1, length + 1, device=bias.device)
    build: Any = sys.modules[cls.__module__]
    counted = build.build_alibi_tensor(seen, heads, torch.float32)  # [heads, 1, length + 1]
    own = counted[..., :length] - counted[..., length:]
    return cast("Tensor", own.repeat(bias.shape[0] // heads, 1, 1).to(bias))


def fit(own: Tensor, like: Tensor) -> Tensor:
    """Return keys or values of a prefix with the rows, heads and dtype of the tokens' ones.

    Args:
        own: `[rows or 1, heads, length, width]`.
        like: `[rows, heads, keys, width]` or `[rows · heads, keys, width]`; its rows and heads may
            be repetitions, as for the windows of an image.

    Returns:
        `[…, length, width]`, with the leading dimensions of `like`.
    """
    count, heads, length, width = own.shape
    lead = like.shape[:-2]
    here = lead[1] if len(lead) > 1 else heads
    own = own.repeat_interleave(here // heads, 1)
    rows = math.prod(lead) // here
    own = own.repeat_interleave(rows // count, 0) if count > 1 else own.expand(rows, -1, -1, -1)
    return own.reshape(*lead, length, width).to(like)  # [*lead, length, width]


def _scaled_dot_product(
    prefix: Prefix,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Torch's `scaled_dot_product_attention` with a prefix, `[…, queries, width]`."""
    rows, queries, keys = query.shape[0], query.shape[-2], key.shape[-2]
    if is_causal:
        attn_mask = causal_mask(query, keys)
    mask = extended(attn_mask, prefix, rows, queries, keys, query.dtype)
    key = torch.cat([fit(prefix.keys, key), key], -2)  # […, length + keys, width]
    value = torch.cat([fit(prefix.values, value), value], -2)  # […, length + keys, value_width]
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p=dropout_p, **kwargs
    )


def causal_mask(query: Tensor, keys: int) -> Tensor:
    """Return the mask that `is_causal` means in torch, `[1, 1, queries, keys]` bool.

    Query i attends to keys 0 to i: keys after the last query are empty cache slots.
    """
    ones = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=query.device)
    return ones.tril()[None, None]


def extended(
    mask: Tensor | None, prefix: Prefix, rows: int, queries: int, keys: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the mask with columns for the prefix; None if nothing is masked."""
    length = prefix.keys.shape[2]
    if mask is None:
        if prefix.mask is None:
            return None
        # eager attention adds the mask, so it must not be bool
        mask = torch.zeros(rows, 1, queries, keys, dtype=dtype, device=prefix.mask.device)
    shape = (*mask.shape[:-1], length)
    if prefix.mask is None:
        seen = mask.new_ones(shape) if mask.dtype is torch.bool else mask.new_zeros(shape)
        return torch.cat([seen, mask], -1)
    own = prefix.mask.repeat_interleave(rows // prefix.mask.shape[0], 0)[:, None, None]
    own = own.expand(rows, mask.shape[1], queries, length).to(mask.device)
    mask = mask.expand(rows, -1, -1, -1)
    if mask.dtype is not torch.bool:
        lowest = torch.finfo(mask.dtype).min
        own = torch.zeros(own.shape, dtype=mask.dtype, device=mask.device).masked_fill(~own, lowest)
    return torch.cat([own, mask], -1)  # [rows, heads or 1, queries, length + keys]


def with_prefix(
    cls: type[nn.Module],
    prefix: Prefix,
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run an attention module that computes its scores itself, with a prefix.

    Args:
        cls: class of the attention.
        prefix: its keys and values.
        forward: the attention's forward.
        args: the call's positional arguments.
        kwargs: the call's keyword arguments.

    Raises:
        StateError: the scores are computed in an unsupported way, or in compiled code.
    """
    name = cls.__name__
    if torch.compiler.is_compiling():
        raise StateError(f"compiled code cannot add a prefix to {name}. Call the uncompiled model.")
    alibi = None
    if name in ALIBI:
        alibi = inspect.signature(forward).bind(*args, **kwargs).arguments["alibi"]
    mode = PrefixMode(prefix, name, None if alibi is None else (alibi, _alibi(cls, prefix, alibi)))
    with mode:
        out = forward(*args, **kwargs)
    if not mode.has_acted:
        raise StateError(
            f"{name}: no product of queries and keys of {prefix.keys.shape[-1]} features was seen, "
            f"so it cannot have a prefix. Use a method at layers, such as LoRAConfig()."
        )
    return out


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

    # whether the module computes its scores itself, without the interface
    _is_inline: bool = False

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return a `config` attribute for modules that look up their function by its name."""
        if is_inline(plain):  # type: ignore[arg-type]
            return {"_is_inline": True}
        return {"config": property(_read_config, lambda self, c: vars(self).update(config=c))}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward with the prefix before its keys and values."""
        active, plan, site = self._planned()
        if site is None:
            return super().forward(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        forward = super(Adapted, self).forward
        base = LayerCall(self, forward, args, kwargs, context=active.call)
        implementation = "" if self._is_inline else vars(self)["config"]._attn_implementation
        if implementation and implementation not in _SUPPORTED:
            raise StateError(
                f"attn_implementation={implementation!r} does not accept a mask that shows a "
                f"prefix. Write model.set_attn_implementation('sdpa')."
            )
        prefix = prefix_of(*acting(self, site), x, base, plan.rows)
        if self._is_inline:
            return with_prefix(plain_class(self), prefix, forward, args, kwargs)
        active.call.prefixes.append((self, prefix))
        try:
            return forward(*args, **kwargs)
        finally:
            active.call.prefixes.pop()


def _read_config(self: AdaptedAttention) -> Any:
    config, running = vars(self)["config"], self._link.active.call.prefixes
    return _Config(config) if running and running[-1][0] is self else config


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
    window, length = kwargs.get("sliding_window"), prefix.keys.shape[2]
    if prefix.in_window and window is not None and length + keys > window:
        raise StateError(
            f"{keys} tokens after a prefix of {length} with positions='shifted' exceed the sliding "
            f"window of {window}. Give the model at most {max(window - length, 0)} tokens."
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

    The prefix is right before the first token that a query attends to, so padding before the
    tokens of a row does not change distances.

    Args:
        module: the attention.
        bias: bias for the tokens, `[rows or 1, heads, queries, keys]`.
        mask: attention mask, `[rows or 1, heads or 1, queries or 1, keys]`; None: nothing is
            masked.
        prefix: the keys and values.
        queries: number of tokens of the call.
        keys: number of keys, including cached keys and empty cache slots.

    Returns:
        `[rows or 1, heads, queries, length + keys]`.
    """
    length = prefix.keys.shape[2]
    if prefix.distances is None:
        return pad(bias, (length, 0))
    # of the modules that could compute the bias of the stack, choose the one that does
    has_one, stacks = getattr(module, RELATIVE_BIAS, None), module._link.active.call.stacks
    inside = [module] if has_one in (None, True) else stacks[-1].module.modules()
    owner = next((m for m in inside if getattr(m, RELATIVE_BIAS, False)), None)
    if owner is None:
        return pad(bias, (length, 0))
    past = module._link.active.call.stack.cached
    if prefix.distances == "shifted":
        if prefix.mask is not None and not bool(prefix.mask.all()):
            raise CompositionError(
                "rows of a batch: their prefixes have different lengths, which shift distances. "
                "Call the model with the rows of one prefix at a time."
            )
        joint: Tensor = owner.compute_bias(queries, length + keys, bias.device, past)
        return joint.to(bias)
    # from the last of this many tokens, all others lie behind: column d is that of distance d
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
