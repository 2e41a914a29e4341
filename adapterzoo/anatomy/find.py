"""Discovery: stacks of blocks, the role of every layer in them, and other parameters."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from .attention import attentions_of, positions_of
from .layouts import is_known_fusion, parts_of
from .patterns import (
    ARCHITECTURES,
    ASIDE,
    ATTENTION_IN,
    ATTENTION_OUT,
    CHANNEL_NORM_CLASS,
    CROSS,
    EXPERTS,
    MLP,
    NORM_CLASS,
    Row,
)
from .reads import marked, unused_of, uses_of
from .sites import ATTENTION_ROLES, Anatomy, Block, Kind, Role, Site
from .streams import sublayers_of
from .tokens import entry_of, input_embeddings_of, tokens_of
from .tree import Branch, Tree, below, joined, parent


def find(model: nn.Module, roles: Mapping[str, Role] | None = None) -> Anatomy:
    """Return the sites for adapters in a model.

    Pure discovery: neither the model nor its configuration is changed, and no weight is read, so
    that a model on the meta device has the same anatomy.

    Args:
        model: a backbone of real or meta tensors. Its `config`, if it has one, helps to read
            fused layers.
        roles: paths of layers below a block to their roles, where names do not show them.
    """
    tree = Tree(model, roles)
    blocks: list[Block] = []
    templates: dict[tuple[object, ...], Block] = {}
    shared = shared_tables_of(tree)
    uses = uses_of(tree) | dict.fromkeys(unused_of(tree, shared), ((), False))
    for stack in _stacks(tree):
        for branch in _branches(tree, stack):
            layers = tuple(_layers(branch, Row()))
            if not layers:
                continue
            # packed parameters do not show the widths
            key = (stack, branch.signature, layers)
            if key not in templates:
                templates[key] = _read(branch, stack)
            block = _planted(templates[key], branch.path, len(blocks))
            sites, parts = (tuple(marked(s, uses) for s in of) for of in (block.sites, block.parts))
            blocks.append(dataclasses.replace(block, sites=sites, parts=parts))
    inside = {layer for block in blocks for site in block.sites for layer in _covered(site)}
    outside = tuple(marked(site, uses) for site in _outside(tree, inside))
    attentions, unreachable = attentions_of(tree, blocks)
    reason = "" if blocks else "no block with attention"
    if not blocks and any(isinstance(module, nn.Conv2d) for module in tree.modules.values()):
        reason = "a convolutional network: no block with attention"
    entry, no_entry = entry_of(tree, blocks)
    positions, unmovable, rotary = positions_of(tree, blocks)
    tokens = tokens_of(tree, blocks)
    ways_in = attentions, unreachable, entry, no_entry, positions, unmovable, rotary, tokens
    others = other_layers_of(tree, blocks, inside | {site.path for site in outside})
    others = tuple(marked(site, uses) for site in others)
    covered = inside | {layer for site in outside for layer in _covered(site)}
    parameters = parameters_of(tree, blocks, covered)
    biases, odd = biases_of(tree, blocks)
    encoders = nn.TransformerEncoder, nn.TransformerEncoderLayer
    fused = tuple(path for path, module in tree.modules.items() if isinstance(module, encoders))
    biases = tuple(marked(site, uses) for site in biases)
    rest = others, parameters, biases, odd, shared, own_table_of(tree), fused
    return Anatomy(tuple(blocks), outside, reason, *ways_in, *rest)


def _covered(site: Site) -> tuple[str, ...]:
    """Return the paths that a site covers: its module, and the layer whose weight that reads."""
    if site.parameter is None:
        return (site.path,)
    return site.path, f"{site.path}.{site.parameter.removesuffix('.weight')}"


def _stacks(tree: Tree) -> Iterator[str]:
    """Yield paths of the containers of blocks, in model order.

    Containers of stages, which hold containers of blocks, are left out, and so are containers of
    sub-layers such as the `layer` of a T5 block.
    """
    taken: list[str] = []
    for container in tree.containers:
        if any(container.startswith(f"{stack}.") for stack in taken):
            continue
        elements = tree.children(container)
        if any(_holds_blocks(tree, element) for element in elements):
            continue
        if any(_has_attention(tree, element) for element in elements):
            taken.append(container)
            yield container


def _branches(tree: Tree, stack: str) -> Iterator[Branch]:
    """Yield the blocks of a stack, as branches of the tree."""
    owner, _, name = stack.rpartition(".")
    lists = _row(tree.branch(owner)).lists
    for path in tree.children(stack):
        if name in lists:
            number = path.rpartition(".")[2]
            yield tree.branch(owner, tuple(f"{part}.{number}" for part in lists))
        else:
            yield tree.branch(path)


def _holds_blocks(tree: Tree, path: str) -> bool:
    """Return whether a container below has elements with attention and a feed-forward part."""
    return any(
        _has_attention(tree, element) and _has_mlp(tree, element)
        for container in tree.containers
        if below(container, path)
        for element in tree.children(container)
    )


def _has_attention(tree: Tree, path: str) -> bool:
    def has_one() -> bool:
        branch = tree.branch(path)
        row = _row(branch)
        layers = () if row.outside else _layers(branch, row)
        return any(_projection(layer, row) in ATTENTION_ROLES for layer in layers)

    return tree.known(path, "attention", has_one)


def _has_mlp(tree: Tree, path: str) -> bool:
    def has_one() -> bool:
        branch = tree.branch(path)
        return "mlp_out" in _roles(branch, list(_layers(branch, _row(branch)))).values()

    return tree.known(path, "mlp", has_one)


def _read(branch: Branch, stack: str) -> Block:
    """Return the block at a branch, with all paths below the block."""
    row = _row(branch)
    layers = list(_layers(branch, row))
    roles = _roles(branch, layers)
    sites = tuple(
        dataclasses.replace(
            layer,
            role=roles[layer.path, layer.parameter],
            stack=stack,
            cross=roles[layer.path, layer.parameter] in ATTENTION_ROLES
            and CROSS.search(f"{stack.rpartition('.')[2]}.{layer.path}") is not None,
            overwritten=bool(row.overwritten and re.fullmatch(row.overwritten, layer.path)),
        )
        for layer in layers
    )
    streams = sublayers_of(branch, sites, row)
    parts = tuple(part for site in sites for part in parts_of(site, sites, branch, row))
    samples = any(site.path.endswith(".sampling_offsets") for site in sites)
    return Block(
        path="",
        layer=-1,
        stack=stack,
        d_model=_d_model(sites),
        sites=sites,
        parts=parts,
        # deformable attention samples, without queries and keys
        absent=row.absent | ({"query", "key"} if samples else set()),
        states=row.states,
        languages=row.languages,
        **streams._asdict(),
    )


def _planted(block: Block, path: str, layer: int) -> Block:
    """Return a block whose paths start at the block with the model's paths and its number."""

    def moved(site: Site) -> Site:
        return dataclasses.replace(site, path=joined(path, site.path), layer=layer)

    return dataclasses.replace(
        block,
        path=path,
        layer=layer,
        sites=tuple(map(moved, block.sites)),
        parts=tuple(map(moved, block.parts)),
        sublayers=tuple(
            dataclasses.replace(
                sub,
                out=joined(path, sub.out),
                source=joined(path, sub.source),
                norm=None if sub.norm is None else joined(path, sub.norm),
            )
            for sub in block.sublayers
        ),
        languages=joined(path, block.languages) if block.languages else "",
    )


