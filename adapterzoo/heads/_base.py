"""The base of all heads and head configs, the registry of head types, and stacks of linear layers.

A head config is a frozen, keyword-only dataclass in the file of its task. Its fields and its dict
are those of AdapterHub's `head_config.json`. Fields that AdapterHub lacks are written only if they
differ from their defaults, so that both libraries can read the files.
"""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from adapterzoo.activations import ActivationName, activation
from adapterzoo.config import Config, Maybe, Range, Share, config_class, field
from adapterzoo.contracts import Head
from adapterzoo.errors import ConfigError, FieldError, listing
from adapterzoo.registry import Registry

from ._backbone import Backbone, Pooling
from ._losses import IGNORED, Count, Logits, checked, labels_from, numbered
from ._task_classes import Static, StaticHead

head_types: Registry[type[HeadConfig]] = Registry("head type")
"""The `head_type` of a config → its class."""


def token_places() -> tuple[str, ...]:
    """Return the arguments of all known head types that are token positions."""
    return tuple(dict.fromkeys(name for cls in head_types.values() for name in cls.token_places))


@config_class
class HeadConfig(Config):
    """Base of all head configs.

    The class attributes tell the model how to run the heads. If one depends on other fields, set it
    on the config in `__post_init__`.

    Attributes:
        head_type: name of the type in files.
        output_class: name of the task's class in `transformers.modeling_outputs`.
        label_names: arguments of the model's `forward` that hold the labels; several are stacked
            along dimension 1 for the head's `loss`.
        inputs: further arguments of the model's `forward` that the head's own `forward` takes.
        logit_names: fields of the output class for the results of the head's `forward`.
        token_labels: whether labels are ignored at tokens where the attention mask is 0.
        decoder_inputs_from: the argument whose tokens, shifted by one, become the decoder's inputs
            if none are given; None: the encoder's tokens.
        scores_vocabulary: whether the heads have `output_embeddings`.
        pipeline_tag: the Hub's name of the task.
        peft_task: PEFT's name of the task; None if it has none.
        peft_classes: for tasks without a name in PEFT: the mapping of model classes in
            `transformers.models.auto.modeling_auto`.
        task_classes: name endings of the task classes whose heads `from_static` reads.
        count_field: the field with the number of labels, if there is one.
        token_places: arguments of the model's `forward` that are token positions.
        label2id: names of the labels → their numbers; None without labels.
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
    peft_classes: ClassVar[str | None] = None
    task_classes: ClassVar[tuple[str, ...]] = ()
    count_field: ClassVar[str] = "num_labels"
    token_places: ClassVar[tuple[str, ...]] = ()

    label2id: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Check every field, and number labels without names."""
        super().__post_init__()
        if (count := self.label_count) is not None:
            names = checked(type(self).__name__, self.label2id, count)
            object.__setattr__(self, "label2id", names)

    @property
    def label_count(self) -> int | None:
        """The number of labels; None for heads without labels."""
        return getattr(self, self.count_field, None)

    @abstractmethod
    def build(self, backbone: Backbone) -> PredictionHead:
        """Return a new head on the backbone's device and in its dtype.

        Raises:
            ConfigError: a value does not fit the backbone.
        """

    @classmethod
    def adapterhub_quirk(cls, model_type: str, config: Mapping[str, Any]) -> str | None:
        """Return how AdapterHub's computation differs in such a model; None if it is the same."""
        return None

    @classmethod
    def from_static(cls, static: Static) -> StaticHead | None:
        """Return the head of a task class as a head of this type; None if another type should.

        Args:
            static: the facts about the head of a class in `task_classes`.

        Raises:
            InexpressibleError: no head of this type computes the same.
        """
        return None

    @property
    def id2label(self) -> dict[int, str] | None:
        """The class numbers to their labels."""
        # files may list the labels by name
        named = self.label2id
        return None if named is None else dict(sorted((i, label) for label, i in named.items()))

    @property
    def problem_type(self) -> str | None:
        """The kind of labels, as in a transformers config; None without a name there."""
        return None

    @property
    def loss_type(self) -> str | None:
        """The name of the loss in transformers, from which `Trainer` learns that labels shift."""
        return None

    # --- inputs and labels ---

    def prepare_inputs(self, inputs: dict[str, Any]) -> None:
        """Convert the base model's arguments to the form that the head needs, in place.

        Args:
            inputs: arguments of the base model's `forward`.
        """

    def find_labels(self, name: str, given: Mapping[str, Any]) -> Tensor | None:
        """Return the labels for a head, stacked along dimension 1 if several; None without any.

        Args:
            name: the head's name; an argument may be a dict from names of heads to labels.
            given: arguments of the model's `forward`.

        Raises:
            ConfigError: some of the arguments are missing.
        """
        every = {argument: given.get(argument) for argument in self.label_names}
        own = {n: v.get(name) if isinstance(v, Mapping) else v for n, v in every.items()}
        found: dict[str, Tensor] = {n: labels for n, labels in own.items() if labels is not None}
        if missing := [n for n in own if n not in found] if found else []:
            raise ConfigError(
                f"forward({', '.join(f'{n}=…' for n in found)}): the head {name!r} also needs "
                f"{listing(missing)}. Write all of them or none."
            )
        labels = [*found.values()]
        if len(labels) < 2:
            return labels[0] if labels else None
        # positions of spans have shape [batch] or [batch, 1]
        flat = [x.squeeze(-1) if x.shape[1:] == (1,) else x for x in labels]  # [batch, …] each
        return torch.stack(flat, dim=1)  # [batch, arguments, …]

    def mask_labels(self, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Return the labels, with −100 at the tokens that do not count.

        Args:
            labels: as `find_labels` returns them.
            mask: `[batch, tokens]`, 1 at the tokens that count; None if all do.
        """
        if not self.token_labels or mask is None or mask.shape != labels.shape:
            return labels
        return labels.masked_fill(mask.to(labels.device) == 0, IGNORED)

    def shift(self, labels: Tensor) -> Tensor:
        """Return the labels at the positions of their logits; same shape."""
        return labels

    def ties_output(self, model_ties: bool) -> bool:
        """Return whether the head's last layer is the input embedding.

        Args:
            model_ties: whether the model's config ties the two; a head's `tie_word_embeddings`
                takes precedence.
        """
        own: bool | None = self.get("tie_word_embeddings", False)
        return model_ties if own is None else own

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        # AdapterHub's files have one or the other
        id2label = fields.pop("id2label", None)
        return super()._from_fields(
            fields if id2label is None else {**fields, "label2id": labels_from(id2label)}
        )

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the config with some fields changed.

        Generated label names are generated again if their count changes.

        Raises:
            ConfigError: a field is unknown, or a value is invalid.
        """
        count = self.label_count
        if self.count_field in changes and count is not None and self.label2id == numbered(count):
            changes.setdefault("label2id", None)
        return super().replace(**changes)


class PredictionHead(Head):
    """Base of the heads that a model can hold by name.

    Attributes:
        config: the config from which it was built; saved with it.
        pooling: how a sequence is reduced to one vector; it determines the hidden states and the
            mask that `forward` gets. None for heads on tokens.
        has_exit: whether `forward` takes `at_exit`, a function that is applied to the input of
            the last layer, by which invertible adapters undo their change of the embeddings.
        averages_itself: whether the loss is always the mean over the batch, whatever `count` is.
        calls_base: whether `answer` itself builds the base model's arguments.
        output_path: path of the linear layer onto the vocabulary; None without one.
    """

    has_exit: ClassVar[bool] = False
    averages_itself: ClassVar[bool] = False
    calls_base: ClassVar[bool] = False
    output_path: str | None = None

    def __init__(self, config: HeadConfig, pooling: Pooling | None = None) -> None:
        """Store the config.

        Args:
            config: the config from which it is built.
            pooling: resolved, never "auto".
        """
        super().__init__()
        self.config = config
        self.pooling = pooling

    def answer(self, call: Any) -> Any:
        """Return the task's output, with the loss if there are labels.

        Args:
            call: the model's call, with the `name` of the head; `given`, labels and other arguments
                by name; `base`, a function that returns the base model's outputs, computed once;
                `features(pooling)`, hidden states and mask; `at_exit`, the inverse of the
                invertible adapters, or None; `arguments(function)`, those that a function takes;
                `output(class name, loss, fields)`, an output with the fields of the base model's.
        """
        config, given = self.config, call.given
        hidden, mask = call.features(self.pooling)
        hidden = self.tokens_to_score(hidden, given.get("logits_to_keep", 0))
        extra = {name: given.get(name) for name in config.inputs}
        if self.has_exit and call.at_exit is not None:
            extra["at_exit"] = call.at_exit
        logits: Logits = self(hidden, mask, **extra)
        labels, loss = config.find_labels(call.name, given), None
        if labels is not None:
            masked = config.mask_labels(labels, mask)
            loss = self.loss(logits, masked, given.get("num_items_in_batch"))
        scores = logits if isinstance(logits, tuple) else (logits,)
        values = dict(zip(config.logit_names, scores, strict=True))
        return call.output(config.output_class, loss, values)

    def tokens_to_score(self, hidden: Tensor, keep: int | Tensor) -> Tensor:
        """Return the hidden states to compute logits for; all, unless the head scores tokens.

        Args:
            hidden: `[batch, tokens, d_model]`.
            keep: `logits_to_keep` of transformers: the number of last tokens, or positions; 0: all.
        """
        return hidden

    # --- the layer onto the vocabulary ---

    # version counter of its weight when it was copied from the base model's checkpoint
    _taken: int | None = None

    @property
    def output_embeddings(self) -> nn.Linear | None:
        """The linear layer onto the vocabulary; None without one."""
        path = self.output_path
        return None if path is None else cast("nn.Linear", self.get_submodule(path))

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the layer with a row for each token of the vocabulary; None without one."""
        return self.output_embeddings

    @property
    def output_key(self) -> str | None:
        """The key of that layer's weight in files that may omit it; None if none may."""
        return None

    # not a plain attribute: any change of the weight makes it False
    @property
    def of_checkpoint(self) -> bool:
        """Whether that layer is known to equal the base model's checkpoint."""
        layer, taken = self.output_embeddings, self._taken
        return layer is not None and taken is not None and taken == layer.weight._version

    @of_checkpoint.setter
    def of_checkpoint(self, value: bool) -> None:
        layer = self.output_embeddings
        vars(self).pop("_taken", None)
        if value and layer is not None and not layer.weight.is_inference():
            self._taken = layer.weight._version

    def __setstate__(self, state: dict[str, object]) -> None:
        """Forget the layer's origin: a copy starts with another version counter."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self).pop("_taken", None)

    def tie(self, weight: nn.Parameter) -> bool:
        """Share the weight of the input embedding; if it does not fit, do nothing and return False.

        Args:
            weight: `[vocab_size, embedding_size]`.
        """
        layer = self.output_embeddings
        if layer is None or layer.weight.shape != weight.shape:
            return False
        layer.weight = weight
        return True

    # not a setter: nn.Module would add the assigned layer as another child
    def replace_output(self, layer: nn.Module) -> None:
        """Replace the output embeddings; without any, do nothing.

        Raises:
            ConfigError: the argument is not a linear layer.
        """
        if self.output_path is None:
            return
        if not isinstance(layer, nn.Linear):
            raise ConfigError(f"{layer!r}: write set_output_embeddings(nn.Linear(…)).")
        self.set_submodule(self.output_path, layer)
        self.of_checkpoint = False

    def resize_output(self, weight: nn.Parameter, bias: Tensor | None) -> None:
        """Give the output embeddings another number of rows; without any, do nothing.

        Args:
            weight: `[vocab_size, embedding_size]`.
            bias: `[vocab_size]`; None without one.
        """
        layer = self.output_embeddings
        if layer is None:
            return
        layer.weight, layer.out_features = weight, weight.shape[0]
        if bias is not None:
            if bias.shape != layer.bias.shape:
                layer.bias.grad = None
            # a task class may also hold it under another name
            layer.bias.data = bias

    @abstractmethod
    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Return the training loss, a scalar.

        Args:
            logits: the result of `forward`.
            labels: −100 where a label does not count.
            count: the divisor of the sum; None: the number of labels of this batch that count. With
                gradient accumulation it is the number over all batches.
        """


# far above any published use: these catch typos before memory is allocated
COUNT = Range(1, 10_000_000)
LAYERS = Range(1, 64)


@config_class
class LayersConfig(HeadConfig):
    """Configs of heads that are a stack of linear layers with dropout.

    Attributes:
        layers: number of linear layers.
        activation_function: the activation between them; None without one.
        dropout_prob: dropout before each; None: the model's.
        bias: whether the last layer has a bias.
    """

    layers: int = field(1, LAYERS)
    activation_function: str | None = field("tanh", ActivationName())
    dropout_prob: float | None = field(None, Maybe(Share(), "that of the model"))
    bias: bool = field(True, ours=True)

    @property
    def d_out(self) -> int:
        """Features after the last layer."""
        return self.label_count or 0


class Activation(nn.Module):
    """An activation function of a head, by name."""

    def __init__(self, name: str) -> None:
        """Look up the function.

        Raises:
            ConfigError: there is no such function.
        """
        super().__init__()
        self.name = name
        self.function = activation(name)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to each element; any shape."""
        return self.function(x)

    def extra_repr(self) -> str:
        """Return the name."""
        return self.name


class LayersHead(PredictionHead):
    """A stack of linear layers, each after a dropout, with activations between them.

    Children are numbered as in AdapterHub's `nn.Sequential`: dropout 0, linear 1, activation 2, ….
    """

    config: LayersConfig

    def __init__(
        self, config: LayersConfig, backbone: Backbone, pooling: Pooling | None = None
    ) -> None:
        """Make the layers.

        Args:
            config: the head's config.
            backbone: the model below.
            pooling: resolved, never "auto"; None for a head on tokens.
        """
        super().__init__(config, pooling)
        dropout = backbone.dropout if config.dropout_prob is None else config.dropout_prob
        width = backbone.hidden_size
        layers: list[nn.Module] = []
        for _ in range(config.layers - 1):
            layers += [nn.Dropout(dropout), backbone.linear(width, width)]
            if config.activation_function:
                layers.append(Activation(config.activation_function))
        layers += [nn.Dropout(dropout), backbone.linear(width, config.d_out, config.bias)]
        number(self, layers)

    def score(self, x: Tensor) -> Tensor:
        """Apply all layers in turn. `x` `[*batch, d_model]` → `[*batch, d_out]`."""
        for layer in self._modules.values():
            x = layer(x)  # type: ignore[misc]
        return x


def number(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Add the layers to the module as children named 0, 1, 2, …."""
    for i, layer in enumerate(layers):
        module.add_module(str(i), layer)


Labels = Mapping[int, str] | None
_F = TypeVar("_F", bound=Callable[..., None])

add_methods: Registry[Callable[..., None]] = Registry("head method")
"""The names of methods that add heads → functions of a model."""


def adds_head(config: Callable[..., HeadConfig]) -> Callable[[_F], _F]:
    """Decorate a declaration to make it a method of all models with named heads.

    The declaration has a signature and a docstring, but no body. Its arguments are AdapterHub's:
    `self`, the model; `head_name`; `overwrite_ok`; `id2label`, if the head has labels; and fields
    of the config.

    Args:
        config: a function that returns the config for the fields.
    """

    def decorate(declared: _F) -> _F:
        signature = inspect.signature(declared)

        @functools.wraps(declared)
        def add(*args: object, **kwargs: object) -> None:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError as error:
                legal = listing([*signature.parameters][1:], limit=40, show=str)
                call = f"{declared.__name__}()"
                raise FieldError(f"{call} {error}. Its arguments: {legal}.") from None
            given.apply_defaults()
            fields = dict(given.arguments)
            model, name, overwrite_ok = map(fields.pop, ("self", "head_name", "overwrite_ok"))
            if "id2label" in fields:
                fields["label2id"] = labels_from(fields.pop("id2label"))
            model.add_prediction_head_from_config(name, config(**fields), overwrite_ok)

        add_methods.register(declared.__name__)(add)
        return cast("_F", add)

    return decorate
