"""Where a model takes its tokens in: the embedding table, the module around it, the first block.

The blocks alone determine the entry, the input of the first block, so that the structure of the
embeddings does not matter, nor whether a caller passes `inputs_embeds`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from .patterns import NO_ENTRY, NO_TOKENS, reason
from .sites import Block, Role, Site, TokenInput
from .tree import Tree, below, joined, nearness, number, parent, unwrapped

_LENGTHS = ("max_position_embeddings", "n_positions")
# rows that a table of positions may have beside those of tokens
_EXTRA = 8


def tokens_of(tree: Tree, blocks: Sequence[Block]) -> TokenInput | None:
    """Return where a model embeds its tokens, or its other inputs if it reads no tokens.

    Args:
        tree: of the model.
        blocks: its blocks.
    """
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    if getattr(getattr(tree.modules[""], "config", None), "is_encoder_decoder", False):
        crossing = {b.stack for b in blocks if any(site.cross for site in b.sites)}
        # such a decoder writes tokens
        stacks = [stack for stack in stacks if stack not in crossing]
    found = [_input(tree, stack, blocks) for stack in stacks]
    reading = {tokens.table: tokens for tokens in found if tokens.table is not None}
    if reading:
        whole = input_embeddings_of(tree.modules[""])
        weight = getattr(whole, "weight", None)
        own = [table for table in reading if _weight(tree, table) is weight]
        # a part of the model may read other tokens than the model
        alone = whole is None and len(reading) == 1
        return reading[own[0]] if own else next(iter(reading.values())) if alone else None
    return found[0] if len(found) == 1 and found[0].stack == "" else None


def token_site(tokens: TokenInput | None, joins: str) -> Site | None:
    """Return the site of tokens that join "inputs" or "embeddings"; None if there is none.

    Its role is "embedding" for the former, and "other" for the latter.
    """
    if tokens is None:
        return None
    role: Role = "embedding"
    path, d = tokens.table, tokens.table_width
    if joins == "embeddings":
        role, path, d = "other", None if tokens.closed else tokens.embeddings, tokens.width
    return None if path is None else Site(path, role, -1, "", "output", d, d)


def usual_joins(tokens: TokenInput | None) -> str:
    """Return what tokens join by default: "embeddings" in a model without a table of tokens."""
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
    owner, table = parent(stack), None
    while True:
        module: Any = tree.modules[owner]
        if "get_input_embeddings" in dir(module):
            table = _table(tree, module, owner)
            break
        if not owner:
            break
        owner = parent(owner)
    d_model = next(block.d_model for block in blocks if block.stack == stack)
    width = d_model if table is None else cast("nn.Embedding", tree.modules[table]).embedding_dim
    embeddings = _embeddings(tree, owner, table, blocks)
    module = tree.modules[owner if embeddings is None else embeddings]
    takes = inspect.signature(type(module).forward).parameters
    said = {getattr(module, "is_causal", None) for _, module in tree.branch(owner).modules}
    attended = any(s.cross for b in blocks if b.stack != stack for s in b.sites)
    return TokenInput(
        stack=owner,
        table=table,
        table_width=width,
        embeddings=embeddings,
        width=_width(tree, embeddings, width),
        embeds_positions=embeddings is not None and "position_ids" in takes,
        positions=_positions(tree, owner, table, blocks),
        is_encoder=attended,
        # some models do not say whether their attentions are causal
        looks_ahead=False in said and True not in said,
        closed=reason(NO_TOKENS, tree),
    )


def input_embeddings_of(model: object) -> nn.Module | None:
    """Return transformers' input embeddings of a model; None if it has none."""
    try:
        found = cast("Any", model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    # a matrix that the model keeps itself is not a layer
    return unwrapped(found) if isinstance(found, nn.Module) else None


def _weight(tree: Tree, table: str) -> object:
    return cast("nn.Embedding", tree.modules[table]).weight


def _table(tree: Tree, module: Any, owner: str) -> str | None:
    """Return the path of the model's embedding of tokens; None if unknown."""
    embedding = input_embeddings_of(module)
    paths = (path for path, found in tree.branch(owner).modules if found is embedding)
    path = next(paths, None) if isinstance(embedding, nn.Embedding) else None
    return None if path is None else joined(owner, path)


def _embeddings(tree: Tree, owner: str, table: str | None, blocks: Sequence[Block]) -> str | None:
    """Return the path of the embedding module: the largest around the table without blocks."""
    paths = [block.path for block in blocks]
    children = tree.children(owner)
    first = next((i for i, c in enumerate(children) if _holds(c, paths)), 0)
    before = children[:first]
    path = table
    if path is None:
        path = before[0] if before else None
        # a table that the model does not call its own may embed anything, or nothing
        if path is not None and isinstance(tree.modules[path], nn.Embedding):
            return None
    while path is not None and parent(path) != owner:
        path = parent(path)
    if path not in before:
        return None
    # modules between it and the blocks may project a token, but not add anything at its place
    between = [tree.modules[c] for c in before if c != path]
    return path if all(isinstance(m, nn.Dropout | nn.Linear) for m in between) else None


def _holds(path: str, blocks: Sequence[str]) -> bool:
    return any(below(block, path) for block in blocks)


def _width(tree: Tree, embeddings: str | None, width: int) -> int:
    norms = () if embeddings is None else tree.branch(embeddings).modules
    shapes = [m.normalized_shape for _, m in norms if isinstance(m, nn.LayerNorm)]
    return int(shapes[-1][0]) if shapes else width


def _positions(tree: Tree, owner: str, table: str | None, blocks: Sequence[Block]) -> int | None:
    """Return the number of learned positions; None if positions are not learned."""
    paths = [block.path for block in blocks]
    branch = tree.branch(owner)
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
        tree: of the model.
        blocks: its blocks.

    Returns:
        The site, or None; and the reason if it is None.
    """
    first = _first_block(tree, blocks)
    if first is None:
        return None, "it has no blocks"
    path = tree.children(first.stack)[0]
    if path != first.path and first.path not in tree.children(first.stack):
        return None, "the parts of its blocks are in lists, and no module is a block"
    if closed := reason(NO_ENTRY, tree):
        return None, closed
    width = first.d_model
    read = _reads(first)
    others = {_reads(block) for block in blocks if block.stack == first.stack} - {0, read}
    if not width or (others and read not in (0, width)):
        return None, f"input and output of {first.path!r} differ in width"
    site = Site(f"{path}.{NAME}", "other", -1, first.stack, "entry", width, width)
    return site, ""


def _first_block(tree: Tree, blocks: Sequence[Block]) -> Block | None:
    """Return the first block of the stack that the embeddings feed."""
    stacks = list(dict.fromkeys(block.stack for block in blocks))
    root = tree.modules[""]
    if getattr(getattr(root, "config", None), "is_encoder_decoder", False):
        decoders = {b.stack for b in blocks if any(site.cross for site in b.sites)}
        stacks = [s for s in stacks if s not in decoders] or stacks
    own = input_embeddings_of(tree.modules[""])
    embedding = next((path for path, module in tree.modules.items() if module is own), "")

    def near(stack: str) -> tuple[int, int]:
        return nearness(stack, embedding), -stack.count(".")

    # the first of equally near ones: stages of a pyramid, or an encoder before its decoder
    stack = max(stacks, key=near, default=None)
    return next((b for b in blocks if b.stack == stack), None)


def _reads(block: Block) -> int:
    """Return the input width of a block's attention; 0 if it has none."""
    return next((site.d_in for site in block.sites if site.role in ("query", "qkv")), 0)
