"""Layers whose parameters the module around them reads, instead of calling them or besides.

Mamba's block computes `self.dt_proj.weight @ x` and never calls `dt_proj`; CLIP's embeddings call
their table of positions, or interpolate its weight. The source of the module's methods tells which.
Embeddings that do more than look up rows (BART's positions, Inkling's norm) and linear layers that
do more than multiply (Llama 4's router) read their own weight.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

from torch import nn

from .sites import Site
from .tree import Tree

# what a module asks about a parameter without computing with it
_FACTS = frozenset(
    ("data", "device", "dim", "dtype", "element_size", "is_meta", "ndim", "numel", "requires_grad",
     "shape", "size")
)  # fmt: skip
# methods that hand a table on, or tie it, and compute nothing
_INPUT = "get_input_embeddings"
_ASIDE = re.compile(r"__init__|_?tie_weights|_?(get|set|resize)_(input|output|token)_embeddings")
# linear layers that return something else than a product
_MORE = re.compile("Router|GroupedLinear")
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Use(NamedTuple):
    """How the methods of a module use a child, or the elements of a list of children.

    Attributes:
        attributes: that they read of it to compute with them.
        is_called: whether they call the child, or hand it to what may.
    """

    attributes: frozenset[str]
    is_called: bool


class Handed(NamedTuple):
    """An argument of another method of the module.

    Attributes:
        method: its name.
        parameter: the number of the argument, or its keyword.
    """

    method: str
    parameter: int | str


# an attribute of a layer, the layer itself, or the parameter of a method that gets the layer
_Access = str | None | Handed


def uses_of(tree: Tree) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Return the layers that are read, or whose methods are called instead of them.

    Args:
        tree: of the model.

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
        use = _use(cast("Any", type(owner)), child)
        read = tuple(name for name in own if name in use.attributes)
        if use.attributes.issubset(own):
            is_called = use.is_called or not read
        elif around == path.rpartition(".")[0] and not use.is_called:
            # methods of the layer other than its forward read its parameters
            read, is_called = tuple(own), False
        else:
            is_called = True
        if read:
            found[path] = read, is_called
    return found


def unused_of(tree: Tree, tables: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the embeddings that only hold the table of others, as T5's `shared` does.

    Args:
        tree: of the model.
        tables: paths of embeddings that share one weight, for each such weight.
    """
    for path in (path for group in tables for path in group):
        owners = [type(owner) for owner in tree.owners(path)]
        around, _, child = path.rpartition(".")
        used = around not in tree.modules or _touches(owners[0], child)
        if not used and not any(_touches(owner, _INPUT) for owner in owners):
            yield path


def marked(site: Site, uses: Mapping[str, tuple[tuple[str, ...], bool]]) -> Site:
    """Return the site of a layer with how it is used."""
    if site.parameter is not None or site.path not in uses:
        return site
    read, is_called = uses[site.path]
    return dataclasses.replace(site, read=read, is_called=is_called)


def _computes_more(layer: nn.Module) -> bool:
    """Return whether a layer does more than look up rows, times `embed_scale`, or multiply.

    Other linear layers with a forward of their own (Falcon's, quantized ones) only multiply.
    """
    cls = next((each for each in _classes(type(layer)) if "forward" in vars(each)), nn.Module)
    if isinstance(layer, nn.Embedding):
        takes = inspect.signature(cls.forward).parameters
        return cls is not nn.Embedding and not (len(takes) == 2 and hasattr(layer, "embed_scale"))
    return isinstance(layer, nn.Linear) and _MORE.search(cls.__name__) is not None


def _touches(cls: type[Any], name: str) -> bool:
    """Return whether the methods of a class use an attribute of the module, or of its children."""
    return any(name in access for access in _all_accesses(cls, name))


@functools.cache
def _use(cls: Any, child: str) -> Use:
    """Return how the methods of a class use a child."""
    found = [attribute for name, attribute in _all_accesses(cls, child) if name == child]
    return Use(frozenset(name for name in found if name), None in found)


