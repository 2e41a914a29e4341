"""One transformer block: the role of each layer, the parts of fused ones, and its sub-layers.

A part of a fused layer is a slice of its output features. Sizes come from the block itself (the
output projection of attention reads as many features as the query has) and, if heads are
interleaved, from the configuration. A layout whose sizes do not add up to the layer's `d_out` is
ignored: a wrong part would be worse than none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn

from .patterns import (
    ARCHITECTURES,
    ASIDE,
    ATTENTION_IN,
    ATTENTION_OUT,
    CROSS,
    EXPERTS,
    FINAL_NORM,
    FUSED,
    INNER_NORM,
    MIXER,
    MLP,
    NORM_CLASS,
    NORM_NAME,
    NORM_PLACES,
    NUMBERED,
    SCALES,
    WIDENED,
    WIDENING,
    NormPosition,
    Row,
)
from .sites import (
    ATTENTION_ROLES,
    MLP_ROLES,
    Block,
    Kind,
    OutputSlice,
    Role,
    Site,
    SubLayer,
    SubLayerKind,
)
from .tree import Branch, below, common, leaf, nearness, parent


def read_block(branch: Branch, stack: str) -> Block:
    """Return the block at a branch, with all paths below the block."""
    row = row_of(branch)
    roles = roles_of(branch)
    sites = tuple(
        dataclasses.replace(
            layer,
            role=roles[layer.path, layer.parameter],
            stack=stack,
            cross=roles[layer.path, layer.parameter] in ATTENTION_ROLES
            and CROSS.search(f"{stack.rpartition('.')[2]}.{layer.path}") is not None,
            overwritten=bool(row.overwritten and re.fullmatch(row.overwritten, layer.path)),
        )
        for layer in layers_of(branch, row)
    )
    parts = tuple(part for site in sites for part in parts_of(site, sites, branch, row))
    samples = any(site.path.endswith(".sampling_offsets") for site in sites)
    # the stream is as wide as most output projections
    outs = ("attention_out", "mixer_out", "mlp_out")
    widths = Counter(s.d_out for s in sites if s.role in outs and s.kind == "linear")
    widths.update(s.d_out for s in sites if s.role == "mlp_out" and s.kind == "experts")
    block = Block(
        path="",
        layer=-1,
        stack=stack,
        d_model=widths.most_common(1)[0][0] if widths else 0,
        sites=sites,
        parts=parts,
        sublayers=(),
        post_norm=False,
        # deformable attention samples without queries and keys
        absent=row.absent | ({"query", "key"} if samples else set()),
        states=row.states,
        note=row.note,
        languages=row.languages,
    )
    return _with_sublayers(block, branch, row)


def _layer(path: str, kind: Kind, d_in: int, d_out: int, **facts: Any) -> Site:
    """Return the site of a layer that has no role yet."""
    return Site(path, "other", -1, "", kind, d_in, d_out, **facts)


def layers_of(branch: Branch, row: Row) -> Iterator[Site]:
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

    `Conv1D`, GPT-2's linear layer, is recognized without importing transformers, as are the
    layers of quantization libraries.
    """
    if isinstance(module, nn.Linear) or is_packed_linear(module):
        return *_widths(module), False
    d_out = getattr(module, "nf", None)
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(d_out, int) and weight is not None:
        return int(weight.shape[0]), d_out, True
    return None


def is_packed_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer without a weight: only its forward can unpack it.

    Quantization libraries agree only on `in_features` and `out_features`.
    """
    widths = _widths(module)
    weight = {**module._parameters, **module._buffers}.get("weight")
    return (
        not isinstance(module, nn.Linear)
        and all(isinstance(width, int) for width in widths)
        and bool(stored(module))
        and (weight is None or not weight.is_floating_point() or weight.shape != widths[::-1])
        # a module around a linear layer has the same attributes
        and all(linear_shape(child) is None for child in module.children())
    )


def stored(module: nn.Module) -> list[Tensor]:
    """Return a module's own tensors: parameters, buffers and attributes."""
    groups = (module._parameters, module._buffers, vars(module))
    return [t for group in groups for t in group.values() if isinstance(t, Tensor)]


