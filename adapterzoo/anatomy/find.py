"""Discovery: stacks of blocks, other layers and parameters, and how the model uses each layer.

A module may read a layer's parameters, instead of or besides calling the layer. Mamba's block
computes `self.dt_proj.weight @ x` and never calls `dt_proj`; CLIP's embeddings call their position
table, or interpolate its weight. The source of the module's methods shows which. Embeddings
that do more than look up rows (BART's positions, Inkling's norm) and linear layers that do more
than multiply (Llama 4's router) read their own weight.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeGuard, cast

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from .blocks import (
    layers_of,
    linear_shape,
    mixers_of,
    projection_role,
    read_block,
    roles_of,
    row_of,
)
from .inputs import attentions_of, entry_of, positions_of, table_of, tokens_of
from .mixtures import mixture_of
from .patterns import CHANNEL_NORM_CLASS, NORM_CLASS, Row
from .sites import ATTENTION_ROLES, MIXER_ROLES, Anatomy, Block, Kind, Role, Site, SubLayer
from .tree import HEAD, Branch, Tree, below, joined


def find(model: nn.Module, roles: Mapping[str, Role] | None = None) -> Anatomy:
    """Return the sites for adapters in a model.

    Pure discovery: neither the model nor its configuration is changed, and no weight is read, so a
    model on the meta device has the same anatomy.

    Args:
        model: a backbone of real or meta tensors. Its `config`, if it has one, helps to read
            fused layers.
        roles: paths of layers relative to a block → their roles, if names do not show them.
    """
    tree = Tree(model, roles)
    blocks: list[Block] = []
    templates: dict[tuple[object, ...], Block] = {}
    shared = shared_tables_of(tree)
    uses = uses_of(tree) | dict.fromkeys(unused_of(tree, shared), ((), False))

    def known(site: Site) -> Site:
        site = marked(site, uses)
        if not site.is_routed:
            return site
        return dataclasses.replace(site, mixture=mixture_of(tree, site))

    for stack in _stacks(tree):
        for branch in _branches(tree, stack):
            layers = tuple(layers_of(branch, Row()))
            if not layers:
                continue
            # packed parameters do not show the widths
            key = (stack, branch.signature, layers)
            if key not in templates:
                templates[key] = read_block(branch, stack)
            block = _planted(templates[key], branch.path, len(blocks))
            sites, parts = (tuple(map(known, of)) for of in (block.sites, block.parts))
            blocks.append(dataclasses.replace(block, sites=sites, parts=parts))
    inside = {layer for block in blocks for site in block.sites for layer in _covered(site)}
    outside: list[Site] = []
    for layer in layers_of(Branch(tree, ""), Row()):
        is_head = re.search(r"(^|\.)(lm_head|embed_out)$", layer.path) is not None
        role: Role = "embedding" if layer.kind == "embedding" else "lm_head" if is_head else "other"
        if layer.path not in inside:
            outside.append(known(dataclasses.replace(layer, role=role)))
    listed = inside | {site.path for site in outside}
    covered = inside.union(*map(_covered, outside))
    others = (
        _site(path, "norm" if is_norm(module) else "layer", module, blocks)
        for path, module in tree.modules.items()
        if path not in listed and any(True for _ in module.parameters(recurse=False))
    )
    attentions, unreachable = attentions_of(tree, blocks)
    entry, no_entry = entry_of(tree, blocks)
    positions, unmovable, rotary = positions_of(tree, blocks)
    biases, odd_biases = biases_of(tree, blocks)
    convolutional = any(isinstance(module, nn.Conv2d) for module in tree.modules.values())
    encoders = nn.TransformerEncoder, nn.TransformerEncoderLayer
    why = "a convolutional network: " * convolutional + "no block with attention"
    return Anatomy(
        tuple(blocks),
        tuple(outside),
        reason="" if blocks else why,
        attentions=attentions,
        unreachable=unreachable,
        entry=entry,
        no_entry=no_entry,
        positions=positions,
        unmovable=unmovable,
        rotary=rotary,
        tokens=tokens_of(tree, blocks),
        others=tuple(map(known, others)),
        parameters=tuple(map(known, parameters_of(tree, blocks, covered))),
        convolutions=tuple(_convolutions(tree, blocks, uses)),
        biases=tuple(map(known, biases)),
        odd_biases=odd_biases,
        shared_tables=shared,
        own_table=(table := table_of(tree)),
        fused=tuple(path for path, module in tree.modules.items() if isinstance(module, encoders)),
        tied=() if table is None else tuple(tied_to(tree.modules[table], tree.modules)),
    )


def tied_to(table: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of the linear layers that share the weight of a table.

    Args:
        table: an embedding.
        layers: modules by path.
    """
    weight = table._parameters.get("weight")
    for path, layer in layers.items():
        if linear_shape(layer) is not None and layer._parameters.get("weight") is weight:
            yield path


