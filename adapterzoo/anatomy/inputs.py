"""Inputs of a model besides those of its layers: tokens, position numbers, and prefixes.

Tokens join at the embedding table, at the module around it, or at the entry, the input of the first
block. The blocks alone determine the entry, so neither the structure of the embeddings matters
nor whether a caller passes `inputs_embeds`. A position table is called with the numbers of
tokens, a rotary embedding with `position_ids`; a module that computes positions itself does not
accept others.

A prefix joins the keys and values of an attention module. In transformers 5 such a module looks up
its function by a name in its config, so the function can be replaced. Other modules compute
attention themselves; `INLINE` lists those whose operations can be followed. Linear attention has no
keys that a prefix could join.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn

from .patterns import NO_ENTRY, NO_TOKENS
from .sites import Block, Role, Site, TokenInput
from .tree import Branch, Tree, below, joined, leaf, nearness, number, parent, unwrapped

_LENGTHS = ("max_position_embeddings", "n_positions")
# rows that a position table may have in addition to those of tokens
_EXTRA = 8


def tokens_of(tree: Tree, blocks: Sequence[Block]) -> TokenInput | None:
    """Return where a model embeds its tokens, or its other inputs if it reads no tokens.

    Args:
        tree: the model's tree.
        blocks: its blocks.
    """
    found = [_input(tree, stack, blocks) for stack in _readers(tree, blocks)]
    reading = {tokens.table: tokens for tokens in found if tokens.table is not None}
    if reading:
        whole = input_embeddings_of(tree.modules[""])
        weight = getattr(whole, "weight", None)
        own = [table for table in reading if cast("Any", tree.modules[table]).weight is weight]
        # a part of the model may read other tokens than the model
        alone = whole is None and len(reading) == 1 and not _closed(NO_TOKENS, tree)
        return reading[own[0]] if own else next(iter(reading.values())) if alone else None
    # a module outside transformers may add its positions after its embeddings
    says = "get_input_embeddings" in dir(tree.modules[""])
    return found[0] if len(found) == 1 and found[0].stack == "" and says else None


def _readers(tree: Tree, blocks: Iterable[Block]) -> list[str]:
    """Return the stacks without those of decoders that another stack conditions."""
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    if not getattr(getattr(tree.modules[""], "config", None), "is_encoder_decoder", False):
        return stacks
    decoders = {b.stack for b in blocks if any(site.cross for site in b.sites)}
    return [stack for stack in stacks if stack not in decoders]


def _closed(table: Mapping[str, str], tree: Tree) -> str:
    """Return why a table of model types lists a model as closed; empty if it does not."""
    return next((table[t] for t in Branch(tree, "").model_types if t in table), "")


def token_site(tokens: TokenInput | None, joins: str) -> Site | None:
    """Return the site of tokens that join "inputs" or "embeddings"; None if there is none.

    Its role is "embedding" for the former and "other" for the latter.
    """
    if tokens is None:
        return None
    role: Role = "embedding"
    path, d = tokens.table, tokens.table_width
    if joins == "embeddings":
        role, path, d = "other", None if tokens.closed else tokens.embeddings, tokens.width
    return None if path is None else Site(path, role, -1, "", "output", d, d)


def usual_joins(tokens: TokenInput | None) -> str:
    """Return where tokens join by default: at "embeddings" in a model without a token table."""
    return "embeddings" if tokens is not None and tokens.table is None else "inputs"


def why_no_token_site(tokens: TokenInput | None, joins: str) -> str:
    """Return why a model has no site of such tokens, as the end of a sentence."""
    if joins == "inputs":
        return "reads no tokens"
    why = "has no module that embeds with positions"
    if tokens is not None and tokens.closed:
        why = f"takes no tokens behind its embeddings: {tokens.closed}"
    reads = tokens is None or tokens.table is not None
    return why if reads else f"reads no tokens, and {why}"


def _input(tree: Tree, stack: str, blocks: Sequence[Block]) -> TokenInput:
    owner = parent(stack)
    while owner and "get_input_embeddings" not in dir(tree.modules[owner]):
        owner = parent(owner)
    table = table_of(tree, owner)
    d_model = next(block.d_model for block in blocks if block.stack == stack)
    width = d_model if table is None else cast("nn.Embedding", tree.modules[table]).embedding_dim
    embeddings = _embeddings(tree, owner, table, blocks)
    inside = () if embeddings is None else Branch(tree, embeddings).modules
    norms = [m.normalized_shape for _, m in inside if isinstance(m, nn.LayerNorm)]
    module = tree.modules[owner if embeddings is None else embeddings]
    takes = inspect.signature(type(module).forward).parameters
    said = {getattr(module, "is_causal", None) for _, module in Branch(tree, owner).modules}
    attended = any(s.cross for b in blocks if b.stack != stack for s in b.sites)
    return TokenInput(
        stack=owner,
        table=table,
        table_width=width,
        embeddings=embeddings,
        width=int(norms[-1][0]) if norms else width,
        embeds_positions=embeddings is not None and "position_ids" in takes,
        positions=_positions(tree, owner, table, blocks),
        is_encoder=attended,
        # some models do not say whether their attentions are causal
        looks_ahead=False in said and True not in said,
        closed=_closed(NO_TOKENS, tree),
    )


def input_embeddings_of(model: object) -> nn.Module | None:
    """Return transformers' input embeddings of a model; None if it has none."""
    try:
        found = cast("Any", model).get_input_embeddings()
    # a module outside transformers has no such method; transformers' own raises if it finds none
    except (AttributeError, NotImplementedError):
        return None
    # a matrix that the model keeps itself is not a layer
    return unwrapped(found) if isinstance(found, nn.Module) else None