def _layer(path: str, kind: Kind, d_in: int, d_out: int, **facts: Any) -> Site:
    """Return the site of a layer that has no role yet."""
    return Site(path, "other", -1, "", kind, d_in, d_out, **facts)


def _layers(branch: Branch, row: Row) -> Iterator[Site]:
    """Yield every layer below the branch that has a weight matrix."""
    torch_attention = {p for p, m in branch.modules if isinstance(m, nn.MultiheadAttention)}
    for path, module in branch.modules:
        if path not in torch_attention and parent(path) in torch_attention:
            continue
        if isinstance(module, nn.Embedding):
            yield _layer(path, "embedding", module.num_embeddings, module.embedding_dim)
        elif (linear := linear_shape(module)) is None:
            yield from _fused(path, module, row)
        else:
            d_in, d_out, transposed = linear
            owner, read = path, None
            if row.functional and re.fullmatch(row.functional, path):
                owner, _, name = path.rpartition(".")
                read = f"{name}.weight"
            yield _layer(owner, "linear", d_in, d_out, parameter=read, transposed=transposed)


def linear_shape(module: nn.Module) -> tuple[int, int, bool] | None:
    """Return (d_in, d_out, stored transposed) of a linear layer; None for any other module.

    `Conv1D`, GPT-2's linear layer, is recognized without importing transformers.
    """
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, False
    d_out = getattr(module, "nf", None)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(d_out, int) and weight is not None:
        return int(weight.shape[0]), d_out, True
    return None


