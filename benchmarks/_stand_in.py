"""PEFT's BOFT without its CUDA extension.

PEFT builds the extension at the first layer, fails where there is no compiler for it, and then
silently takes one factor. With this in its place PEFT computes what it says, and loses no time.
"""

from __future__ import annotations

from torch import Tensor


class BlockDiagonal:
    """What the extension computes, in plain torch: one copy for all blocks."""

    @staticmethod
    def forward(blocks: Tensor) -> list[Tensor]:
        """`[m, blocks, b, b]` → `[m, blocks · b, blocks · b]`."""
        m, n, b, _ = blocks.shape
        dense = blocks.new_zeros(m, n, b, n, b)
        dense.diagonal(dim1=1, dim2=3).copy_(blocks.permute(0, 2, 3, 1))  # [m, b, b, n]
        return [dense.view(m, n * b, n * b)]  # [m, n · b, n · b]

    @staticmethod
    def backward(grad: Tensor, blocks: Tensor) -> list[Tensor]:
        """The blocks' part of `grad` `[m, blocks · b, blocks · b]`."""
        m, n, b, _ = blocks.shape
        parts = grad.view(m, n, b, n, b).diagonal(dim1=1, dim2=3)  # [m, b, b, n]
        return [parts.permute(0, 3, 1, 2).contiguous()]  # [m, n, b, b]


def stand_in() -> None:
    """Give PEFT's BOFT the plain version of its extension, in this process.

    PEFT asks for it in each layer that it makes, and in each forward.
    """
    from peft.tuners.boft import layer

    layer.get_fbd_cuda = lambda: BlockDiagonal
