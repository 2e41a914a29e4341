"""What every head shares: its config, the registry of head types, its layers and its labels.

A head config is a frozen, keyword-only dataclass in the file of its task. Its fields and its dict
are those of AdapterHub's `head_config.json`; fields that AdapterHub does not have are written only
when they differ from their default, so that files go both ways.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from adapterzoo.configs import Config
from adapterzoo.contracts import Head
from adapterzoo.registry import Registry

from ._labels import checked, find_labels, labels_from, recounted
from ._losses import IGNORED
from ._pooling import Pooling

if TYPE_CHECKING:
    from ._static import Static, StaticHead


@dataclass(frozen=True, kw_only=True, slots=True)
class Backbone:
    """What a head must know of the model below it.

    Attributes:
        hidden_size: width of the hidden states.
        device: where the head's parameters shall be.
        dtype: of the head's parameters.
        vocab_size: rows of the input embedding, None without one.
        embedding_size: width of the input embedding, where it is not `hidden_size`.
        dropout: of heads that do not say their own.
        layer_norm_eps: of the norms in heads.
        init_std: standard deviation of fresh weights.
        pooling: what `pooling="auto"` means for this model.
        encoder_decoder: whether the hidden states are a decoder's, over those of an encoder.
        lm_scale: factor of the hidden states below a language modelling head that says none.
    """

    hidden_size: int
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    vocab_size: int | None = None
    embedding_size: int | None = None
    dropout: float = 0.0
    layer_norm_eps: float = 1e-12
    init_std: float = 0.02
    pooling: Pooling = "cls"
    encoder_decoder: bool = False
    lm_scale: float | None = None

    def linear(self, d_in: int, d_out: int, bias: bool = True) -> nn.Linear:
        """A fresh linear layer, normal weights and zero bias."""
        layer = nn.Linear(d_in, d_out, bias=bias, device=self.device, dtype=self.dtype)
        nn.init.normal_(layer.weight, std=self.init_std)
        if bias:
            nn.init.zeros_(layer.bias)
        return layer

    def layer_norm(self, width: int, bias: bool = True, eps: float | None = None) -> nn.LayerNorm:
        """A fresh norm; `eps` None for that of the model."""
        eps = self.layer_norm_eps if eps is None else eps
        return nn.LayerNorm(width, eps, bias=bias, device=self.device, dtype=self.dtype)


head_types: Registry[type[HeadConfig]] = Registry("head type")
"""The `head_type` of a config to its class."""


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Config):
    """Base of all head configs.

    Attributes:
        head_type: name of the type in files.
        output_class: which class of `transformers.modeling_outputs` the task answers with.
        label_names: arguments of the model's `forward` that hold the labels; the head's `loss`
            gets them stacked along dimension 1 when they are several.
        inputs: further arguments of the model's `forward` that the head's own `forward` takes.
        logit_names: fields of the output class for what `forward` returns.
        token_labels: whether labels at tokens where the attention mask is 0 do not count.
        decoder_inputs_from: the argument whose tokens, moved by one, are the inputs of a decoder
            that was given none; None: the encoder's own tokens.
        scores_vocabulary: whether its heads have `output_embeddings`.
        pipeline_tag: the task's name on the Hub.
        peft_task: the task's name in PEFT's files.
        task_classes: how the names of transformers' classes end whose heads `from_static` reads.
        count_field: the field that says how many labels there are, where there is one.
        label2id: names of the labels; None where they have none.
    """

    kind_field: ClassVar[str] = "head_type"
    kinds: ClassVar[Registry[Any] | None] = head_types

    head_type: ClassVar[str]
    output_class: ClassVar[str]
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    inputs: ClassVar[tuple[str, ...]] = ()
    logit_names: ClassVar[tuple[str, ...]] = ("logits",)
    token_labels: ClassVar[bool] = False
    decoder_inputs_from: ClassVar[str | None] = None
    scores_vocabulary: ClassVar[bool] = False
    pipeline_tag: ClassVar[str | None] = None
    peft_task: ClassVar[str | None] = None
    task_classes: ClassVar[tuple[str, ...]] = ()
    count_field: ClassVar[str] = "num_labels"

    label2id: Mapping[str, int] | None = None

    @abstractmethod
    def build(self, backbone: Backbone) -> PredictionHead:
        """A fresh head on the backbone's device and of its dtype.

        Raises:
            ConfigError: a value does not fit the backbone.
        """

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a task class as a head of this type; None if another type has it.

        Args:
            static: the tensors' names and shapes, and the config, of a class in `task_classes`.

        Raises:
            InexpressibleError: no head of this type computes the same.
        """
        return None

    @property
    def id2label(self) -> dict[int, str] | None:
        """The label of each class number."""
        # files may list the labels by name
        named = self.label2id
        return None if named is None else dict(sorted((i, label) for label, i in named.items()))

    @property
    def problem_type(self) -> str | None:
        """What a transformers config calls the kind of labels; None where it has no word."""
        return None

    @property
    def loss_type(self) -> str | None:
        """The name of the loss in transformers, by which `Trainer` knows that labels shift."""
        return None

    # --- what goes into the model and into the loss ---

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Bring the arguments of the base model into the form that the head needs, in place.

        Args:
            inputs: arguments of the base model's `forward`.
        """

    def find_labels(self, name: str, given: Mapping[str, Any]) -> Tensor | None:
        """Return the labels for a head, several stacked along dimension 1; None without any.

        Args:
            name: of the head; an argument may be a dict from names of heads to labels.
            given: arguments of the model's `forward`.

        Raises:
            ConfigError: some of the arguments are missing, or their shapes differ.
        """
        return find_labels(name, self.label_names, given)

    def mask_labels(self, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Return the labels, −100 at the tokens that do not count.

        Args:
            labels: as `find_labels` returns them.
            mask: `[batch, tokens]`, 1 at the tokens that count; None when all do.
        """
        if not self.token_labels or mask is None or mask.shape != labels.shape:
            return labels
        return labels.masked_fill(mask.to(labels.device) == 0, IGNORED)

    def shift(self, labels: Tensor) -> Tensor:
        """Return the label that the logits at each place are compared with; same shape."""
        return labels

    def ties_output(self, model_ties: bool) -> bool:
        """Return whether the last layer of the head is the input embedding.

        Args:
            model_ties: whether the model's config ties the two.
        """
        return False

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        # AdapterHub's files have either
        id2label = fields.pop("id2label", None)
        return super()._from_fields(
            fields if id2label is None else {**fields, "label2id": labels_from(id2label)}
        )

    def replace(self, **changes: Any) -> Self:
        """The same config with some fields changed.

        Labels without names of their own are numbered anew where their count changes.

        Raises:
            ConfigError: a field is unknown, a value is not legal, or the count of labels that
                have names changes and the names do not.
        """
        count = self.count_field
        if count in self.keys() and count in changes and "label2id" not in changes:
            names = self.label2id, self[count], changes[count]
            changes["label2id"] = recounted(type(self).__name__, count, *names)
        return super().replace(**changes)

    def _check_labels(self, count: int) -> None:
        """Number the labels where they have no names; check the names where they have."""
        names = checked(type(self).__name__, self.label2id, count)
        object.__setattr__(self, "label2id", names)


