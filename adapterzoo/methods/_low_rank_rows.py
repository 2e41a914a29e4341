"""LoRA's update in a mixed batch: each row gets that of its adapter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adapterzoo.contracts import BaseLayer
from adapterzoo.kernels.grouped import (
    Groups,
    grouped_expand,
    grouped_shrink,
    stacked_down,
    stacked_up,
)

from ._gate import Gate
from ._invocation import invoked_rows
from ._low_rank import LowRank
from ._rows import features, gated, restored


def updated_with_options(
    y: Tensor,
    adapters: Sequence[LowRank],
    groups: Groups,
    x: Tensor,
    base: BaseLayer,
    biases: Sequence[Tensor],
    gates: Sequence[Gate],
    invocations: Sequence[tuple[int, ...] | None],
) -> Tensor:
    """Return y with the gated update after the invocation, and with B's bias.

    Args:
        y: the layer's output, `[rows, *tokens, d_out]`.
        adapters: of the layer.
        groups: which of them each row takes; some rows have an adapter.
        x: the layer's input, `[rows, *tokens, d_in]`.
        base: the layer.
        biases: of B in each adapter; empty: there are none.
        gates: of each adapter; empty: there are none.
        invocations: of each adapter.
    """
    one = adapters[0]
    down = stacked_down([each.lora_A for each in adapters])  # [n, rank, d_in]
    up = stacked_up([each.lora_B for each in adapters])  # [n, d_out, rank]
    t = grouped_shrink(x, down, groups, one.dropout, one.training)  # [rows, *tokens, rank]
    onto = features(biases, groups, y.dim()).to(t.dtype) if biases else t.new_zeros(())
    # s is of the bias as well, so that it comes after the sum
    update = grouped_expand(onto.expand(y.shape), t, up, [1.0] * len(adapters), groups)
    scales = tuple(each.scaling for each in adapters)
    scaling = groups.row_scales(scales, t.device, t.dtype)  # [rows]
    update = update * scaling.view(-1, *(1 for _ in y.shape[1:]))
    update = invoked_rows(update, invocations, groups, x, base)
    if gates:
        update = update * gated(gates, groups, x, base)
    return restored(y + update.to(y.dtype), y, groups)
