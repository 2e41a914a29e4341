"""A head that classifies tokens: named entities, parts of speech.

logits = W_n · act(… act(W_1 · hidden + b_1) …) + b_n for each token, dropout before each W.

Differs from AdapterHub: nothing; `bias` can leave out that of the last layer.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from adapterzoo.config_base import config_class
from adapterzoo.fields import field

from ._adding import Labels, Model, adds_head
from ._layers import COUNT, LayersConfig, LayersHead
from .backbone import Backbone
from .base import head_types
from .losses import Count, Logits, cross_entropy
from .task_classes import InexpressibleError, Static, StaticHead

# encoder–decoders whose token classifiers have the encoder only
_OF_ENCODER = frozenset({"mt5", "t5", "umt5"})


@head_types.register("tagging")
@config_class
class TaggingConfig(LayersConfig):
    """A head that gives each token one of `num_labels` classes.

    Attributes:
        num_labels: number of classes.
    """

    head_type: ClassVar[str] = "tagging"
    output_class: ClassVar[str] = "TokenClassifierOutput"
    token_labels: ClassVar[bool] = True
    pipeline_tag: ClassVar[str | None] = "token-classification"
    peft_task: ClassVar[str | None] = "TOKEN_CLS"
    task_classes: ClassVar[tuple[str, ...]] = ("ForTokenClassification",)

    num_labels: int = field(2, COUNT)

    @classmethod
    def from_static(cls, static: Static) -> StaticHead:
        """Return the one layer of a token classifier.

        Raises:
            InexpressibleError: it has more, or reads an encoder below a decoder.
        """
        if static.config.get("model_type") in _OF_ENCODER:
            raise InexpressibleError("it labels the encoder's tokens, named heads the decoder's")
        out, keys = static.one_linear()
        count = static.shape(out)[0]
        config = cls(
            num_labels=count,
            activation_function=None,
            label2id=static.label_names(count),
            bias=static.has_bias(out),
            dropout_prob=static.dropout(),
        )
        return StaticHead(config, keys)

    def build(self, backbone: Backbone) -> TaggingHead:
        """Return a fresh head."""
        return TaggingHead(self, backbone)


class TaggingHead(LayersHead):
    """Layers on each token."""

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, tokens, num_labels]`. `hidden` `[batch, tokens, d_model]`."""
        return self.score(hidden)

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the cross entropy of `labels` `[batch, tokens]`."""
        if isinstance(logits, tuple):
            (logits,) = logits
        return cross_entropy(logits, labels, count)


@adds_head(TaggingConfig)
def add_tagging_head(
    self: Model,
    head_name: str,
    num_labels: int = 2,
    layers: int = 1,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    id2label: Labels = None,
) -> None:
    """Add a head that classifies tokens; arguments as of `add_classification_head`."""
