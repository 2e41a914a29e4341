"""Stream sites: where the sub-layers of a block meet the residual stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from .patterns import (
    FINAL_NORM,
    INNER_NORM,
    NORM_CLASS,
    NORM_NAME,
    NORM_PLACES,
    NUMBERED,
    SCALES,
    WIDENED,
    Place,
    Row,
)
from .sites import MLP_ROLES, Site, SubLayer, SubLayerKind
from .tree import Branch


@dataclass(frozen=True, slots=True)
class Streams:
    """The stream sites of a block, as in `Block`."""

    sublayers: tuple[SubLayer, ...] = ()
    post_norm: bool = False
    mixed: frozenset[SubLayerKind] = frozenset()
    note: str = ""


@dataclass(slots=True)
class _Part:
    """A sub-layer in the making; all paths are below the block."""

    kind: SubLayerKind
    out: str
    reader: str
    root: str
    place: int = 0
    pre: str | None = None
    branch: str | None = None
    scale: str | None = None
    post: str | None = None
    at: str | None = None

    def chain(self) -> str:
        """The last module before the addition."""
        return self.scale or self.branch or self.out


@dataclass(slots=True)
class _Norms:
    """The norms of a block by what their names say."""

    placed: list[tuple[str, Place, SubLayerKind]] = field(default_factory=list)
    numbered: list[str] = field(default_factory=list)


def sublayers_of(
    branch: Branch, sites: tuple[Site, ...], row: Row
) -> Streams:
    """The sub-layers of a block.

    Args:
        branch: the block.
        sites: its layers, with roles and with paths below the block.
        row: what the table says of the architecture.

    """
    away = [pattern for pattern, out in row.outs.items() if not out]
    parts = [
        part
        for part in (*_attentions(sites), *_mlps(sites))
        if not any(re.fullmatch(pattern, part.out) for pattern in away)
    ]
    if not parts or (row.note and not row.mixed):
        return Streams(note=row.note)
    places = {path: place for place, (path, _) in enumerate(branch.modules)}
    for part in parts:
        part.place = places[part.out]
    names = [path for path, module in branch.modules if path and _is_norm(path, module)]
    norms = _placed(names, parts, row)
    own = [n for n in names if "." not in n or not INNER_NORM.search(n.rpartition(".")[2])]
    _hand_out(norms, parts, alone=own[0] if len(own) == 1 else None)
    for path, _ in branch.modules:
        for pattern, kind in SCALES:
            if pattern.search(path) and (part := _nearest(path, kind, parts)):
                part.scale = path
    post_norm = _is_post(branch, parts, row)
    if row.lists and not post_norm:
        return Streams(note="a block is no module of its own: its output cannot be reached")
    sublayers: list[SubLayer] = []
    for part in parts:
        pre = part.pre or (None if post_norm else part.at)
        post = part.post or (part.at if post_norm else None)
        moved = [out for pattern, out in row.outs.items() if re.fullmatch(pattern, part.out)]
        out = moved[0] if moved else part.chain()
        sublayers.append(SubLayer(part.kind, out, pre or part.reader, post))
    # a bare projection beside attention carries the stream to another width (Hiera)
    changed = any("." not in s.path and s.role == "other" and s.d_in != s.d_out for s in sites)
    if changed:
        return Streams(tuple(sublayers), post_norm, frozenset({"attention"}), WIDENED)
    return Streams(tuple(sublayers), post_norm, row.mixed, row.note)


def _attentions(sites: tuple[Site, ...]) -> Iterator[_Part]:
    for site in sites:
        if site.role != "attention_out":
            continue
        inputs = [s for s in sites if s.role in ("query", "qkv", "value")]
        near = max(inputs, key=lambda s: _shared(s.path, site.path), default=site)
        if not _shared(near.path, site.path):
            near = site if _parent(site.path) else near
        # the module, not its query: a query may read the stream plus positions (DETR)
        reader = _parent(near.path) or near.path
        if site.parameter and site.kind == "linear":
            reader = site.path
        root = _common(near.path, site.path)
        yield _Part("cross" if site.cross else "attention", site.path, reader, root)


def _mlps(sites: tuple[Site, ...]) -> Iterator[_Part]:
    split = [
        re.split(r"(?:^|\.)experts(?:\.|$)", site.path)
        for site in sites
        if site.role in MLP_ROLES
    ]
    moes = dict.fromkeys(parts[0] for parts in split if len(parts) > 1)
    for root in moes:
        yield _Part("mlp", root, root, root)
    for site in sites:
        if site.role != "mlp_out" or any(site.path.startswith(f"{root}.") for root in moes):
            continue
        before = sites[: sites.index(site)]
        inputs = [s for s in before or sites if s.role in ("mlp_in", "mlp_gate")]
        # of those equally near by path the last: `lang_output` follows `lang_inter`
        near = max(reversed(inputs), key=lambda s: _shared(s.path, site.path), default=site)
        yield _Part("mlp", site.path, near.path, _common(near.path, site.path))


def _is_norm(path: str, module: nn.Module) -> bool:
    by_class = NORM_CLASS.search(type(module).__name__) is not None
    name = path.rpartition(".")[2]
    # an identity in the place of a norm reads the stream as well (the first ModernBERT block)
    return by_class or (isinstance(module, nn.Identity) and NORM_NAME.search(name) is not None)


def _placed(names: list[str], parts: list[_Part], row: Row) -> _Norms:
    norms = _Norms()
    for name in names:
        special = [place for pattern, place in row.norms.items() if re.fullmatch(pattern, name)]
        if special:
            if special[0] is not None:
                norms.placed.append((name, *special[0]))
            continue
        if NUMBERED.search(name.rpartition(".")[2]):
            norms.numbered.append(name)
            continue
        for pattern, place, kind in NORM_PLACES:
            if pattern.search(name):
                norms.placed.append((name, place, kind))
                break
        else:
            own = [p for p in parts if p.root and _parent(name) in (_parent(p.root), p.root)]
            leaf = name.rpartition(".")[2]
            if own and "." in name and not INNER_NORM.search(leaf):
                place: Place = "branch" if leaf.startswith("post_") else "at"
                norms.placed.append((name, "pre" if leaf.startswith("pre_") else place, own[0].kind))
    return _settled(norms, parts)


def _settled(norms: _Norms, parts: list[_Part]) -> _Norms:
    """Give `post_attention_layernorm` and its like their place, which the others decide."""
    leaves = {name.rpartition(".")[2] for name, _, _ in norms.placed}
    crossing = any(p.kind == "cross" for p in parts) and any(p.kind == "attention" for p in parts)
    before_mlp = any(place == "pre" and kind == "mlp" for _, place, kind in norms.placed)
    before_attention = any(place == "pre" and kind == "attention" for _, place, kind in norms.placed)
    out: list[tuple[str, Place, SubLayerKind]] = []
    for name, place, kind in norms.placed:
        leaf = name.rpartition(".")[2]
        if place == "after":
            if crossing and "final_layernorm" in leaves:
                place, kind = "pre", "cross"
            elif before_mlp or (not before_attention and "post_feedforward_layernorm" in leaves):
                place = "branch"
            elif not before_attention:
                place = "post"
            else:
                place, kind = "pre", "mlp"
        elif leaf == "post_mlp_layernorm" and not before_attention:
            place = "post"
        elif leaf == "final_layernorm":
            place = "pre"
        out.append((name, place, kind))
    norms.placed = out
    return norms


def _hand_out(norms: _Norms, parts: list[_Part], alone: str | None) -> None:
    for name, place, kind in norms.placed:
        for part in _candidates(name, kind, parts):
            if getattr(part, place) is None:
                setattr(part, place, name)
    if alone and alone in (*norms.numbered, *(name for name, _, _ in norms.placed)):
        # one norm in front of parallel sub-layers (GPT-J), or of the only one
        for part in parts:
            part.pre = part.pre or alone
        return
    for owner in dict.fromkeys(map(_parent, norms.numbered)):
        beside = sorted(name for name in norms.numbered if _parent(name) == owner)
        below = [part for part in parts if not owner or part.out.startswith(f"{owner}.")]
        for name, part in zip(beside, _in_order(below), strict=False):
            part.at = part.at or name


def _in_order(parts: list[_Part]) -> list[_Part]:
    """The sub-layers as they follow one another: attention, cross-attention, feed-forward."""
    kinds: tuple[SubLayerKind, ...] = ("attention", "cross", "mlp")
    if len(parts) > len(kinds):
        return sorted(parts, key=lambda part: part.place)
    return sorted(parts, key=lambda part: kinds.index(part.kind))


def _candidates(name: str, kind: SubLayerKind, parts: list[_Part]) -> list[_Part]:
    """The sub-layers of a kind that a norm may belong to: those nearest to it by path."""
    same = [p for p in parts if p.kind == kind]
    if not same and kind == "attention":
        same = [p for p in parts if p.kind == "cross"]
    if not same:
        return []
    likeness = [(_named_after(name, p), _shared(name, p.out)) for p in same]
    return [p for p, alike in zip(same, likeness, strict=True) if alike == max(likeness)]


def _named_after(name: str, part: _Part) -> int:
    """How much of the sub-layer's name the norm bears: `norm_feed_forward1`, `ffn2_layer_norm`."""
    owner = part.out.partition(".")[0]
    return len(owner) if owner in name else 0


