"""One call of a model as its heads see it: the base model, which may have run, and arguments."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers.utils.generic import ModelOutput

from adapterzoo import inject
from adapterzoo.composition import RowMap
from adapterzoo.heads import Pooling

from .inputs import head_input
from .outputs import head_output
from .rows import given_to, outputs_of

# arguments of `forward` that belong to heads of any type
COMMON = ("logits_to_keep", "num_items_in_batch")
# what heads on features have under names of their own
_FEATURES = ("attention_mask", "input_ids")


class Base:
    """The base model in one call; attributes other than its call are those of the model's own.

    Attributes:
        outputs: of the last run; None before it has run.
    """

    def __init__(self, model: Any, outputs: ModelOutput | None = None) -> None:
        """Keep the model.

        Args:
            model: with named heads.
            outputs: what every call returns; None: each call runs the base model.
        """
        self._model = model
        self._is_fixed = outputs is not None
        self.outputs = outputs

    def __call__(self, *args: Any, **kwargs: Any) -> ModelOutput:
        """Return the outputs of the base model."""
        if not self._is_fixed:
            self.outputs = self._model.base_model(*args, **{**kwargs, "return_dict": True})
        return cast("ModelOutput", self.outputs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model's own base model."""
        return getattr(self._model.base_model, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a model as its heads see it; see `PredictionHead.answer`.

    Attributes:
        model: with named heads.
        name: of the head; empty before there is one.
        base: the base model, for these rows.
        inputs: arguments of the base model, for all rows.
        given: labels and other arguments of heads.
        rows: as the adapters divide them.
        part: the rows of the head, as a part of the batch; None: all.
    """

    model: Any
    name: str = ""
    base: Base
    inputs: Mapping[str, Any]
    given: Mapping[str, Any]
    rows: RowMap | None
    part: tuple[int, RowMap] | None = None

    def on(self, part: int, name: str, rows: RowMap, own: set[str]) -> Call:
        """Return the call of a head on one part of the rows; the base model has run.

        Args:
            part: its number.
            name: of the head.
            rows: of the batch.
            own: arguments that may be dicts from names of heads.
        """
        labels = {key: value for key, value in self.given.items() if key in own}
        given = given_to(part, name, rows, labels, len(rows.index) // rows.copies)
        for key in self.given.keys() - own:
            value = self.given[key]
            has_rows = isinstance(value, Tensor) and key not in COMMON
            given[key] = rows.take(part, value) if has_rows else value
        outputs = outputs_of(part, rows, cast("ModelOutput", self.base.outputs))
        return dataclasses.replace(
            self,
            name=name,
            base=Base(self.model, outputs),
            given=given,
            rows=None if self.rows is None else self.rows.of(rows, part),
            part=(part, rows),
        )

    # --- what heads read ---

    @property
    def at_exit(self) -> Callable[[Tensor], Tensor] | None:
        """The inverse of the invertible adapters; None without any."""
        plan = self.model._active.plan
        if plan.exit is None:
            return None
        return lambda y: inject.leave(self.model.base_model, plan, y, self.rows)

    def features(self, pooling: Pooling | None) -> tuple[Tensor, Tensor | None]:
        """Return hidden states and their mask.

        Args:
            pooling: of the head.
        """
        mask, ids = (self.given[name] for name in _FEATURES)
        return head_input(self.model, pooling, self.base(**self.inputs), mask, ids)

    def output(self, name: str, loss: Tensor | None, values: Mapping[str, Tensor]) -> ModelOutput:
        """Return an output of a class of transformers, with the base model's outputs.

        Args:
            name: of the class.
            loss: None without labels.
            values: its other fields.
        """
        outputs = cast("ModelOutput", self.base.outputs)
        return head_output(name, {"loss": loss, **values}, outputs)

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments that a task class takes.

        Args:
            function: the forward of the class.
        """
        known = inspect.signature(function).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
        found = {**self._inputs(), **{k: v for k, v in self.given.items() if k not in _FEATURES}}
        # a dict has labels of several heads; outputs of an encoder are mappings too
        own = {k: v.get(self.name) if type(v) is dict else v for k, v in found.items()}
        # a task class averages its loss itself
        return {
            key: value
            for key, value in own.items()
            if value is not None and key != "num_items_in_batch" and (anything or key in known)
        }

    def _inputs(self) -> Mapping[str, Any]:
        if self.part is None:
            return self.inputs
        part, rows = self.part
        return {
            key: rows.take(part, value) if isinstance(value, Tensor) and value.dim() else value
            for key, value in self.inputs.items()
        }
