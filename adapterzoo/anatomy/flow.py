"""Proof of stream sites: run a model on the meta device and follow its residual stream.

Every tensor carries its value as a sum of *atoms*, Σ c·a. An addition adds sums, a view or a
cast passes them on, a product with a number scales them; any other operator makes a new atom.
No number is computed, so that the largest model takes milliseconds, and the answer is exact: the
output of a sub-layer is added to the residual stream, or it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .patterns import NORM_CLASS
from .sites import Block, SubLayer

Sum = Mapping[int, float]

_ADD = {"add", "add_"}
_SCALE = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
# operators that move values or cast them, and change none
_CARRY = {
    "view", "_unsafe_view", "reshape", "transpose", "transpose_", "permute", "t", "unsqueeze",
    "squeeze", "squeeze_", "expand", "clone", "_to_copy", "detach", "alias", "slice", "select",
    "constant_pad_nd", "roll", "contiguous", "copy_", "as_strided", "flatten", "unflatten",
    "index", "split", "split_with_sizes", "cat", "stack", "masked_fill", "masked_fill_", "unbind",
    "movedim", "repeat", "unfold", "lift_fresh", "index_select", "nan_to_num", "clamp",
}  # fmt: skip


@dataclass
class _Call:
    """What went in and out of the modules of one block during one call."""

    inputs: dict[str, Sum] = field(default_factory=dict)
    outputs: dict[str, Sum] = field(default_factory=dict)
    additions: list[Sum] = field(default_factory=list)


class _Flow(TorchDispatchMode):
    """Follows the sums of atoms through every operator."""

    def __init__(self) -> None:
        super().__init__()
        # tensors are kept, so that no two of them ever have the same id
        self._sums: dict[int, tuple[Tensor, Sum]] = {}
        self._atoms = 0
        self._gains: dict[int, float] = {}
        self.additions: list[Sum] = []

    def sum_of(self, tensor: Tensor) -> Sum:
        """The tensor's value; a new atom when it was never seen."""
        if id(tensor) not in self._sums:
            self.put(tensor, self.atom())
        return self._sums[id(tensor)][1]

    def put(self, tensor: Tensor, value: Sum) -> None:
        """Say what the tensor's value is."""
        self._sums[id(tensor)] = (tensor, value)

    def atom(self) -> Sum:
        """A value that is not known to be a sum of others."""
        self._atoms += 1
        return {self._atoms: 1.0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        value = self._value(name, args, kwargs or {}, result) if isinstance(result, Tensor | list | tuple) else None
        for tensor in _tensors(result):
            self.put(tensor, self.atom() if value is None else value)
        return result

    def _value(self, name: str, args: Any, kwargs: Any, result: Any) -> Sum | None:
        tensors = list(_tensors(args))
        if not tensors:
            return None
        if name in _CARRY:
            moved = [t for t in tensors if t.is_floating_point()] or tensors
            if name in ("cat", "stack"):
                moved = [max(moved, key=Tensor.numel)]
            return self.sum_of(moved[1] if name == "copy_" and len(moved) > 1 else moved[0])
        if name in _ADD and len(tensors) == 2 and result.is_floating_point():
            one, other = map(self.sum_of, tensors)
            total = _plus(one, other, float(kwargs.get("alpha", 1)))
            self.additions.append(total)
            return total
        if name in _SCALE and len(args) > 1:
            return self._scaled(args, _SCALE[name])
        return None

    def _scaled(self, args: Any, power: int) -> Sum | None:
        """A product with a number, or with a parameter that acts as a gain."""
        value, by = args[:2]
        if isinstance(value, nn.Parameter) or not isinstance(value, Tensor):
            value, by = by, value
        if isinstance(by, int | float):
            factor = float(by) ** power
        elif isinstance(by, nn.Parameter) or by.numel() == 1:
            # an unknown constant: a number that no other constant of the model has
            factor = self._gains.setdefault(id(by), math.sqrt(2 + len(self._gains))) ** power
        else:
            return None
        return {atom: c * factor for atom, c in self.sum_of(value).items()}


def prove(
    model: nn.Module, blocks: Iterable[Block], run: Callable[[], object]
) -> dict[int, str]:
    """Check the stream sites of blocks while the model runs.

    Args:
        model: the model that `blocks` were found in, on the meta device, in evaluation mode.
        blocks: the blocks to check.
        run: calls the model; errors pass through, after the blocks that ran were checked.

    Returns:
        For each block that ran, by number: what is wrong, empty when all its sites are right.
    """
    verdicts: dict[int, str] = {}
    handles: list[Any] = []
    flow = _Flow()
    for block in blocks:
        handles += _watch(model, block, flow, verdicts)
    try:
        with torch.no_grad(), flow:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return verdicts


def _watch(
    model: nn.Module, block: Block, flow: _Flow, verdicts: dict[int, str]
) -> list[Any]:
    call = _Call()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        call.inputs.clear()
        call.outputs.clear()
        flow.additions = call.additions = []
        first = next(_tensors((args, kwargs)), None)
        if first is not None:
            call.inputs[""] = flow.sum_of(first)

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        last = next(_tensors(result), None)
        if last is not None:
            call.outputs[""] = flow.sum_of(last)
        verdicts[block.layer] = "; ".join(filter(None, _wrongs(block, call)))

    def reads(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(_tensors((args, kwargs)), None)
            if first is not None and path not in call.inputs:
                call.inputs[path] = flow.sum_of(first)

        return hook

    def writes(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            first = next(_tensors(result), None)
            if first is not None and path not in call.outputs:
                call.outputs[path] = flow.sum_of(first)

        return hook

    module = model.get_submodule(block.path)
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)]
    norms = {
        f"{block.path}.{path}"
        for path, below in module.named_modules()
        if path and NORM_CLASS.search(type(below).__name__)
    }
    for path in norms:
        below = model.get_submodule(path)
        handles.append(below.register_forward_pre_hook(reads(path), with_kwargs=True))
        handles.append(below.register_forward_hook(writes(path)))
    for sub in block.sublayers:
        for path in {sub.source, sub.norm} - {None} - norms:
            handles.append(
                model.get_submodule(path or "").register_forward_pre_hook(
                    reads(path or ""), with_kwargs=True
                )
            )
        if sub.out not in norms:
            handles.append(model.get_submodule(sub.out).register_forward_hook(writes(sub.out)))
    handles.append(module.register_forward_hook(leave))
    return handles


def _wrongs(block: Block, call: _Call) -> Iterable[str]:
    for sub in block.sublayers:
        yield _wrong(block, sub, call)
    stream, out = call.inputs.get(""), call.outputs.get("")
    if not block.post_norm and stream and out and not _within(stream, out):
        # a block may close with a norm of the stream (Conformer)
        closing = [s for path, s in call.inputs.items() if call.outputs.get(path) == out]
        if not any(_within(stream, s) for s in closing):
            yield "the block's output is not its input plus its sub-layers"


def _wrong(block: Block, sub: SubLayer, call: _Call) -> str:
    """What is wrong with a sub-layer; empty when nothing is."""
    name = f"{sub.kind} ({sub.out.removeprefix(block.path + '.')})"
    inp, h = call.inputs.get(sub.source), call.outputs.get(sub.out)
    if inp is None or h is None:
        return f"{name}: {'source' if inp is None else 'out'} was not called"
    if sub.norm is not None:
        s = call.inputs.get(sub.norm)
        if s is None:
            return f"{name}: norm was not called"
        rest = {a: c for a, c in s.items() if a not in inp and a not in h}
        right = _within(inp, s) and _within(h, s) and not rest
        return "" if right else f"{name}: norm does not read inp + h"
    if any(_residual(inp, h, s, call) for s in call.additions):
        return ""
    if any(_within(h, s) for s in call.additions):
        return f"{name}: source does not read the stream that out is added to"
    return f"{name}: the output of out is never added"


def _residual(inp: Sum, h: Sum, s: Sum, call: _Call) -> bool:
    """Whether `s` is `inp + h`, perhaps with other sub-layers that work beside this one.

    When there is more in it, no norm may read the stream with that more but without `h`: then
    that norm, and not the source, would be what stands before the sub-layer.
    """
    if not (_within(inp, s) and _within(h, s)):
        return False
    before = {atom: c for atom, c in s.items() if atom not in h}
    return set(before) == set(inp) or not any(set(x) == set(before) for x in call.inputs.values())


def _within(part: Sum, whole: Sum) -> bool:
    """Whether the whole holds the part, all of it with the same factor."""
    if not part or not set(part) <= set(whole):
        return False
    ratios = [whole[atom] / c for atom, c in part.items()]
    return all(math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios)


def _plus(one: Sum, other: Sum, alpha: float) -> dict[int, float]:
    total = dict(one)
    for atom, c in other.items():
        total[atom] = total.get(atom, 0.0) + alpha * c
    return {atom: c for atom, c in total.items() if abs(c) > 1e-9}


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
