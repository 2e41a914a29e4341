"""The class swap: give a layer the class for adapters, and restore its own.

The subclass is created once for each class of layers, so equal layers share it, and unpickling
finds it by the layer's own class. A layer holds its adapters in containers: submodules with the
names that AdapterHub's `adapters` uses (`query.loras.<name>`). A name is unique within a layer, so
compositions need no containers.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from adapterzoo.anatomy import unwrapped
from adapterzoo.anatomy.tree import below
from adapterzoo.composition.compile import Copies, SiteStep, Step, evaluate, fold, no_rows
from adapterzoo.contracts import Contained, SharedModules, WeightAdapter, compute_dtype
from adapterzoo.errors import listing
from adapterzoo.runtime import ActiveState, Division, Plan, tokens_key
from adapterzoo.tensor_parallel import LayerSplit, whole_tensor

from .layers import (
    ExpertAdapters,
    LayerCall,
    as_matrix,
    changed,
    is_quantized,
    matrix,
    own,
    stores_transposed,
)
from .mixtures import RoutedRows
from .parallel import (
    ParallelCall,
    ParallelLayer,
    keep_part,
    parallel_forward,
    return_forward,
    split_of,
    take_forward,
)

SHARED = SharedModules.container
"""The container of modules that the layers of an adapter share, unless they name another."""


class AdapterDict(nn.ModuleDict):
    """Modules by name; any name that `check_name` accepts.

    Attributes:
        name_prefix: precedes the names in compositions, see `Contained`.
    """

    name_prefix: str = ""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        """Add a module; `add_module` would reject the names of its own methods."""
        self._modules[key] = module


class SharedDict(AdapterDict):
    """The modules that the layers of adapters share, in the base model."""

    def __repr__(self) -> str:
        """Show the names of the adapters."""
        return f"SharedDict({listing(self._modules)})"


def container_of(module: nn.Module, default: str = Contained.container) -> str:
    """Return the name of the container for a module.

    Args:
        module: an adapter, or any other module that a layer keeps by name.
        default: for modules that name no container.
    """
    return module.container if isinstance(module, Contained) else default


def adapters_of(layer: Any) -> dict[str, Any]:
    """Return a layer's adapters by name; do not modify the result.

    Args:
        layer: a layer with the class `Adapted`.
    """
    # runs at every layer in each forward: most have one container
    containers: list[str] = layer._link.containers
    found: dict[str, Any]
    if len(containers) == 1 and not (only := layer._modules[containers[0]]).name_prefix:
        found = only._modules
        return found
    found = {}
    for container in containers:
        held = layer._modules[container]
        for key, module in held._modules.items():
            found[held.name_prefix + key] = module
    return found


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


# invariants of each module
_ASKED = {
    nn.TransformerEncoder: "use_nested_tensor",
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
}


def asked(plain: type[nn.Module]) -> dict[str, Any]:
    """Return the attribute that torch reads from an encoder; it is false while adapters are active.

    Args:
        plain: a module's own class; the result is empty unless it is an encoder's.
    """

    def attribute(name: str) -> property:
        def answer(module: Any) -> Any:
            own = vars(module)[name]
            return own if module._link.active.plan.setup is None else type(own)(0)

        return property(answer)

    return {name: attribute(name) for kind, name in _ASKED.items() if issubclass(plain, kind)}


@dataclass(slots=True)
class _Link:
    """The link of a layer to the model: stored in the layer and shared by its shallow copies."""

    active: ActiveState
    path: str
    # names of the submodules that hold its adapters
    containers: list[str] = field(default_factory=list)
    # sites and names of the adapters that need the module
    helps: set[tuple[str, str]] = field(default_factory=set)
    # whether the model writes into the layer's output in place
    overwritten: bool = False
    # how tensor parallelism splits the layer
    split: LayerSplit | None = None


def acting(layer: nn.Module, site: SiteStep) -> tuple[Step, Sequence[Any]]:
    """Return the step of a site, and the adapters that it numbers.

    Args:
        layer: the layer at the site.
        site: the site, as planned.
    """
    if site.adapters is None:
        held = adapters_of(layer)
        return site.step, [held[name] for name in site.names]
    return site.step, site.adapters


class Shown(NamedTuple):
    """The parameters that a model reads outside their layer's calls.

    Attributes:
        names: names of the parameters.
        is_called: whether the adapters also act in the layer's calls, which then read the
            untouched parameters.
    """

    names: tuple[str, ...] = ()
    is_called: bool = True


_CALLED = Shown()
_NO_INPUT = torch.empty(0)


class Adapted(nn.Module):
    """Mixed into the class of a layer that has adapters, or of a module that helps such layers."""

    _link: _Link
    # the class without adapters, and the mixin of the class with them, if not just this one
    _plain: type[nn.Module]
    _kind: type[Adapted] | None = None
    # names of the parameters that adapters change, if the layer computes with parameters
    _read: tuple[str, ...] = ()
    # names of those that the model reads outside of the layer's calls, if it does
    _shown: Shown = _CALLED
    # arguments of the forward that can be given by position
    _positions: tuple[str, ...] = ()
    # what adapters get as their base, and whether transformers has split the layer
    _call: type[LayerCall] = LayerCall
    _is_parallel: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward with the active adapters; without any, run the plain one."""
        link = self._link
        active = link.active
        # the usual case of `active.plan`
        default = active.default
        usual = active.override is None and not default.has_blocks
        plan = default.plan if usual else active.plan
        site = plan.sites.get(link.path)
        if site is None:
            if plan.setup is None:
                return super().forward(*args, **kwargs)
        else:
            if plan.trunk is not None:
                plan.trunk.end()
            if site.only is not None and args and not self._read:
                base = self._call(self, super().forward, args, kwargs, None, active.call)
                y = site.only(args[0], base)
                return base.pack(y.clone() if link.overwritten and y.requires_grad else y)
        for reader in plan.captures.get(link.path, ()):
            active.call.captures[reader] = args[0] if args else next(iter(kwargs.values()))
        if plan.divisions and (division := plan.divisions.get(link.path)) is not None:
            return self._divided(plan, division, args, kwargs)
        forward: Callable[..., Any] = super().forward
        if site is None:
            return forward(*args, **kwargs)
        step, adapters = acting(self, site)
        if isinstance(step, Copies):
            return step.call(adapters, forward, args, kwargs, plan.rows)
        if not (args or kwargs):
            # a module that only reads its parameters, such as Swin's table of positions
            plain = forward
            forward, args = lambda _: plain(), (_NO_INPUT,)
        residual = active.call.captures.pop(link.path, None)
        if residual is not None:
            also = active.call.captures.pop(f"+{link.path}", None)
            residual = residual if also is None else residual + also
        base = self._call(self, forward, args, kwargs, residual, active.call)
        x = args[0] if args else next(iter(kwargs.values()))
        if not self._read:
            y = evaluate(step, adapters, x, base, plan.rows)
            # an adapter may need its output in the backward pass
            return base.pack(y.clone() if link.overwritten and y.requires_grad else y)
        # a module may read a parameter once per expert: build it only once
        active.call.reads.append((self, {}))
        try:
            return base.pack(evaluate(step, adapters, x, base))
        finally:
            active.call.reads.pop()

    def _divided(
        self, plan: Plan, division: Division, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the forward once for each kind of rows; see `mixtures`."""
        active, path = self._link.active, self._link.path
        captures = active.call.captures
        tokens = RoutedRows(captures.pop(tokens_key(path), None), plan.rows, division.numbers, path)
        inside = [key for key in captures if below(key.removeprefix("+"), path)]
        streams = {key: captures.pop(key) for key in inside}
        runs, outputs = tokens.layout.runs, []
        outer = active.override
        try:
            for number, start, size in runs:
                take = functools.partial(tokens.take, start=start, size=size)
                captures.update({key: take(stream) for key, stream in streams.items()})
                named = {name: take(value) for name, value in kwargs.items()}
                active.override = division.plans[number]
                outputs.append(Adapted.forward(self, *map(take, args), **named))
        finally:
            active.override = outer
        y = tokens.join(outputs, [size for _, _, size in runs])
        if len(runs) == len(division.plans) or not torch.is_grad_enabled():
            return y
        there = {number for number, _, _ in runs}
        absent = [own for number, own in enumerate(division.plans) if number not in there]
        return self._with_zeros(y, absent)

    def _with_zeros(self, y: Any, plans: Sequence[Plan]) -> Any:
        """Return an output whose gradient reaches the adapters of plans without rows."""
        first = y if isinstance(y, Tensor) else y[0]
        adapters: list[Any] = []
        for plan in plans:
            for path, site in plan.sites.items():
                below_it = path.removeprefix(self._link.path).removeprefix(".")
                layer = below_wrappers(self.get_submodule(below_it))
                adapters += acting(layer, site)[1]
        whole = torch.cat([first, no_rows(adapters, first, base_of(self))])
        return whole if isinstance(y, Tensor) else type(y)((whole, *y[1:]))

    @classmethod
    def members(cls, plain: type[nn.Module]) -> dict[str, Any]:
        """Return the additional attributes of a layer's class.

        Args:
            plain: the layer's own class.
        """
        return {}

    def _planned(self) -> tuple[ActiveState, Plan, SiteStep | None]:
        """Return the active state, its plan, and the plan's step at this layer."""
        active = self._link.active
        plan = active.plan
        site = plan.sites.get(self._link.path)
        if site is not None and plan.trunk is not None:
            plan.trunk.end()
        return active, plan, site

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the layer's own class: loading creates the subclass again."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        facts = self._plain, self._read, self._kind, self._shown, self._is_parallel
        return _blank, facts, state

    def __repr__(self) -> str:
        """Show the layer as its own class does, and behind it the adapters in one line."""
        containers = self._link.containers
        shown = self._plain.__new__(self._plain)
        parts = {key: part for key, part in self._modules.items() if key not in containers}
        vars(shown).update(vars(self) | {"_modules": parts})
        held = adapters_of(self)
        return f"{shown!r} + {listing(held.items(), limit=3, show=_shown)}" if held else repr(shown)

    def _replicate_for_data_parallel(self) -> Any:
        # worker threads run the replicas: they need the active state of the replicating thread
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        link = self._link
        replica._link = replace(link, active=link.active.pinned())
        return replica


def _shown(held: tuple[str, nn.Module]) -> str:
    name, module = held
    size = sum(parameter.numel() for parameter in module.parameters())
    # some are in a module that the layers share
    return f"{type(module).__name__} {name!r}" + (f" ({size:,} parameters)" if size else "")


def positions_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of a method that can be given by position, without `self`."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = inspect.signature(method).parameters.values()
    return tuple(p.name for p in parameters if p.kind in kinds)[1:]


def below_wrappers(layer: Any) -> Adapted:
    """Return the layer with adapters, even if torch or a library such as PEFT has wrapped it.

    Args:
        layer: the module now at the layer's path.
    """
    layer = unwrapped(layer)
    while not isinstance(layer, Adapted) and "base_layer" in layer._modules:
        layer = unwrapped(layer._modules["base_layer"])
    return cast("Adapted", layer)


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """Return the layer's class without adapters."""
    return layer._plain if isinstance(layer, Adapted) else type(layer)


class _Untouched(nn.Module):
    """Between `Adapted` and the class of a layer that the model calls and whose weight it reads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, which reads the untouched parameters."""
        running = cast("Adapted", self)._link.active.call.running
        running.append(self)
        try:
            return super().forward(*args, **kwargs)
        finally:
            running.pop()


def base_of(
    layer: nn.Module,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Mapping[str, Tensor] = MappingProxyType({}),
) -> LayerCall:
    """Return the whole layer as its adapters see it, outside a forward.

    Args:
        layer: the layer.
        weight: `[d_out, d_in]`, the weight to pass as untouched; None: the layer's own.
        bias: `[d_out]`, the bias to pass as untouched; None: the layer's own.
        kept: the untouched values of merged parameters, as the layer stores them.
    """
    if isinstance(layer, Adapted):
        base = LayerCall(layer, super(Adapted, layer).forward, context=layer._link.active.call)
    else:
        base = LayerCall(layer, functools.partial(type(layer).forward, layer))
    if parallel_forward(layer) is not None:
        stored = {n: p for n, p in layer._parameters.items() if p is not None} | dict(kept)
        kept = {name: whole_tensor(tensor) for name, tensor in stored.items()}
        weight = as_matrix(layer, "weight", kept["weight"]) if weight is None else weight
        bias = kept.get("bias") if bias is None else bias
    base.shown = None if weight is None else whole_tensor(weight)
    base.shown_bias = None if bias is None else whole_tensor(bias)
    base.kept = kept
    return base


def swap(
    layer: nn.Module,
    active: ActiveState,
    path: str,
    parameters: tuple[str, ...] = (),
    kind: type[Adapted] | None = None,
    shown: Shown = _CALLED,
) -> None:
    """Give a layer the class for adapters, or update its settings if it has it.

    Args:
        layer: any module of the model.
        active: the model's `Active`.
        path: the layer's path, as plans name it.
        parameters: names of the parameters that adapters change.
        kind: the mixin of its class, if not just `Adapted`.
        shown: the parameters that the model reads outside the layer's calls.
    """
    if not isinstance(layer, Adapted):
        split = split_of(layer)
        is_parallel = take_forward(layer)
        set_class(layer, _adapted_class(type(layer), parameters, kind, shown, is_parallel))
        known = split if isinstance(split, LayerSplit) else None
        cast("Adapted", layer)._link = _Link(active, path, split=known)
        return
    own = tuple(dict.fromkeys((*layer._read, *parameters)))
    facts = own, kind or layer._kind, shown if shown.names else layer._shown
    if facts != (layer._read, layer._kind, layer._shown):
        set_class(layer, _adapted_class(layer._plain, *facts, layer._is_parallel))


def restore(layer: Adapted) -> None:
    """Restore a layer's own class, unless an adapter still needs the subclass."""
    if not layer._link.containers and not layer._link.helps:
        discard(layer)


def discard(layer: Adapted) -> None:
    """Remove adapters from a copy of a layer; the original keeps its link to the model.

    Args:
        layer: a copy of a layer.
    """
    for container in layer._link.containers:
        del layer._modules[container]
    del layer._link
    set_class(layer, layer._plain)
    return_forward(layer)


@contextmanager
def split_later(model: nn.Module) -> Iterator[None]:
    """Make a model's layers plain in the block, which splits them over processes.

    Args:
        model: a model with adapters, which keep their parts after the block.
    """
    every = [m for m in model.modules() if isinstance(m, Adapted)]
    facts = [(layer._plain, layer._read, layer._kind, layer._shown) for layer in every]
    for layer in every:
        set_class(layer, layer._plain)
    try:
        yield
    finally:
        for layer, own in zip(every, facts, strict=True):
            split = split_of(layer)
            layer._link.split = split if isinstance(split, LayerSplit) else None
            set_class(layer, _adapted_class(*own, take_forward(layer)))
            for adapter in adapters_of(layer).values():
                keep_part(layer, adapter)


def set_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, a sub- or superclass of its own.

    Args:
        layer: the module.
        cls: its new class.
    """
    before: Any = type(layer).forward
    layer.__class__ = cls
    # accelerate (device_map, offloading) stores the original forward in the instance, and diffusers
    # (casting, offloading) in the hooks of the instance; compressed-tensors' own calls the class's
    hooks: list[Any] = getattr(vars(layer).get("_diffusers_hook"), "_fn_refs", [])
    for owner in (layer, *hooks):
        for name in ("forward", "_old_forward", "original_forward"):
            kept = vars(owner).get(name)
            is_own = isinstance(kept, types.MethodType) and kept.__self__ is layer
            if is_own and kept.__func__ is before:
                setattr(owner, name, types.MethodType(cls.forward, layer))


class _LayoutType(type):
    """The type of the classes for adapters, whose instances have the memory layout of the layer.

    CPython takes the layout from the first base, and only swaps classes of the same layout; that of
    quanto's layers differs from that of `nn.Module`. So the layer's class is the first base, but
    the last one in which methods are looked up.
    """

    def mro(cls) -> list[type[Any]]:
        """Return the classes in which methods are looked up, those of adapters first."""
        own = cls.__bases__[0].__mro__
        return [*(each for each in super().mro() if each not in own), *own]


class _AdaptedType(_LayoutType):
    """The type of the classes for adapters: layers without adapters are also instances.

    FSDP's auto-wrap takes the class of the first layer with a name, and wraps its instances.
    """

    _plain: type[nn.Module]

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is an instance of the class without adapters."""
        return isinstance(instance, cls._plain)


asked_of_layers: dict[str, Callable[[Any], Any]] = {}
"""Attributes that the peers' code reads from a layer with adapters → functions for their values."""


class _Asked:
    """An attribute of `asked_of_layers`; the layer's own attributes take precedence."""

    def __init__(self, name: str, answer: Callable[[Any], Any]) -> None:
        self.name = name
        self.answer = answer

    def __get__(self, layer: Any, owner: object) -> Any:
        if layer is None or not layer._link.containers or self.name in layer._modules:
            raise AttributeError(self.name)
        found = self.answer(layer)
        if isinstance(found, Mapping) and not found:
            raise AttributeError(self.name)
        return found


# one subclass for each class of layers, so that equal layers share a class
_classes: dict[tuple[Any, ...], type[Adapted]] = {}


def _adapted_class(
    cls: type[nn.Module],
    parameters: tuple[str, ...],
    kind: type[Adapted] | None = None,
    shown: Shown = _CALLED,
    is_parallel: bool = False,
) -> type[Adapted]:
    key = (cls, parameters, kind, shown, is_parallel)
    if key not in _classes:
        members: dict[str, Any] = {
            "_read": parameters,
            "_shown": shown,
            "_plain": cls,
            "_kind": kind,
            "_positions": positions_of(cls.forward),
            # libraries look for layers by the name of their class
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        members |= _answers(cls, (*parameters, *shown.names))
        for parameter in dict.fromkeys((*parameters, *shown.names)):
            members[parameter] = property(
                functools.partial(_changed, parameter=parameter),
                functools.partial(_set, parameter=parameter),
            )
        own = kind or Adapted
        bases = (cls, Adapted) if kind is None else (cls, kind, Adapted)
        if shown.names and (shown.is_called or kind is not None):
            bases = (*bases, _Untouched)
        elif shown.names:
            members["forward"] = _plainly
        if is_parallel:
            bases = (*bases, ParallelLayer)
            members |= {"_call": ParallelCall, "_is_parallel": True}
        made = _type_over(type(cls))(cls.__name__, bases, members | asked(cls) | own.members(cls))
        _classes[key] = cast("type[Adapted]", made)
    return _classes[key]


def _type_over(meta: Any) -> Any:
    """Return the type of the classes for adapters over classes with a metaclass."""
    if meta is type:
        return _AdaptedType
    # a whole model has its own metaclass, and stands alone
    return type(meta.__name__, (_LayoutType, meta), {})


def _answers(cls: type[nn.Module], parameters: Sequence[str]) -> dict[str, _Asked]:
    taken = {*dir(cls), *parameters}
    return {name: _Asked(name, a) for name, a in asked_of_layers.items() if name not in taken}


def answer_at_layers(answers: Mapping[str, Callable[[Any], Any]]) -> None:
    """Give layers with adapters more attributes, in existing models too.

    Args:
        answers: functions that return their values; see `asked_of_layers`.
    """
    asked_of_layers.update(answers)
    for (cls, parameters, _, shown, _), made in _classes.items():
        for name, answer in _answers(cls, (*parameters, *shown.names)).items():
            if name not in vars(made):
                setattr(made, name, answer)


def _plainly(layer: Adapted, *args: Any, **kwargs: Any) -> Any:
    """Run the own forward of a layer whose adapters act when its parameters are read."""
    return super(Adapted, layer).forward(*args, **kwargs)


def _changed(layer: Adapted, parameter: str) -> Tensor | None:
    """Return a parameter that a module reads, changed by active adapters; None without any."""
    plain = own(layer, parameter)
    active, _, site = layer._planned()
    if site is None or plain is None:
        return plain
    if parameter not in layer._read and (layer in active.call.running or is_quantized(layer)):
        return plain
    reads = active.call.reads
    if not reads or reads[-1][0] is not layer:
        return _build(layer, parameter, plain, site)
    built = reads[-1][1]
    # a value built without gradients cannot provide any
    key = parameter, site, torch.is_grad_enabled()
    if key not in built:
        built[key] = _build(layer, parameter, plain, site)
    return built[key]


def _build(layer: Adapted, parameter: str, plain: Tensor, site: SiteStep) -> Tensor:
    """Return a parameter with the change of a site's adapters, in the layer's layout."""
    transposed = stores_transposed(layer, parameter)
    base, value = base_of(layer), plain
    if parameter in layer._read:
        # it may be packed
        base.shown = matrix(layer, parameter)
        value = base.shown.mT if transposed else base.shown
    step, adapters = acting(layer, site)

    def change(number: int, value: Tensor) -> Tensor:
        adapter = adapters[number]
        # others act only in the layer's calls
        shows = isinstance(adapter, WeightAdapter) and parameter in layer._shown.names
        acts = shows or isinstance(adapter, ExpertAdapters)
        return changed(adapter, parameter, value, base, layer) if acts else value

    # the sum of all changes is rounded once
    value = fold(step, value.to(compute_dtype(value.dtype)), change).to(plain.dtype)
    # restore the memory layout too: with another one, products differ in the last bit
    return value.contiguous() if transposed else value


def _set(layer: Adapted, value: object, parameter: str) -> None:
    """Set a parameter of a replica, as DataParallel does."""
    vars(layer)[parameter] = value


def _blank(*facts: Any) -> nn.Module:
    """Return an empty layer with the class that `_adapted_class` returns for the same facts."""
    adapted = _adapted_class(*facts)
    return adapted.__new__(adapted)
