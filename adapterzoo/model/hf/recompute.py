"""Gradient checkpointing: blocks are recomputed in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapterzoo.runtime import ActiveState


def checkpointed(active: ActiveState, checkpoint: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block that the backward pass recomputes, with the adapters of this forward pass.

    On CUDA the backward pass runs in threads of its own, which do not see an `AdapterSetup` of the
    thread that ran the forward pass.

    Args:
        active: state of the model.
        checkpoint: torch's function, with its options.
        run: the block.
        *args: its inputs.
        **kwargs: the same, by name.

    Returns:
        The output of the block.
    """
    if getattr(checkpoint, "keywords", {}).get("use_reentrant", True):
        args = _differentiable(args)
    resume = active.resumable()
    if resume is None:
        return checkpoint(run, *args, **kwargs)

    def run_again(*inputs: Any, **named: Any) -> Any:
        with resume():
            return run(*inputs, **named)

    return checkpoint(run_again, *args, **kwargs)


def _differentiable(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a block; one of them requires a gradient.

    Reentrant checkpointing gives a block no gradients if none of its inputs requires one, as above
    frozen layers; transformers handles this for token embeddings only.
    """
    floating = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.is_floating_point()]
    if not floating or any(args[i].requires_grad for i in floating) or not torch.is_grad_enabled():
        return args
    first = floating[0]
    return (*args[:first], args[first].detach().requires_grad_(), *args[first + 1 :])
