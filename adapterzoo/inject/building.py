"""Building the modules of an adapter for one layer, without changing the model."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import ENTRY, WRAPPED, Site, part_names, unwrapped
from adapterzoo.anatomy.blocks import stored
from adapterzoo.config import AdapterConfig, Placement
from adapterzoo.contracts import Adapter, AttentionAdapter, CopyAdapter, SharedKey, SharedModules
from adapterzoo.errors import ConfigError

from .adapted import SHARED, AdapterDict, container_of, plain_class
from .convolution import at_convolution
from .layers import ExpertAdapters, FusedAdapters, is_quantized, mergeable
from .parallel import check_split


def layer_at(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a path that exists, inside any wrappers of torch.

    Return the block for an entry that does not exist yet.
    """
    model = unwrapped(model)
    for name in path.split(".") if path else ():
        if name == ENTRY and name not in model._modules:
            break
        model = unwrapped(cast("nn.Module", model._modules[name]))
    return model


def inject_path(site: Site) -> str:
    """Return the path of the module that gets the adapter; its parameter may be in a child."""
    below = (site.parameter or "").rpartition(".")[0]
    return f"{site.path}.{below}" if below else site.path


def build(
    layer: nn.Module,
    path: str,
    placements: list[Placement],
    model_dtype: torch.dtype,
    at: torch.device | None = None,
    sharing: Mapping[int, int | None] = MappingProxyType({}),
) -> Adapter:
    """Return all adapters of one name at one layer as one module, on its device and in its dtype.

    Args:
        layer: the layer; not changed.
        path: the layer's path.
        placements: the adapters to build.
        model_dtype: dtype of the parameters if the layer is quantized.
        at: device, if not the layer's.
        sharing: id of a config whose adapters share a module → its number in a union.

    Raises:
        ConfigError: a config does not fit its site, or two cannot share the layer.
    """
    device = at or device_of(layer)
    # bitsandbytes casts the bias to its compute dtype at the first forward
    plain = own_parameters(layer, with_quantized=False)
    wide = (t.dtype for t in plain if t.is_floating_point() and t.element_size() >= 2)
    dtype = next(wide, model_dtype)
    built = [p.config.build(p.site, device, dtype) for p in placements]
    for placement, adapter in zip(placements, built, strict=True):
        check_split(layer, placement.site, placement.config, adapter)
        if placement.site.kind == "convolution":
            adapter.__class__ = at_convolution(cast("Any", type(adapter)))
    for placement, adapter in zip(placements, built, strict=True):
        if isinstance(adapter, CopyAdapter):
            adapter.layer = blank_copy(layer, path, device)
        if id(placement.config) in sharing:
            adapter.shared_key = SharedKey("", sharing[id(placement.config)])
    sites = [p.site for p in placements]
    if len(built) > 1 and any(adapter.stands_alone for adapter in built):
        raise ConfigError(
            f"{placements[0].config!r} with {placements[1].config!r}: at {path!r}, one replaces "
            f"values of the layer that the other changes. Train the layer in one way only."
        )
    if len(built) == 1 and sites[0].output_slice is None and sites[0].parameter is None:
        return built[0]
    whole = [
        (p.config, a) for p, a in zip(placements, built, strict=True) if p.site.output_slice is None
    ]
    # those that change the input come first
    whole.sort(key=lambda pair: pair[1].acts_on != "input")
    has_prefix = any(isinstance(adapter, AttentionAdapter) for _, adapter in whole)
    if len(whole) > 1 and (
        whole[0][1].acts_on == "input" or sites[0].kind == "entry" or has_prefix
    ):
        changed = "keys and values" if has_prefix else "input"
        raise ConfigError(
            f"{whole[0][0]!r} with {whole[1][0]!r}: one of them changes the {changed} of {path!r}. "
            f"Add them under two names and write set_active_adapters(Stack('a', 'b'))."
        )
    parts = list(zip(part_names(sites), [s.output_slice for s in sites], built, strict=True))
    if sites[0].parameter is None:
        return FusedAdapters(parts)
    grouped: dict[str, list[Any]] = {}
    for site, part in zip(sites, parts, strict=True):
        mergeable(part[2])
        grouped.setdefault(str(site.parameter).rpartition(".")[2], []).append(part)
    return ExpertAdapters({n: FusedAdapters(ps) for n, ps in grouped.items()})