def _widths(module: Any) -> tuple[Any, Any]:
    """Return (d_in, d_out) as stated by a module, if it does."""
    # it has no other record of them
    if type(module).__name__ == "EetqLinear":
        return tuple(module.weight.shape)
    return _stated(module, "in_features"), _stated(module, "out_features")


def _stated(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module or property of its class, but no answer meant for PEFT."""
    if name in vars(module):
        return vars(module)[name]
    found = next((vars(cls)[name] for cls in type(module).__mro__ if name in vars(cls)), None)
    return getattr(module, name) if isinstance(found, property) else None


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


def row_of(branch: Branch) -> Row:
    """Return the table's entry for a branch's architecture, with the roles that a user gives."""
    block, given = branch.tree.modules[branch.path], branch.tree.given
    names = (type(block).__name__, *branch.model_types)
    row = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), Row())
    if not given:
        return row
    # fused layers unknown to the table are [q | k | v]
    fused = [path for path, role in given.items() if role == "qkv"]
    unknown = [path for path in fused if not any(p.search(path) for p, _ in FUSED)]
    return dataclasses.replace(
        row,
        roles={**{re.escape(path): role for path, role in given.items()}, **row.roles},
        layouts={**{re.escape(path): "q, k, v" for path in unknown}, **row.layouts},
    )


def projection_role(layer: Site, row: Row) -> Role:
    """Return the role of an input projection of attention by its name; `other` for other layers."""
    if layer.parameter == "in_proj_weight":
        return "qkv"
    path = layer.path
    if layer.kind == "linear" and layer.parameter is not None:
        path = f"{path}.{layer.parameter.removesuffix('.weight')}"
    named = {**row.roles, **row.experts}
    for pattern, role in named.items():
        if re.fullmatch(pattern, path):
            return role
    if layer.kind == "experts":
        return EXPERTS.get(layer.parameter or "", "other")
    if layer.kind == "embedding" or ASIDE.search(path):
        return "other"
    found = [role for role, names in ATTENTION_IN if names.search(path)]
    return found[0] if found else "attention_out" if layer.parameter else "other"


def roles_of(branch: Branch) -> dict[tuple[str, str | None], Role]:
    """Return the role of each layer, by (path, parameter)."""
    row = row_of(branch)
    layers = list(layers_of(branch, row))
    roles = {(layer.path, layer.parameter): projection_role(layer, row) for layer in layers}
    linears = [s for s in layers if s.kind == "linear" and s.parameter is None]
    cores = [parent(p) if not m else p for (p, m), r in roles.items() if r in ATTENTION_ROLES[:4]]
    inner: set[str] = set()
    for core in dict.fromkeys(cores):
        root, outs = _way_out(core, linears, roles)
        inner.add(root)
        for out in outs:
            roles[out, None] = "attention_out"
    for core in mixers_of(branch):
        if not any(below(core, root) for root in inner):
            inner.add(core)
            for layer in (s for s in linears if below(s.path, core)):
                named = (role for role, names in MIXER if names.search(layer.path))
                roles[layer.path, None] = next(named, roles[layer.path, None])
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
            # a feed-forward part without a gate, one of whose layers is named like a gate (TimesFM)
            roles[key] = "mlp_in"
    return roles


def mixers_of(branch: Branch) -> Iterator[str]:
    """Yield the paths of the modules below a branch that mix tokens within each channel."""
    for path, module in branch.modules:
        children = module.children() if path else ()
        if any(isinstance(m, nn.Conv1d) and m.groups == m.in_channels > 1 for m in children):
            yield path


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


def experts_transposed(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a module stores its experts' weights as `[experts, d_in, d_out]`.

    The shapes of the projections into and out of the inner width decide; if they fit both ways,
    the module's `is_transposed` decides, which some families lack (Llama 4).

    Args:
        module: the owner of the weights.
        shapes: shapes of its 3-D weights, by name; undecided without `down_proj`.
    """
    if "down_proj" not in shapes:
        return bool(getattr(module, "is_transposed", False))
    down = shapes["down_proj"]
    into = next((shape for name, shape in shapes.items() if name != "down_proj"), down)
    # [experts, d_model, d_inner] and [experts, (2) d_inner, d_model], or the other way round
    upright = into[2] == down[1] and into[1] in (down[2], 2 * down[2])
    transposed = into[1] == down[2] and into[2] in (down[1], 2 * down[1])
    return bool(getattr(module, "is_transposed", transposed)) if upright else transposed


def parts_of(site: Site, sites: tuple[Site, ...], branch: Branch, row: Row) -> Iterator[Site]:
    """Yield the parts of a fused layer as sites; none if it is not fused or its layout is unknown.

    Args:
        site: the layer, with its path relative to the block.
        sites: all layers of the block.
        branch: the block.
        row: the table's entry for the architecture.
    """
    if site.role not in ("qkv", "mlp_in"):
        return
    behind = "attention_out" if site.role == "qkv" else "mlp_out"
    outs = [s for s in sites if s.role == behind and s.kind == site.kind]
    near = max(outs, key=lambda s: nearness(s.path, site.path), default=None)
    # of the projection that reads the layer's result, the nearest one by path
    inner = near.d_in if near else 0
    named = [name for pattern, name in row.layouts.items() if re.fullmatch(pattern, site.path)]
    if not named and site.role == "qkv":
        stored = site.parameter or site.path
        named = [name for pattern, name in FUSED if pattern.search(stored)]
        queries = [s for s in sites if s.role == "query" and parent(s.path) == parent(site.path)]
        if queries and named == ["q, k, v"]:
            named = ["k, v"]
    if not named and site.role == "mlp_in" and site.d_out == 2 * inner:
        named = ["gate, in"]
    for role, part in (_slices(named[0], site, inner, branch) if named else {}).items():
        if part.groups * part.width == site.d_out and 0 <= part.start < part.stop <= part.width:
            yield dataclasses.replace(site, role=role, d_out=part.size, output_slice=part)


_QKV: tuple[Role, ...] = ("query", "key", "value")
# layouts with parts of equal width, and their number of groups
_EQUAL: Mapping[str, tuple[tuple[Role, ...], int]] = {
    "k, v": (("key", "value"), 1),
    # for each of the four slices of the tensor-parallel training run
    "codegen": (("query", "value", "key"), 4),
    # the gate is the half that goes through the activation
    "gate, in": (("mlp_gate", "mlp_in"), 1),
    "in, gate": (("mlp_in", "mlp_gate"), 1),
}


def _slices(layout: str, site: Site, inner: int, branch: Branch) -> Mapping[Role, OutputSlice]:
    """Return the features of each part of a fused layer.

    Args:
        layout: name of the layout, as in `patterns.Row.layouts`.
        site: the layer.
        inner: width of attention's output, or inner width of the feed-forward part.
        branch: the block.
    """
    d_out, setting = site.d_out, functools.partial(branch.setting, site.path)
    heads = setting("num_attention_heads", "num_heads", "n_head", "n_heads")
    if layout == "falcon" and setting("new_decoder_architecture"):
        groups, size = setting("num_kv_heads"), inner // heads
        return _consecutive(_QKV, (heads // groups * size, size, size), groups)
    if layout in ("falcon", "q, k, v by multi_query"):
        layout = "q, k, v" if setting("multi_query") else "q, k, v per head"
    if layout.endswith("per head") and not heads:
        return {}
    match layout:
        case "q, k, v":
            # narrower keys and values if heads share them
            shared = (d_out - inner) // 2
            return _consecutive(_QKV, (inner, shared, shared))
        case "q, k, v per head":
            return _consecutive(_QKV, (d_out // heads // 3,) * 3, heads)
        case "q, k, v of linear attention":
            # the value, not the query, is as wide as the output
            size = (d_out - inner) // 2
            return _consecutive(_QKV, (size, size, inner))
        case "q, k, v, z per head":
            # for each key head of linear attention; z gates the output
            groups = setting("linear_num_key_heads", "num_k_heads") or 1
            value = inner // groups
            size = (d_out // groups - 2 * value) // 2
            return _consecutive((*_QKV, "other"), (size, size, value, value), groups)
        case "q, gate per head":
            # the gate is as wide as the value
            gate = inner // heads
            return _consecutive(("query", "other"), (d_out // heads - gate, gate), heads)
        case "k, v per head":
            # multi-head latent attention: the key without position
            sizes = setting("qk_nope_head_dim"), setting("v_head_dim")
            groups = d_out // sum(sizes) if all(sizes) else 0
            return _consecutive(("key", "value"), sizes, groups)
        case "k = v":
            return dict.fromkeys(("key", "value"), OutputSlice(1, d_out, 0, d_out))
        case "levit":
            # narrow keys and wide values; queries may have a separate layer
            owner = branch.by_path[site.path.split(".")[0] if "module" in site.path else ""]
            heads, size = getattr(owner, "num_attention_heads", 1), getattr(owner, "key_dim", 0)
            roles = _QKV if "queries" in site.path else _QKV[1:]
            return _consecutive(roles, (size, size, inner // heads)[-len(roles) :], heads)
        case "gate, in by turns":
            return _consecutive(("mlp_gate", "mlp_in"), (1, 1), d_out // 2)
    roles, groups = _EQUAL[layout]
    return _consecutive(roles, (d_out // groups // len(roles),) * len(roles), groups)


def _consecutive(
    roles: Sequence[Role], sizes: Sequence[int], groups: int = 1
) -> dict[Role, OutputSlice]:
    """Return consecutive parts of these sizes in each group."""
    ends = list(itertools.accumulate(sizes))
    return {
        role: OutputSlice(groups, ends[-1], end - size, end)
        for role, size, end in zip(roles, sizes, ends, strict=True)
    }


# path of a norm, its place, and its sub-layer
_Placed: TypeAlias = tuple[str, NormPosition, SubLayerKind]


@dataclass(slots=True)
class _Part:
    """A sub-layer while its norms are being found; all paths are relative to the block."""

    kind: SubLayerKind
    out: str
    reader: str
    root: str
    place: int = 0
    scale: str | None = None
    norms: dict[NormPosition, str] = field(default_factory=dict)

    def sublayer(self, post_norm: bool, outs: Mapping[str, str]) -> SubLayer:
        """Return the sub-layer, once the block's style is known."""
        at = self.norms.get("at")
        pre = self.norms.get("pre") or (None if post_norm else at)
        post = self.norms.get("post") or (at if post_norm else None)
        named = [out for pattern, out in outs.items() if re.fullmatch(pattern, self.out)]
        last = self.scale or self.norms.get("branch") or self.out
        return SubLayer(self.kind, named[0] if named else last, pre or self.reader, post)


def _with_sublayers(block: Block, branch: Branch, row: Row) -> Block:
    """Return the block with its sub-layers if their places on the stream are known."""
    sites = block.sites
    away = [pattern for pattern, out in row.outs.items() if not out]
    parts = [
        part
        for part in (*_attentions(sites), *_mixers(sites), *_mlps(sites))
        if not any(re.fullmatch(pattern, part.out) for pattern in away)
    ]
    if not parts or (row.note and not row.mixed | row.apart):
        return block
    places = {path: place for place, (path, _) in enumerate(branch.modules)}
    for part in parts:
        part.place = places[part.out]
    names = [path for path, module in branch.modules if path and _is_norm(path, module)]
    placed, numbered = _placed(names, parts, row)
    own = [n for n in names if "." not in n or not INNER_NORM.search(leaf(n))]
    _assign(placed, numbered, parts, alone=own[0] if len(own) == 1 else None)
    for path, _ in branch.modules:
        for pattern, kind in SCALES:
            near = _candidates(path, kind, parts) if pattern.search(path) else []
            if near:
                near[0].scale = path
    post_norm = _is_post(branch, parts, row)
    if row.lists and not post_norm:
        note = "a block is not a module of its own: its output cannot be reached"
        return dataclasses.replace(block, note=note)
    for part in parts:
        # the language adapters call the norm too: an adapter there would act twice
        if post_norm and row.languages and part.out.startswith(f"{row.languages}."):
            part.norms.pop("at", None)
    sublayers = tuple(part.sublayer(post_norm, row.outs) for part in parts)
    mixed, apart, note = row.mixed, row.apart, row.note
    if any(WIDENING.search(s.path) and s.d_in != s.d_out for s in sites):
        mixed, apart, note = frozenset({"attention"}), frozenset(), WIDENED
    return dataclasses.replace(
        block, sublayers=sublayers, post_norm=post_norm, mixed=mixed, apart=apart, note=note
    )


def _attentions(sites: tuple[Site, ...]) -> Iterator[_Part]:
    for site in sites:
        if site.role != "attention_out":
            continue
        inputs = [s for s in sites if s.role in ("query", "qkv", "value")]
        near = max(inputs, key=lambda s: nearness(s.path, site.path), default=site)
        if not nearness(near.path, site.path):
            near = site if parent(site.path) else near
        # the module, not its query: a query may read the stream plus positions (DETR)
        reader = parent(near.path) or near.path
        if site.parameter and site.kind == "linear":
            reader = site.path
        root = common(near.path, site.path)
        yield _Part("cross" if site.cross else "attention", site.path, reader, root)


def _mixers(sites: tuple[Site, ...]) -> Iterator[_Part]:
    if any(site.role in ATTENTION_ROLES for site in sites):
        return
    for site in sites:
        if site.role == "mixer_out":
            # the module: kernels that fuse all of it read the projection without calling it
            root = parent(site.path)
            yield _Part("mixer", root, root, root)


def _mlps(sites: tuple[Site, ...]) -> Iterator[_Part]:
    split = [re.split(r"(?:^|\.)experts(?:\.|$)", s.path) for s in sites if s.role in MLP_ROLES]
    moes = dict.fromkeys(parts[0] for parts in split if len(parts) > 1)
    for root in moes:
        yield _Part("mlp", root, root, root)
    for site in sites:
        if site.role != "mlp_out" or any(site.path.startswith(f"{root}.") for root in moes):
            continue
        inputs = [s for s in sites[: sites.index(site)] if s.role in ("mlp_in", "mlp_gate")]
        # the last of equally near modules: `lang_output` follows `lang_inter`
        near = max(reversed(inputs), key=lambda s: nearness(s.path, site.path), default=site)
        yield _Part("mlp", site.path, near.path, common(near.path, site.path))


def _is_norm(path: str, module: nn.Module) -> bool:
    # an identity in place of a norm also reads the stream (the first ModernBERT block)
    by_name = isinstance(module, nn.Identity) and NORM_NAME.search(leaf(path))
    return bool(by_name or NORM_CLASS.search(type(module).__name__))


def _placed(names: list[str], parts: list[_Part], row: Row) -> tuple[list[_Placed], list[str]]:
    """Return the norms whose names show their places, and the names of numbered norms."""
    placed: list[_Placed] = []
    numbered: list[str] = []
    places: dict[str, NormPosition] = {"pre": "pre", "post": "branch"}
    for name in names:
        special = [place for pattern, place in row.norms.items() if re.fullmatch(pattern, name)]
        if special:
            if special[0] is not None:
                placed.append((name, *special[0]))
            continue
        if NUMBERED.search(leaf(name)):
            numbered.append(name)
            continue
        found = [(name, place, kind) for names, place, kind in NORM_PLACES if names.search(name)]
        # in a sub-layer's module, or in the module around both (T5)
        owner = parent(name)
        own = [part for part in parts if part.root and owner in (parent(part.root), part.root)]
        if own and owner and not INNER_NORM.search(leaf(name)):
            found.append((name, places.get(leaf(name).partition("_")[0], "at"), own[0].kind))
        placed += found[:1]
    return _resolved(placed, parts), numbered


def _resolved(placed: list[_Placed], parts: list[_Part]) -> list[_Placed]:
    """Find the place of norms such as `post_attention_layernorm` from the other norms."""
    leaves = {leaf(name) for name, _, _ in placed}
    crossing = {"attention", "cross"} <= {part.kind for part in parts}
    before = {kind for _, place, kind in placed if place == "pre"}
    out: list[_Placed] = []
    for name, place, kind in placed:
        if place == "after":
            if crossing and "final_layernorm" in leaves:
                place, kind = "pre", "cross"
            elif "mlp" in before or (
                "attention" not in before and "post_feedforward_layernorm" in leaves
            ):
                place = "branch"
            elif "attention" not in before:
                place = "post"
            else:
                place, kind = "pre", "mlp"
        elif leaf(name) == "post_mlp_layernorm" and "attention" not in before:
            place = "post"
        elif leaf(name) == "final_layernorm":
            place = "pre"
        out.append((name, place, kind))
    return out


def _assign(
    placed: list[_Placed], numbered: list[str], parts: list[_Part], alone: str | None
) -> None:
    """Assign the norms to the sub-layers; `alone`: the block's only norm, if it has just one."""
    for name, place, kind in placed:
        for part in _candidates(name, kind, parts):
            part.norms.setdefault(place, name)
    if alone and alone in (*numbered, *(name for name, _, _ in placed)):
        # one norm before parallel sub-layers (GPT-J), or before the only one
        for part in _below(parent(alone), parts):
            part.norms.setdefault("pre", alone)
        return
    kinds: tuple[SubLayerKind, ...] = ("attention", "mixer", "cross", "mlp")
    for owner in dict.fromkeys(map(parent, numbered)):
        beside = sorted(name for name in numbered if parent(name) == owner)
        below = _below(owner, parts)
        # no block has both attention and a mixer among its parts
        by_kind = len(below) < len(kinds)
        below.sort(key=lambda part: kinds.index(part.kind) if by_kind else part.place)
        for name, part in zip(beside, below, strict=False):
            part.norms.setdefault("at", name)


def _below(owner: str, parts: list[_Part]) -> list[_Part]:
    """Return the sub-layers within a module of the block; all of them for the block itself."""
    return [part for part in parts if not owner or part.out.startswith(f"{owner}.")]


def _candidates(name: str, kind: SubLayerKind, parts: list[_Part]) -> list[_Part]:
    """Return the sub-layers of a kind that are nearest to a norm by path."""
    same = [p for p in parts if p.kind == kind]
    if not same and kind == "attention":
        same = [p for p in parts if p.kind in ("mixer", "cross")]
    if not same:
        return []
    # a norm may also contain the sub-layer's name, such as `ffn2_layer_norm`
    owners = [p.out.partition(".")[0] for p in same]
    likeness = [
        (len(owner) if owner in name else 0, nearness(name, p.out))
        for p, owner in zip(same, owners, strict=True)
    ]
    return [p for p, alike in zip(same, likeness, strict=True) if alike == max(likeness)]


def _is_post(branch: Branch, parts: list[_Part], row: Row) -> bool:
    places = {place for part in parts for place in part.norms}
    unclear = [part.norms["at"] for part in parts if "at" in part.norms]
    if "post" in places:
        return True
    if places & {"pre", "branch"} or not unclear:
        return False
    if isinstance(row.post_norm, str):
        flag = row.post_norm.removeprefix("!")
        return bool(branch.setting("", flag)) != row.post_norm.startswith("!")
    if row.post_norm is not None:
        return row.post_norm
    if any(NUMBERED.search(leaf(name)) for name in unclear):
        return False
    # pre-LN stacks need a norm after them, post-LN stacks have none
    tree, owner = branch.tree, parent(parent(branch.path))
    return not any(
        FINAL_NORM.search(leaf(name)) and NORM_CLASS.search(type(tree.modules[name]).__name__)
        for name in (*tree.children(owner), *tree.children(parent(owner)))
    )
