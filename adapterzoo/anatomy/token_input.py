"""Where a model takes its tokens in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenInput:
    """The part of a model that turns tokens into the input of the first block.

    Attributes:
        stack: path of the model whose forward takes the tokens.
        table: path of the embedding of tokens; None if the model reads none.
        table_width: its features.
        embeddings: path of the module that adds positions, norms and the like; None if no module
            returns the result.
        width: output features of that module.
        embeds_positions: whether that module takes the positions of tokens.
        positions: number of learned positions; None if positions are not learned.
        is_encoder: whether another stack attends to this one.
        looks_ahead: whether no attention hides later tokens from earlier ones.
        closed: why tokens cannot join the output of the embeddings; empty if they can.
    """

    stack: str
    table: str | None
    table_width: int
    embeddings: str | None
    width: int
    embeds_positions: bool
    positions: int | None
    is_encoder: bool
    looks_ahead: bool = False
    closed: str = ""
