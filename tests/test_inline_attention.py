"""Prefixes in attentions that compute their scores by themselves.

A key and value that are copies of those of a token weigh as much as ln 2 more on its score: that is
what the attention computes without a prefix, when a mode adds it where scores become probabilities.
"""

import math

import pytest
import torch
from architectures.tiny_models import tiny_model
from cached import CACHE
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adapterzoo import BatchSplit, init
from adapterzoo.anatomy import find
from adapterzoo.anatomy.inputs import is_inline
from adapterzoo.contracts import Prefix
from adapterzoo.errors import StateError
from adapterzoo.inject.attention import with_prefix
from adapterzoo.methods.prompt.prefix_tuning import PrefixTuningConfig

FLAT = PrefixTuningConfig(prefix_length=3, flat=True)
# none of these adds a position bias by key, which only a token has
TYPES = (
    "vilt",  # matmul, mask
    "megatron-bert",
    "timesformer",  # one layer for query, key and value
    "groupvit",  # bmm, scores viewed
    "mvp",
    "imagegpt",  # causal, by where
    "gpt_neox_japanese",  # baddbmm
    "falcon",  # torch's own function, one head of keys
    "mobilevit",  # windows: several rows for one of the batch
    "pvt",  # fewer keys than queries
)


class Observed(TorchFunctionMode):
    """Record keys and values, and add to the score of the first token."""

    def __init__(self, width, more):
        super().__init__()
        self.width, self.more = width, more
        self.keys = self.values = self.probabilities = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        if func is functional.scaled_dot_product_attention:
            query, self.keys, self.values = args[:3]
            causal = torch.ones(query.shape[-2], self.keys.shape[-2]).tril().log()
            given = kwargs.pop("attn_mask", None)
            mask = given if given is not None else causal * kwargs.pop("is_causal", False)
            mask = mask.float().log() if mask.dtype is torch.bool else mask.nan_to_num(0.0)
            mask = mask.to(query.dtype, copy=True)
            mask[..., 0] += self.more
            return func(*args, attn_mask=mask, **kwargs)
        if self.keys is None and name == "baddbmm":
            self.keys = kwargs.get("batch2", args[-1]).mT
        elif name in ("matmul", "__matmul__", "bmm"):
            if self.keys is None and args[1].shape[-2] == self.width and args[0].dim() > 2:
                self.keys = args[1].mT
            elif self.probabilities is not None and self.values is None:
                self.values = args[1]
        elif name == "softmax" and self.keys is not None and self.probabilities is None:
            scores = args[0].clone()
            scores[..., 0] += self.more
            self.probabilities = func(scores, *args[1:], **kwargs)
            return self.probabilities
        return func(*args, **kwargs)


def calls_of(model, inputs):
    """The first attention of each class that is inline, with the arguments of its call."""
    found, handles = {}, []
    for attention in find(model).attentions:
        module = model.get_submodule(attention.path)
        if is_inline(type(module)):

            def record(module, args, kwargs, attention=attention):
                found.setdefault(type(module), (attention, module, args, kwargs))

            handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return found.values()


def in_float64(inputs):
    floats = {k: v.double() for k, v in inputs.items() if v.is_floating_point()}
    return {**inputs, **floats}


class Odd(nn.Module):
    """An attention of no known class."""


@pytest.mark.parametrize("model_type", TYPES)
def test_a_copy_of_a_token_weighs_like_ln_2(model_type):
    """The attention with a prefix that repeats its first token, in float64."""
    tiny = tiny_model(model_type)
    model = tiny.model.double()
    calls = calls_of(model, in_float64(tiny.inputs))
    assert calls
    for attention, module, args, kwargs in calls:
        kwargs = {k: None if "past" in k or "cache" in k else v for k, v in kwargs.items()}
        outs = []
        with torch.no_grad():
            for more in (0.0, math.log(2)):
                with Observed(attention.head_widths[0], more) as seen:
                    out = module(*args, **kwargs)
                outs.append(out[0] if isinstance(out, tuple) else out)
            lead = (-1, attention.heads) if seen.keys.dim() == 3 else seen.keys.shape[:2]
            keys, values = (t.reshape(*lead, *t.shape[-2:]) for t in (seen.keys, seen.values))
            every = keys.shape[1] // attention.heads
            prefix = Prefix(keys[:, ::every, :1].clone(), values[:, ::every, :1].clone())
            # a class without ALiBi, by which the copy would be one position ahead
            out = with_prefix(Odd, prefix, module.forward, args, kwargs)
        got = out[0] if isinstance(out, tuple) else out
        assert (outs[1] - outs[0]).abs().max() > 1e-6
        torch.testing.assert_close(got, outs[1], rtol=1e-9, atol=1e-10)


def made(model_type, **configs):
    tiny = tiny_model(model_type)
    model = init(tiny.model.double())
    for number, (name, config) in enumerate(configs.items()):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(number)
            model.add_adapter(name, config)
    return model, in_float64(tiny.inputs)


@pytest.mark.parametrize("model_type", ["gptj", "bloom", "falcon"])
def test_the_cache_holds_no_prefix(model_type):
    model, inputs = made(model_type, a=FLAT)
    model.set_active_adapters("a")
    ids = inputs["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).last_hidden_state
        first = model(input_ids=ids[:, :9], use_cache=True)
        cache = first[CACHE]
        assert cache.get_seq_length() == 9
        rest = model(input_ids=ids[:, 9:], **{CACHE: cache}).last_hidden_state
    # GPT-J computes scores in float32 in a model of any dtype
    rounding = {"rtol": 1e-5, "atol": 1e-6} if model_type == "gptj" else {}
    torch.testing.assert_close(rest, whole[:, 9:], **rounding)


@pytest.mark.parametrize("model_type", ["megatron-bert", "falcon", "mvp"])
def test_rows_have_prefixes_of_their_own(model_type):
    """Prefixes of different lengths, one row without any."""
    longer = PrefixTuningConfig(prefix_length=5, flat=True)
    model, inputs = made(model_type, a=FLAT, b=longer)
    inputs = {name: t.repeat(3, *[1] * (t.dim() - 1)) for name, t in inputs.items()}
    alone = {}
    with torch.no_grad():
        for name in ("a", "b", None):
            model.set_active_adapters(name)
            alone[name] = model(**inputs)[0]
        model.set_active_adapters(BatchSplit("a", "b", batch_sizes=[1, 2]))
        both = model(**inputs)[0]
    torch.testing.assert_close(both, torch.cat([alone["a"][:1], alone["b"][1:]]))
    assert not torch.allclose(alone["a"], alone[None])


def test_what_cannot_be_followed_is_refused_by_name():
    keys = torch.zeros(1, 2, 3, 4)

    def sorted_scores(x):
        return (x @ x.mT).sort(-1).values.softmax(-1) @ x

    with pytest.raises(StateError, match=r"Odd: its scores go through 'sort'.*LoRAConfig\(\)"):
        with_prefix(Odd, Prefix(keys, keys), sorted_scores, (torch.ones(1, 2, 5, 4),), {})
    with pytest.raises(StateError, match=r"Odd: no product of queries and keys of 4 features"):
        with_prefix(Odd, Prefix(keys, keys), torch.exp, (torch.ones(2),), {})
