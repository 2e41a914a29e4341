"""Dependency parsing: the head of each word, and the kind of relation between the two.

Dozat & Manning 2017, arXiv:1611.01734; Glavaš & Vulić 2021, arXiv:2008.06788, §2.1.
arc[i, j] = [x_i; 1]ᵀ U y_j,  rel[i, j, l] = [x_i; 1]ᵀ V_l [y_j; 1], with x_i the mean of the tokens
of word i, and y the first token, which represents the root, then the words.

Differs from AdapterHub: word starts of 0 or less are padding and labels below 0 do not count,
whatever the id of the padding token (AdapterHub compares both with it); a word without tokens is
zero (AdapterHub: NaN).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adapterzoo.config import Range, config_class, field
from adapterzoo.errors import ConfigError

from ._backbone import Backbone
from ._base import HeadConfig, Labels, PredictionHead, adds_head, head_types
from ._losses import IGNORED, Count, Logits, check_range, cross_entropy


@head_types.register("dependency_parsing")
@config_class
class DependencyParsingConfig(HeadConfig):
    """A head that assigns each word its head and one of `num_labels` relations.

    Attributes:
        num_labels: number of relations.
    """

    head_type: ClassVar[str] = "dependency_parsing"
    output_class: ClassVar[str] = "DependencyParsingOutput"
    label_names: ClassVar[tuple[str, ...]] = ("labels_arcs", "labels_rels")
    logit_names: ClassVar[tuple[str, ...]] = ("rel_preds", "arc_preds")
    inputs: ClassVar[tuple[str, ...]] = ("word_starts",)

    num_labels: int = field(2, Range(1, 100_000))

    def build(self, backbone: Backbone) -> DependencyParsingHead:
        """Return a new head; its scores are 0 until it is trained."""
        return DependencyParsingHead(self, backbone)


class Biaffine(nn.Module):
    """Scores of pairs: [x; 1]ᵀ W_o [y; 1], or with y alone."""

    def __init__(self, backbone: Backbone, outputs: int, bias_y: bool) -> None:
        """Make the weight, all zero.

        Args:
            backbone: the model below.
            outputs: number of scores for each pair.
            bias_y: whether a 1 is appended to `y`.
        """
        super().__init__()
        self.bias_y = bias_y
        d = backbone.hidden_size
        shape = (outputs, d + 1, d + int(bias_y))
        self.weight = nn.Parameter(torch.zeros(shape, device=backbone.device, dtype=backbone.dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return scores `[batch, outputs, n, m]`. `x` `[batch, n, d]`, `y` `[batch, m, d]`."""
        x = F.pad(x, (0, 1), value=1.0)
        if self.bias_y:
            y = F.pad(y, (0, 1), value=1.0)
        return torch.einsum("bxi,oij,byj->boxy", x, self.weight, y)  # [batch, outputs, n, m]


class DependencyParsingHead(PredictionHead):
    """Biaffine scores of arcs and relations between words."""

    config: DependencyParsingConfig

    def __init__(self, config: DependencyParsingConfig, backbone: Backbone) -> None:
        """Make the weights."""
        super().__init__(config)
        self.biaffine_arcs = Biaffine(backbone, 1, bias_y=False)
        self.biaffine_rels = Biaffine(backbone, config.num_labels, bias_y=True)
        self.dropout = nn.Dropout(backbone.dropout)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, word_starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of relations `[batch, tokens, tokens + 1, num_labels]` and of arcs.

        The scores of arcs are `[batch, tokens, tokens + 1]`.

        Word i is row i; column 0 is the root, column j + 1 word j. Rows after the last word are
        padding.

        Args:
            hidden: `[batch, tokens, d_model]`.
            mask: not used; `word_starts` defines the words.
            word_starts: `[batch, words + 1 or more]`, ascending: the first token of each word,
                then the token after the last word; 0 or less is padding.

        Raises:
            ConfigError: the word starts are missing.
        """
        if word_starts is None:
            raise ConfigError("word_starts is missing. Write model(…, word_starts=…).")
        hidden = self.dropout(hidden)
        words = mean_words(hidden, word_starts)
        heads = torch.cat([hidden[:, :1], words], dim=1)  # [batch, tokens + 1, d_model]
        arcs = self.biaffine_arcs(words, heads).squeeze(1)  # [batch, tokens, tokens + 1]
        rels = self.biaffine_rels(words, heads).permute(0, 2, 3, 1)  # [batch, n, n + 1, labels]
        return rels, arcs

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the cross entropy of the arcs plus that of the relations at the true arcs.

        Args:
            logits: logits of relations and arcs, as `forward` gives them.
            labels: `[batch, 2, tokens]`: for each word the column of its head, and its relation;
                values below 0 do not count.
            count: the divisor of each sum, instead of the number of words that count.

        Raises:
            ConfigError: wrong dtype, shape or value of the labels.
        """
        rels, arcs = logits
        gold = labels.to(arcs.device)
        gold = gold.where(gold >= 0, IGNORED)
        heads, kinds = gold.unbind(dim=1)
        loss = cross_entropy(arcs, heads, count)
        check_range(kinds, 0, self.config.num_labels - 1)
        # the relations to the true head of each word
        index = heads.clamp(min=0)[..., None, None]  # [batch, words, 1, 1]
        index = index.expand(-1, -1, 1, rels.shape[-1])  # [batch, words, 1, labels]
        chosen = rels.gather(2, index).squeeze(2)  # [batch, words, labels]
        return loss + cross_entropy(chosen, kinds.where(heads >= 0, IGNORED), count)


def mean_words(hidden: Tensor, word_starts: Tensor) -> Tensor:
    """Return the mean of each word's tokens, `[batch, tokens, d_model]`; zeros after the last word.

    Args:
        hidden: `[batch, tokens, d_model]`.
        word_starts: as in `DependencyParsingHead.forward`.
    """
    tokens = hidden.shape[1]
    starts = word_starts.to(hidden.device)
    real = starts > 0
    bounds = starts.where(real, tokens)  # padding comes after every token
    position = torch.arange(tokens, device=hidden.device)
    # the number of words that begin at or before the token, minus one
    begun = bounds.unsqueeze(-1) <= position  # [batch, words, tokens]
    word = begun.sum(dim=1) - 1  # [batch, tokens]
    last = real.sum(dim=1, keepdim=True) - 1  # the last start is the end of the last word
    word = word.where(word < last, -1)
    member = word.unsqueeze(1) == position.unsqueeze(-1)  # [batch, words, tokens]
    share = member.sum(dim=-1, keepdim=True).clamp(min=1)
    return (member.to(hidden.dtype) @ hidden) / share


@adds_head(DependencyParsingConfig)
def add_dependency_parsing_head(
    self: Any,
    head_name: str,
    num_labels: int = 2,
    overwrite_ok: bool = False,
    id2label: Labels = None,
) -> None:
    """Add a head that finds each word's head and relation; `forward` takes `word_starts`."""
