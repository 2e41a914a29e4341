"""Adapters in models that transformers has split over processes (`tp_plan="auto"`).

transformers (5.24) keeps the parameters of such a layer as DTensors, and replaces its forward with
a function that takes and returns plain tensors: this process's parts, or whole ones. An adapter
acts around that function. At a split layer its tensors are DTensors too, cut along the sides that
its class names, so code that gathers, counts, saves or clips parameters sees whole ones; in a
forward the adapter sees plain tensors, its parts. Everything outside a forward (initial values,
combining, merging) uses whole tensors, in each process.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adapterzoo.anatomy import OutputSlice, Site
from adapterzoo.contracts import Adapter, AttentionAdapter, BaseLayer, Prefix
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.tensor_parallel import LayerSplit, is_part, whole_tensor

from .layers import FusedAdapters, LayerCall, as_matrix, own

_HOST = "transformers.distributed."
_FORWARD = "_split_forward"
_M = TypeVar("_M", bound=nn.Module)


# --- what transformers has done to a layer ---


def parallel_forward(layer: nn.Module) -> Any:
    """Return the function that replaces a layer's forward; None without one."""
    found = vars(layer).get(_FORWARD, vars(layer).get("forward"))
    is_function = isinstance(found, types.FunctionType)
    return found if is_function and found.__module__.startswith(_HOST) else None


def _style(layer: nn.Module) -> tuple[str, Any, Any]:
    """Return the name of the style that splits a layer, the style, and the mesh.

    Returns:
        Empty and None for a layer that is not split; None if the function has no style.
    """
    forward = parallel_forward(layer)
    if forward is None:
        return "", None, None
    cells = (cell.cell_contents for cell in forward.__closure__ or ())
    held = dict(zip(forward.__code__.co_freevars, cells, strict=True))
    style = held.get("self")
    named = forward.__qualname__.partition(".")[0] if style is None else type(style).__name__
    return named, style, held.get("mesh")


def split_of(layer: nn.Module) -> LayerSplit | str | None:
    """Return how a layer is split; None if each process runs it whole.

    A layer with whole inputs and outputs is split on neither side, although each process has only
    a part of the weight.

    Args:
        layer: any module of the model.

    Returns:
        A name for a style that adapters cannot follow.
    """
    name, style, mesh = _style(layer)
    if not name:
        return None
    from torch.distributed.tensor import Replicate, Shard

    known = {
        ("ColwiseParallel", Replicate(), Shard(-1)): (False, True),
        ("ColwiseParallel", Replicate(), Replicate()): (False, False),
        ("RowwiseParallel", Shard(-1), Replicate()): (True, False),
        ("RowwiseParallel", Replicate(), Replicate()): (False, False),
        ("EmbeddingParallel", None, None): (False, False),
    }
    layouts = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    sides = known.get((name, *layouts)) if getattr(style, "use_local_output", False) else None
    return name if sides is None else LayerSplit(mesh, *sides, getattr(layer, "in_features", 0))


def heads_split_of(attention: nn.Module) -> LayerSplit | str | None:
    """Return how an attention's heads are split; None if each process has all of them.

    Args:
        attention: the model's attention.

    Returns:
        A name if adapters cannot follow the style of a layer in it.
    """
    found = [split_of(m) for m in attention.modules() if isinstance(m, nn.Linear)]
    unknown = (split for split in found if isinstance(split, str))
    parts = (split for split in found if isinstance(split, LayerSplit) and split.outputs)
    return next(unknown, next(parts, None))


def check_split(layer: nn.Module, site: Site, config: object, adapter: Adapter) -> None:
    """Check that an adapter can act at a layer that may be split.

    Args:
        layer: the layer at the site.
        site: the adapter's site.
        config: the adapter's config.
        adapter: an adapter that has not been added yet.

    Raises:
        ConfigError: the adapter cannot act there.
    """
    is_attention = isinstance(adapter, AttentionAdapter)
    split = heads_split_of(layer) if is_attention else split_of(layer)
    if split is None:
        return
    at = f"{type(config).__name__} at {site.path!r}"
    if isinstance(split, str):
        raise ConfigError(
            f"{at}: tensor parallelism splits the layer by {split}, which adapters cannot follow. "
            f"Write other target_modules, or load the model without tp_plan."
        )
    if is_attention:
        if site.heads % split.size:
            raise ConfigError(
                f"{at}: {split.size} processes cannot share {site.heads} heads of keys and values "
                f"equally. Start a number of processes that divides {site.heads}, or write "
                "LoRAConfig()."
            )
        return
    features = site.output_slice
    is_packed = split.outputs and features is not None and features.groups % split.size
    if split.sides - adapter.splits or (split.sides and (site.read or is_packed)):
        what = "output" if split.outputs else "input"
        needs = (
            "the layer's parts are packed one after the other"
            if is_packed
            else ("the adapter needs all of them")
        )
        raise ConfigError(
            f"{at}: tensor parallelism splits the {what} features of the layer over {split.size} "
            f"processes, and {needs}. Write LoRAConfig(), or load the model without tp_plan."
        )


