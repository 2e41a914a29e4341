"""The unchanged head of a transformers task class, if no other type of head equals it.

output = f(base; x, layers): f, the forward of the task class, computes with the head's layers
around this model's base model, with its own pooling, activations and loss.

Differs from AdapterHub: there, such a head works only in the task class itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from adapterzoo.config import FLAG, Maybe, Text, config_class, field
from adapterzoo.errors import ConfigError
from adapterzoo.names import STATIC

from ._backbone import Backbone
from ._base import COUNT, HeadConfig, PredictionHead, head_types
from ._losses import Count, Logits

OWN_OUTPUT = "own_output"
"""The key in a document of a task class: whether the output layer is the adapter's own."""


@head_types.register(STATIC)
@config_class
class StaticConfig(HeadConfig):
    """The head of a task class.

    Attributes:
        model_class: name of the class in transformers.
        label_names: arguments of its forward with labels.
        num_labels: number of classes; None if its tensors do not depend on it.
        fields: fields of the transformers config that differ from the model's; None: none differ.
        tie_word_embeddings: as in language modeling heads.
    """

    head_type: ClassVar[str] = STATIC
    output_class: ClassVar[str] = "ModelOutput"

    model_class: str = dataclasses.field(metadata={"check": Text()})
    label_names: tuple[str, ...] = ("labels",)  # type: ignore[misc]
    num_labels: int | None = field(None, Maybe(COUNT))
    fields: Mapping[str, Any] | None = field(None, ours=True)
    tie_word_embeddings: bool | None = field(
        None, Maybe(FLAG, "that of the model's config"), ours=True
    )

    @property
    def problem_type(self) -> str | None:
        """The kind of labels in the class's config."""
        return cast("str | None", (self.fields or {}).get("problem_type"))

    def find_labels(self, name: str, given: Mapping[str, Any]) -> Tensor | None:
        """Return the labels if there is only one argument; several count different things."""
        return super().find_labels(name, given) if len(self.label_names) == 1 else None

    def build(self, backbone: Backbone) -> TaskHead:
        """Return new layers of the class.

        Raises:
            ConfigError: transformers has no such class, or the class has another base model.
        """
        return cast("TaskHead", cast("Any", backbone.task_head)(self, backbone))


class TaskHead(PredictionHead):
    """The layers of a task class under their names there, without its base model.

    Attributes:
        task_class: the class.
        base_name: the attribute that holds its base model.
        facts: its other attributes.
        output_path: path of the layer onto the vocabulary; None without one.
        is_tied: whether the class ties that layer to the input embedding.
        aliases: keys of parameters that repeat another one of this head → its key.
    """

    averages_itself: ClassVar[bool] = True
    calls_base: ClassVar[bool] = True
    config: StaticConfig

    def __init__(
        self,
        config: StaticConfig,
        task: nn.Module,
        base_name: str,
        output_path: str | None,
        is_tied: bool,
    ) -> None:
        """Take the layers from a model of the class; the other arguments set attributes."""
        super().__init__(config)
        held = ("_modules", "_parameters", "_buffers")
        self.task_class = type(task)
        self.base_name = base_name
        self.output_path = output_path
        self.is_tied = is_tied
        self.facts = {name: value for name, value in vars(task).items() if name not in held}
        for kind in held:
            getattr(self, kind).update(getattr(task, kind))
        del self._modules[base_name]
        self._non_persistent_buffers_set |= task._non_persistent_buffers_set
        own = [*self.named_parameters(remove_duplicate=False)]
        first = {id(parameter): key for key, parameter in reversed(own)}
        self.aliases = {key: first[id(p)] for key, p in own if first[id(p)] != key}

    def around(self, base: Callable[..., Any] | None) -> nn.Module:
        """Return a model of the class with these layers.

        Args:
            base: its base model; None without one.
        """
        made = self.task_class.__new__(self.task_class)
        children: Any = self._modules if base is None else {**self._modules, self.base_name: base}
        # a DataParallel replica has its parameters as plain attributes
        copied = vars(self).get("_former_parameters", {})
        vars(made).update(self.facts | copied, training=self.training, _modules=children)
        vars(made).update(_parameters=self._parameters, _buffers=self._buffers)
        return made

    def forward(self, base: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:  # type: ignore[override]
        """Return the output of the class, with the loss if there are labels.

        Args:
            base: the base model, called in place of the class's own.
            inputs: arguments of the forward of the class, with labels if there are any.
        """
        return self.around(base)(**inputs)

    def answer(self, call: Any) -> Any:
        """Return the class's output."""
        return self(call.base, call.arguments(self.task_class.forward))

    def loss(self, logits: Logits, labels: Tensor, count: Count = None) -> Tensor:
        """Refuse: the class computes its loss in `forward`.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a {self.config.model_class} computes its loss in its forward. Write model(…).loss."
        )

    def share_again(self) -> None:
        """Share again the parameters that the class shares."""
        for key, source in self.aliases.items():
            owner, _, name = key.rpartition(".")
            self.get_submodule(owner)._parameters[name] = self.get_parameter(source)

    def tie(self, weight: nn.Parameter) -> bool:
        """Share the weight of the input embedding, if the class does so and it fits."""
        return self.is_tied and super().tie(weight)
