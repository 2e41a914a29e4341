"""The bytes that a call keeps for the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.composition import Composition
from adapterzoo.model.activation import make_plan
from adapterzoo.model.state import AdaptedModel, layer_in


class _Saved:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(model: nn.Module, call: Callable[[], object]) -> int:
    """Return the bytes that a call keeps for the backward pass, counting each storage once.

    Args:
        model: the model; its parameters and buffers do not count.
        call: the forward pass; its result keeps the graph alive.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(t: Tensor) -> _Saved:
        saved = _Saved(t)
        kept.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        result = call()
    # the set no longer has tensors that the forward has released
    storages = {s.data_ptr(): s.nbytes() for s in (k.tensor.untyped_storage() for k in kept)}
    del result
    return sum(size for pointer, size in storages.items() if pointer not in own)


def bytes_per_token(
    model: AdaptedModel,
    setup: Composition,
    trained: Iterable[nn.Parameter],
    inputs: Mapping[str, Any],
) -> tuple[float, str]:
    """Return the bytes that a step keeps for each token because of an adapter, and the unit.

    The same rows run once and twice, and the difference counts: bytes that do not grow with the
    number of tokens, such as those of norms of weights, cancel.

    Args:
        model: with adapters.
        setup: the active adapter or fusion.
        trained: its parameters.
        inputs: arguments of a call.
    """
    called: Any = model
    device = next((p.device for p in called.parameters() if not p.is_meta), None)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    tensors = [v for v in given.values() if isinstance(v, Tensor)]
    main = given.get(getattr(called, "main_input_name", ""), tensors[0])
    trained = [*trained]

    def is_row_by_row(value: object) -> bool:
        return isinstance(value, Tensor) and value.shape[:1] == main.shape[:1]

    def kept(acting: Composition | None, times: int) -> int:
        call = {k: _repeated(v, times) if is_row_by_row(v) else v for k, v in given.items()}
        plan = make_plan(model, acting)
        with _trained(model, trained if acting else ()), model._active.entered(plan):
            return saved_bytes(called, lambda: called(**call))

    more = [kept(acting, 2) - kept(acting, 1) for acting in (setup, None)]
    tokens, unit = len(main), "row"
    if not main.is_floating_point():
        tokens, unit = main.numel(), f"token of rows of {main.shape[-1]}"
    return (more[0] - more[1]) / tokens, unit


def _repeated(t: Tensor, times: int) -> Tensor:
    """Return the rows of an input repeated; floating-point inputs require gradients."""
    rows = torch.cat([t.detach()] * times)
    return rows.requires_grad_() if rows.is_floating_point() else rows


@contextmanager
def _trained(model: AdaptedModel, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Return a context that trains only these parameters, in evaluation mode.

    The outputs of the embeddings require gradients, so that a base model without an adapter passes
    gradients through too.
    """
    module: Any = model
    before = {p: p.requires_grad for p in module.parameters()}
    modes = {part: part.training for part in module.modules()}
    anatomy = model.anatomy
    tables = () if anatomy.own_table is None else anatomy.sharing(anatomy.own_table)
    layers = (layer_in(model, path) for path in tables)
    hooks = [layer.register_forward_hook(_asks_for_gradients) for layer in layers]
    try:
        module.eval()
        for p in before:
            p.requires_grad_(False)
        for p in parameters:
            if p.is_floating_point():
                p.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for p, asked in before.items():
            p.requires_grad_(asked)
        for part, mode in modes.items():
            part.training = mode


def _asks_for_gradients(module: nn.Module, inputs: Any, y: Tensor) -> Tensor:
    # a copy, since models may write into it in place
    return y if y.requires_grad else y.requires_grad_().clone()