# --- the layer ---


class ParallelLayer(nn.Module):
    """Between `Adapted` and the class of a layer that transformers has split."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function that replaces the layer's forward."""
        return vars(self)[_FORWARD](*args, **kwargs)


def take_forward(layer: nn.Module) -> bool:
    """Put away the function that replaces a layer's forward, if there is one.

    Args:
        layer: a layer that is about to get a class with `ParallelLayer`.
    """
    forward = parallel_forward(layer)
    if forward is not None:
        vars(layer).pop("forward", None)
        vars(layer)[_FORWARD] = forward
    return forward is not None


def return_forward(layer: nn.Module) -> None:
    """Undo `take_forward`."""
    if _FORWARD in vars(layer):
        vars(layer)["forward"] = vars(layer).pop(_FORWARD)


class ParallelCall(LayerCall):
    """One call of a split layer; its weight and bias are this process's parts."""

    @property
    def split(self) -> LayerSplit | None:  # type: ignore[override]
        """How the layer is split; None if its input and its output are whole."""
        split: LayerSplit | None = cast("Any", self._module)._link.split
        return split if split is not None and split.sides else None

    @property
    def weight(self) -> Tensor:
        """The weight of this process's features."""
        if self.shown is None:
            weight = self._seen(cast("Tensor", own(self._module, "weight")))
            self.shown = as_matrix(self._module, "weight", weight)
        return self.shown

    @property
    def bias(self) -> Tensor | None:
        """The bias of this process's features."""
        bias = own(self._module, "bias")
        return None if bias is None else self._seen(bias)

    def _seen(self, tensor: Tensor) -> Tensor:
        part: Any = tensor
        if not is_part(tensor):
            return tensor
        return cast("Tensor", part.full_tensor() if self.split is None else part.to_local())


def split_output(layer: nn.Module) -> None:
    """Make an output layer compute with a table of tokens that is split over processes.

    Args:
        layer: a layer of a head; its weight is that of the table, and its bias a parameter of its
            own.

    Raises:
        StateError: the table is split by features, not by tokens.
    """
    weight: Any = layer._parameters.get("weight")
    if not is_part(weight) or parallel_forward(layer) is not None:
        return
    from torch.distributed.tensor import Shard, distribute_tensor
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    if weight.placements != (Shard(0),):
        raise StateError(
            "tensor parallelism splits the features of the model's table of tokens, which a head "
            "cannot share. Load the model without tp_plan."
        )
    bias = layer._parameters.get("bias")
    if bias is not None and not is_part(bias):
        mesh = weight.device_mesh
        value: Any = distribute_tensor(bias.detach(), mesh, [Shard(0)], src_data_rank=None)
        layer._parameters["bias"] = nn.Parameter(value, bias.requires_grad)
    ALL_PARALLEL_STYLES["colwise_gather_output"].install_forward(layer, weight.device_mesh)


# --- the adapters ---


class _SplitPart(nn.Module):
    """Mixed into the class of an adapter, or a module in it, of which each process has a part."""

    _whole: type[nn.Module]
    _split: LayerSplit


class _PartOfAdapter(_SplitPart, Adapter):
    @property
    def row_options(self) -> None:
        """None: each adapter acts alone on its rows."""


class _PartOfPrefix(_SplitPart, AttentionAdapter):
    def forward(self, x: Tensor, base: BaseLayer) -> Prefix:  # type: ignore[override]
        """Return the keys and values of this process's heads."""
        prefix = super().forward(x, base)  # type: ignore[safe-super]
        split = self._split
        keys, values = (split.part(split.spread(t), 1) for t in (prefix.keys, prefix.values))
        return prefix._replace(keys=keys, values=values)


def _local(module: Any, name: str) -> Tensor:
    parameter: Any = module._parameters.get(name)
    part = module._buffers[name] if parameter is None else parameter
    # code that fills a model during loading looks for the DTensor
    return cast("Tensor", part if part.is_meta else part.to_local())