def output_site(model: nn.Module, path: str) -> Site | None:
    """Return the site of a head's layer onto the vocabulary; None if it is not a linear layer.

    Args:
        model: the whole model, with real or meta tensors.
        path: the layer's path.
    """
    tree = Tree(model)
    shape = linear_shape(tree.modules[path])
    if shape is None:
        return None
    d_in, d_out, transposed = shape
    site = Site(path, "lm_head", -1, "", "linear", d_in, d_out, transposed=transposed)
    return dataclasses.replace(marked(site, uses_of(tree)), path=f"{HEAD}{path}")


def _covered(site: Site) -> tuple[str, ...]:
    """Return the paths that a site covers: its module, and the layer whose weight it reads."""
    if site.parameter is None:
        return (site.path,)
    return site.path, f"{site.path}.{site.parameter.removesuffix('.weight')}"


def _stacks(tree: Tree) -> Iterator[str]:
    """Yield paths of the containers of blocks, in model order.

    Containers of stages, which hold containers of blocks, are omitted, and so are containers of
    sub-layers such as the `layer` of a T5 block.
    """

    @functools.cache
    def mixes(path: str) -> bool:
        branch = Branch(tree, path)
        row = row_of(branch)
        layers = () if row.outside else layers_of(branch, row)
        if any(projection_role(layer, row) in ATTENTION_ROLES for layer in layers):
            return True
        return any(mixers_of(branch)) and not roles_in(path).isdisjoint(MIXER_ROLES)

    def roles_in(path: str) -> set[Role]:
        return {*roles_of(Branch(tree, path)).values()}

    @functools.cache
    def is_block(path: str) -> bool:
        return mixes(path) and not roles_in(path).isdisjoint(("mixer_out", "mlp_out"))

    elements = {
        path: tree.children(path)
        for path, module in tree.modules.items()
        if path and isinstance(module, nn.ModuleList | nn.Sequential)
    }
    taken: list[str] = []
    for container in elements:
        if any(container.startswith(f"{stack}.") for stack in taken):
            continue
        inner = (own for path, own in elements.items() if path.startswith(f"{container}."))
        if any(is_block(element) for own in inner for element in own):
            continue
        if any(mixes(element) for element in elements[container]):
            taken.append(container)
            yield container


def _branches(tree: Tree, stack: str) -> Iterator[Branch]:
    """Yield the blocks of a stack, as branches of the tree."""
    owner, _, name = stack.rpartition(".")
    lists = row_of(Branch(tree, owner)).lists
    for path in tree.children(stack):
        if name in lists:
            number = path.rpartition(".")[2]
            yield Branch(tree, owner, tuple(f"{part}.{number}" for part in lists))
        else:
            yield Branch(tree, path)


def _planted(block: Block, path: str, layer: int) -> Block:
    """Return a block with relative paths, with the model's paths and its number."""
    at = functools.partial(joined, path)

    def moved(site: Site) -> Site:
        return dataclasses.replace(site, path=at(site.path), layer=layer)

    return dataclasses.replace(
        block,
        path=path,
        layer=layer,
        sites=tuple(map(moved, block.sites)),
        parts=tuple(map(moved, block.parts)),
        sublayers=tuple(
            SubLayer(sub.kind, at(sub.out), at(sub.source), sub.norm and at(sub.norm))
            for sub in block.sublayers
        ),
        languages=block.languages and at(block.languages),
    )


