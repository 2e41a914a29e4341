"""Parameters outside of linear layers: those of other layers, biases, and shared tables."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from .names import below, joined
from .norms import CHANNEL_NORM_CLASS, NORM_CLASS
from .sites import Block, Kind, Site
from .tokens import input_embeddings_of
from .tree import Tree

# convolutions; torch's recurrent layers, which compute with a list of their weights, taken once;
# and parts from which a weight is computed
_OPAQUE = _ConvNd, nn.RNNBase, ParametrizationList


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


def parameters_of(tree: Tree, blocks: Sequence[Block], listed: Collection[str]) -> tuple[Site, ...]:
    """Return the matrices that modules compute with and no other site has, in model order.

    Args:
        tree: of the model.
        blocks: its blocks.
        listed: paths of the layers with a weight matrix, and of fused experts.
    """
    found = []
    for path, module in tree.modules.items():
        if not path or path in listed or isinstance(module, _OPAQUE):
            continue
        for name, own in module._parameters.items():
            if own is None or own.dim() not in (2, 3) or not own.is_floating_point():
                continue
            *experts, d_out, d_in = own.shape
            site = Site(
                path, "other", *_place(path, blocks), "experts" if experts else "linear",
                d_in, d_out, parameter=name, experts=experts[0] if experts else 0,
            )  # fmt: skip
            found.append(site)
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
        spatial = conv or _normalizes_channels(module)
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


def own_table_of(tree: Tree) -> str | None:
    """Return the path of the input embeddings, if they are a table."""
    own = input_embeddings_of(tree.modules[""])
    paths = (path for path, module in tree.modules.items() if module is own)
    return next(paths, None) if isinstance(own, nn.Embedding) else None


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
    """Return whether a module normalizes features, the last dimension."""
    own = list(_own(module))
    named = NORM_CLASS.search(type(module).__name__) is not None
    apart = isinstance(module, (nn.GroupNorm, _NormBase))
    return named and not apart and bool(own) and all(p.dim() == 1 for p in own)


def _normalizes_channels(module: nn.Module) -> bool:
    """Return whether the features of a norm are channels, the second dimension."""
    first = getattr(module, "data_format", None) == "channels_first"
    return first or CHANNEL_NORM_CLASS.search(type(module).__name__) is not None


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


def _is_read(tree: Tree, path: str) -> bool:
    """Return whether the module above reads the layer's parameters without calling it."""
    return any(isinstance(owner, nn.MultiheadAttention) for owner in tree.owners(path))


def _site(path: str, kind: Kind, module: nn.Module, blocks: Sequence[Block]) -> Site:
    layer, stack = _place(path, blocks)
    # a bias is as long as the output of its layer
    own = (module._parameters.get("bias"), *_own(module))
    # a parameter without dimensions, such as CLIP's logit scale, has no width
    width = next(p.shape[-1] if p.dim() else 1 for p in own if p is not None)
    return Site(path, "other", layer, stack, kind, width, width)


def _place(path: str, blocks: Sequence[Block]) -> tuple[int, str]:
    """Return the number of the block around a path, −1 outside of blocks, and its stack."""
    inside = next(_around(path, blocks), None)
    return (-1, "") if inside is None else (inside.layer, inside.stack)


def _around(path: str, blocks: Sequence[Block]) -> Iterator[Block]:
    for block in blocks:
        if below(path, block.path):
            yield block
