"""The entry of a model: the input of its first block, the finished embeddings.

The blocks alone determine it, so that the structure of the embeddings does not matter, nor whether
a caller passes `inputs_embeds`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .closed import NO_ENTRY, reason
from .names import nearness
from .sites import Block, Site
from .tokens import input_embeddings_of
from .tree import Tree

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
    embedding = _embedding_path(tree)

    def near(stack: str) -> tuple[int, int]:
        return nearness(stack, embedding), -stack.count(".")

    # the first of equally near ones: stages of a pyramid, or an encoder before its decoder
    stack = max(stacks, key=near, default=None)
    return next((b for b in blocks if b.stack == stack), None)


def _reads(block: Block) -> int:
    """Return the input width of a block's attention; 0 if it has none."""
    return next((site.d_in for site in block.sites if site.role in ("query", "qkv")), 0)


def _embedding_path(tree: Tree) -> str:
    """Return the path of the module that transformers calls the input embeddings, empty if none."""
    module = input_embeddings_of(tree.modules[""])
    return next((path for path, m in tree.modules.items() if m is module), "")
