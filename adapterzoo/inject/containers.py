"""The containers of a layer: the submodules that hold its adapters by name.

Each method names its container (`query.loras.<name>`), with the names of AdapterHub's `adapters`. A
name is unique within a layer, so that compositions need no containers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from adapterzoo.contracts import Contained, SharedModules

SHARED = SharedModules.container
"""The container of modules that the layers of an adapter share, unless they name another."""


class AdapterDict(nn.ModuleDict):
    """Modules by name; any name is legal, also `train` or `type`.

    Attributes:
        prefix: precedes the names in compositions, see `Contained`.
    """

    prefix: str = ""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        """Add the module; `add_module` would reject the names of its own methods."""
        self._modules[key] = module


class SharedDict(AdapterDict):
    """The modules that the layers of adapters share, in the base model."""


def container_of(module: nn.Module, default: str = Contained.container) -> str:
    """Return the name of the container for a module.

    Args:
        module: an adapter, or any other module that a layer keeps by name.
        default: for modules that name no container.
    """
    return module.container if isinstance(module, Contained) else default


def adapters_of(layer: Any) -> dict[str, Any]:
    """Return the adapters of a layer by name; not to be changed.

    Args:
        layer: an `Adapted` one.
    """
    # runs at every layer in each forward: most have one container
    containers: list[str] = layer._link.containers
    found: dict[str, Any]
    if len(containers) == 1 and not (only := layer._modules[containers[0]]).prefix:
        found = only._modules
        return found
    found = {}
    for container in containers:
        held = layer._modules[container]
        for key, module in held._modules.items():
            found[held.prefix + key] = module
    return found


def hold(layer: Any, name: str, module: nn.Module) -> None:
    """Put a module into its container, which is made when missing.

    Args:
        layer: an `Adapted` one.
        name: of the module in compositions.
        module: that has no place yet.
    """
    container = container_of(module)
    if container not in layer._link.containers:
        layer._modules[container] = held = AdapterDict().train(layer.training)
        if isinstance(module, Contained):
            held.prefix = module.prefix
        layer._link.containers.append(container)
    held = layer._modules[container]
    held[name.removeprefix(held.prefix)] = module


def release(layer: Any, name: str) -> nn.Module:
    """Undo `hold`, and return the module."""
    module: nn.Module = adapters_of(layer)[name]
    container = container_of(module)
    held = layer._modules[container]
    del held._modules[name.removeprefix(held.prefix)]
    if not held:
        del layer._modules[container]
        layer._link.containers.remove(container)
    return module


def shared_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that the layers of adapters share, by adapter.

    Args:
        model: the base model, or a replica of it.
    """
    found: dict[str, nn.Module] = {}
    for child in model._modules.values():
        if isinstance(child, SharedDict):
            found.update(child._modules)
    return found
