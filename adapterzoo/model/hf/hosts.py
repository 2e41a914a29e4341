"""What the libraries that run a model need to know of it: transformers' Trainer, and TRL."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from torch import nn
from transformers.utils.generic import find_labels

from adapterzoo.anatomy import unwrapped
from adapterzoo.errors import StateError
from adapterzoo.inject import Adapted
from adapterzoo.inject.building import plain_state


def gives_loss(cls: type[nn.Module]) -> bool:
    """Return whether a class of transformers can compute a loss without a head.

    Models of two towers, such as CLIP, compare the rows with each other (`return_loss=True`).
    """
    return bool(find_labels(cls)) or "return_loss" in inspect.signature(cls.forward).parameters


def refuse_fused(model: Any, output: nn.Module, head: nn.Module | None = None) -> None:
    """Refuse what TRL's fused head would leave out.

    It multiplies hidden states by the weight of `get_output_embeddings()`, and calls neither this
    layer nor the head. Tested with TRL 1.16.

    Args:
        model: with adapters.
        output: what `get_output_embeddings()` returns.
        head: the named head that it belongs to.

    Raises:
        StateError: TRL asks for the layer, and the logits depend on more than its weight and bias.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _home(frame).startswith("adapterzoo."):
        frame = frame.f_back
    is_fused = frame is not None and frame.f_code.co_name == "_fused_forward"
    if frame is None or not (is_fused and _home(frame).startswith("trl.")):
        return
    if head is not None and len(head.state_dict()) > len(plain_state(output)):
        raise StateError(
            "TRL computes the loss from the hidden states and the output matrix, without the "
            "other layers of the active head. Write add_causal_lm_head('a', layers=1), or train "
            "with AdapterTrainer."
        )
    plan = model._active.plan
    is_changed = isinstance(output, Adapted) and output._link.path in plan.sites
    if is_changed or (head is not None and plan.exit is not None):
        raise StateError(
            "TRL computes the loss from the hidden states and the output matrix of the base "
            "model, without what the active adapters change there. Add an adapter that leaves "
            "the output layer and the embeddings as they are, or train with AdapterTrainer."
        )


def _home(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def collated(collator: Callable[[Any], Any], rows: Any) -> Any:
    """Return a batch with the texts of `adapter_names` and `task_ids`, one for each row.

    transformers' collators drop texts, or fail on them.

    Args:
        collator: makes the batch.
        rows: of the dataset.
    """
    first = rows[0] if isinstance(rows[0], Mapping) else {}
    texts = {
        key: [row[key] for row in rows]
        for key in ("adapter_names", "task_ids")
        if key in first and any(isinstance(row[key], str) for row in rows)
    }
    home = getattr(collator, "__module__", "")
    if texts and home.startswith("transformers."):
        rows = [{k: v for k, v in row.items() if k not in texts} for row in rows]
    batch = collator(rows)
    batch.update({key: values for key, values in texts.items() if key not in batch})
    return batch


def refuse_trained(model: Any, name: str, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to change what the optimizer of a running Trainer holds.

    Raises:
        StateError: it holds parameters of the adapter, fusion or head of this name.
    """
    held = _optimized(model)
    if held and any(id(p) in held for p in parameters):
        raise StateError(
            f"a running Trainer trains {name!r}, and its optimizer would keep the old tensors. "
            f"Write it after trainer.train()."
        )


def refuse_untrained(model: Any, setup: object, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse to train what the optimizer of a running Trainer does not hold.

    Raises:
        StateError: it does not hold all parameters.
    """
    if is_untrained(model, parameters):
        raise StateError(
            f"a Trainer is running, and its optimizer does not hold all tensors of {setup!r}, "
            f"which would stay as they are. Write it after trainer.train(), and train {setup!r} "
            f"with a Trainer of its own."
        )


def is_untrained(model: Any, parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether a Trainer is running whose optimizer does not hold all parameters."""
    held = _optimized(model)
    return held is not None and any(id(p) not in held for p in parameters)


def _optimized(model: Any) -> set[int] | None:
    """Return the ids of the parameters in the optimizer of the Trainer that is training the model.

    None where no Trainer runs. A Trainer makes its optimizer once, before the first step.
    """
    trainers: Any = sys.modules.get("transformers.trainer")
    frame = None if trainers is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "train":
            trainer = frame.f_locals.get("self")
            if isinstance(trainer, trainers.Trainer) and _steps(trainer, model):
                return {id(p) for each in trainer.optimizer.param_groups for p in each["params"]}
        frame = frame.f_back
    return None


def _steps(trainer: Any, model: Any) -> bool:
    """Return whether a running Trainer will train the model further."""
    is_own = unwrapped(trainer.model) is model
    return is_own and trainer.optimizer is not None and not trainer.control.should_training_stop
