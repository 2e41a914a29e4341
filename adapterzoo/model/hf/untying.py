"""Gives each of the layers that share a weight one of its own, in the model and in its config."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from adapterzoo.errors import StateError

_FLAG = "tie_word_embeddings"


@contextlib.contextmanager
def untied(model: Any) -> Iterator[None]:
    """Give each layer a weight of its own, and let the config say so; undone if the block fails.

    Args:
        model: of transformers.

    Raises:
        StateError: the config cannot say it without changing what the model computes.
    """
    _check(model)
    seen: set[int] = set()
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            for name, own in module._parameters.items():
                if own is not None and id(own) in seen:
                    undo.callback(module._parameters.__setitem__, name, own)
                    copied = nn.Parameter(own.detach().clone(), own.requires_grad)
                    module._parameters[name] = copied
                seen.add(id(own))
            if "all_tied_weights_keys" in vars(module):
                undo.callback(
                    setattr, module, "all_tied_weights_keys", module.all_tied_weights_keys
                )
                cast("Any", module).all_tied_weights_keys = {}
        for config in _configs(model.config):
            undo.callback(setattr, config, _FLAG, getattr(config, _FLAG))
            setattr(config, _FLAG, False)
        yield
        undo.pop_all()


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and those in it, as far as they say whether embeddings are tied."""
    parts = [config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))]
    return [part for part in parts if hasattr(part, _FLAG)]


def _check(model: Any) -> None:
    twin = copy.deepcopy(model.config)
    for part in _configs(twin):
        setattr(part, _FLAG, False)
    again = type(twin).from_dict(twin.to_dict())
    classes = {
        c for m in model.modules() if isinstance(m, PreTrainedModel) for c in type(m).__mro__
    }
    # below decorators
    forwards = (inspect.unwrap(vars(c)["forward"]) for c in classes if "forward" in vars(c))
    codes = [code for f in forwards if (code := getattr(f, "__code__", None)) is not None]
    if again.to_dict() != twin.to_dict() or any(_FLAG in code.co_names for code in codes):
        raise StateError(
            f"a {type(model).__name__} computes something else with {_FLAG}=False, which the "
            "merged model needs. Keep the adapter active instead."
        )