def _fused(path: str, module: nn.Module, row: Row) -> Iterator[Site]:
    """Yield weights that are parameters of a module: of experts and of torch's own attention."""
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        # torch reads the weights and calls no module, not even the output projection
        d_out, d_in = module.in_proj_weight.shape
        yield _layer(path, "linear", d_in, d_out, parameter="in_proj_weight")
        d_out, d_in = module.out_proj.weight.shape
        yield _layer(path, "linear", d_in, d_out, parameter="out_proj.weight")
        return
    if any(re.fullmatch(pattern, path) for pattern in row.experts):
        count, d_out, d_in = next(module.parameters(recurse=False)).shape
        yield _layer(path, "experts", d_in, d_out, parameter="weight", experts=count)
        return
    stored = {
        name: tuple(tensor.shape)
        for name, tensor in module.named_parameters(recurse=False)
        if name in EXPERTS and tensor.dim() == 3
    }
    if "down_proj" not in stored:
        return
    transposed = experts_transposed(module, stored)
    for name, (count, rows, columns) in stored.items():
        d_out, d_in = (columns, rows) if transposed else (rows, columns)
        facts = {"parameter": name, "transposed": transposed, "experts": count}
        says = bool(getattr(module, "is_transposed", False))
        yield _layer(path, "experts", d_in, d_out, says_transposed=says, **facts)


def _row(branch: Branch) -> Row:
    """Return the table's entry for the architecture of a branch."""
    block = branch.tree.modules[branch.path]
    names = (type(block).__name__, *branch.model_types)
    row = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), Row())
    return _with_roles(row, branch.tree.given) if branch.tree.given else row


def _with_roles(row: Row, given: Mapping[str, Role]) -> Row:
    """Return a row with roles that a user gives; fused layers are [q | k | v]."""
    unknown = [p for p, role in given.items() if role == "qkv" and not is_known_fusion(p)]
    return dataclasses.replace(
        row,
        roles={**{re.escape(path): role for path, role in given.items()}, **row.roles},
        layouts={**{re.escape(path): "q, k, v" for path in unknown}, **row.layouts},
    )


def _projection(layer: Site, row: Row) -> Role:
    """Return the role of an input projection of attention by its name; `other` for other layers."""
    if layer.parameter == "in_proj_weight":
        return "qkv"
    path = layer.path
    if layer.kind == "linear" and layer.parameter is not None:
        path = f"{path}.{layer.parameter.removesuffix('.weight')}"
    named = {**row.roles, **row.experts}
    if special := [role for pattern, role in named.items() if re.fullmatch(pattern, path)]:
        return special[0]
    if layer.kind == "experts":
        return EXPERTS.get(layer.parameter or "", "other")
    if layer.kind == "embedding" or ASIDE.search(path):
        return "other"
    found = [role for role, names in ATTENTION_IN if names.search(path)]
    return found[0] if found else "attention_out" if layer.parameter else "other"


