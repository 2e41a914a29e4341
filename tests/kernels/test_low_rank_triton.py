"""The Triton kernels of the low-rank update, in Triton's interpreter, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adapterzoo.kernels import low_rank_triton as shipped

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.fixture(scope="module")
def errors():
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_all_shapes_dtypes_and_layouts_are_right(errors):
    assert {case: e for case, e in errors.items() if e and case != "planted"} == {}
    assert len(errors) > 25


def test_a_wrong_element_is_seen(errors):
    assert errors["planted"] == "ValueError: planted: wrong by nan"


def test_few_rows_are_cut_into_parts_that_cover_all_features():
    for width in (1, 64, 100, 4096, 14336):
        for columns in (32, 128):
            for programs in (0, 1, 7, 128, 5000):
                parts, part = shipped._parts(width, columns, programs)
                assert parts * part >= width > (parts - 1) * part
                assert part % columns == 0
                assert parts == 1 or parts * programs <= 128


def test_the_default_tile_is_a_function_of_the_shape():
    half = torch.bfloat16
    assert shipped.shrink_tile(8192, 16, half) == (64, 128, 16, 4, 3)
    assert shipped.shrink_tile(8192, 24, half).rank == 64
    assert shipped.shrink_tile(1, 512, half)[:3] == (16, 64, 64)
    assert shipped.expand_backward_tile(8192, 8, torch.float32)[:3] == (64, 32, 32)
