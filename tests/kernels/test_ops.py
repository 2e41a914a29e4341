"""Every operator in torch operations under `opcheck`; in Triton `test_interpreted.py` does it."""

import opcheck_cases
import pytest

CASES = dict(opcheck_cases.cases())


@pytest.mark.parametrize("name", CASES)
def test_fake_outputs_are_laid_out_as_real_ones(name):
    CASES[name]()
