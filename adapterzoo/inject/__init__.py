"""Injection: the only module that changes a model. `put` and `take` undo each other.

`put` gives a layer *object* a subclass of its own class and hangs the adapters below it; `take`
removes them and gives the class back. No wrapper, so the base model's state-dict keys and
`isinstance` answers stay; no hook and no closure, so copies, pickles and replicas are independent.
PyTorch's own `fully_shard` changes classes in the same way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.composition import Step, evaluate, fold
from adapterzoo.contracts import Adapter, Base, compute_dtype
from adapterzoo.errors import DuplicateNameError, StateError
from adapterzoo.families import Family
from adapterzoo.selection import Selection

from .parts import ParameterParts, Parts, is_additive, mergeable
from .views import Layer, matrix, own, put_rows, stores_transposed, take_rows

__all__ = [
    "Adapted",
    "ParameterParts",
    "Parts",
    "Shelf",
    "base_of",
    "become",
    "check_put",
    "introduce",
    "is_additive",
    "matrix",
    "mergeable",
    "plain_class",
    "put",
    "put_rows",
    "stores_transposed",
    "take",
    "take_rows",
    "tap",
    "untap",
]


class Shelf(nn.ModuleDict):
    """The adapters of one layer, by name; any name is legal, also `train` or `type`."""

    def __setitem__(self, key: str, module: nn.Module) -> None:
        """Enter the module; `add_module` would refuse the names of its own methods."""
        self._modules[key] = module


@dataclass(slots=True)
class _Link:
    """What ties a layer to the model: kept in the layer, shared by shallow copies of it."""

    selection: Selection
    path: str
    # sites and names of the adapters that need the module
    helps: set[tuple[str, str]] = field(default_factory=set)


class Adapted(nn.Module):
    """Mixed into the class of a layer that has adapters, or of a module that helps such layers."""

    _link: _Link
    # names of the parameters that are read changed, where the layer computes with parameters
    _read: tuple[str, ...] = ()
    adapters: Shelf

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward with the active adapters; the plain one when none is active."""
        link = self._link
        selection = link.selection
        plan = selection.plan
        if plan.setup is None:
            return super().forward(*args, **kwargs)
        for reader in plan.taps.get(link.path, ()):
            selection.taps[reader] = args[0] if args else next(iter(kwargs.values()))
        forward = super().forward
        if link.path in plan.families:
            forward = self._gathering
        step = plan.steps.get(link.path)
        if step is None:
            return forward(*args, **kwargs)
        residual = selection.taps.pop(link.path, None)
        base = Layer(self, forward, args, kwargs, residual, selection.family)
        x = args[0] if args else next(iter(kwargs.values()))
        adapters = cast("Any", self._modules["adapters"])._modules
        if not self._read:
            return base.pack(evaluate(step, adapters, x, base, plan.rows))
        # a module may read a parameter once for each expert: what it reads is built once
        selection.reads.append((self, {}))
        try:
            return base.pack(evaluate(step, adapters, x, base))
        finally:
            selection.reads.pop()

    def _gathering(self, *args: Any, **kwargs: Any) -> Any:
        """The plain forward of a module with layers that read one input."""
        selection = self._link.selection
        members = []
        # found below the module and not kept: replicas and copies have their own
        for layer, names in selection.plan.families[self._link.path]:
            shelf = cast("Any", self._modules[layer])._modules["adapters"]
            members += [shelf._modules[name] for name in names]
        outer, selection.family = selection.family, Family(members)
        try:
            return super().forward(*args, **kwargs)
        finally:
            selection.family = outer

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the layer's own class: the subclass is made anew where it is loaded."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _blank, (plain_class(self), self._read), state

    def _replicate_for_data_parallel(self) -> Any:
        # worker threads run the replicas: they must see what the replicating thread sees
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        link = self._link
        replica._link = _Link(link.selection.pinned(), link.path, link.helps)
        return replica


