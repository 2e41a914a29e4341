"""Every operator in torch operations under `opcheck`; in Triton `test_interpreted.py` does it."""

import opcheck_cases
import pytest
import torch

CASES = dict(opcheck_cases.cases())


@pytest.mark.parametrize("name", CASES)
def test_fake_outputs_are_laid_out_as_real_ones(name):
    CASES[name]()


def test_differentiable_operators_register_their_gradients():
    for made in opcheck_cases.CHECKED:
        for name, args in made(3, opcheck_cases.LAYOUTS["rows"]):
            if name.endswith("_backward") or name == "row_norm":
                continue
            given = [
                v.requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
                for v in args
            ]
            op = getattr(torch.ops.adapterzoo, name).default
            torch.library.opcheck(op, given, test_utils="test_autograd_registration")
