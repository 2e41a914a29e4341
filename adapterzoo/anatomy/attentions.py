"""Attention sites: modules that call the attention function which their config names.

transformers 5 lets an attention module look its function up by the config's name for it. Such a
module can be given a function of ours; one that computes attention by itself cannot.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any, cast

from torch import nn

from .names import below
from .sites import Attention, Block
from .tree import Tree

# the table of attention functions, by its name in the code of a forward
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "qk_head_dim")


def attentions_of(tree: Tree, blocks: Iterable[Block]) -> tuple[tuple[Attention, ...], str]:
    """The attention modules in the blocks that look their function up, in model order.

    Args:
        tree: of the model.
        blocks: its blocks.

    Returns:
        The modules; and why some block's attention is not among them, empty if none is missing.
    """
    found: list[Attention] = []
    missing = ""
    for block in blocks:
        own: list[Attention] = []
        for path, module in tree.branch(block.path).modules:
            whole = f"{block.path}.{path}" if path else block.path
            if not hasattr(module, "config") or not _looks_up(cast("Any", type(module))):
                continue
            made = _attention(block, whole, module)
            if isinstance(made, str):
                missing = missing or f"{whole!r}: {made}"
            else:
                own.append(made)
        covered = [s for s in block.sites if any(below(s.path, a.path) for a in own)]
        outs = [s for s in block.sites if s.role in ("query", "qkv") and s not in covered]
        if outs and not missing:
            missing = f"{outs[0].path!r}: its attention computes scores by itself"
        found += own
    return tuple(found), missing


@functools.cache
def _looks_up(cls: Any) -> bool:
    # also that of a base class: a module with adapters has a class of its own
    forwards = (inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c))
    codes = (getattr(forward, "__code__", None) for forward in forwards)
    return any(code is not None and _TABLE in code.co_names for code in codes)


def _attention(block: Block, path: str, module: nn.Module) -> Attention | str:
    """What is known of a module; or why its keys and values have no known shape."""
    width = next((w for n in _WIDTHS if isinstance(w := getattr(module, n, None), int)), None)
    inside = [s for s in (*block.sites, *block.parts) if below(s.path, path)]
    keys = [s for s in inside if s.role == "key" and s.output_slice is None]
    keys = keys or [s for s in inside if s.role == "key"]
    heads = getattr(module, "num_key_value_heads", None)
    if width is None:
        count = getattr(module, "num_attention_heads", getattr(module, "num_heads", None))
        width = keys[0].d_out // count if keys and isinstance(count, int) and count else None
    if width is None:
        return "it does not say how wide a head is"
    value_width = getattr(module, "v_head_dim", width)
    if value_width != width:
        # keys and values are made of a latent one: as many as there are queries
        heads = getattr(module, "num_heads", None)
    elif keys and not keys[0].d_out % width:
        heads = keys[0].d_out // width
    if not isinstance(heads, int) or not heads:
        return "it does not say how many heads its keys have"
    return Attention(
        path=path,
        layer=block.layer,
        stack=block.stack,
        cross=any(s.cross for s in inside),
        d_model=block.d_model,
        heads=heads,
        key_width=width,
        value_width=value_width,
    )
