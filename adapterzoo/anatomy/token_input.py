"""Where a model takes its tokens in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenInput:
    """The part of a model that turns tokens into what the first block is given.

    Attributes:
        stack: path of the model whose forward takes the tokens.
        table: path of the embedding of tokens; None where the model reads none.
        table_width: its features.
        embeddings: path of the module that adds positions, norms and what else there is; None
            where no module has the result.
        width: features of what that module returns.
        embeds_positions: whether it is given the positions of tokens.
        positions: how many tokens the learned positions are for; None without such.
        is_encoder: whether another stack attends to this one.
        closed: why tokens cannot join what the embeddings return; empty if they can.
    """

    stack: str
    table: str | None
    table_width: int
    embeddings: str | None
    width: int
    embeds_positions: bool
    positions: int | None
    is_encoder: bool
    closed: str = ""
