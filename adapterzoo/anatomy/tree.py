"""A model's modules by path, walked once, and comparison of paths."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from adapterzoo.contracts import Contained
from adapterzoo.errors import StateError

from .sites import Role


def tail(*names: str) -> re.Pattern[str]:
    """Return a pattern for paths that end with one of the names, each a regular expression."""
    # some models wrap each linear layer in its own module: `q_proj.linear`
    return re.compile(rf"(?:^|\.)(?:{'|'.join(names)})(?:\.linear)?$")


def parent(path: str) -> str:
    """Return the path of the module that holds the one at `path`."""
    return path.rpartition(".")[0]


def leaf(path: str) -> str:
    """Return the last name of a path."""
    return path.rpartition(".")[2]


def joined(owner: str, path: str) -> str:
    """Return the path of an owner's descendant from their paths; either may be empty."""
    return f"{owner}.{path}" if owner and path else owner or path


def below(path: str, root: str) -> bool:
    """Return whether the path is the root or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def common(one: str, other: str) -> str:
    """Return the path of the nearest module that holds both."""
    names = zip(one.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], names))


HEAD = ".."
"""The start of the path of a head's layer, which is outside the base model."""


def in_whole(path: str, prefix: str) -> str:
    """Return the path in the whole model.

    Args:
        path: a path below the base model, or of a head's layer.
        prefix: the prefix of the base model's paths, such as "model.".
    """
    return path.removeprefix(HEAD) if path.startswith(HEAD) else f"{prefix}{path}"


def shown(path: str) -> str:
    """Return the path of a site as messages show it."""
    return path.removeprefix(HEAD)


def nearness(one: str, other: str) -> int:
    """Return the number of leading names that two paths share."""
    shared = common(one, other)
    return shared.count(".") + 1 if shared else 0


_FSDP1 = "_fsdp_wrapped_module"
# children inside a module that replaces them: of torch.compile, checkpoint_wrapper and FSDP1
WRAPPED = frozenset(("_orig_mod", "_checkpoint_wrapped_module", _FSDP1))


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside torch's wrappers, which have no step in paths.

    Raises:
        StateError: FSDP1 has wrapped it, and holds pieces of its parameters.
    """
    while not WRAPPED.isdisjoint(module._modules):
        if _FSDP1 in module._modules:
            raise StateError(
                "FullyShardedDataParallel wraps a part of the model and holds pieces of weights. "
                "Write fully_shard(model), or with Trainer fsdp_config={'version': 2}."
            )
        module = next(m for n, m in module._modules.items() if m is not None and n in WRAPPED)
    return module


def without_wrappers(path: str) -> str:
    """Return a path without the steps of torch's wrappers."""
    return ".".join(step for step in path.split(".") if step not in WRAPPED)


class Tree:
    """All modules of a model, each once.

    Attributes:
        given: paths of layers relative to a block → the roles that a user gives them.
    """

    def __init__(self, model: nn.Module, given: Mapping[str, Role] | None = None) -> None:
        self.given = given or {}
        self.modules: dict[str, nn.Module] = dict(_plain(model, "", set()))
        self._order = list(self.modules)
        self._place = {path: i for i, path in enumerate(self._order)}

    def children(self, path: str) -> list[str]:
        """Return the paths of a module's children that do not occur earlier in the model."""
        prefix = f"{path}." if path else ""
        names = (f"{prefix}{name}" for name, _ in self.modules[path].named_children())
        return [name for name in names if name in self.modules]

    def below(self, path: str) -> Iterator[tuple[str, nn.Module]]:
        """Yield (path below `path`, module) in model order; the module itself has path ''."""
        prefix = f"{path}." if path else ""
        for name in self._order[self._place[path] :]:
            if name == path:
                yield "", self.modules[name]
            elif name.startswith(prefix):
                yield name[len(prefix) :], self.modules[name]
            else:
                return

    def owners(self, path: str) -> Iterator[nn.Module]:
        """Yield the modules that hold the one at `path`, nearest first."""
        while path:
            path = parent(path)
            if path in self.modules:
                yield self.modules[path]


def _plain(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and those below by path, each once, without adapters and scripted modules."""
    if isinstance(module, torch.jit.ScriptModule):
        return
    module = unwrapped(module)
    if id(module) in seen or isinstance(module, Contained):
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _plain(child, f"{path}.{name}" if path else name, seen)


class Branch:
    """A module of a tree and all modules below it, by paths relative to that module."""

    def __init__(self, tree: Tree, path: str, only: tuple[str, ...] = ()) -> None:
        self.tree = tree
        self.path = path
        self.modules = [
            (name, module)
            for name, module in tree.below(path)
            if not only or any(below(name, o) for o in only)
        ]
        self.by_path = dict(self.modules)

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for branches with the same anatomy (names, classes and shapes)."""
        return tuple(
            (path, type(module), *(tuple(p.shape) for p in module.parameters(recurse=False)))
            for path, module in self.modules
        )

    @property
    def configs(self) -> list[Any]:
        """The configurations of the branch and the modules around it, the nearest first."""
        owners = (self.tree.modules[self.path], *self.tree.owners(self.path))
        found = (getattr(module, "config", None) for module in owners)
        return [config for config in found if config is not None]

    @property
    def model_types(self) -> list[str]:
        """The model types of these configurations, the nearest first."""
        types = (getattr(config, "model_type", None) for config in self.configs)
        return list(dict.fromkeys(t for t in types if isinstance(t, str)))

    def setting(self, path: str, *names: str) -> int:
        """Return a setting from a layer's owners or, if they have none, from the nearest config.

        Args:
            path: the layer, relative to this branch; its owners come first because a configuration
                may differ from layer to layer.
            names: possible names of the setting.

        Returns:
            The number (a flag counts as 0 or 1); 0 if the setting is unknown.
        """
        owners = []
        while path := parent(path):
            owners.append(self.by_path[path])
        owners.append(self.tree.modules[self.path])
        values = [getattr(owner, name, None) for owner in owners for name in names]
        # `vars`, because a configuration with per-layer values refuses `getattr`
        values += [vars(config).get(name) for config in self.configs for name in names]
        return next((value for value in values if isinstance(value, int)), 0)


def number(owner: Any, *names: str) -> int | None:
    """Return the first of some attributes that is an integer; None if none is."""
    found = (getattr(owner, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)
