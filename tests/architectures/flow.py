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
from torch.utils.hooks import RemovableHandle

from adapterzoo.anatomy import Block, SubLayer
from adapterzoo.anatomy.patterns import NORM_CLASS

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
        super().__init__()  # type: ignore[no-untyped-call]
        # tensors are kept, so that no two of them ever have the same id
        self._sums: dict[int, tuple[Tensor, Sum]] = {}
        self._atoms = 0
        self._gains: dict[int, float] = {}
        self._constants: set[int] = set()
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # a question about values, such as whether all tokens are real: yes
            return True if args[0].dtype is torch.bool else 1
        result = func(*args, **(kwargs or {}))
        read = list(_tensors(args))
        value = self._value(func.overloadpacket.__name__, args, kwargs or {}, result, read)
        constant = bool(read) and all(self._is_constant(t) for t in read)
        for tensor in _tensors(result):
            self.put(tensor, self.atom() if value is None else value)
            if constant:
                self._constants.add(id(tensor))
        return result

    def _is_constant(self, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or id(tensor) in self._constants

    def _value(
        self, name: str, args: Any, kwargs: Any, result: Any, tensors: list[Tensor]
    ) -> Sum | None:
        if not tensors or not isinstance(result, Tensor | list | tuple):
            return None
        if name in _CARRY:
            moved = [t for t in tensors if t.is_floating_point()] or tensors
            if name in ("cat", "stack"):
                moved = [max(moved, key=Tensor.numel)]
            return self.sum_of(moved[1] if name == "copy_" and len(moved) > 1 else moved[0])
        if name in _ADD and len(tensors) == 2 and tensors[0].is_floating_point():
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
        if not isinstance(value, Tensor) or self._is_constant(value) or _is_number(value):
            value, by = by, value
        if not isinstance(value, Tensor):
            return None
        if isinstance(by, int | float):
            factor = float(by) ** power
        elif self._is_constant(by) or _is_number(by):
            # an unknown constant: a number that no other constant of the model has
            factor = self._gains.setdefault(id(by), math.sqrt(2 + len(self._gains))) ** power
        else:
            return None
        return {atom: c * factor for atom, c in self.sum_of(value).items()}


def prove(
    model: nn.Module, blocks: Iterable[Block], run: Callable[[], object]
) -> tuple[dict[int, str], str]:
    """Check the stream sites of blocks while the model runs.

    Of blocks with the same anatomy in one stack the first is checked; the others only hand on
    what it returned.

    Args:
        model: the model that `blocks` were found in, on the meta device, in evaluation mode.
        blocks: the blocks to check.
        run: calls the model.

    Returns:
        (by block number, for each block that ran: what is wrong, empty when all its sites are
        right; why the run broke off, empty when it did not)
    """
    verdicts: dict[int, str] = {}
    handles: list[RemovableHandle] = []
    flow = _Flow()
    twins: dict[object, list[Block]] = {}
    for block in blocks:
        twins.setdefault(likeness(block), []).append(block)
    stood_in: list[nn.Module] = []
    failure = ""
    try:
        for first, *others in twins.values():
            watch = _Watch(model, first, flow, verdicts, handles)
            for other in others:
                module = model.get_submodule(other.path)
                if module is not model:
                    module.forward = watch.stand_in
                    stood_in.append(module)
        with torch.no_grad(), flow:
            run()
    except Exception as error:  # noqa: BLE001 - any model may fail for want of an input
        failure = f"{type(error).__name__}: {error}"
    finally:
        for handle in handles:
            handle.remove()
        for module in stood_in:
            del module.forward
    for alike in twins.values():
        if alike[0].layer in verdicts:
            verdicts.update({block.layer: verdicts[alike[0].layer] for block in alike})
    return verdicts, failure


def likeness(block: Block) -> object:
    """Equal for blocks of one stack that have the same layers and stream sites."""
    start = len(block.path)
    layers = tuple((s.path[start:], s.role, s.d_in, s.d_out) for s in block.sites)
    subs = tuple((s.out[start:], s.source[start:]) for s in block.sublayers)
    return block.stack, block.d_model, layers, subs


class _Watch:
    """Hooks on one block: what its modules read and write, judged when the block returns.

    Each of the hooks is in `handles` as soon as it is there.
    """

    def __init__(
        self,
        model: nn.Module,
        block: Block,
        flow: _Flow,
        verdicts: dict[int, str],
        handles: list[RemovableHandle],
    ) -> None:
        self._block, self._flow, self._verdicts, self._handles = block, flow, verdicts, handles
        self._call = _Call()
        self._returned: Any = None
        module = model.get_submodule(block.path)
        handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
        paths = {path for sub in block.sublayers for path in (sub.source, sub.out)}
        paths |= {sub.norm for sub in block.sublayers if sub.norm}
        paths |= {
            f"{block.path}.{path}" if block.path else path
            for path, below in module.named_modules()
            if path and NORM_CLASS.search(type(below).__name__)
        }
        paths |= {s.path for s in block.sites if s.kind == "linear" and s.role != "other"}
        for path in sorted(paths):
            self._listen(path, model.get_submodule(path))
        handles.append(module.register_forward_hook(self._leave))

    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the watched block returned."""
        if self._returned is None:
            raise RuntimeError("a block like this one was to run before it")
        return self._returned

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._call = _Call()
        self._flow.additions = self._call.additions
        first = next(_tensors((args, kwargs)), None)
        if first is not None:
            self._call.inputs[""] = self._flow.sum_of(first)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._returned = result
        last = next(_tensors(result), None)
        if last is not None:
            self._call.outputs[""] = self._flow.sum_of(last)
        wrongs = "; ".join(filter(None, _wrongs(self._block, self._call)))
        self._verdicts.setdefault(self._block.layer, wrongs)

    def _listen(self, path: str, module: nn.Module) -> None:
        def reads(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(_tensors((args, kwargs)), None)
            if first is not None:
                self._call.inputs.setdefault(path, self._flow.sum_of(first))

        def writes(module: nn.Module, args: Any, result: Any) -> None:
            first = next(_tensors(result), None)
            if first is not None:
                self._call.outputs.setdefault(path, self._flow.sum_of(first))

        self._handles.append(module.register_forward_pre_hook(reads, with_kwargs=True))
        self._handles.append(module.register_forward_hook(writes))


def _wrongs(block: Block, call: _Call) -> Iterable[str]:
    for sub in block.sublayers:
        yield _wrong(block, sub, call)
    for site in block.sites:
        alone = site.kind == "linear" and site.role != "other" and "expert" not in site.path
        if alone and site.path not in call.outputs:
            yield f"{site.role} ({site.path.removeprefix(block.path + '.')}): was not called"
    stream, out = call.inputs.get(""), call.outputs.get("")
    plain = not block.post_norm and not block.apart
    if plain and stream and out and not _within(stream, out):
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
    if sub.kind in block.apart:
        return ""
    if sub.norm is not None:
        s = call.inputs.get(sub.norm)
        if s is None:
            return f"{name}: norm was not called"
        rest = {a: c for a, c in s.items() if a not in inp and a not in h}
        right = _within(inp, s) and _within(h, s) and not rest
        if not right and sub.kind in block.mixed:
            right = _within(h, s)
        return "" if right else f"{name}: norm does not read inp + h"
    if any(_residual(inp, h, s, call) for s in call.additions):
        return ""
    if any(_within(h, s) for s in call.additions):
        if sub.kind in block.mixed:
            return ""
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


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
