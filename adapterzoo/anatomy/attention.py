"""Attention modules that can take a prefix, and modules that take position numbers.

In transformers 5 an attention module looks up its function by a name in its config, so that we can
replace the function. Other modules compute attention themselves; `INLINE` lists those whose
operations can be followed. Linear attention has no keys that a prefix could join. A position table
is called with the numbers of tokens, a rotary embedding with `position_ids`; a module that computes
positions itself does not accept others.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, cast

from torch import nn

from .sites import Block, Site
from .tree import Tree, below, joined, leaf, number, parent

# the table of attention functions, by its name in the code of a forward
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "qk_head_dim")
_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_heads_per_partition")
# state-space and linear attention, by class
_LINEAR = re.compile(r"DeltaNet|DeltaAttention|Linear\w*Attention|LightningAttention|Rwkv|[mx]LSTM")
# classes that repeat keys before the function gets them → the attribute with the number of times
_REPEATED = {"JetMoeAttention": "top_k"}
# classes that compute their scores themselves, in operations that `inject.attention` follows
INLINE = frozenset(
    (
        "BarkSelfAttention", "BloomAttention",
        "BrosSelfAttention", "CanineSelfAttention", "ClapAudioSelfAttention", "ClvpSelfAttention",
        "CodeGenAttention", "CpmAntAttention", "Data2VecVisionSelfAttention",
        "DonutSwinSelfAttention", "FalconAttention", "FlavaSelfAttention",
        "GLPNEfficientSelfAttention", "GPTJAttention", "GPTNeoSelfAttention",
        "GPTNeoXJapaneseAttention", "GitSelfAttention", "GotOcr2VisionAttention",
        "GroupViTAttention", "ImageGPTAttention", "LayoutLMv3SelfAttention", "LxmertAttention",
        "MPNetSelfAttention", "MaskFormerSwinSelfAttention", "MegatronBertSelfAttention",
        "MgpstrAttention", "MobileViTSelfAttention", "MptAttention", "MultiHeadAttention",
        "MvpAttention", "PvtEfficientSelfAttention", "PvtV2SelfAttention", "RemBertSelfAttention",
        "RoFormerSelfAttention", "SamHQVisionAttention", "SamVisionAttention", "SegGptAttention",
        "TapasSelfAttention", "TimesformerSelfAttention", "TvpAttention",
        "UnlimitedOcrSamVisionAttention", "ViltSelfAttention", "VisualBertSelfAttention",
        "VitDetAttention", "XGLMAttention",
    )
)  # fmt: skip


def attentions_of(tree: Tree, blocks: Iterable[Block]) -> tuple[tuple[Site, ...], str]:
    """Return the attention modules in the blocks that can take a prefix, in model order.

    Args:
        tree: of the model.
        blocks: its blocks.

    Returns:
        The modules; and why the attention of some block is missing, empty if none is.
    """
    found: list[Site] = []
    missing = ""
    for block in blocks:
        own: list[Site] = []
        linear: list[str] = []
        for path, module in tree.branch(block.path).modules:
            whole = joined(block.path, path)
            if _LINEAR.search(type(module).__name__):
                linear.append(whole)
            # a block of parallel lists holds other blocks' modules too
            if not _reads(block, whole, module):
                continue
            made = _attention(tree, block, whole, module)
            if isinstance(made, str):
                missing = missing or f"{whole!r}: {made}"
            else:
                own.append(made)
        covered = (*(a.path for a in own), *linear)
        outs = (s for s in block.sites if s.role in ("query", "qkv"))
        left = next((s for s in outs if not any(below(s.path, path) for path in covered)), None)
        if left is not None and not missing:
            missing = f"{left.path!r}: its attention computes scores by itself"
        found += own
    return tuple(found), missing


def is_inline(cls: type) -> bool:
    """Return whether an attention of the class computes its scores by itself."""
    return not _looks_up(cast("Any", cls))


def _reads(block: Block, path: str, module: nn.Module) -> bool:
    """Return whether a module is an attention of the block that can take a prefix."""
    # Inkling 2 mixes the outputs of earlier blocks in an attention that projects nothing
    if not any(below(s.path, path) for s in (*block.sites, *block.parts)):
        return False
    cls = cast("Any", type(module))
    return _is_known(cls) or (vars(module).get("config") is not None and _looks_up(cls))


@functools.cache
def _is_known(cls: Any) -> bool:
    # a module with adapters has a subclass of its class
    return any(c.__name__ in INLINE for c in cls.__mro__)


@functools.cache
def _looks_up(cls: Any) -> bool:
    # base classes too: a module with adapters has a subclass of its class
    return any(_TABLE in code.co_names for code in _forwards(cls))


def _forwards(cls: type) -> Iterator[CodeType]:
    for c in cls.__mro__:
        forward = inspect.unwrap(vars(c)["forward"]) if "forward" in vars(c) else None
        if inspect.isfunction(forward):
            yield forward.__code__


def _attention(tree: Tree, block: Block, path: str, module: nn.Module) -> Site | str:
    """Return the attention site of a module, or why the shape of its keys and values is unknown."""
    inside = [s for s in (*block.sites, *block.parts) if below(s.path, path)]
    key = _projection(inside, "key")
    count = number(module, *_COUNTS)
    width = number(module, *_WIDTHS)
    if width is None and key is not None and count:
        width = key.d_out // count
    if width is None:
        return "it does not say how wide a head is"
    heads = number(module, "num_key_value_heads")
    value_width = number(module, "v_head_dim")
    if value_width is None:
        value_width = width
    if key is not None and key.output_slice is None and not key.d_out % width:
        heads = key.d_out // width
    elif value_width != width:
        # keys and values come from a latent state and have as many heads as the queries
        heads = count
    elif key is not None and not key.d_out % width:
        heads = key.d_out // width
    if heads is None:
        # an earlier block has computed the keys
        heads = tree.branch(path).setting("", "num_key_value_heads")
    if not heads:
        return "it does not say how many heads its keys have"
    return Site(
        path=path,
        role="other",
        layer=block.layer,
        stack=block.stack,
        kind="attention",
        d_in=block.d_model,
        d_out=block.d_model,
        cross=any(s.cross for s in inside),
        heads=heads * (number(module, _REPEATED.get(type(module).__name__, "")) or 1),
        head_widths=(width, value_width),
    )


def _projection(inside: Iterable[Site], role: str) -> Site | None:
    named = [s for s in inside if s.role == role]
    return next((s for s in named if s.output_slice is None), named[0] if named else None)


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
        near = stacks if len(stacks) == 1 else [s for s in stacks if below(path, parent(s))]
        # several may share it
        stack = near[0] if len(near) == 1 else None
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
        inside = [module for _, module in tree.branch(stack).modules]
        relative = any(hasattr(m, RELATIVE_BIAS) or type(m).__name__ in ALIBI for m in inside)
        if not relative and not any(site.stack == stack for site in found):
            unmovable.setdefault(stack, "no module is known that takes position numbers")
    return tuple(found), unmovable, frozenset(rotary)


@functools.cache
def _takes_numbers(cls: Any) -> bool:
    return _NUMBERS in inspect.signature(cls.forward).parameters