def _nearest(name: str, kind: SubLayerKind, parts: list[_Part]) -> _Part | None:
    near = _candidates(name, kind, parts)
    return near[0] if near else None


def _is_post(branch: Branch, parts: list[_Part], row: Row) -> bool:
    if any(part.post for part in parts):
        return True
    if any(part.pre or part.branch for part in parts):
        return False
    if not any(part.at for part in parts):
        return False
    if isinstance(row.post_norm, str):
        flag = row.post_norm.removeprefix("!")
        return bool(branch.setting("", flag)) != row.post_norm.startswith("!")
    if row.post_norm is not None:
        return row.post_norm
    if any(NUMBERED.search(part.at.rpartition(".")[2]) for part in parts if part.at):
        return False
    return not _has_final_norm(branch)


def _has_final_norm(branch: Branch) -> bool:
    """Whether a norm follows the stack: pre-LN stacks need one, post-LN stacks have none."""
    owner = _parent(_parent(branch.path))
    names = [*branch.tree.children(owner), *branch.tree.children(_parent(owner))]
    return any(
        FINAL_NORM.search(name.rpartition(".")[2]) is not None
        and NORM_CLASS.search(type(branch.tree.modules[name]).__name__) is not None
        for name in names
    )


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _common(one: str, other: str) -> str:
    """The nearest module that holds both."""
    parts: list[str] = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        parts.append(a)
    return ".".join(parts)


def _shared(one: str, other: str) -> int:
    common = _common(one, other)
    return common.count(".") + 1 if common else 0
