"""How the Triton kernels of the low-rank update are cut into programs and tiles."""

import torch

from adapterzoo.kernels import low_rank_triton as shipped
from adapterzoo.kernels._tiles_triton import parted


def test_few_rows_are_cut_into_parts_that_cover_all_features():
    for width in (1, 64, 100, 4096, 14336):
        for columns in (32, 128):
            for programs in (0, 1, 7, 128, 5000):
                parts, part = parted(width, columns, programs)
                assert parts * part >= width > (parts - 1) * part
                assert part % columns == 0
                assert parts == 1 or parts * programs <= 128


def test_the_default_tile_is_a_function_of_the_shape():
    half = torch.bfloat16
    assert shipped.shrink_tile(8192, 16, half) == (64, 128, 16, 4, 3)
    assert shipped.shrink_tile(8192, 24, half).rank == 64
    assert shipped.shrink_tile(1, 512, half)[:3] == (16, 64, 64)
    assert shipped.expand_backward_tile(8192, 8, torch.float32)[:3] == (64, 32, 32)
