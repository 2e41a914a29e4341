"""How the Triton kernels of the low-rank update are cut into programs and tiles."""

import pytest
import torch

from adapterzoo.kernels.tiles_triton import parted, precision


def test_few_rows_are_cut_into_parts_that_cover_all_features():
    for width in (1, 64, 100, 4096, 14336):
        for columns in (32, 128):
            for programs in (0, 1, 7, 128, 5000):
                parts, part = parted(width, columns, programs)
                assert parts * part >= width > (parts - 1) * part
                assert part % columns == 0
                assert parts == 1 or (parts * programs <= 512 and part >= 4 * columns)


@pytest.fixture
def unset():
    """Torch's settings as they were."""
    matmul = torch.backends.cuda.matmul
    before = torch.backends.fp32_precision, matmul.fp32_precision
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision, matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("nothing", "", "tf32x3"),
        ("set_float32_matmul_precision", "highest", "tf32x3"),
        ("set_float32_matmul_precision", "high", "tf32"),
        ("set_float32_matmul_precision", "medium", "tf32"),
        ("allow_tf32", True, "tf32"),
        ("allow_tf32", False, "tf32x3"),
        ("matmul.fp32_precision", "tf32", "tf32"),
        ("matmul.fp32_precision", "ieee", "tf32x3"),
        ("backends.fp32_precision", "tf32", "tf32"),
        ("backends.fp32_precision", "ieee", "tf32x3"),
    ],
)
@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one way only"
)
def test_products_follow_each_of_torchs_settings(unset, setting, value, expected):
    matmul = torch.backends.cuda.matmul
    if setting == "set_float32_matmul_precision":
        torch.set_float32_matmul_precision(value)
    elif setting == "allow_tf32":
        matmul.allow_tf32 = value
    elif setting == "matmul.fp32_precision":
        matmul.fp32_precision = value
    elif setting == "backends.fp32_precision":
        torch.backends.fp32_precision = value
    assert precision(torch.float32) == expected
    assert precision(torch.bfloat16) == "tf32"
