"""Adapters of a token table and the layers tied to it: one here, one for each in PEFT.

With `ensure_weight_tying` PEFT writes the tensors of all of them. A linear layer's tensors are the
table's, transposed: the update B A of the table `[d, vocab]` is (B A)ᵀ = Aᵀ Bᵀ there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from adapterzoo.spelling import PeftSpelling

FIELD = "ensure_weight_tying"


def _ends(spelling: PeftSpelling) -> list[tuple[str, str, str]]:
    """Return ends of keys: each parameter's at a table and at a layer, its twin's at a table."""
    at_table, at_layer = spelling.embedding_tensors, spelling.tensors
    pairs = spelling.transposes.items()
    return [(at_table[own][0], at_layer[own][0], at_table[other][0]) for own, other in pairs]


def without_twins(
    tensors: Mapping[str, Tensor],
    spelling: PeftSpelling,
    saved: Sequence[str],
    used: Mapping[str, bool],
) -> dict[str, Tensor]:
    """Return a file's tensors without those that repeat the table's adapter, or its copy.

    Args:
        tensors: the tensors, by key.
        spelling: the method's spelling.
        saved: PEFT's `modules_to_save`.
        used: path of a layer in the file → whether the model uses it.
    """
    found = dict(tensors)
    ends = _ends(spelling)
    first = ends[0][0] if ends else FIELD
    starts = [key.removesuffix(first) for key in tensors if key.endswith(first)]
    # the adapter here is that of the first layer that the model uses
    starts.sort(key=lambda start: not used.get(start.removesuffix("."), True))
    for start in starts[:1]:
        own = {end: tensors[start + end] for end, _, _ in ends}
        others = {k.removesuffix(end) for k in tensors for end in ends[0][:2] if k.endswith(end)}
        for other in others - {start}:
            at_table = {other + end: own[end] for end, _, _ in ends}
            at_layer = {other + end: own[twin].mT for _, end, twin in ends}
            for twins in (at_table, at_layer):
                if all(k in found and torch.equal(found[k], t) for k, t in twins.items()):
                    found = {key: tensor for key, tensor in found.items() if key not in twins}
    names = tuple(saved)
    copied = {k: t for k, t in tensors.items() if k.removesuffix(".weight").endswith(names)}
    return {
        key: tensor
        for key, tensor in found.items()
        if key in copied
        or not key.endswith(".weight")
        or not any(torch.equal(tensor, own) for own in copied.values())
    }


def twin_of(table: Mapping[str, Tensor], spelling: PeftSpelling) -> dict[str, Tensor]:
    """Return the tensors of a layer that is tied to a table, by the endings of their keys.

    Args:
        table: the tensors of the table's adapter.
        spelling: the method's spelling.
    """
    return {
        spelling.tensors[own][0]: table[other].mT.contiguous()
        for own, other in spelling.transposes.items()
    }
