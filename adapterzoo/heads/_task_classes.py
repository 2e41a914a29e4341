"""The heads of transformers' own task classes, as head types read them.

A task class such as `BertForSequenceClassification` is a base model and a few tensors. The end of
its name gives the task, and the tensors' names and shapes give the layers. Tables give the
activations between layers and the pooled tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterzoo.config import Config

from ._backbone import Backbone

Shapes = Mapping[str, tuple[int, ...]]

_DENSE = re.compile(r"(^|\.)(dense|pre_classifier|vocab_transform|summary)$")
_NORM = re.compile(r"norm$", re.IGNORECASE)

# model types whose sequence classifiers choose the tokens with global attention themselves
_GLOBAL_ATTENTION = frozenset({"longformer"})


class InexpressibleError(Exception):
    """A static head without an equivalent among named heads; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class StaticHead:
    """A static head as a named one.

    Attributes:
        config: config of the named head.
        keys: names of the static head's tensors → those of the named head; tensors that the
            static head shares have the same name there.
    """

    config: Config
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Static:
    """The facts about a static head.

    Attributes:
        task: the ending of the class's name.
        tensors: names and shapes of all tensors except the base model's.
        config: the transformers config as a dict, overridden by the fields of its text part.
        backbone: the base model.
        pooler: whether the base model's checkpoint has a pooler.
    """

    task: str
    tensors: Shapes
    config: Mapping[str, Any]
    backbone: Backbone
    pooler: bool

    def module(self, role: str) -> str | None:
        """Return the path of the "dense" layer, the "norm", or the "output" layer.

        Raises:
            InexpressibleError: there are several such layers.
        """
        paths = [k.removesuffix(".weight") for k in self.tensors if k.endswith(".weight")]
        found = [path for path in paths if _role(path) == role]
        if len(found) > 1:
            raise InexpressibleError(f"it has several layers of one kind: {', '.join(found)}")
        return found[0] if found else None

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a module's weight."""
        return self.tensors[f"{path}.weight"]

    def has_bias(self, path: str) -> bool:
        """Return whether the module has a bias."""
        return f"{path}.bias" in self.tensors

    def keys_at(self, places: Mapping[Any, int]) -> dict[str, str]:
        """Return the names of tensors in a named head.

        Args:
            places: paths of modules → their numbers there; None for a missing module.
        """
        found: dict[str, str] = {}
        for path, place in places.items():
            for end in ("weight", "bias"):
                if f"{path}.{end}" in self.tensors:
                    found[f"{path}.{end}"] = f"{place}.{end}"
        return found

    def linears(self) -> tuple[str, str | None, dict[str, str]]:
        """Return the last layer, the one before it, if any, and the tensors' names in a named head.

        Raises:
            InexpressibleError: the head has other layers.
        """
        out, dense = self.module("output"), self.module("dense")
        if out is None:
            raise InexpressibleError("it has no output layer")
        # dropout 0, dense 1, activation 2, dropout 3, output 4; or dropout 0, output 1
        places = {out: 1} if dense is None else {dense: 1, out: 4}
        keys = self.keys_at(places)
        self.refuse_unused(keys)
        d = self.backbone.hidden_size
        if self.shape(out)[1:] != (d,) or (dense is not None and self.shape(dense) != (d, d)):
            raise InexpressibleError(f"its layers are not {d} wide")
        if dense is not None and not self.has_bias(dense):
            raise InexpressibleError(f"{dense} has no bias")
        return out, dense, keys

    def one_linear(self) -> tuple[str, dict[str, str]]:
        """Return the only layer, and the names of its tensors in a named head.

        Raises:
            InexpressibleError: there are several layers.
        """
        out, dense, keys = self.linears()
        if dense is not None:
            raise InexpressibleError(f"it has the layer {dense} before the last")
        return out, keys

    def refuse_unused(self, keys: Mapping[str, str]) -> None:
        """Check that all tensors are among the keys.

        Raises:
            InexpressibleError: the use of a tensor is unknown.
        """
        if rest := sorted(set(self.tensors) - set(keys)):
            raise InexpressibleError(f"it has tensors of unknown use: {', '.join(rest[:5])}")

    def refuse_other_inputs(self) -> None:
        """Check that the class passes its inputs unchanged to the base model.

        Raises:
            InexpressibleError: it changes them.
        """
        if self.config.get("model_type") in _GLOBAL_ATTENTION:
            raise InexpressibleError("it chooses the tokens with global attention")

    def dropout(self, *names: str) -> float | None:
        """Return the dropout before the layers; None for the model's own.

        Args:
            names: fields of the config to look at first.
        """
        config = self.config
        for name in (*names, "classifier_dropout", "hidden_dropout_prob"):
            if config.get(name) is not None:
                # None: the default of heads on this model
                return None if config[name] == self.backbone.dropout else float(config[name])
        return 0.0

    def label_names(self, count: int) -> dict[str, int] | None:
        """Return the label names; None if the config has another number of labels.

        Raises:
            InexpressibleError: the values of `label2id` are not numbers.
        """
        names = self.config.get("label2id")
        return label_numbers(names) if isinstance(names, Mapping) and len(names) == count else None


def label_numbers(label2id: Mapping[Any, Any]) -> dict[str, int]:
    """Return the `label2id` of a transformers config with its numbers as integers.

    Raises:
        InexpressibleError: a value is not a number.
    """
    try:
        return {str(label): int(number) for label, number in label2id.items()}
    except (OverflowError, TypeError, ValueError) as error:
        shown = ", ".join(f"{label!r}: {n!r}" for label, n in [*label2id.items()][:10])
        raise InexpressibleError(f"its config has label2id={{{shown}}}") from error


def _role(path: str) -> str:
    if _DENSE.search(path):
        return "dense"
    return "norm" if _NORM.search(path) else "output"


# model types whose `classifier.dense` is followed by config.hidden_act instead of tanh
_HIDDEN_ACT = frozenset({"big_bird", "convbert", "mra", "nystromformer", "roformer", "yoso"})


def activation_after(dense: str, config: Mapping[str, Any]) -> str:
    """Return the activation after a head's layer, by its path and the transformers config.

    Raises:
        InexpressibleError: the activation is unknown.
    """
    named = _ACTIVATIONS.get(dense)
    found = named(config) if named is not None else None
    if not isinstance(found, str):
        raise InexpressibleError(f"the activation after {dense} is unknown")
    return found


def _after_classifier(config: Mapping[str, Any]) -> object:
    model_type = config.get("model_type")
    if model_type in _HIDDEN_ACT:
        return config.get("hidden_act")
    return "gelu" if model_type == "electra" else "tanh"


_ACTIVATIONS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "classifier.dense": _after_classifier,
    "classification_head.dense": lambda _: "tanh",
    "pre_classifier": lambda _: "relu",
    "pooler.dense": lambda config: config.get("pooler_hidden_act"),
    "sequence_summary.summary": lambda config: config.get("summary_activation") or "linear",
    "cls.predictions.transform.dense": lambda config: config.get("hidden_act"),
    "predictions.dense": lambda config: config.get("hidden_act"),
    "lm_head.dense": lambda _: "gelu",
    "generator_predictions.dense": lambda _: "gelu",
    "vocab_transform": lambda config: config.get("activation"),
    "head.dense": lambda config: config.get("classifier_activation"),
}