def table_of(tree: Tree, owner: str = "") -> str | None:
    """Return the path of a model's token embedding; None if it is not a table, or unknown."""
    own = input_embeddings_of(tree.modules[owner])
    paths = (path for path, module in Branch(tree, owner).modules if module is own)
    path = next(paths, None) if isinstance(own, nn.Embedding) else None
    return None if path is None else joined(owner, path)


def _embeddings(tree: Tree, owner: str, table: str | None, blocks: Sequence[Block]) -> str | None:
    """Return the path of the embedding module: the largest around the table without blocks."""
    paths = [block.path for block in blocks]
    children = tree.children(owner)
    holding = (i for i, c in enumerate(children) if any(below(block, c) for block in paths))
    first = next(holding, 0)
    before = children[:first]
    path = table
    if path is None:
        path = before[0] if before else None
        # a table that the model does not declare as its own may embed anything, or nothing
        if path is not None and isinstance(tree.modules[path], nn.Embedding):
            return None
    while path is not None and parent(path) != owner:
        path = parent(path)
    if path not in before:
        return None
    # modules between it and the blocks may project a token, but add nothing in its place
    between = [tree.modules[c] for c in before if c != path]
    return path if all(isinstance(m, nn.Dropout | nn.Linear) for m in between) else None


def _positions(tree: Tree, owner: str, table: str | None, blocks: Sequence[Block]) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    paths = [block.path for block in blocks]
    branch = Branch(tree, owner)
    length = next((n for c in branch.configs for k in _LENGTHS if (n := number(c, k))), None)
    for path, module in branch.modules:
        whole = joined(owner, path)
        if not isinstance(module, nn.Embedding) or whole == table or length is None:
            continue
        rows = module.num_embeddings
        if any(below(whole, block) for block in paths) or not length <= rows <= length + _EXTRA:
            continue
        skipped = getattr(module, "offset", 0) if module.padding_idx is None else None
        return rows - (cast("int", module.padding_idx) + 1 if skipped is None else int(skipped))
    return None


# name of the block's child that holds the adapters
NAME = "entry"


def entry_of(tree: Tree, blocks: Sequence[Block]) -> tuple[Site | None, str]:
    """Return the entry: the input of the first block of the stack that the embeddings feed.

    In an encoder-decoder this is the encoder.

    Args:
        tree: the model's tree.
        blocks: its blocks.

    Returns:
        The site, or None; and the reason if it is None.
    """
    stacks = _readers(tree, blocks) or [block.stack for block in blocks]
    own = input_embeddings_of(tree.modules[""])
    table = next((path for path, module in tree.modules.items() if module is own), "")
    # the first of equally near ones: stages of a pyramid, or an encoder before its decoder
    stack = max(stacks, key=lambda s: (nearness(s, table), -s.count(".")), default=None)
    first = next((b for b in blocks if b.stack == stack), None)
    if first is None:
        return None, "it has no blocks"
    path = tree.children(first.stack)[0]
    if path != first.path and first.path not in tree.children(first.stack):
        return None, "the parts of its blocks are in lists, and no module is a block"
    if closed := _closed(NO_ENTRY, tree):
        return None, closed
    width = first.d_model
    read = _width_read(first)
    others = {_width_read(block) for block in blocks if block.stack == first.stack} - {0, read}
    if not width or (others and read not in (0, width)):
        return None, f"input and output of {first.path!r} differ in width"
    site = Site(f"{path}.{NAME}", "other", -1, first.stack, "entry", width, width)
    return site, ""


def _width_read(block: Block) -> int:
    """Return the input width of a block's attention; 0 if it has none."""
    return next((site.d_in for site in block.sites if site.role in ("query", "qkv")), 0)