# convolutions; torch's recurrent layers, which compute with a list of weights taken only once;
# and parts from which a weight is computed
_OPAQUE = _ConvNd, nn.RNNBase, ParametrizationList


def parameters_of(tree: Tree, blocks: Sequence[Block], listed: Collection[str]) -> Iterator[Site]:
    """Yield the matrices that modules compute with and that no other site has, in model order.

    Args:
        tree: the model's tree.
        blocks: the model's blocks.
        listed: paths of the layers with a weight matrix, and of fused experts.
    """
    for path, module in tree.modules.items():
        if not path or path in listed or isinstance(module, _OPAQUE):
            continue
        for name, own in module._parameters.items():
            if own is None or own.dim() not in (2, 3) or not own.is_floating_point():
                continue
            *experts, d_out, d_in = own.shape
            yield Site(
                path, "other", *_place(path, blocks), "experts" if experts else "linear",
                d_in, d_out, parameter=name, experts=experts[0] if experts else 0,
            )  # fmt: skip


def _convolutions(
    tree: Tree, blocks: Sequence[Block], uses: Mapping[str, object]
) -> Iterator[Site]:
    """Yield, in order, the convolutions that only convolve and whose weight nothing else reads."""
    for path, module in tree.modules.items():
        weight = module._parameters.get("weight")
        if weight is None or is_lazy(weight) or path in uses or not weight.is_floating_point():
            continue
        if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            continue
        d_out, *rest = weight.shape
        yield Site(
            path, "other", *_place(path, blocks), "convolution", math.prod(rest), d_out,
            kernel=tuple(rest[1:]), groups=module.groups, special=_special(module),
        )  # fmt: skip


def _special(module: _ConvNd) -> tuple[str, ...]:
    """Return a convolution's unusual arguments, see `Site`."""
    sizes = ("kernel_size", "stride", "padding")
    found = [name for name in sizes if len({*getattr(module, name)}) > 1]
    if any(d > 1 < k for d, k in zip(module.dilation, module.kernel_size, strict=True)):
        found.append("dilation")
    if module.padding_mode != "zeros" and any(module._reversed_padding_repeated_twice):
        found.append("padding_mode")
    return tuple(found)


def biases_of(tree: Tree, blocks: Sequence[Block]) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """Return the layers whose output is a sum with their bias, and paths of others with a bias."""
    found, others = [], []
    for path, module in tree.modules.items():
        if module._parameters.get("bias") is None:
            continue
        conv = isinstance(module, _ConvNd)
        # torch's attention reads the parameters of its layers
        is_read = any(isinstance(owner, nn.MultiheadAttention) for owner in tree.owners(path))
        if is_read or not (conv or is_norm(module) or linear_shape(module) is not None):
            others.append(path)
            continue
        # the features of such a norm are channels, the second dimension
        by_channels = getattr(module, "data_format", None) == "channels_first"
        spatial = conv or by_channels or CHANNEL_NORM_CLASS.search(type(module).__name__)
        found.append(_site(path, "layer" if spatial else "output", module, blocks))
    return tuple(found), tuple(others)


def shared_tables_of(tree: Tree) -> tuple[tuple[str, ...], ...]:
    """Return the paths of embeddings that share one weight, for each weight that is shared."""
    tables = {p: m for p, m in tree.modules.items() if isinstance(m, nn.Embedding)}
    source = dict(_declared(tree)) if any(m.weight.is_meta for m in tables.values()) else {}
    groups: dict[object, list[str]] = {}
    for path, module in tables.items():
        first = tables.get(source.get(path, path), module)
        groups.setdefault(id(first._parameters["weight"]), []).append(path)
    return tuple(tuple(paths) for paths in groups.values() if len(paths) > 1)