class PredictionHead(Head):
    """Base of the heads that a model can hold by name.

    Attributes:
        config: from which it was built; saved with it.
        pooling: how the model's answer for each sequence is taken from its tokens: it decides
            which hidden states and which mask the model hands over. None for heads on tokens.
    """

    def __init__(self, config: HeadConfig, pooling: Pooling | None = None) -> None:
        """Keep the config.

        Args:
            config: from which it is built.
            pooling: resolved, never "auto".
        """
        super().__init__()
        self.config = config
        self.pooling = pooling

    def tokens_to_score(self, hidden: Tensor, keep: int | Tensor) -> Tensor:
        """Return the hidden states whose logits are wanted; all, unless the head scores tokens.

        Args:
            hidden: `[batch, tokens, d_model]`.
            keep: `logits_to_keep` of transformers: how many last tokens, or which; 0 for all.
        """
        return hidden

    @property
    def output_embeddings(self) -> nn.Linear | None:
        """The layer that has a row for each token of the vocabulary, None without one."""
        return None

    @property
    def output_key(self) -> str | None:
        """The key of that layer's weight in the head's `state_dict`, None without one."""
        return None

    # whether the output embeddings are known to be those of the base model's checkpoint, unchanged
    of_checkpoint: bool = False

    def tie(self, weight: nn.Parameter) -> bool:
        """Share the weight of the input embedding; False, and nothing done, if it does not fit.

        Args:
            weight: `[vocab_size, embedding_size]`.
        """
        return False

    def replace_output(self, layer: nn.Module) -> None:
        """Put another layer in the place of the output embeddings; without any, do nothing.

        Raises:
            ConfigError: it is not a linear layer.
        """

    def resize_output(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        """Give the output embeddings another number of rows; without any, do nothing.

        Args:
            weight: `[vocab_size, embedding_size]`.
            bias: `[vocab_size]`, None without one.
        """

    @abstractmethod
    def loss(
        self,
        logits: Tensor | tuple[Tensor, ...],
        labels: Tensor,
        count: Tensor | int | None = None,
    ) -> Tensor:
        """The training loss, a scalar.

        Args:
            logits: as `forward` gave them.
            labels: −100 where a label does not count.
            count: by how many labels the sum is divided; those of this batch that count, when
                None. With gradient accumulation it is the number over all the batches.
        """