# the name of the table of attention functions in the code of a forward
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "qk_head_dim")
_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_heads_per_partition")
# state-space and linear attention, by class
_LINEAR = re.compile(r"DeltaNet|DeltaAttention|Linear\w*Attention|LightningAttention|Rwkv|[mx]LSTM")
# classes that repeat keys before the function gets them → the attribute with the repetitions
_REPEATED = {"JetMoeAttention": "top_k"}
# classes that compute their scores themselves, with operations that `inject.attention` follows
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
        "RoFormerSelfAttention", "SamHQVisionAttention", "SamVisionAttention",
        "TapasSelfAttention", "TimesformerSelfAttention", "TvpAttention",
        "UnlimitedOcrSamVisionAttention", "ViltSelfAttention", "VisualBertSelfAttention",
        "VitDetAttention", "XGLMAttention",
    )
)  # fmt: skip


def attentions_of(tree: Tree, blocks: Iterable[Block]) -> tuple[tuple[Site, ...], str]:
    """Return the attention modules in the blocks that can take a prefix, in model order.

    Args:
        tree: the model's tree.
        blocks: its blocks.

    Returns:
        The modules; and why the attention of some block is missing, empty if none is.
    """
    found: list[Site] = []
    missing = ""
    for block in blocks:
        own: list[Site] = []
        linear: list[str] = []
        for path, module in Branch(tree, block.path).modules:
            whole = joined(block.path, path)
            if _LINEAR.search(type(module).__name__):
                linear.append(whole)
            # a block of parallel lists also holds other blocks' modules, and Inkling 2 mixes the
            # outputs of earlier blocks in an attention that projects nothing
            if not any(below(s.path, whole) for s in (*block.sites, *block.parts)):
                continue
            # a module with adapters has a subclass of its class
            cls: Any = type(module)
            is_known = any(c.__name__ in INLINE for c in cls.__mro__)
            if not is_known and (vars(module).get("config") is None or is_inline(cls)):
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


@functools.cache
def is_inline(cls: Any) -> bool:
    """Return whether an attention of the class computes its scores itself."""
    # base classes too: a module with adapters has a subclass of its class
    own = (inspect.unwrap(vars(c)["forward"]) for c in cls.__mro__ if "forward" in vars(c))
    return not any(inspect.isfunction(f) and _TABLE in f.__code__.co_names for f in own)


def _attention(tree: Tree, block: Block, path: str, module: nn.Module) -> Site | str:
    """Return the attention site of a module, or why the shape of its keys and values is unknown."""
    inside = [s for s in (*block.sites, *block.parts) if below(s.path, path)]
    # its own layer comes before a part of a fused one
    keys = sorted((s for s in inside if s.role == "key"), key=lambda s: s.output_slice is not None)
    key = keys[0] if keys else None
    count = number(module, *_COUNTS)
    width = number(module, *_WIDTHS)
    if width is None and key is not None and count:
        width = key.d_out // count
    if width is None:
        return "it does not say how wide a head is"
    heads = number(module, "num_key_value_heads")
    value_width = number(module, "v_head_dim") or width
    is_whole = key is not None and key.output_slice is None
    if key is not None and not key.d_out % width and (is_whole or value_width == width):
        heads = key.d_out // width
    elif value_width != width:
        # keys and values come from a latent state and have as many heads as the queries
        heads = count
    if heads is None:
        # an earlier block has computed the keys
        heads = Branch(tree, path).setting("", "num_key_value_heads")
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


_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
# T5's attention modules, which use only distances
RELATIVE_BIAS = "has_relative_attention_bias"
# attention modules that add a bias linear in the position, which changes only distances
ALIBI = frozenset(("BloomAttention",))


def positions_of(
    tree: Tree, blocks: Iterable[Block]
) -> tuple[tuple[Site, ...], Mapping[str, str], frozenset[str]]:
    """Return the modules that take position numbers.

    Args:
        tree: the model's tree.
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
        # several modules may share it
        stack = near[0] if len(near) == 1 else None
        if takes and "Rotary" in type(module).__name__:
            # several stacks may share one, or each attention has its own
            rotary |= {s for s in stacks if below(s, parent(path)) or below(path, s)}
        is_table = isinstance(module, nn.Embedding)
        if stack is None or not (is_table or takes):
            reason = f"{path!r}, a {type(module).__name__}, counts the tokens itself"
            unmovable |= dict.fromkeys(stacks if stack is None else [stack], reason)
            continue
        found.append(Site(path, "other", -1, stack, "positions", d_in=0, d_out=0))
    for stack in stacks:
        inside = [module for _, module in Branch(tree, stack).modules]
        relative = any(hasattr(m, RELATIVE_BIAS) or type(m).__name__ in ALIBI for m in inside)
        if not relative and not any(site.stack == stack for site in found):
            unmovable.setdefault(stack, "no module is known that takes position numbers")
    return tuple(found), unmovable, frozenset(rotary)


@functools.cache
def _takes_numbers(cls: Any) -> bool:
    return "position_ids" in inspect.signature(cls.forward).parameters