def _all_accesses(cls: type[Any], name: str) -> Iterator[tuple[str, str | None]]:
    """Yield what the methods of a class that have a name use."""
    methods = {method.__name__: method for method in reversed([*_methods(cls)])}
    for method in _methods(cls):
        if name not in _names(method.__code__):
            continue
        for child, access in _accesses(method):
            if not isinstance(access, Handed):
                yield child, access
            elif access.method in methods:
                for inner in _of_parameter(methods[access.method], access.parameter):
                    yield child, None if isinstance(inner, Handed) else inner
            else:
                yield child, None


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names in the code of a function, and in that of functions in it."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*inner)


def _classes(cls: type[Any]) -> list[type[Any]]:
    """Return the classes that a module's class derives from, without those of adapters."""
    return [each for each in cls.__mro__ if not each.__module__.startswith("adapterzoo.")]


def _methods(cls: type[Any]) -> Iterator[FunctionType]:
    """Yield the methods of a class and of those below `nn.Module`, without overridden ones."""
    seen: set[str] = set()
    for each in _classes(cls):
        if each is nn.Module:
            return
        for name, value in vars(each).items():
            method = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if method is None or name in seen or _ASIDE.fullmatch(name):
                continue
            if isinstance(method, FunctionType) and method.__code__.co_argcount:
                # a method that calls the one it overrides uses what that uses
                if "super" not in method.__code__.co_names:
                    seen.add(name)
                yield method


@functools.cache
def _accesses(method: FunctionType) -> tuple[tuple[str, _Access], ...]:
    """Return each child that a method uses, with how it does."""
    around, me = _around(method), method.__code__.co_varnames[0]
    return tuple(
        (node.attr, access)
        for node in around
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == me and not isinstance(node.ctx, ast.Store)
        for access in _access(node, around, me)
    )


@functools.cache
def _of_parameter(method: FunctionType, parameter: int | str) -> tuple[_Access, ...]:
    """Return how a method uses the argument that it gets at a place."""
    me, *names = method.__code__.co_varnames
    name = names[parameter] if isinstance(parameter, int) else parameter
    around = _around(method)
    return tuple(
        access
        for node in around
        if isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Store)
        for access in _access(node, around, me)
    )


def _around(method: FunctionType) -> dict[ast.AST, ast.AST]:
    """Return the node around each node of a method; nothing for code without a file."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return {}
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def _access(node: ast.expr, around: Mapping[ast.AST, Any], me: str) -> Iterator[_Access]:
    """Yield how one mention of a layer uses it, unless it only looks at it."""
    while isinstance(outer := around[node], ast.Subscript) and outer.value is node:
        node = outer
    keyword = outer.arg if isinstance(outer, ast.keyword) else None
    call = around[outer] if isinstance(outer, ast.keyword) else outer
    if isinstance(outer, ast.Attribute):
        if _computes(outer, around):
            yield outer.attr
    elif isinstance(call, ast.Call) and call.func is not node and (name := _method(call.func, me)):
        yield Handed(name, keyword or call.args.index(node))
    elif _computes(node, around):
        yield None


def _method(function: ast.expr, me: str) -> str | None:
    """Return the name of a function if it is a method of the module."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.attr if function.value.id == me else None
    return None


def _computes(node: ast.expr, around: Mapping[ast.AST, ast.AST]) -> bool:
    """Return whether a value is computed with, and not only looked at."""
    outer: Any = around[node]
    if isinstance(outer, ast.Attribute):
        return outer.attr not in _FACTS
    if isinstance(outer, ast.Compare):
        return not all(isinstance(op, (ast.Is, ast.IsNot)) for op in outer.ops)
    is_question = isinstance(outer, ast.Call) and isinstance(outer.func, ast.Name)
    return not (is_question and outer.func.id in ("isinstance", "hasattr"))
