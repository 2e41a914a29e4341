"""Position sites: modules that turn the numbers of tokens into embeddings or rotations.

A position table is called with the numbers, a rotary embedding with `position_ids`. A module that
computes positions itself does not accept others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from .names import below, leaf, parent
from .sites import Block, Site
from .tree import Tree

_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# T5's attention modules, which only use distances
RELATIVE_BIAS = "has_relative_attention_bias"
# attention modules that add a bias linear in the position, which only changes distances
ALIBI = frozenset(("BloomAttention",))
_NUMBERS = "position_ids"
_ROTARY = "Rotary"


def positions_of(
    tree: Tree, blocks: Iterable[Block]
) -> tuple[tuple[Site, ...], Mapping[str, str], frozenset[str]]:
    """Return the modules that take position numbers.

    Args:
        tree: of the model.
        blocks: its blocks.

    Returns:
        Their sites; the stacks whose positions cannot be changed, with the reason; and those whose
        positions rotate queries and keys.
    """
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    found: list[Site] = []
    unmovable: dict[str, str] = {}
    rotary: set[str] = set()
    for path, module in tree.modules.items():
        takes = _takes_numbers(cast("Any", type(module)))
        if module._modules or not (takes or leaf(path) in _TABLES):
            continue
        stack = _stack_of(path, stacks)
        if takes and _ROTARY in type(module).__name__:
            # several stacks may share one, or each attention has its own
            rotary |= {s for s in stacks if below(s, parent(path)) or below(path, s)}
        is_table = isinstance(module, nn.Embedding)
        if stack is None or (is_table and takes) or not (is_table or takes):
            reason = f"{path!r}, a {type(module).__name__}, counts the tokens itself"
            unmovable |= dict.fromkeys(stacks if stack is None else [stack], reason)
            continue
        found.append(Site(path, "other", -1, stack, "positions", d_in=0, d_out=0))
    for stack in stacks:
        if not any(site.stack == stack for site in found) and not _is_relative(tree, stack):
            unmovable.setdefault(stack, "no module is known that takes position numbers")
    return tuple(found), unmovable, frozenset(rotary)


@functools.cache
def _takes_numbers(cls: Any) -> bool:
    return _NUMBERS in inspect.signature(cls.forward).parameters


def _stack_of(path: str, stacks: list[str]) -> str | None:
    """Return the only stack that a module of positions can belong to; None if several can be."""
    near = stacks if len(stacks) == 1 else [s for s in stacks if below(path, parent(s))]
    return near[0] if len(near) == 1 else None


def _is_relative(tree: Tree, stack: str) -> bool:
    modules = [module for _, module in tree.branch(stack).modules]
    return any(hasattr(m, RELATIVE_BIAS) or type(m).__name__ in ALIBI for m in modules)
