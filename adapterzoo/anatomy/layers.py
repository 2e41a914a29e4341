"""What can be trained as it is: layers without a weight matrix, biases, and shared tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from .names import below
from .norms import NORM_CLASS
from .sites import Block, Kind, Site
from .tree import Tree


def other_layers_of(
    tree: Tree, blocks: Sequence[Block], listed: Collection[str]
) -> tuple[Site, ...]:
    """Return the modules with parameters of their own that have no weight matrix, in model order.

    Args:
        tree: of the model.
        blocks: its blocks.
        listed: paths of the layers with a weight matrix.
    """
    found = []
    for path, module in tree.modules.items():
        if path not in listed and _own(module):
            found.append(_site(path, "norm" if is_norm(module) else "layer", module, blocks))
    return tuple(found)


def biases_of(tree: Tree, blocks: Sequence[Block]) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """Return the layers whose output is a sum with their bias, and paths of others with a bias."""
    found, others = [], []
    for path, module in tree.modules.items():
        if module._parameters.get("bias") is None:
            continue
        norm, conv = is_norm(module), isinstance(module, _ConvNd)
        is_linear = isinstance(module, nn.Linear) or hasattr(module, "nf")
        if not (norm or conv or is_linear) or _is_read(tree, path):
            others.append(path)
            continue
        found.append(_site(path, "layer" if conv else "output", module, blocks))
    return tuple(found), tuple(others)


def shared_tables_of(tree: Tree) -> tuple[tuple[str, ...], ...]:
    """Return the paths of embeddings that share one weight, for each weight that is shared."""
    paths: dict[int, list[str]] = {}
    for path, module in tree.modules.items():
        if isinstance(module, nn.Embedding):
            paths.setdefault(id(module._parameters["weight"]), []).append(path)
    return tuple(tuple(each) for each in paths.values() if len(each) > 1)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module normalizes features, the last dimension."""
    own = list(_own(module))
    named = NORM_CLASS.search(type(module).__name__) is not None
    apart = isinstance(module, (nn.GroupNorm, _NormBase))
    return named and not apart and bool(own) and all(p.dim() == 1 for p in own)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _is_read(tree: Tree, path: str) -> bool:
    """Return whether the module above reads the layer's parameters without calling it."""
    return any(isinstance(owner, nn.MultiheadAttention) for owner in tree.owners(path))


def _site(path: str, kind: Kind, module: nn.Module, blocks: Sequence[Block]) -> Site:
    inside = next(_around(path, blocks), None)
    layer, stack = (-1, "") if inside is None else (inside.layer, inside.stack)
    # a bias is as long as the output of its layer
    own = (module._parameters.get("bias"), *_own(module))
    width = next(p.shape[-1] if p.dim() else 1 for p in own if p is not None)
    return Site(path, "other", layer, stack, kind, width, width)


def _around(path: str, blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if below(path, block.path):
            yield block
