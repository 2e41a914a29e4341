"""The `add_…_head` methods of a model: one for each kind of head, with AdapterHub's arguments."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Mapping

from adapterzoo.heads import (
    CausalLMConfig,
    ClassificationConfig,
    DependencyParsingConfig,
    HeadConfig,
    ImageClassificationConfig,
    MaskedLMConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
    Pooling,
    QuestionAnsweringConfig,
    Seq2SeqLMConfig,
    TaggingConfig,
    labels_from,
)

Labels = Mapping[int, str] | None


# not of ABC: its __slots__ give models a layout to which fully_shard cannot change their class
class AddHeadsMixin(metaclass=ABCMeta):
    """Adds heads by name; each becomes the active head.

    All methods raise `ConfigError` for a value or a name that is not legal and
    `DuplicateNameError` for a name that is taken; then nothing has changed.
    """

    @abstractmethod
    def _add_head(
        self,
        call: str,
        name: object,
        config: HeadConfig,
        overwrite_ok: bool = False,
        set_active: bool = True,
    ) -> None:
        """Build the head and put it on the shelf."""

    def add_classification_head(
        self,
        head_name: str,
        num_labels: int = 2,
        layers: int = 2,
        activation_function: str | None = "tanh",
        overwrite_ok: bool = False,
        multilabel: bool = False,
        id2label: Labels = None,
        use_pooler: bool = False,
        pooling: Pooling = "auto",
    ) -> None:
        """Add a head that judges whole sequences.

        Args:
            head_name: how it is called.
            num_labels: number of classes; 1 for a number instead (regression).
            layers: number of linear layers.
            activation_function: between them; None for none.
            overwrite_ok: whether a head of that name may be replaced.
            multilabel: whether each class is a yes or no of its own.
            id2label: names of the classes.
            use_pooler: whether to take the model's own pooled output.
            pooling: which tokens answer for the sequence; "auto" does what the family does.
        """
        config = MultilabelClassificationConfig if multilabel else ClassificationConfig
        made = config(
            num_labels=num_labels,
            layers=layers,
            activation_function=activation_function,
            label2id=labels_from(id2label),
            use_pooler=use_pooler,
            pooling=pooling,
        )
        self._add_head("add_classification_head", head_name, made, overwrite_ok)

    def add_image_classification_head(
        self,
        head_name: str,
        num_labels: int = 2,
        layers: int = 1,
        activation_function: str | None = "tanh",
        overwrite_ok: bool = False,
        multilabel: bool = False,
        id2label: Labels = None,
        use_pooler: bool = False,
        pooling: Pooling = "auto",
    ) -> None:
        """Add a head that judges images; arguments as of `add_classification_head`."""
        made = ImageClassificationConfig(
            num_labels=num_labels,
            layers=layers,
            activation_function=activation_function,
            multilabel=multilabel,
            label2id=labels_from(id2label),
            use_pooler=use_pooler,
            pooling=pooling,
        )
        self._add_head("add_image_classification_head", head_name, made, overwrite_ok)

    def add_multiple_choice_head(
        self,
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
            head_name: how it is called.
            num_choices: number of sequences to choose from.
            layers: as of `add_classification_head`, like the rest.
            activation_function: between the layers.
            overwrite_ok: whether a head of that name may be replaced.
            id2label: names of the choices.
            use_pooler: whether to take the model's own pooled output.
            pooling: which tokens answer for a sequence.
        """
        made = MultipleChoiceConfig(
            num_choices=num_choices,
            layers=layers,
            activation_function=activation_function,
            label2id=labels_from(id2label),
            use_pooler=use_pooler,
            pooling=pooling,
        )
        self._add_head("add_multiple_choice_head", head_name, made, overwrite_ok)

    def add_tagging_head(
        self,
        head_name: str,
        num_labels: int = 2,
        layers: int = 1,
        activation_function: str | None = "tanh",
        overwrite_ok: bool = False,
        id2label: Labels = None,
    ) -> None:
        """Add a head that gives each token a class; arguments as of `add_classification_head`."""
        made = TaggingConfig(
            num_labels=num_labels,
            layers=layers,
            activation_function=activation_function,
            label2id=labels_from(id2label),
        )
        self._add_head("add_tagging_head", head_name, made, overwrite_ok)

    def add_qa_head(
        self,
        head_name: str,
        num_labels: int = 2,
        layers: int = 1,
        activation_function: str | None = "tanh",
        overwrite_ok: bool = False,
        id2label: Labels = None,
    ) -> None:
        """Add a head that finds the span of an answer; `num_labels` is 2, its start and end."""
        made = QuestionAnsweringConfig(
            num_labels=num_labels,
            layers=layers,
            activation_function=activation_function,
            label2id=labels_from(id2label),
        )
        self._add_head("add_qa_head", head_name, made, overwrite_ok)

    def add_dependency_parsing_head(
        self,
        head_name: str,
        num_labels: int = 2,
        overwrite_ok: bool = False,
        id2label: Labels = None,
    ) -> None:
        """Add a head that finds each word's head and relation; `forward` takes `word_starts`."""
        made = DependencyParsingConfig(num_labels=num_labels, label2id=labels_from(id2label))
        self._add_head("add_dependency_parsing_head", head_name, made, overwrite_ok)

    def add_masked_lm_head(
        self,
        head_name: str,
        activation_function: str | None = "gelu",
        layers: int = 2,
        overwrite_ok: bool = False,
    ) -> None:
        """Add a head that scores masked tokens; it shares the embedding where the model ties."""
        made = MaskedLMConfig(layers=layers, activation_function=activation_function)
        self._add_head("add_masked_lm_head", head_name, made, overwrite_ok)

    def add_causal_lm_head(
        self,
        head_name: str,
        activation_function: str | None = "gelu",
        layers: int = 2,
        overwrite_ok: bool = False,
    ) -> None:
        """Add a head that scores the next token; it shares the embedding where the model ties."""
        made = CausalLMConfig(
            layers=layers, activation_function=activation_function, layer_norm=True, bias=True
        )
        self._add_head("add_causal_lm_head", head_name, made, overwrite_ok)

    def add_seq2seq_lm_head(
        self, head_name: str, layers: int = 1, overwrite_ok: bool = False
    ) -> None:
        """Add a head that scores a decoder's next token, on encoder–decoder models."""
        made = Seq2SeqLMConfig(layers=layers)
        self._add_head("add_seq2seq_lm_head", head_name, made, overwrite_ok)