def blank_copy(layer: nn.Module, path: str, device: torch.device) -> nn.Module:
    """Return a copy of a layer without adapters, its parameters uninitialized and trainable.

    Args:
        layer: the layer; not changed.
        path: the layer's path.
        device: device for the parameters.

    Raises:
        ConfigError: the layer cannot be copied, or its copy cannot run in its place.
    """
    takes = inspect.signature(plain_class(layer).forward).parameters
    children = [c for c in layer.children() if not isinstance(c, AdapterDict)]
    buffers = {*layer._buffers} - layer._non_persistent_buffers_set
    why = ""
    if is_quantized(layer):
        why = "its weight is quantized"
    elif any(True for child in children for _ in child.parameters()):
        why = "it computes with parameters as well as those of the layers in it"
    elif len(takes) != 2:
        why = f"it is called with more than its input ({', '.join([*takes][1:])})"
    elif buffers:
        why = f"it has statistics ({', '.join(sorted(buffers))})"
    if why:
        raise ConfigError(
            f"the layer at {path!r}, a {plain_class(layer).__name__}, cannot have a copy for each "
            f"adapter: {why}. Leave it out."
        )
    memo: dict[int, Any] = {}
    for parameter in layer._parameters.values():
        if parameter is not None:
            fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            memo[id(parameter)] = nn.Parameter(fresh, parameter.is_floating_point())
    bare = plain_class(layer).__new__(plain_class(layer))
    left_out = ("_link", "_hf_hook", "_old_forward", "forward", "_split_forward")
    own = {name: value for name, value in vars(layer).items() if name not in left_out}
    own["_modules"] = {n: m for n, m in layer._modules.items() if not isinstance(m, AdapterDict)}
    # hooks of users and of accelerate run around the layer, and so around its copy too
    own |= {name: type(held)() for name, held in own.items() if "_hooks" in name}
    vars(bare).update(copy.deepcopy(own, memo))
    return bare


def build_shared(
    config: AdapterConfig, placements: Iterable[Placement], device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module | None, dict[int, int | None]]:
    """Return the module that an adapter's layers share, if any, and the configs that use it.

    Args:
        config: the adapter's config.
        placements: all placements of the adapter.
        device: device for the tensors.
        dtype: dtype of parameters.

    Returns:
        The module, with one child for each number of a config in a union; and id of a config to its
        number, None outside unions.

    Raises:
        ConfigError: a config does not fit its sites.
    """
    listed, found = list(placements), SharedModules()
    for number, member in enumerate(config.members):
        own = [p for p in listed if p.config is member]
        if (shared := member.shared(own, device, dtype)) is not None:
            if member is config:
                return shared, {id(member): None}
            found[str(number)] = shared
    if len(containers := {container_of(shared, SHARED) for shared in found.values()}) == 1:
        found.container = containers.pop()
    return found or None, {id(config.members[int(number)]): int(number) for number in found}


@contextmanager
def at_hand(layer: nn.Module) -> Iterator[None]:
    """Load the layer's values while the context runs, if accelerate has offloaded them."""
    hook = vars(layer).get("_hf_hook")
    if hook is None:
        yield
        return
    hook.pre_forward(layer)
    try:
        yield
    finally:
        hook.post_forward(layer, None)


def is_offloaded(layer: nn.Module) -> bool:
    """Return whether `at_hand` would load the layer's values."""
    return bool(getattr(vars(layer).get("_hf_hook"), "offload", False))


def offloaded_value(layer: nn.Module, name: str) -> Tensor:
    """Return a parameter that accelerate has offloaded, from its storage.

    Args:
        layer: the layer with the parameter.
        name: name of the parameter.
    """
    return cast("Tensor", vars(layer)["_hf_hook"].weights_map[name])


def plain_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its descendants with their paths, without adapters.

    Unlike `named_modules`, it takes as long with 100 adapters as with one, and yields a module with
    two paths twice. Wrappers of torch come before the modules that they wrap, with the same path.

    Args:
        module: the model's module.
        path: the module's path.
    """
    yield path, module
    for n, child in module._modules.items():
        if child is not None and not isinstance(child, AdapterDict):
            yield from plain_modules(child, path if n in WRAPPED else f"{path}.{n}" if path else n)


def plain_state(module: nn.Module, path: str = "") -> dict[str, Tensor]:
    """Return the state dict of a module without its adapters, with the tensors themselves.

    Args:
        module: the model's module.
        path: the module's path.
    """
    found: dict[str, Tensor] = {}
    for at, part in plain_modules(module, path):
        # quantized layers override this method
        part._save_to_state_dict(found, f"{at}." if at else "", keep_vars=True)
    return found


def own_parameters(layer: nn.Module, with_quantized: bool = True) -> Iterator[nn.Parameter]:
    """Yield only the base model's parameters: earlier adapters must not affect a new one.

    Args:
        layer: any module of the model.
        with_quantized: whether to include those of quantized layers.
    """
    if with_quantized or not is_quantized(layer):
        yield from (p for p in layer._parameters.values() if p is not None)
    for child in layer.children():
        if not isinstance(child, AdapterDict):
            yield from own_parameters(child, with_quantized)


def device_of(layer: nn.Module) -> torch.device:
    """Return the device for a layer's adapters."""
    # weights that accelerate offloads are on the meta device between two forwards
    device = getattr(vars(layer).get("_hf_hook"), "execution_device", None)
    if device is None:
        # some quantized layers have no parameters
        first = next(itertools.chain(own_parameters(layer), stored(layer)), None)
        device = torch.get_default_device() if first is None else first.device
    return torch.device(device)