def _roles(branch: Branch, layers: list[Site]) -> dict[tuple[str, str | None], Role]:
    """Return the role of each layer, by (path, parameter)."""
    row = _row(branch)
    roles = {(layer.path, layer.parameter): _projection(layer, row) for layer in layers}
    linears = [s for s in layers if s.kind == "linear" and s.parameter is None]
    cores = [parent(p) if not m else p for (p, m), r in roles.items() if r in ATTENTION_ROLES[:4]]
    inner: set[str] = set()
    for core in dict.fromkeys(cores):
        root, outs = _way_out(core, linears, roles)
        inner.add(root)
        for out in outs:
            roles[out, None] = "attention_out"
    fixed = {s.path for s in linears if any(re.fullmatch(p, s.path) for p in row.roles)}
    for layer in linears:
        taken = roles[layer.path, None] != "other" or layer.path in fixed
        attends = any(below(layer.path, root) for root in inner)
        if not (taken or attends or ASIDE.search(layer.path)):
            named = (role for role, names in MLP if names.search(layer.path))
            roles[layer.path, None] = next(named, "other")
    gated = {parent(path) for (path, _), role in roles.items() if role == "mlp_in"}
    for key, role in roles.items():
        if role == "mlp_gate" and parent(key[0]) not in gated:
            # a feed-forward part without a gate whose layer is named like one (TimesFM)
            roles[key] = "mlp_in"
    return roles


def _way_out(
    core: str, linears: list[Site], roles: dict[tuple[str, str | None], Role]
) -> tuple[str, list[str]]:
    """Return the path of the whole attention and the paths of its output projections.

    The core holds query, key and value. The output projection is below it or, as in BERT, in a
    module next to it.
    """
    root = core
    while True:
        inside = [
            s.path
            for s in linears
            if below(s.path, root)
            and roles[s.path, None] in ("other", "attention_out")
            and not ASIDE.search(s.path)
        ]
        named = [p for p in inside if roles[p, None] == "attention_out"]
        if named:
            return root, named
        for names in ATTENTION_OUT:
            if found := [path for path in inside if names.search(path.removeprefix(f"{root}."))]:
                return root, found[:1] if len(found) > 1 and root != core else found
        if not root or not parent(root):
            return core, []
        root = parent(root)


def _d_model(sites: tuple[Site, ...]) -> int:
    """Return the width of the residual stream: that of most output projections."""
    widths = Counter(
        s.d_out for s in sites if s.role in ("attention_out", "mlp_out") and s.kind == "linear"
    )
    widths.update(s.d_out for s in sites if s.role == "mlp_out" and s.kind == "experts")
    return widths.most_common(1)[0][0] if widths else 0


def _outside(tree: Tree, inside: set[str]) -> Iterator[Site]:
    """Yield embeddings, language model heads and other layers outside of blocks."""
    for layer in _layers(tree.branch(""), Row()):
        if layer.path in inside:
            continue
        role: Role = "other"
        if layer.kind == "embedding":
            role = "embedding"
        elif re.search(r"(^|\.)lm_head$|(^|\.)embed_out$", layer.path):
            role = "lm_head"
        yield dataclasses.replace(layer, role=role)


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
        # torch's attention reads the parameters of its layers
        is_read = any(isinstance(owner, nn.MultiheadAttention) for owner in tree.owners(path))
        if is_read or not (norm or conv or is_linear):
            others.append(path)
            continue
        # the features of such a norm are channels, the second dimension
        by_channels = getattr(module, "data_format", None) == "channels_first"
        named = CHANNEL_NORM_CLASS.search(type(module).__name__) is not None
        spatial = conv or by_channels or named
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


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


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


def experts_transposed(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a module stores its experts' weights as `[experts, d_in, d_out]`.

    The shapes of the projections into and out of the inner width decide; if they fit both ways,
    the module's `is_transposed` does, which some families lack (Llama 4).

    Args:
        module: the owner of the weights.
        shapes: of its 3-D weights, by name; undecided without `down_proj`.
    """
    if "down_proj" not in shapes:
        return bool(getattr(module, "is_transposed", False))
    down = shapes["down_proj"]
    into = next((shape for name, shape in shapes.items() if name != "down_proj"), down)
    # [experts, d_model, d_inner] and [experts, (2) d_inner, d_model], or the other way round
    upright = into[2] == down[1] and into[1] in (down[2], 2 * down[2])
    transposed = into[1] == down[2] and into[2] in (down[1], 2 * down[1])
    return bool(getattr(module, "is_transposed", transposed)) if upright else transposed
