"""A head that chooses one of several sequences.

Differs from AdapterHub: `pooling` chooses the tokens; labels of −100 do not count.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from adapterzoo.config_base import config_class
from adapterzoo.errors import ConfigError
from adapterzoo.fields import field

from ._adding import Labels, Model, adds_head
from ._layers import COUNT
from ._pooling import Pooling
from .backbone import Backbone
from .base import head_types
from .pooled import PooledConfig, PooledHead
from .task_classes import Static

# arguments of the base model with one row for each sequence
_PER_SEQUENCE = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


@head_types.register("multiple_choice")
@config_class
class MultipleChoiceConfig(PooledConfig):
    """A head that chooses the best of `num_choices` sequences, each scored by itself."""

    head_type: ClassVar[str] = "multiple_choice"
    output_class: ClassVar[str] = "MultipleChoiceModelOutput"
    pipeline_tag: ClassVar[str | None] = "multiple-choice"
    count_field: ClassVar[str] = "num_choices"
    task_classes: ClassVar[tuple[str, ...]] = ("ForMultipleChoice",)

    num_choices: int = field(2, COUNT)

    @property
    def d_out(self) -> int:
        """One score for each sequence."""
        return 1

    @property
    def problem_type(self) -> str:
        """The choices are classes."""
        return "single_label_classification"

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Flatten the choices into the batch: `[batch, choices, …]` → `[batch · choices, …]`."""
        for name in _PER_SEQUENCE:
            value = inputs.get(name)
            if isinstance(value, Tensor) and value.dim() == (4 if name == "inputs_embeds" else 3):
                inputs[name] = value.flatten(0, 1)  # [batch · choices, tokens]

    def build(self, backbone: Backbone) -> MultipleChoiceHead:
        """Return a fresh head."""
        return MultipleChoiceHead(self, backbone)

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return as many choices as the config has labels; 2 if it has none."""
        return {"num_choices": len(static.config.get("id2label") or (0, 1))}


class MultipleChoiceHead(PooledHead):
    """A score for each sequence, compared within each group of choices."""

    config: MultipleChoiceConfig

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return logits `[batch, num_choices]`.

        Args:
            hidden: `[batch · num_choices, tokens, d_model]`, the choices of one question together.
            mask: `[batch · num_choices, tokens]`.

        Raises:
            ConfigError: the sequences do not divide into groups of choices.
        """
        choices = self.config.num_choices
        if hidden.shape[0] % choices:
            raise ConfigError(
                f"multiple choice: {hidden.shape[0]} sequences do not divide into groups of "
                f"num_choices={choices}. Write input_ids of shape [batch, {choices}, tokens]."
            )
        return super().forward(hidden, mask).view(-1, choices)  # [batch, num_choices]


@adds_head(MultipleChoiceConfig)
def add_multiple_choice_head(
    self: Model,
    head_name: str,
    num_choices: int = 2,
    layers: int = 2,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    id2label: Labels = None,
    use_pooler: bool = False,
    pooling: Pooling = "auto",
) -> None:
    """Add a head that chooses among sequences; inputs are `[batch, num_choices, tokens]`.

    Args:
        self: the model.
        head_name: of the new head.
        num_choices: number of sequences to choose from.
        layers: as of `add_classification_head`, like the rest.
        activation_function: between the layers.
        overwrite_ok: whether a head of that name may be replaced.
        id2label: names of the choices.
        use_pooler: whether to use the model's own pooled output.
        pooling: the tokens that represent a sequence.
    """