def put(layer: nn.Module, name: str, adapter: nn.Module, selection: Selection, path: str) -> None:
    """Hang the adapter below the layer, inactive until the selection says otherwise.

    Args:
        layer: any module of the model; its class changes to a subclass of itself.
        name: under which the adapter is found, `layer.adapters[name]`.
        adapter: on the device and of the dtype that it shall have; or what adapters there share.
        selection: the model's.
        path: of the layer, as plans name it.

    Raises:
        DuplicateNameError: the layer has an adapter of this name.
        StateError: the layer has an attribute `adapters` of its own.
    """
    check_put(layer, path)
    parameters = tuple(adapter._modules) if isinstance(adapter, ParameterParts) else ()
    _swap(layer, selection, path, parameters)
    shelf = cast("Shelf", layer._modules.setdefault("adapters", Shelf().train(layer.training)))
    if name in shelf:
        raise DuplicateNameError(
            f"put({name!r}): there is one at {path!r} already. Take it first, or use another name."
        )
    shelf[name] = adapter.train(layer.training)


def check_put(layer: nn.Module, path: str) -> None:
    """Check that an adapter can hang below the layer.

    Raises:
        StateError: the layer has an attribute `adapters` of its own.
    """
    shelf = layer._modules.get("adapters")
    if isinstance(shelf, Shelf):
        return
    places = (
        *map(vars, plain_class(layer).__mro__),
        vars(layer),
        layer._modules,
        layer._parameters,
    )
    if any("adapters" in place for place in places):
        raise StateError(
            f"adapter at {path!r}: {type(layer).__name__} has an attribute 'adapters' of its own, "
            f"where adapters hang. Exclude this layer by exclude_modules=[{path!r}]."
        )


def take(layer: nn.Module, name: str) -> Adapter:
    """Remove the adapter; the last one leaves the layer as it was before the first `put`.

    Raises:
        StateError: the layer has no adapter of this name.
    """
    shelf = layer._modules.get("adapters")
    if not isinstance(layer, Adapted) or not isinstance(shelf, Shelf) or name not in shelf:
        raise StateError(f"take({name!r}): {type(layer).__name__} has no adapter of this name.")
    adapter = cast("Adapter", shelf._modules.pop(name))
    if not shelf:
        del layer._modules["adapters"]
    _restore(layer)
    return adapter


def tap(module: nn.Module, reader: str, name: str, selection: Selection, path: str) -> None:
    """Let a module help the site `reader`, for the adapter `name`, in the way that plans say.

    It passes its first input on to the site, or lets it share what it computes with the layers
    beside it.
    """
    _swap(module, selection, path)
    cast("Adapted", module)._link.helps.add((reader, name))


def untap(module: nn.Module, reader: str, name: str) -> None:
    """Undo `tap`."""
    if isinstance(module, Adapted):
        module._link.helps.discard((reader, name))
        _restore(module)


def plain_class(layer: nn.Module) -> type[nn.Module]:
    """The layer's class without adapters."""
    mro = type(layer).__mro__
    return mro[mro.index(Adapted) + 1] if Adapted in mro else mro[0]


def introduce(layer: nn.Module, adapter: Adapter, originals: Mapping[str, Tensor]) -> None:
    """Let a fresh adapter take initial values from the layer that it will be put at.

    Args:
        layer: the layer.
        adapter: not yet put.
        originals: parameters of the layer as they were before adapters were merged into it.
    """

    def shown(parameter: str) -> Tensor | None:
        kept = originals.get(parameter)
        return kept.mT if kept is not None and stores_transposed(layer, parameter) else kept

    if isinstance(adapter, ParameterParts):
        for parameter, parts in adapter._modules.items():
            weight = shown(parameter)
            own_weight = matrix(layer, parameter) if weight is None else weight
            cast("Parts", parts).attach(base_of(layer, own_weight))
    else:
        adapter.attach(base_of(layer, shown("weight"), originals.get("bias")))


