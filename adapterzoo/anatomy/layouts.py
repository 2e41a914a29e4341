"""Fused layers: which output features are query, key, value, gate and input.

Sizes come from the block itself (the output projection of attention reads as many features as
the query has) and, if heads are interleaved, from the configuration. A layout whose sizes do not
add up to the layer's `d_out` is ignored: a wrong part would be worse than none.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping

from .patterns import FUSED, Row
from .sites import OutputSlice, Role, Site
from .tree import Branch, nearness, parent

Split = Mapping[Role, OutputSlice]
# the fused layer, the width of attention's output, and the block → the layer's parts
Layout = Callable[[Site, int, Branch], Split]


def parts_of(site: Site, sites: tuple[Site, ...], branch: Branch, row: Row) -> Iterator[Site]:
    """Yield the parts of a fused layer as sites; none if it is not fused or its layout is unknown.

    Args:
        site: the layer, with its path below the block.
        sites: all layers of the block.
        branch: the block.
        row: the table's entry for the architecture.
    """
    for role, part in _split(site, sites, branch, row).items():
        if part.groups * part.width == site.d_out and 0 <= part.start < part.stop <= part.width:
            yield dataclasses.replace(site, role=role, d_out=part.size, output_slice=part)


def _split(site: Site, sites: tuple[Site, ...], branch: Branch, row: Row) -> Split:
    if site.role not in ("qkv", "mlp_in"):
        return {}
    inner = _inner(site, sites)
    named = [name for pattern, name in row.layouts.items() if re.fullmatch(pattern, site.path)]
    if not named and site.role == "qkv":
        stored = site.parameter or site.path
        named = [name for pattern, name in FUSED if pattern.search(stored)]
        around = parent(site.path)
        if named == ["q, k, v"] and any(
            s.role == "query" and parent(s.path) == around for s in sites
        ):
            named = ["k, v"]
    if not named and site.role == "mlp_in" and site.d_out == 2 * inner:
        named = ["gate, in"]
    return LAYOUTS[named[0]](site, inner, branch) if named else {}


def is_known_fusion(path: str) -> bool:
    """Return whether the name of a fused layer tells its layout."""
    return any(pattern.search(path) for pattern, _ in FUSED)


def _inner(site: Site, sites: tuple[Site, ...]) -> int:
    """Return d_in of the projection that reads the layer's result, the nearest one by path."""
    behind = "attention_out" if site.role == "qkv" else "mlp_out"
    outs = [s for s in sites if s.role == behind and s.kind == site.kind]
    near = max(outs, key=lambda s: nearness(s.path, site.path), default=None)
    return near.d_in if near else 0


def _consecutive(roles: tuple[Role, ...], sizes: tuple[int, ...], groups: int = 1) -> Split:
    """Return consecutive parts of these sizes in each group."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return {
        role: OutputSlice(groups, ends[-1], end - size, end)
        for role, size, end in zip(roles, sizes, ends, strict=False)
    }


def _heads(site: Site, branch: Branch) -> int:
    return branch.setting(site.path, "num_attention_heads", "num_heads", "n_head", "n_heads")


def _contiguous(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | k | v]`; k and v are narrower if heads share them."""
    shared = (site.d_out - inner) // 2
    return _consecutive(("query", "key", "value"), (inner, shared, shared))


def _per_head(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | k | v]` for each head."""
    heads = _heads(site, branch)
    if not heads:
        return {}
    size = site.d_out // heads // 3
    return _consecutive(("query", "key", "value"), (size, size, size), heads)


def _bigcode(site: Site, inner: int, branch: Branch) -> Split:
    """All queries, then one key and one value for all heads; or `[q | k | v]` for each head."""
    shared = branch.setting(site.path, "multi_query")
    return (_contiguous if shared else _per_head)(site, inner, branch)


def _falcon(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | k | v]` for each group of heads; older models as `_bigcode`."""
    heads = _heads(site, branch)
    if not heads:
        return {}
    size = inner // heads
    if branch.setting(site.path, "new_decoder_architecture"):
        groups = branch.setting(site.path, "num_kv_heads")
        sizes = (heads // groups * size, size, size)
        return _consecutive(("query", "key", "value"), sizes, groups)
    return _bigcode(site, inner, branch)


def _equal(*roles: Role, groups: int = 1) -> Layout:
    """Return the layout with parts of equal width in each group."""

    def layout(site: Site, inner: int, branch: Branch) -> Split:
        size = site.d_out // groups // len(roles)
        return _consecutive(roles, (size,) * len(roles), groups)

    return layout


def _one_for_both(site: Site, inner: int, branch: Branch) -> Split:
    """The same features are key and value."""
    return dict.fromkeys(("key", "value"), OutputSlice(1, site.d_out, 0, site.d_out))


def _latent(site: Site, inner: int, branch: Branch) -> Split:
    """Multi-head latent attention: `[k without position | v]` for each head."""
    value = branch.setting(site.path, "v_head_dim")
    key = branch.setting(site.path, "qk_nope_head_dim")
    if not value or not key or site.d_out % (key + value):
        return {}
    return _consecutive(("key", "value"), (key, value), site.d_out // (key + value))


def _query_gate(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | gate]` for each head; the gate is as wide as the value."""
    heads = _heads(site, branch)
    if not heads:
        return {}
    gate = inner // heads
    return _consecutive(("query", "other"), (site.d_out // heads - gate, gate), heads)


def _linear_attention(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | k | v]` where the value, not the query, has the width of the output."""
    size = (site.d_out - inner) // 2
    return _consecutive(("query", "key", "value"), (size, size, inner))


def _gated_linear_attention(site: Site, inner: int, branch: Branch) -> Split:
    """`[q | k | v | z]` for each key head; z gates the output."""
    heads = branch.setting(site.path, "linear_num_key_heads", "num_k_heads")
    if not heads:
        return {}
    value = inner // heads
    size = (site.d_out // heads - 2 * value) // 2
    return _consecutive(("query", "key", "value", "other"), (size, size, value, value), heads)


def _levit(site: Site, inner: int, branch: Branch) -> Split:
    """Narrow keys and wide values for each head; queries may have a separate layer."""
    owner = branch.by_path[site.path.split(".")[0] if "module" in site.path else ""]
    heads, size = getattr(owner, "num_attention_heads", 0), getattr(owner, "key_dim", 0)
    if not heads or not size:
        return {}
    value = inner // heads
    if "queries" in site.path:
        return _consecutive(("query", "key", "value"), (size, size, value), heads)
    return _consecutive(("key", "value"), (size, value), heads)


def _gate_in_by_turns(site: Site, inner: int, branch: Branch) -> Split:
    """Gate and input features alternate."""
    return _consecutive(("mlp_gate", "mlp_in"), (1, 1), site.d_out // 2)


LAYOUTS: Mapping[str, Layout] = {
    "q, k, v": _contiguous,
    "q, k, v per head": _per_head,
    "q, k, v by multi_query": _bigcode,
    "falcon": _falcon,
    # for each of the four slices of the tensor-parallel training run
    "codegen": _equal("query", "value", "key", groups=4),
    "k, v": _equal("key", "value"),
    "k = v": _one_for_both,
    "k, v per head": _latent,
    "q, gate per head": _query_gate,
    "q, k, v of linear attention": _linear_attention,
    "q, k, v, z per head": _gated_linear_attention,
    "levit": _levit,
    # the gate is the half that goes through the activation
    "gate, in": _equal("mlp_gate", "mlp_in"),
    "in, gate": _equal("mlp_in", "mlp_gate"),
    "gate, in by turns": _gate_in_by_turns,
}
