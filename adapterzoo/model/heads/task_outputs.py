"""The outputs of static heads: the forward of a task class around a base model's outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo.composition import RowMap
from adapterzoo.heads import TaskHead

from . import store

# what `forward_head` has under names of its own
_OURS = ("attention_mask", "input_ids", "inputs")


class _Base:
    """A base model in a task class: other attributes than its call are those of the model's own."""

    def __init__(self, model: Any, call: Callable[..., Any]) -> None:
        self._model = model
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the base model."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's own base model."""
        return getattr(self._model.base_model, name)


def run(model: Any, name: str, given: Mapping[str, Any]) -> tuple[ModelOutput, ModelOutput]:
    """Run the base model and a head; return the outputs of the head and of the base model.

    Args:
        model: with named heads.
        name: of the head, which prepares the inputs of the base model.
        given: arguments of the forward of its class.
    """
    outputs: list[ModelOutput] = []

    def call(*args: Any, **kwargs: Any) -> ModelOutput:
        outputs.append(model.base_model(*args, **{**kwargs, "return_dict": True}))
        return outputs[-1]

    head = cast("TaskHead", store.find(model, name))
    answer = head(_Base(model, call), _arguments(head, name, given))
    return answer, outputs[-1]


def on(model: Any, name: str, outputs: ModelOutput, given: Mapping[str, Any]) -> ModelOutput:
    """Return the output of a head on outputs of the base model.

    Args:
        model: with named heads.
        name: of the head.
        outputs: of the base model.
        given: arguments of `AdapterModel.forward_head`.
    """
    head = cast("TaskHead", store.find(model, name))
    inputs = given.get("inputs") or {key: given[key] for key in _OURS if key != "inputs"}
    rest = {key: value for key, value in given.items() if key not in _OURS}
    arguments = _arguments(head, name, {**inputs, **rest})
    answer: ModelOutput = head(_Base(model, lambda *_, **__: outputs), arguments)
    return answer


def _arguments(head: TaskHead, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given and that the class of a head takes."""
    known = inspect.signature(head.task_class.forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
    # a dict has labels of several heads; outputs of an encoder are mappings too
    own = {k: v.get(name) if type(v) is dict else v for k, v in given.items()}
    # a head averages its loss itself
    return {
        key: value
        for key, value in own.items()
        if value is not None and key != "num_items_in_batch" and (anything or key in known)
    }


def inputs_of(part: int, rows: RowMap, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the inputs of the rows of one part."""
    return {
        key: rows.take(part, value) if isinstance(value, Tensor) and value.dim() else value
        for key, value in (inputs or {}).items()
    }


def joined(results: Sequence[ModelOutput], rows: RowMap, loss: Tensor | None) -> ModelOutput | None:
    """Return one output for the whole batch in row order; None if kinds or shapes differ.

    Args:
        results: of static heads, each on its rows.
        rows: of the batch.
        loss: of all.
    """
    first = results[0]
    if any(type(each) is not type(first) or each.keys() != first.keys() for each in results):
        return None
    whole: dict[str, Any] = {}
    for key in first.keys() - {"loss"}:
        parts = [each[key] for each in results]
        listed = [part if isinstance(part, tuple) else (part,) for part in parts]
        flat = [tensor for part in listed for tensor in part]
        if not all(isinstance(t, Tensor) and t.dim() for t in flat):
            return None
        columns = [*zip(*listed, strict=True)]
        if any(len({(t.shape[1:], t.dtype) for t in column}) > 1 for column in columns):
            return None
        put = tuple(rows.put([*column]) for column in columns)
        whole[key] = put if isinstance(parts[0], tuple) else put[0]
    return type(first)(loss=loss, **whole)
