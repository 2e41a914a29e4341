"""Adapters at other places than a layer, and those that fusions attend to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias

from torch import Tensor

from .adapter import Adapter, BaseLayer

if TYPE_CHECKING:
    pass


class FusibleAdapter(Adapter):
    """An adapter that adds a function of the stream; a fusion can replace that function."""

    @abstractmethod
    def update(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the adapter's update of `x` `[*batch, d_model]`, same shape; fusions attend to it.

        Gates and dropouts are left out.

        Args:
            x: what the adapter's function reads.
            base: the layer.
        """

    @abstractmethod
    def forward(
        self, x: Tensor, base: BaseLayer, instead: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Return the adapted layer.

        Args:
            x: `[*batch, d_in]`.
            base: the layer.
            instead: a function of the same input to add in place of the adapter's own.

        Returns:
            `[*batch, d_out]`, in the base's dtype.
        """


class Prefix(NamedTuple):
    """Keys and values that precede those of the attention module.

    Attributes:
        keys: `[rows or 1, kv_heads, length, key_width]`; they are not rotated.
        values: `[rows or 1, kv_heads, length, value_width]`.
        mask: `[rows, length]` bool, false for padding; None: every query attends to all.
        distances: how a relative position bias counts distances. "kept": between tokens as without
            a prefix. "shifted": keys count from the first of the prefix and queries from 0.
            None: the attention has no such bias, as in cross-attention.
        in_window: whether a sliding window hides it from tokens far after it.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None
    distances: Literal["kept", "shifted"] | None = "kept"
    in_window: bool = False


class AttentionAdapter(Adapter):
    """An adapter that prepends keys and values to those of an attention module.

    In a `Stack` the keys and values of the first adapter come first.

    Attributes:
        counts_padding: whether rotary positions count the padding before a row's first token, as a
            model does without `position_ids`.
    """

    stacks_only: ClassVar[str] = "keys and values of a prefix"
    counts_padding: bool = False

    @abstractmethod
    def forward(self, x: Tensor, base: BaseLayer) -> Prefix:  # type: ignore[override]
        """Return the keys and values.

        Args:
            x: the input of the queries, `[rows, tokens, d_model]`.
            base: the attention.
        """


class InvertibleAdapter(Adapter):
    """A function at a model's input whose inverse acts before the logits."""

    stacks_only: ClassVar[str] = "an invertible function"

    @abstractmethod
    def inverse(self, y: Tensor, base: BaseLayer) -> Tensor:
        """Return the inverse of `forward`; `y` `[*batch, d_model]` enters a head's last layer."""


class PositionAdapter(Adapter):
    """An adapter that changes position numbers: `forward` calls `base` with the new ones."""

    acts_on = "input"


class LanguageFreeAdapter(Adapter):
    """An adapter in the place of a block's language adapters, which do not act.

    Its input is the stream that they would read; in a `Stack` the first adapter acts first, and the
    last one returns what the language adapters would have returned.

    Attributes:
        is_base: whether it only leaves them out, so that it does nothing beside another one.
        joining: the configs of adapters that can act with it.
    """

    acts_on = "input"
    stacks_only = "a base model without its language adapters"
    is_base: ClassVar[bool] = False
    joining: ClassVar[str]


Joins: TypeAlias = Literal["inputs", "embeddings"]
"""Where added tokens join: at the output of the embedding table, or of the embedding module."""


class PromptAdapter(Adapter):
    """An adapter that adds tokens to each sequence; its site is where they join it.

    The mask, positions and labels of the call get room for them before anything is computed. In
    a `Stack` the tokens of the first adapter come first.

    Attributes:
        length: how many tokens.
        after_first: whether they follow the first real token; otherwise they precede it.
        joins: where they join.
    """

    stacks_only: ClassVar[str] = "the tokens of a prompt"
    # outermost at the table, so that other adapters there do not act on placeholders
    acts_on = "input"
    reads_call = True
    length: int
    after_first: bool
    joins: Joins

    @abstractmethod
    def prompt(self, base: BaseLayer) -> Tensor:
        """Return the tokens, `[length, d]`."""

    def forward(self, x: Tensor, base: BaseLayer) -> Tensor:
        """Return the layer's output with the tokens inserted, `[rows, tokens, d]`."""
        y = base(x)
        # outside of a call, the table is only looked up
        at = base.call.added(self.shared_key, x) if base.is_in_call else None  # [rows, length]
        if at is None:
            return y
        at = at.to(y.device).unsqueeze(-1).expand(-1, -1, y.shape[-1])  # [rows, length, d]
        return y.scatter(1, at, self.prompt(base).to(y).expand(at.shape))
