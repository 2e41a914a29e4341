"""How the Triton kernels of the low-rank update are cut into programs and tiles."""

from adapterzoo.kernels._tiles_triton import parted


def test_few_rows_are_cut_into_parts_that_cover_all_features():
    for width in (1, 64, 100, 4096, 14336):
        for columns in (32, 128):
            for programs in (0, 1, 7, 128, 5000):
                parts, part = parted(width, columns, programs)
                assert parts * part >= width > (parts - 1) * part
                assert part % columns == 0
                assert parts == 1 or parts * programs <= 128
