"""Stream sites: where the sub-layers of a block meet the residual stream."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

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
    WIDENING,
    NormPosition,
    Row,
)
from .sites import MLP_ROLES, Site, SubLayer, SubLayerKind
from .tree import Branch, common, leaf, nearness, parent

# path of a norm, its place, and its sub-layer
_Placed: TypeAlias = tuple[str, NormPosition, SubLayerKind]


class Streams(NamedTuple):
    """The stream sites of a block; for the attributes see `Block`."""

    sublayers: tuple[SubLayer, ...] = ()
    post_norm: bool = False
    mixed: frozenset[SubLayerKind] = frozenset()
    apart: frozenset[SubLayerKind] = frozenset()
    note: str = ""


@dataclass(slots=True)
class _Part:
    """A sub-layer while its norms are being found; all paths are below the block."""

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


def sublayers_of(branch: Branch, sites: tuple[Site, ...], row: Row) -> Streams:
    """Return the sub-layers of a block.

    Args:
        branch: the block.
        sites: its layers, with roles, and with paths below the block.
        row: the table's entry for the architecture.
    """
    away = [pattern for pattern, out in row.outs.items() if not out]
    parts = [
        part
        for part in (*_attentions(sites), *_mlps(sites))
        if not any(re.fullmatch(pattern, part.out) for pattern in away)
    ]
    if not parts or (row.note and not row.mixed | row.apart):
        return Streams(note=row.note)
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
        return Streams(note="a block is not a module of its own: its output cannot be reached")
    for part in parts:
        # the language adapters call the norm too: an adapter there would act twice
        if post_norm and row.languages and part.out.startswith(f"{row.languages}."):
            part.norms.pop("at", None)
    sublayers = tuple(part.sublayer(post_norm, row.outs) for part in parts)
    changed = any(WIDENING.search(s.path) and s.d_in != s.d_out for s in sites)
    if changed:
        return Streams(sublayers, post_norm, frozenset({"attention"}), note=WIDENED)
    return Streams(sublayers, post_norm, row.mixed, row.apart, row.note)


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


def _mlps(sites: tuple[Site, ...]) -> Iterator[_Part]:
    split = [
        re.split(r"(?:^|\.)experts(?:\.|$)", site.path) for site in sites if site.role in MLP_ROLES
    ]
    moes = dict.fromkeys(parts[0] for parts in split if len(parts) > 1)
    for root in moes:
        yield _Part("mlp", root, root, root)
    for site in sites:
        if site.role != "mlp_out" or any(site.path.startswith(f"{root}.") for root in moes):
            continue
        inputs = [s for s in sites[: sites.index(site)] if s.role in ("mlp_in", "mlp_gate")]
        # the last of equally near ones: `lang_output` follows `lang_inter`
        near = max(reversed(inputs), key=lambda s: nearness(s.path, site.path), default=site)
        yield _Part("mlp", site.path, near.path, common(near.path, site.path))


def _is_norm(path: str, module: nn.Module) -> bool:
    by_class = NORM_CLASS.search(type(module).__name__) is not None
    # an identity in place of a norm also reads the stream (the first ModernBERT block)
    return by_class or (
        isinstance(module, nn.Identity) and NORM_NAME.search(leaf(path)) is not None
    )


def _placed(names: list[str], parts: list[_Part], row: Row) -> tuple[list[_Placed], list[str]]:
    """Return the norms whose names show their place, and the names of numbered norms."""
    placed: list[_Placed] = []
    numbered: list[str] = []
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
        placed += found[:1] or _by_owner(name, parts)
    return _resolved(placed, parts), numbered


def _by_owner(name: str, parts: list[_Part]) -> list[_Placed]:
    """Return the place of a norm in a sub-layer's module, or in the module around both (T5)."""
    owner = parent(name)
    own = [part for part in parts if part.root and owner in (parent(part.root), part.root)]
    if not own or not owner or INNER_NORM.search(leaf(name)):
        return []
    places: dict[str, NormPosition] = {"pre": "pre", "post": "branch"}
    return [(name, places.get(leaf(name).partition("_")[0], "at"), own[0].kind)]


def _resolved(placed: list[_Placed], parts: list[_Part]) -> list[_Placed]:
    """Decide the place of norms such as `post_attention_layernorm` by the other norms."""
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
    """Assign the norms to the sub-layers; `alone`: the only norm of the block, if it has one."""
    for name, place, kind in placed:
        for part in _candidates(name, kind, parts):
            part.norms.setdefault(place, name)
    if alone and alone in (*numbered, *(name for name, _, _ in placed)):
        # one norm before parallel sub-layers (GPT-J), or before the only one
        for part in parts:
            part.norms.setdefault("pre", alone)
        return
    for owner in dict.fromkeys(map(parent, numbered)):
        beside = sorted(name for name in numbered if parent(name) == owner)
        below = [part for part in parts if not owner or part.out.startswith(f"{owner}.")]
        for name, part in zip(beside, _in_order(below), strict=False):
            part.norms.setdefault("at", name)


def _in_order(parts: list[_Part]) -> list[_Part]:
    """Return the sub-layers in order: attention, cross-attention, feed-forward."""
    kinds: tuple[SubLayerKind, ...] = ("attention", "cross", "mlp")
    if len(parts) > len(kinds):
        return sorted(parts, key=lambda part: part.place)
    return sorted(parts, key=lambda part: kinds.index(part.kind))


def _candidates(name: str, kind: SubLayerKind, parts: list[_Part]) -> list[_Part]:
    """Return the sub-layers of a kind that are nearest to a norm by path."""
    same = [p for p in parts if p.kind == kind]
    if not same and kind == "attention":
        same = [p for p in parts if p.kind == "cross"]
    if not same:
        return []
    # a norm may have the sub-layer's name too, as `ffn2_layer_norm`
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
    return not _has_final_norm(branch)


def _has_final_norm(branch: Branch) -> bool:
    """Return whether a norm follows the stack: pre-LN stacks need one, post-LN stacks have none."""
    owner = parent(parent(branch.path))
    names = [*branch.tree.children(owner), *branch.tree.children(parent(owner))]
    return any(
        FINAL_NORM.search(leaf(name)) is not None
        and NORM_CLASS.search(type(branch.tree.modules[name]).__name__) is not None
        for name in names
    )