def base_of(layer: nn.Module, weight: Tensor | None = None, bias: Tensor | None = None) -> Base:
    """The layer as its adapters see it, outside of a forward.

    Args:
        layer: the layer.
        weight: `[d_out, d_in]`, to be shown as the untouched weight; None: the layer's own.
        bias: `[d_out]`, to be shown as the untouched bias; None: the layer's own.
    """
    base = Layer(layer, functools.partial(plain_class(layer).forward, layer))
    base.shown = weight
    base.shown_bias = bias
    return base


def _swap(
    layer: nn.Module, selection: Selection, path: str, parameters: tuple[str, ...] = ()
) -> None:
    if not isinstance(layer, Adapted):
        become(layer, _adapted_class(type(layer), parameters))
        cast("Adapted", layer)._link = _Link(selection, path)
    elif missing := tuple(p for p in parameters if p not in layer._read):
        become(layer, _adapted_class(plain_class(layer), (*layer._read, *missing)))


def _restore(layer: Adapted) -> None:
    if "adapters" not in layer._modules and not layer._link.helps:
        del layer._link
        become(layer, plain_class(layer))


def become(layer: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, a sub- or superclass of its own.

    Args:
        layer: the module.
        cls: its new class.
    """
    layer.__class__ = cls
    # accelerate (device_map, offloading) keeps the forward it has found in the instance
    for name in ("forward", "_old_forward"):
        kept = vars(layer).get(name)
        if isinstance(kept, types.MethodType) and kept.__self__ is layer:
            setattr(layer, name, types.MethodType(cls.forward, layer))


# one subclass for each class of layers, so that equal layers stay of one class
_classes: dict[tuple[type[nn.Module], tuple[str, ...]], type[Adapted]] = {}


def _adapted_class(cls: type[nn.Module], parameters: tuple[str, ...] = ()) -> type[Adapted]:
    key = (cls, parameters)
    if key not in _classes:
        members: dict[str, Any] = {"_read": parameters}
        for parameter in parameters:
            members[parameter] = property(
                functools.partial(_changed, parameter=parameter),
                functools.partial(_set, parameter=parameter),
            )
        made = type(f"Adapted{cls.__name__}", (Adapted, cls), members)
        _classes[key] = cast("type[Adapted]", made)
    return _classes[key]


def _changed(layer: Adapted, parameter: str) -> Tensor | None:
    """What a layer that computes with its parameters reads: the changed one when active."""
    plain = own(layer, parameter)
    link = layer._link
    selection = link.selection
    step = selection.plan.steps.get(link.path)
    if step is None or plain is None:
        return plain
    reads = selection.reads
    if not reads or reads[-1][0] is not layer:
        return _build(layer, parameter, plain, step)
    built = reads[-1][1]
    # what was built without gradients cannot give any
    key = parameter, step, torch.is_grad_enabled()
    if key not in built:
        built[key] = _build(layer, parameter, plain, step)
    return built[key]


def _build(layer: Adapted, parameter: str, plain: Tensor, step: Step) -> Tensor:
    """A parameter, stored as the layer's own one is, with the change of a step's adapters."""
    own_weight = matrix(layer, parameter)
    base = base_of(layer, own_weight)
    # the sum of all changes is rounded once
    w = own_weight.to(compute_dtype(own_weight.dtype))

    def change(name: str, w: Tensor) -> Tensor:
        adapter = layer.adapters._modules[name]
        return adapter.changed(parameter, w, base) if isinstance(adapter, ParameterParts) else w

    w = fold(step, w, change).to(plain.dtype)
    # in memory as well: products of equal numbers differ in the last bit with another layout
    return w.mT.contiguous() if stores_transposed(layer, parameter) else w


def _set(layer: Adapted, value: object, parameter: str) -> None:
    """What DataParallel does to a replica, which has no parameters of its own."""
    vars(layer)[parameter] = value


def _blank(cls: type[nn.Module], parameters: tuple[str, ...]) -> nn.Module:
    adapted = _adapted_class(cls, parameters)
    return adapted.__new__(adapted)
