"""What gates and fusions decide in a forward, as outputs of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from adapterzoo.composition import Composition, fusions_of, parse
from adapterzoo.methods._gate import Gate

from .fusing import FusionMixin
from .refusals import lasts_of

Scores: TypeAlias = dict[str, dict[int, dict[str, Tensor]]]
"""Name of an adapter or a fusion to block number to location to what was decided there."""

# name, block and location, with what each call of the module there has decided
_Calls: TypeAlias = dict[tuple[str, int, str], list[Tensor]]


class OutputRecorder(FusionMixin):
    """`output_adapter_gating_scores` and `output_adapter_fusion_attentions` of `forward`."""

    def _listening(
        self, run: Callable[[], Any], adapter_names: Sequence[Any] | None, gates: bool, fused: bool
    ) -> Any:
        """The output of a forward with what its gates and fusions have decided.

        Args:
            run: the forward.
            adapter_names: of its rows, where it has been given them.
            gates: whether the output gets `adapter_gating_scores`.
            fused: whether it gets `adapter_fusion_attentions`.

        Returns:
            The output; a tuple has the two, in this order, at its end.
        """
        if adapter_names is None:
            acting = [self._active.plan.setup]
            rows = self._active.plan.rows is not None
        else:
            # names that are none, and lists that fit no batch, the forward itself refuses
            listed = adapter_names if isinstance(adapter_names, Sequence) else ()
            acting, rows = [parse(name) for name in listed], True
        heard: dict[str, _Calls] = {}
        with ExitStack() as stack:
            if gates:
                watched = self._gates_of(acting)
                heard["adapter_gating_scores"] = stack.enter_context(_hooked(watched, _score))
            if fused:
                layers = self._fusions_of(acting)
                heard["adapter_fusion_attentions"] = stack.enter_context(_hooked(layers, _shares))
            outputs = run()
        found = {name: _by_place(calls, rows) for name, calls in heard.items()}
        if isinstance(outputs, tuple):
            return (*outputs, *found.values())
        for name, scores in found.items():
            outputs[name] = scores
        return outputs

    def _gates_of(
        self, acting: Iterable[Composition | None]
    ) -> Iterator[tuple[tuple[str, int, str], nn.Module]]:
        names = dict.fromkeys(n for setup in acting if setup is not None for n in setup.flatten())
        for name in names:
            # what the forward refuses has no gates
            installed = self._adapter_state.records.get(name)
            if installed is None:
                continue
            for path, module in self.adapter_modules(name):
                placements = installed.places[path]
                # the parts of a layer are in the order of its placements
                parts = list(module.children()) if len(placements) > 1 else [module]
                for placement, part in zip(placements, parts, strict=False):
                    at = name, placement.site.layer, placement.location or str(placement.site.role)
                    yield from ((at, m.decided) for m in part.modules() if isinstance(m, Gate))

    def _fusions_of(
        self, acting: Iterable[Composition | None]
    ) -> Iterator[tuple[tuple[str, int, str], nn.Module]]:
        fuses = {fuse.name: fuse for setup in acting for fuse in fusions_of(setup)}
        for name, fuse in fuses.items():
            if name not in self._adapter_state.fusions:
                continue
            places = self._adapter_state.records[lasts_of(fuse)[-1]].places
            for path, layer in self.fusion_modules(name):
                placement = places[path][0]
                yield (name, placement.site.layer, placement.location), layer


def _score(openness: Tensor) -> Tensor:
    return openness.flatten(1)  # [batch, 1]


def _shares(fused: tuple[Tensor, Tensor]) -> Tensor:
    return fused[1]  # [batch, tokens, adapters]


@contextmanager
def _hooked(
    watched: Iterable[tuple[tuple[str, int, str], nn.Module]], read: Callable[[Any], Tensor]
) -> Iterator[_Calls]:
    """What some modules give in calls of this thread, as the calls go on.

    Args:
        watched: places with their modules.
        read: takes what is wanted out of a module's output.
    """
    calls: _Calls = {}
    thread = threading.get_ident()
    handles = []
    for at, module in watched:

        def keep(module: nn.Module, args: Any, out: Any, at: tuple[str, int, str] = at) -> None:
            if threading.get_ident() == thread:
                calls.setdefault(at, []).append(read(out).detach())

        handles.append(module.register_forward_hook(keep))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _by_place(calls: _Calls, rows: bool) -> Scores:
    """The calls by name, block and location, several of one place as one tensor.

    Args:
        calls: at each place.
        rows: whether several calls are of different rows of the batch; else they are of the same
            rows, and give a column each.
    """
    found: Scores = {}
    for (name, block, location), tensors in calls.items():
        joined = torch.cat(tensors, 0 if rows else -1)  # [batch, …]
        if joined.dim() == 2 and joined.shape[1] == 1:
            joined = joined.squeeze(1)  # [batch]
        found.setdefault(name, {}).setdefault(block, {})[location] = joined
    return found