@functools.cache
def _class_of_part(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return the class for a module of which each process has a part; it keeps its name.

    Args:
        cls: class of the module.
        names: names of its own tensors, which are DTensors.
    """
    kind: type[_SplitPart] = _SplitPart
    if issubclass(cls, Adapter):
        kind = _PartOfPrefix if issubclass(cls, AttentionAdapter) else _PartOfAdapter
    members: dict[str, Any] = {
        "_whole": cls, "__module__": cls.__module__, "__doc__": cls.__doc__,
        **{name: property(functools.partial(_local, name=name)) for name in names},
    }  # fmt: skip
    return cast("type[nn.Module]", type(cls.__name__, (kind, cls), members))


def keep_part(layer: nn.Module, adapter: nn.Module) -> None:
    """Keep this process's part of the tensors of an adapter, which are equal in all processes.

    Args:
        layer: the layer that will get the adapter; a whole layer does not change it.
        adapter: the adapter that `check_split` has checked.
    """
    if isinstance(adapter, _SplitPart):
        return
    if isinstance(adapter, AttentionAdapter):
        if isinstance(heads := heads_split_of(layer), LayerSplit):
            _mark(adapter, heads, ())
    elif isinstance(split := split_of(layer), LayerSplit) and split.sides:
        _cut(adapter, split)


def _mark(module: nn.Module, split: LayerSplit, names: Iterable[str]) -> None:
    module.__class__ = _class_of_part(cast("Any", type(module)), tuple(names))
    cast("Any", module)._split = split


def _cut(adapter: nn.Module, split: LayerSplit) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if isinstance(adapter, FusedAdapters):
        for child in adapter.children():
            _cut(child, split)
        if split.outputs:
            adapter.slices = _slices(adapter.slices, lambda groups: groups // split.size)
        _mark(adapter, split, ())
        return
    sides: Mapping[str, tuple[str, ...]] = cast("Adapter", adapter).split_dims
    if not sides:
        return
    for path, module in [*adapter.named_modules()]:
        tensors: dict[str, Tensor] = {
            name: t for name, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        }  # fmt: skip
        for name, tensor in tensors.items():
            dims = sides.get(f"{path}.{name}" if path else name, ())
            cut = next((i for i, side in enumerate(dims) if side in split.sides), None)
            place = Replicate() if cut is None else Shard(cut)
            value: Any = distribute_tensor(tensor.detach(), split.mesh, [place], src_data_rank=None)
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(value, tensor.requires_grad)
            else:
                module._buffers[name] = value
        if tensors or module is adapter:
            _mark(module, split, tensors)


def _slices(slices: Mapping[str, OutputSlice | None], count: Any) -> dict[str, OutputSlice | None]:
    return {
        label: None if s is None else dataclasses.replace(s, groups=count(s.groups))
        for label, s in slices.items()
    }


def whole(adapter: _M) -> _M:
    """Return a copy of an adapter with whole tensors; the adapter itself if it is whole.

    A collective call.

    Args:
        adapter: a layer's adapter.
    """
    parts = [module for module in adapter.modules() if isinstance(module, _SplitPart)]
    if not parts:
        return adapter
    memo: dict[int, Any] = {id(part._split): part._split for part in parts}
    for module in adapter.modules():
        if isinstance(module, Adapter) and module.shared_key is not None:
            memo[id(module.shared_key)] = module.shared_key
    for tensor in (*adapter.parameters(), *adapter.buffers()):
        value = whole_tensor(tensor).detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    made = copy.deepcopy(adapter, memo)
    for module in made.modules():
        if isinstance(module, _SplitPart):
            cast("Any", module).__class__ = module._whole
            if isinstance(module, FusedAdapters) and module._split.outputs:
                size = cast("Any", module)._split.size
                module.slices = _slices(module.slices, lambda groups, n=size: groups * n)
            del module._split
    return made


@torch.no_grad()
def equalize(modules: Iterable[nn.Module], mesh: Any) -> None:
    """Copy the values of plain tensors from a mesh's first process to all; a collective call.

    Args:
        modules: new modules, the same in all processes.
        mesh: a mesh with one dimension.
    """
    group = mesh.get_group()
    first = dist.get_global_rank(group, 0)
    every = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    for tensor in {id(t): t for t in every}.values():
        if not (is_part(tensor) or tensor.is_meta):
            value = tensor.detach().contiguous()
            dist.broadcast(value, first, group)
            tensor.copy_(value)
