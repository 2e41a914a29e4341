"""The outputs of heads, in the output classes of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import modeling_outputs
from transformers.utils.generic import ModelOutput

from adapterzoo.caches import CACHES


@dataclass
class DependencyParsingOutput(ModelOutput):
    """Scores of a dependency parser.

    Attributes:
        loss: of arcs and relations, with labels only.
        rel_preds: `[batch, tokens, tokens + 1, num_labels]`.
        arc_preds: `[batch, tokens, tokens + 1]`.
        hidden_states: of the base model.
        attentions: of the base model.
    """

    loss: Tensor | None = None
    rel_preds: Tensor | None = None
    arc_preds: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


@dataclass
class MultiHeadOutput(ModelOutput):
    """The outputs of several heads: `output[0]`, `len(output)`, `for head_output in output`.

    Attributes:
        head_outputs: in the order of `active_head`.
        loss: the sum of their losses; None when no head had labels.
        rows: the numbers of each head's rows; None if every head gets all rows.
    """

    head_outputs: list[ModelOutput] | None = None
    loss: Tensor | None = None
    rows: list[list[int]] | None = None

    @property
    def logits(self) -> Tensor:
        """The logits of all heads, one batch after the other."""
        return torch.vstack([output["logits"] for output in self])

    def __getitem__(self, k: Any) -> Any:
        """Return the output of a head by its number, a field by its name."""
        return [*self][k] if isinstance(k, int) else cast("Any", super()).__getitem__(k)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the outputs of the heads."""
        return iter(self.head_outputs or ())

    def __len__(self) -> int:
        """Return how many heads there are."""
        return len(self.head_outputs or ())


def head_output(name: str, values: Mapping[str, Any], outputs: ModelOutput) -> ModelOutput:
    """Return a head's output in the output class of its task, with the base model's outputs.

    Args:
        name: name of the class in `transformers.modeling_outputs`.
        values: the fields from the head.
        outputs: the outputs of the base model.
    """
    variants = {
        f"Seq2Seq{name}": "encoder_last_hidden_state" in outputs,
        f"{name}WithCrossAttentions": outputs.get("cross_attentions") is not None,
        f"Moe{name}WithPast": outputs.get("router_logits") is not None,
        f"{name}WithPast": any(field in CACHES for field in outputs),
    }
    fitting = (variant for variant, fits in variants.items() if fits and variant in _CLASSES)
    cls: Any
    cls, names = _CLASSES[next(fitting, name)]
    found = {name: outputs.get(name) for name in names if name in outputs}
    for name in ("hidden_states", "attentions"):
        if name in names and name not in found:
            found[name] = outputs.get(f"decoder_{name}")
    return cast("ModelOutput", cls(**{**found, **values}))


# output classes by name, each with the names of its fields; looked up once, not in each forward
_CLASSES = {
    cls.__name__: (cls, tuple(field.name for field in dataclasses.fields(cls)))
    for cls in (*vars(modeling_outputs).values(), DependencyParsingOutput)
    if isinstance(cls, type) and issubclass(cls, ModelOutput) and dataclasses.is_dataclass(cls)
}
