"""What the tests of kernels share: an adapted model, errors against float64, what a call keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from families import tiny_config
from snapshots import stir
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel

from adapterzoo import AdapterConfig, init


def adapted(
    config: str, *names: str, layer_class: type[nn.Linear] | None = None
) -> tuple[Any, nn.Linear]:
    """A BERT with random adapters at its queries, none active, and the first query.

    Args:
        config: of the adapters, a config string; where they are is not part of it.
        names: of the adapters; one, "a", if none are given.
        layer_class: of the first query; None: it stays as it is.
    """
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config("bert"))
    attention = model.encoder.layer[0].attention.self
    if layer_class is not None:
        plain = attention.query
        attention.query = layer_class(plain.in_features, plain.out_features)
    init(model)
    for name in names or ("a",):
        model.add_adapter(name, AdapterConfig.load(config, target_modules="query"))
        stir(model, name)
    return model, attention.query


def near(got: Tensor, expected: Tensor, tolerance: float, sizes: Tensor | None = None) -> None:
    """Whole tensors, to a part of the largest element: of the expected values, or of `sizes`.

    Args:
        got: the values.
        expected: in float64.
        tolerance: the part.
        sizes: the expected values where the formula gets absolute values: Σ |a| |b|.
    """
    assert got.shape == expected.shape
    if got.numel():
        size = max((expected if sizes is None else sizes).abs().max().item(), 1e-9)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * size)


def loss(out: Tensor) -> Tensor:
    """The sum of squares, small enough for the gradients to be numbers of float16."""
    return out.double().square().sum() / 256


def kept(run: Callable[[], Tensor], *known: Tensor) -> dict[int, int]:
    """Address and bytes of every storage that autograd keeps, besides those of known tensors."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        assert run().requires_grad
    for tensor in known:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    return found


class Operations(TorchDispatchMode):
    """Notes each operation but for views, which cost no memory and little time.

    Attributes:
        names: of the operations.
        largest: the most elements that one of their results had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if not func.is_view and "view" not in name and name not in ("t", "empty", "new_empty"):
            self.names.append(name)
            of = out if isinstance(out, (tuple, list)) else (out,)
            self.largest = max([self.largest, *(t.numel() for t in of if isinstance(t, Tensor))])
        return out


def with_gradients(run: Callable[..., Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of its `loss`."""
    out = run(*values)
    return [out, *torch.autograd.grad(loss(out), values)]


def compiled_as_eager(run: Callable[..., Tensor], values: Sequence[Tensor], near_to: float) -> None:
    """In one graph, with the same random numbers."""
    torch._dynamo.reset()
    found = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(2)
        found.append(with_gradients(call, values))
    torch._dynamo.reset()
    for eager, compiled in zip(*found, strict=True):
        near(compiled, eager.detach().double(), near_to)


def autocast_as(
    reference: Callable[..., Tensor],
    run: Callable[..., Tensor],
    values: Sequence[Tensor],
    near_to: float,
) -> None:
    """Dtypes and values, with gradients and without."""
    found = []
    for call in (run, reference):
        with torch.autocast("cpu", torch.bfloat16):
            # a backward inside the region, which is not recommended, is right too
            found.append(with_gradients(call, values))
    for own, expected in zip(*found, strict=True):
        assert own.dtype is expected.dtype
        near(own, expected.detach().double(), near_to)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        near(run(*values), found[1][0].double(), near_to)


def only_needed_gradients(
    run: Callable[..., Tensor], values: Sequence[Tensor], expected: Sequence[Tensor]
) -> None:
    """Whichever operands need one, they get the expected gradient, and no other operand does."""
    for needed in itertools.product((False, True), repeat=len(values)):
        own = [v.detach().clone().requires_grad_(n) for v, n in zip(values, needed, strict=True)]
        out = run(*own)
        if any(needed):
            loss(out).backward()
        for value, wanted, need in zip(own, expected, needed, strict=True):
            assert (value.grad is not None) == need
            if need:
                near(value.grad, wanted, 1e-13)


def writable(run: Callable[[], Tensor], params: Sequence[Tensor]) -> None:
    """A model may write into the output in place: gradients are those of a product beside it."""
    wanted = torch.autograd.grad(run().mul(2).sum(), params)
    found = torch.autograd.grad(run().mul_(2).sum(), params)
    assert all(map(torch.equal, found, wanted))
