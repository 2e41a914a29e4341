"""Rows of several batches in one call of the base model: joined before it, and divided after it.

Sequences of different lengths are padded at the end, and attention masks hide the padding. The
outputs of each batch are cut to its own rows and lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from adapterzoo.errors import BatchError
from adapterzoo.model.batches import batch_size

# argument with a value for each token → the sequence of these tokens, whose length is that of the
# first argument given
_SEQUENCES = {
    "input_ids": "own", "inputs_embeds": "own", "attention_mask": "own",
    "token_type_ids": "own", "position_ids": "own",
    "decoder_input_ids": "decoder", "decoder_inputs_embeds": "decoder",
    "decoder_attention_mask": "decoder", "decoder_position_ids": "decoder",
    # of a decoder that is called alone
    "encoder_hidden_states": "read", "encoder_attention_mask": "read",
}  # fmt: skip
_MASKS = {
    "own": "attention_mask", "decoder": "decoder_attention_mask", "read": "encoder_attention_mask",
}  # fmt: skip
_IDS = ("input_ids", "decoder_input_ids")

# output → its dimensions of tokens → their sequence: the first of these that the call has
_MAIN, _CROSS = ("decoder", "own"), ("read", "own")
_OUTPUTS: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "last_hidden_state": {1: _MAIN},
    "hidden_states": {1: _MAIN},
    "attentions": {2: _MAIN, 3: _MAIN},
    "encoder_last_hidden_state": {1: ("own",)},
    "encoder_hidden_states": {1: ("own",)},
    "encoder_attentions": {2: ("own",), 3: ("own",)},
    "decoder_hidden_states": {1: ("decoder",)},
    "decoder_attentions": {2: ("decoder",), 3: ("decoder",)},
    "cross_attentions": {2: _MAIN, 3: _CROSS},
    "pooler_output": {},
}
# outputs in which rows and tokens share one dimension
_FLAT = {"router_logits": _MAIN, "encoder_router_logits": ("own",),
         "decoder_router_logits": ("decoder",)}  # fmt: skip
# a training step does not need a cache
_CACHES = ("past_key_values", "cache_params", "mems")


class Piece(NamedTuple):
    """One batch as a part of a call.

    Attributes:
        rows: the number of its rows.
        lengths: the lengths of its sequences.
    """

    rows: int
    lengths: Mapping[str, int]


@dataclass(frozen=True)
class JoinedCall:
    """A call with the rows of several batches.

    Attributes:
        inputs: its arguments.
        pieces: the batches, in order.
        rows: the number of its rows.
        lengths: the lengths of its sequences.
    """

    inputs: dict[str, Any]
    pieces: list[Piece]
    rows: int
    lengths: Mapping[str, int]


def kind_of(inputs: Mapping[str, Any]) -> Any:
    """Return a key; batches with equal keys can be joined.

    Args:
        inputs: arguments of the base model.
    """
    rows, kinds = batch_size(inputs), list[Any]()
    for name, value in sorted(inputs.items()):
        has_rows = isinstance(value, Tensor) and value.shape[:1] == (rows,)
        if value is None or (name in _MASKS.values() and has_rows and value.dim() == 2):
            continue
        if has_rows:
            # sequences are padded
            features = value.shape[2 if name in _SEQUENCES else 1 :]
            kinds.append((name, value.dtype, value.device, value.dim(), features))
        else:
            # without a value for each row: a number, or the same object
            is_plain = isinstance(value, (bool, int, float, str))
            kinds.append((name, value if is_plain else id(value)))
    return tuple(kinds)


def join(batches: Sequence[Mapping[str, Any]], padding: int) -> JoinedCall:
    """Return one call for the rows of several batches of one kind.

    Args:
        batches: the arguments of the base model for each batch.
        padding: the id of padding.
    """
    pieces = [Piece(batch_size(each), _lengths(each)) for each in batches]
    lengths = {name: max(p.lengths[name] for p in pieces) for name in pieces[0].lengths}
    inputs: dict[str, Any] = {}
    for name in dict.fromkeys(name for each in batches for name in each):
        values = [each.get(name) for each in batches]
        tensors = [v for v in values if isinstance(v, Tensor)]
        if name in _MASKS.values() and all(t.dim() == 2 for t in tensors):
            continue
        if not tensors or tensors[0].shape[:1] != (pieces[0].rows,):
            inputs[name] = values[0]
            continue
        fill = padding if name in _IDS else 0
        length = lengths.get(_SEQUENCES.get(name, ""))
        inputs[name] = torch.cat([_padded(t, length, fill) for t in tensors])  # [rows, …]
    for sequence, name in _MASKS.items():
        if sequence not in lengths or name in inputs:
            continue
        masks = [each.get(name) for each in batches]
        is_padded = any(p.lengths[sequence] != lengths[sequence] for p in pieces)
        if not is_padded and all(mask is None for mask in masks):
            continue
        like = next(t for n, t in inputs.items() if _SEQUENCES.get(n) == sequence)
        ones = (like.new_ones(p.rows, p.lengths[sequence], dtype=torch.long) for p in pieces)
        whole = [one if mask is None else mask for mask, one in zip(masks, ones, strict=True)]
        inputs[name] = torch.cat([_padded(m, lengths[sequence], 0) for m in whole])
    return JoinedCall(inputs, pieces, sum(piece.rows for piece in pieces), lengths)


def _lengths(inputs: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, sequence in _SEQUENCES.items():
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.dim() > 1:
            found.setdefault(sequence, value.shape[1])
    return found


def _padded(t: Tensor, length: int | None, fill: int) -> Tensor:
    missing = 0 if length is None or t.dim() < 2 else length - t.shape[1]
    if not missing:
        return t
    # at the end of dimension 1, whatever dimensions follow
    return pad(t, (0,) * (2 * t.dim() - 3) + (missing,), value=fill)


def divide(outputs: Any, joined: JoinedCall) -> list[Any]:
    """Return the outputs of a joined call for each of its batches.

    Args:
        outputs: the mapping that the base model returned.
        joined: the call.

    Raises:
        BatchError: a value belongs to the call as a whole.
    """
    divided: list[dict[str, Any]] = [{} for _ in joined.pieces]
    for name, value in outputs.items():
        if name in _CACHES or value is None:
            continue
        if isinstance(value, tuple):
            columns = [_parts(name, t, joined) for t in value]
            parts: list[Any] = [tuple(c[i] for c in columns) for i in range(len(divided))]
        elif isinstance(value, Tensor):
            parts = _parts(name, value, joined)
        else:
            raise BatchError(f"the output {name!r} of the base model cannot be divided")
        for own, part in zip(divided, parts, strict=True):
            own[name] = part
    return [type(outputs)(**own) for own in divided]


def _parts(name: str, t: Tensor | None, joined: JoinedCall) -> list[Any]:
    """Return the rows and tokens of each batch in an output.

    One `split` divides the rows, since the backward of each slice would fill a whole tensor.
    """
    if t is None:
        return [None for _ in joined.pieces]
    rows = [piece.rows for piece in joined.pieces]
    if name in _FLAT and t.dim() == 2:
        own = t.reshape(joined.rows, -1, t.shape[-1]).split(rows)  # each [rows, tokens, experts]
        lengths = [_length(piece.lengths, _FLAT[name]) for piece in joined.pieces]
        return [part[:, :n].flatten(0, 1) for part, n in zip(own, lengths, strict=True)]
    if not t.dim() or t.shape[0] != joined.rows:
        raise BatchError(f"the output {name!r} of the base model belongs to the whole batch")
    return [
        _cut(name, part, piece, joined)
        for part, piece in zip(t.split(rows), joined.pieces, strict=True)
    ]


def _cut(name: str, t: Tensor, piece: Piece, joined: JoinedCall) -> Tensor:
    """Return an output of one batch without the padding of the joined call."""
    if piece.lengths == joined.lengths:
        return t
    if name not in _OUTPUTS:
        raise BatchError(f"it is unknown which dimension of the output {name!r} counts tokens")
    for dim, of in _OUTPUTS[name].items():
        if t.shape[dim] != _length(joined.lengths, of):
            raise BatchError(f"the output {name!r} does not have one state for each token")
        t = t.narrow(dim, 0, cast("int", _length(piece.lengths, of)))
    return t


def _length(lengths: Mapping[str, int], of: Sequence[str]) -> int | None:
    """Return the length of the first of these sequences that is in a call; None without any."""
    return next((lengths[sequence] for sequence in of if sequence in lengths), None)
