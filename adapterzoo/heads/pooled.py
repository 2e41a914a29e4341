"""Heads on one pooled vector per sequence: pooling, then a stack of layers.

logits = W_n · act(… act(W_1 · pool(hidden) + b_1) …) + b_n, dropout before each W.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adapterzoo.config_base import config_class
from adapterzoo.errors import ConfigError
from adapterzoo.fields import Choice, field

from ._layers import LayersConfig, LayersHead
from ._pooling import POOLINGS, Pooling, pool
from ._static_activations import activation_after
from .backbone import Backbone
from .losses import LOSSES, Count, Logits
from .task_classes import InexpressibleError, Static, StaticHead

_SUMMARIES = {"first": "cls", "last": "last"}


@config_class
class PooledConfig(LayersConfig):
    """Configs of heads on one pooled vector per sequence.

    Attributes:
        use_pooler: whether to use the model's own pooler; the same as `pooling="pooler"`.
        pooling: the tokens that represent the sequence.
    """

    layers: int = 2
    use_pooler: bool = False
    pooling: Pooling = field("auto", Choice(*POOLINGS), ours=True)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.use_pooler and self.pooling not in ("auto", "pooler"):
            raise ConfigError(
                f"{type(self).__name__}(use_pooler=True, pooling={self.pooling!r}): the model's "
                f"pooler and another pooling exclude each other. "
                f"Write use_pooler=False, pooling={self.pooling!r}."
            )
        if self.pooling == "pooler":
            # write only the form that AdapterHub reads
            object.__setattr__(self, "use_pooler", True)
            object.__setattr__(self, "pooling", "auto")

    def resolved(self, backbone: Backbone) -> Pooling:
        """Return the pooling for this backbone, never "auto"."""
        if self.use_pooler:
            return "pooler"
        return backbone.pooling if self.pooling == "auto" else self.pooling

    def build(self, backbone: Backbone) -> PooledHead:
        """Return a fresh head."""
        return PooledHead(self, backbone)

    @property
    def problem_type(self) -> str:
        """The kind of labels, which decides the loss and how pipelines read the logits."""
        return "regression" if self.label_count == 1 else "single_label_classification"

    def loss(self, logits: Tensor, labels: Tensor, count: Count) -> Tensor:
        """Return the loss for the kind of labels."""
        return LOSSES[self.problem_type](logits, labels, count)

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return a static head on a pooled vector as a head of this type."""
        static.refuse_other_inputs()
        out, dense, keys = static.linears()
        pooling: Any = "cls"
        activation = None
        if dense is not None:
            activation = activation_after(dense, static.config)
            if dense.startswith("classification_head."):
                pooling = "eos"
            elif dense.startswith("sequence_summary."):
                pooling = _summary_pooling(static.config)
        elif (named := cls.pooling_of(static)) is not None:
            pooling = named
        elif out == "score":
            pooling = "last"
        elif static.pooler:
            pooling = "pooler"
        else:
            raise InexpressibleError("its base model has no pooler")
        config = cls(
            layers=1 if dense is None else 2,
            activation_function=activation,
            use_pooler=pooling == "pooler",
            pooling="auto" if pooling in (static.backbone.pooling, "pooler") else pooling,
            bias=static.has_bias(out),
            dropout_prob=static.dropout("seq_classif_dropout"),
            **cls.labels_of(static, static.shape(out)[0]),
        )
        return StaticHead(config, keys)

    @classmethod
    def pooling_of(cls, static: Static) -> str | None:
        """Return the pooling of a static head without inner layers; None if its layers imply it.

        Raises:
            InexpressibleError: it is not known.
        """
        return None

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return the fields for the labels of a static head.

        Args:
            static: the head.
            outputs: rows of its last layer.

        Raises:
            InexpressibleError: no head of this type has such labels.
        """
        if outputs > 1 and static.config.get("problem_type") == "regression":
            raise InexpressibleError(f"it is a regression of {outputs} numbers at once")
        return {"num_labels": outputs, "label2id": static.label_names(outputs)}


class PooledHead(LayersHead):
    """Layers on one pooled vector per sequence."""

    config: PooledConfig

    def __init__(self, config: PooledConfig, backbone: Backbone) -> None:
        """Make the layers."""
        super().__init__(config, backbone, config.resolved(backbone))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, num_labels]`.

        Args:
            hidden: `[batch, tokens, d_model]`, or `[batch, d_model]` if the model has pooled.
            mask: `[batch, tokens]`, true or 1 at the tokens that `pooling` uses.
        """
        return self.score(pool(hidden, mask, self.pooling or "cls"))

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the loss of the task. `logits` `[batch, num_labels]`, `labels` `[batch]`."""
        scores = logits[0] if isinstance(logits, tuple) else logits
        return self.config.loss(scores, labels, count)


def is_multilabel(static: Static) -> bool:
    """Return whether each label of a static head is a yes or no."""
    return static.config.get("problem_type") == "multi_label_classification"


def _summary_pooling(config: Mapping[str, Any]) -> str:
    """Return the pooling for the `summary_type` of a transformers config.

    Raises:
        InexpressibleError: no head type here has it.
    """
    kind = str(config.get("summary_type"))
    if kind not in _SUMMARIES:
        raise InexpressibleError(f"its config has summary_type={kind!r}")
    return _SUMMARIES[kind]
