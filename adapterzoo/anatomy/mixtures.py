"""Mixtures of experts: where the row of each token is still known.

Experts get tokens in their own order. The module that is called with the tokens in batch order is
usually the one that holds the weights of all experts and also gets the routing of each token: the
experts of Mixtral and most others. If the tokens are sorted earlier (Llama 4, JetMoE), it is the
surrounding block, which takes only its input.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from .patterns import EXPERTS
from .sites import MLP_ROLES, Mixture, Site
from .tree import Tree, joined, parent

_NAME = "experts"


def mixture_of(tree: Tree, site: Site) -> Mixture | None:
    """Return where the rows of a routed site's tokens are known; None if nowhere.

    Args:
        tree: the model's tree.
        site: a site of experts or of a parameter.
    """
    steps = site.path.split(".")
    if _NAME in steps[:-1]:
        return _at_or_around(tree, ".".join(steps[: steps.index(_NAME) + 1]))
    if steps[-1] == _NAME or site.parameter in EXPERTS:
        return _at_or_around(tree, site.path)
    if site.kind == "experts" and site.role in MLP_ROLES:
        # its tokens are sorted by expert
        return _around(tree, site.path)
    if site.parameter is None:
        return None
    # a router also computes with its parameters
    around = parent(site.path)
    beside = tree.children(around) if around else []
    is_beside = any(_are_experts(tree.modules[path]) for path in beside)
    is_mixture = is_beside or joined(around, _NAME) in tree.modules
    is_called = is_mixture and bool(_arguments(tree.modules[site.path]))
    return Mixture(site.path, around) if is_called else None


def _at_or_around(tree: Tree, path: str) -> Mixture | None:
    """Return the experts at a path if they get the tokens' routing, else the surrounding block."""
    if len(_arguments(tree.modules[path])) > 1:
        return Mixture(path, parent(path))
    return _around(tree, path)


def _around(tree: Tree, path: str) -> Mixture | None:
    """Return the block around experts if it takes only its input."""
    around = parent(path)
    is_block = bool(around) and len(_arguments(tree.modules[around])) == 1
    return Mixture(around, around) if is_block else None


def _are_experts(module: nn.Module) -> bool:
    return any(
        name in EXPERTS and tensor is not None and tensor.dim() == 3
        for name, tensor in module._parameters.items()
    )


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the arguments of a module's own forward; empty for a list of modules."""
    cls: Any = type(module)
    return _arguments_of(getattr(cls, "_plain", cls))


@functools.cache
def _arguments_of(cls: Any) -> tuple[str, ...]:
    if cls.forward is nn.Module.forward:
        return ()
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    listed = inspect.signature(cls.forward).parameters.values()
    return tuple(p.name for p in listed if p.kind not in variable)[1:]