def _declared(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield (path, path of the layer whose weight it will share) of a model that is being loaded.

    Its parameters are on the meta device and not yet tied.
    """
    for path, module in tree.modules.items():
        keys = getattr(type(module), "_tied_weights_keys", None)
        if isinstance(keys, dict) and getattr(module.config, "tie_word_embeddings", True):
            for key, source in keys.items():
                names = (joined(path, k.removesuffix(".weight")) for k in (key, source))
                yield next(names), next(names)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes over features, the last dimension."""
    own = list(module.parameters(recurse=False))
    named = NORM_CLASS.search(type(module).__name__) is not None
    apart = isinstance(module, (nn.GroupNorm, _NormBase))
    return named and not apart and bool(own) and all(p.dim() == 1 for p in own)


def _site(path: str, kind: Kind, module: nn.Module, blocks: Sequence[Block]) -> Site:
    layer, stack = _place(path, blocks)
    # a bias is as long as its layer's output
    own = (module._parameters.get("bias"), *module.parameters(recurse=False))
    # a parameter without dimensions, such as CLIP's logit scale, has no width
    width = next(p.shape[-1] if p.dim() else 1 for p in own if p is not None)
    return Site(path, "other", layer, stack, kind, width, width)


def _place(path: str, blocks: Sequence[Block]) -> tuple[int, str]:
    """Return the number of the block around a path, −1 outside blocks, and its stack."""
    around = ((block.layer, block.stack) for block in blocks if below(path, block.path))
    return next(around, (-1, ""))


# what a module reads from a parameter without computing with it
_FACTS = frozenset(
    ("data", "device", "dim", "dtype", "element_size", "is_meta", "ndim", "numel", "requires_grad",
     "shape", "size")
)  # fmt: skip
# methods that pass a table on, or tie it, and compute nothing
_INPUT = "get_input_embeddings"
_ASIDE = re.compile(r"__init__|_?tie_weights|_?(get|set|resize)_(input|output|token)_embeddings")
# linear layers that return something other than a product
_MORE = re.compile("Router|GroupedLinear")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Handed(NamedTuple):
    """An argument of another method of the module.

    Attributes:
        method: name of the method.
        parameter: number or keyword of the argument.
    """

    method: str
    parameter: int | str


# an attribute of a layer that is computed with; None for the layer itself, which may be called; or
# the argument of a method that gets the layer
_Access = str | None | Handed


def uses_of(tree: Tree) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return the layers that are read, or whose methods are called in their place.

    Args:
        tree: the model's tree.

    Returns:
        Path of a layer → names of the parameters that are read, and whether the layer is called.
    """
    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    for path, module in tree.modules.items():
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        around, _, child = path.rpartition(".")
        while around and isinstance(tree.modules.get(around), _LISTS):
            around, _, child = around.rpartition(".")
        owner = tree.modules.get(around)
        if not own or not path or owner is None:
            continue
        if _computes_more(module):
            found[path] = ("weight",), False
            continue
        used = _used(cast("Any", type(owner)), child)
        read = tuple(name for name in own if name in used)
        if used - {None} <= set(own):
            is_called = None in used or not read
        elif around == path.rpartition(".")[0] and None not in used:
            # methods of the layer other than its forward read its parameters
            read, is_called = tuple(own), False
        else:
            is_called = True
        if read:
            found[path] = read, is_called
    return found


def unused_of(tree: Tree, tables: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the embeddings that only hold the table of others, such as T5's `shared`.

    Args:
        tree: the model's tree.
        tables: paths of embeddings that share one weight, for each such weight.
    """
    for path in (path for group in tables for path in group):
        owners = [type(owner) for owner in tree.owners(path)]
        around, _, child = path.rpartition(".")
        used = around not in tree.modules or _touches(owners[0], child)
        if not used and not any(_touches(owner, _INPUT) for owner in owners):
            yield path


def marked(site: Site, uses: Mapping[str, tuple[tuple[str, ...], bool]]) -> Site:
    """Return a layer's site with the uses of the layer."""
    if site.parameter is not None or site.path not in uses:
        return site
    read, is_called = uses[site.path]
    return dataclasses.replace(site, read=read, is_called=is_called)


def _computes_more(layer: nn.Module) -> bool:
    """Return whether a layer does more than look up rows, times `embed_scale`, or multiply.

    Other linear layers with their own forward (Falcon's, quantized ones) only multiply. A
    convolution with its own forward pads its input or changes its weight first.
    """
    cls = next((each for each in _classes(type(layer)) if "forward" in vars(each)), nn.Module)
    if isinstance(layer, nn.Embedding):
        takes = inspect.signature(cls.forward).parameters
        return cls is not nn.Embedding and not (len(takes) == 2 and hasattr(layer, "embed_scale"))
    if isinstance(layer, _ConvNd):
        return cls not in (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    rounds = hasattr(layer, "weight_fake_quant")
    return isinstance(layer, nn.Linear) and (rounds or _MORE.search(cls.__name__) is not None)


def _touches(cls: type[Any], name: str) -> bool:
    """Return whether the methods of a class use an attribute of the module or of its children."""
    return any(name in access for access in _all_accesses(cls, name))


@functools.cache
def _used(cls: Any, child: str) -> frozenset[str | None]:
    """Return the uses, in the methods of a class, of a child or of a list's elements."""
    return frozenset(access for name, access in _all_accesses(cls, child) if name == child)


def _all_accesses(cls: type[Any], name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the uses in those methods of a class that have a name."""
    methods = {method.__name__: method for method in reversed([*_methods(cls)])}
    for method in _methods(cls):
        if name not in _names(method.__code__):
            continue
        for child, access in _mentions(method):
            if not child.startswith("self."):
                continue
            inside: list[_Access] = [access]
            if isinstance(access, Handed) and (inner := methods.get(access.method)) is not None:
                place, (_, *takes) = access.parameter, inner.__code__.co_varnames
                argument = takes[place] if isinstance(place, int) else place
                inside = [use for name, use in _mentions(inner) if name == argument]
            for use in inside:
                yield child.removeprefix("self."), None if isinstance(use, Handed) else use


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names in the code of a function and of the functions in it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)


def _classes(cls: type[Any]) -> list[type[Any]]:
    """Return the base classes of a module's class, without those of adapters."""
    return [each for each in cls.__mro__ if not each.__module__.startswith("adapterzoo.")]


def _methods(cls: type[Any]) -> Iterator[FunctionType]:
    """Yield the methods of a class and its bases below `nn.Module`, without overridden ones."""
    seen: set[str] = set()
    for each in _classes(cls):
        if each is nn.Module:
            return
        for name, value in vars(each).items():
            method = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if method is None or name in seen or _ASIDE.fullmatch(name):
                continue
            if isinstance(method, FunctionType) and method.__code__.co_argcount:
                # a method that calls the one it overrides has its uses too
                if "super" not in method.__code__.co_names:
                    seen.add(name)
                yield method


@functools.cache
def _mentions(method: FunctionType) -> tuple[tuple[str, _Access], ...]:
    """Return each mention of a variable, or of an attribute `self.name`, with its use."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        # code without a file
        return ()
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    me = method.__code__.co_varnames[0]
    found: list[tuple[str, _Access]] = []
    for node in around:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
            name = node.id
        elif _is_own(node, me) and not isinstance(node.ctx, ast.Store):
            name = f"self.{node.attr}"
        else:
            continue
        found += [(name, access) for access in _access(node, around, me)]
    return tuple(found)


def _is_own(node: ast.AST, me: str) -> TypeGuard[ast.Attribute]:
    """Return whether an expression is an attribute of the module."""
    return (
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == me
    )


def _access(node: ast.expr, around: Mapping[ast.AST, Any], me: str) -> Iterator[_Access]:
    """Yield how one mention of a layer uses it, unless it only inspects it."""
    while isinstance(outer := around[node], ast.Subscript) and outer.value is node:
        node = outer
    keyword = outer.arg if isinstance(outer, ast.keyword) else None
    call = around[outer] if keyword else outer
    if isinstance(outer, ast.Attribute):
        if _computes(outer, around):
            yield outer.attr
    elif isinstance(call, ast.Call) and call.func is not node and _is_own(call.func, me):
        yield Handed(call.func.attr, keyword or call.args.index(node))
    elif _computes(node, around):
        yield None


def _computes(node: ast.expr, around: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether a value is computed with, not only inspected."""
    outer: Any = around[node]
    if isinstance(outer, ast.Attribute):
        return outer.attr not in _FACTS
    if isinstance(outer, ast.Compare):
        return not all(isinstance(op, (ast.Is, ast.IsNot)) for op in outer.ops)
    is_question = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
    return not (is_question and outer.func.id in ("isinstance", "hasattr"))
