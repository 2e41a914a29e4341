"""The composition of a rescaled layer: against float64, with what it keeps for the backward."""

import itertools
from unittest import mock

import compose_cases
import pytest
import torch
from measured import compiled_as_eager, kept, near
from rounded import right, rounding
from torch.utils.checkpoint import checkpoint

from adapterzoo.errors import KernelError
from adapterzoo.kernels import compose as module
from adapterzoo.kernels import use
from adapterzoo.kernels.compose import compose, compose_reference

ROWS, RANK, OUT = 12, 3, 10
# with a bias or not, with an update or not
CASES = list(itertools.product([True, False], repeat=2))


def operands(dtype=torch.float32, bias=True, update=True, wide=torch.float32):
    source = torch.Generator().manual_seed(0)

    def drawn(*shape, of=dtype):
        return torch.randn(*shape, generator=source, dtype=torch.float64).to(of)

    found = {
        "y": drawn(3, ROWS // 3, OUT),
        "gain": drawn(OUT, of=wide).abs() + 0.5,
        "bias": drawn(OUT) if bias else None,
        "t": drawn(3, ROWS // 3, RANK) if update else None,
        "b": drawn(OUT, RANK) if update else None,
    }
    return {k: v if v is None else v.requires_grad_() for k, v in found.items()}


def weights(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)


def gradients(out, of):
    wanted = [t for t in of.values() if t is not None]
    return list(torch.autograd.grad((out * weights(out)).sum(), wanted))


def truth(of):
    wide = {k: v if v is None else v.detach().double().requires_grad_() for k, v in of.items()}
    y, gain, bias = wide["y"], wide["gain"], wide["bias"]
    whole = y if wide["t"] is None else y + 0.7 * wide["t"] @ wide["b"].T
    out = whole * gain if bias is None else (whole - bias) * gain + bias
    return out, gradients(out, wide)


@pytest.mark.parametrize(("bias", "update"), CASES)
@pytest.mark.parametrize("of_gain", [1.0, 1e-3])  # what is kept is the output, or y
@pytest.mark.parametrize("batch", [(3, 4), (30, 70)])  # the first is below the size of large ones
def test_sequences_may_stand_before_rows_in_memory(bias, update, of_gain, batch):
    source = torch.Generator().manual_seed(0)
    shapes = {"y": (*batch[::-1], OUT), "gain": (OUT,), "bias": (OUT,)}
    shapes |= {"t": (*batch[::-1], RANK), "b": (OUT, RANK)}
    of = {k: torch.randn(shape, generator=source) for k, shape in shapes.items()}
    of["y"], of["t"] = of["y"].transpose(0, 1), of["t"].transpose(0, 1)
    of["gain"] = of_gain * (of["gain"].abs() + 0.5)
    of |= {} if bias else {"bias": None}
    of |= {} if update else {"t": None, "b": None}
    of = {k: v if v is None else v.requires_grad_() for k, v in of.items()}
    out = compose(*of.values(), 0.7)
    expected, wanted = truth(of)
    with torch.no_grad():
        # another product of matrices may be chosen here
        without = compose(*of.values(), 0.7)
    for found in (out, without):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients(out, of), wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


def keeping_y(*values):
    """The operator, which keeps y for the backward."""
    return module._compose(*values, False, None, None)


@pytest.mark.parametrize(("bias", "update"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("least", [None, 1e-3, 1e-30, 0.0])
@pytest.mark.parametrize("mode", ["auto", "reference", "y is kept"])
def test_values_and_gradients_are_those_of_the_formula(bias, update, dtype, least, mode):
    of = operands(dtype, bias, update, torch.float64 if dtype is torch.float64 else torch.float32)
    with torch.no_grad():
        of["gain"][3:4] = of["gain"][3] if least is None else least
    with use("auto" if mode == "y is kept" else mode):
        out = (keeping_y if mode == "y is kept" else compose)(*of.values(), 0.7)
        found = gradients(out, of)
    expected, grads, by_output = compose_cases.truth(
        of["y"], weights(out), *list(of.values())[1:], of["gain"].dtype
    )
    right("value", out, expected, dtype)
    wanted = {k: v for k, v in zip(of, grads, strict=True) if v is not None}
    if least is None or (least == 1e-3 and not bias):
        # the output may be what is kept
        wanted["gain"] = by_output
    for (name, want), got in zip(wanted.items(), found, strict=True):
        right(name, got, want, of[name].dtype)


@pytest.mark.parametrize(("bias", "update"), CASES)
@pytest.mark.parametrize("run", [compose, keeping_y])
@pytest.mark.parametrize("least", [0.5, 0.0])
def test_gradcheck_twice(bias, update, run, least):
    of = operands(torch.float64, bias, update, torch.float64)
    with torch.no_grad():
        of["gain"][3] = least
    given = {k: v for k, v in of.items() if v is not None}

    def from_given(*tensors):
        return run(*{**of, **dict(zip(given, tensors, strict=True))}.values(), 0.7)

    assert torch.autograd.gradcheck(from_given, tuple(given.values()))
    assert torch.autograd.gradgradcheck(from_given, tuple(given.values()))


@pytest.mark.parametrize("least", [1 / 15, 1 / 4, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_small_gain_is_as_exact_as_the_definition(dtype, least):
    source = torch.Generator().manual_seed(0)
    before, bias = 0.1 * torch.randn(64, OUT, generator=source), torch.full((OUT,), 0.5)
    dy = torch.randn(64, OUT, generator=source).to(dtype)
    wanted = (before.double() * dy.double()).sum(0)
    # a layer has rounded its output already
    y, bias = (before + bias).to(dtype), bias.to(dtype)
    errors = {}
    for mode in ("auto", "reference"):
        gain = torch.full((OUT,), least, requires_grad=True)
        with use(mode):
            compose(y.clone().requires_grad_(), gain, bias).backward(dy)
        errors[mode] = (gain.grad - wanted).norm()
    assert errors["auto"] <= 3 * errors["reference"]


@pytest.mark.parametrize(("bias", "update"), CASES)
def test_writing_into_the_output_in_place(bias, update):
    of = operands(torch.float32, bias, update)
    out = compose(*of.values(), 0.7)
    assert not out._is_view()
    out.mul_(2.0)
    with pytest.raises(
        KernelError, match=r"^compose: .*modified by an inplace.*use\('reference'\)"
    ):
        gradients(out, of)
    with use("reference"):
        found = gradients(compose(*of.values(), 0.7).mul_(2.0), of)
    for got, want in zip(found, truth(of)[1], strict=True):
        torch.testing.assert_close(got.double(), 2 * want, rtol=1e-5, atol=1e-5)


def test_the_transforms_of_torch_func():
    of = {k: v.detach() for k, v in operands(torch.float64, wide=torch.float64).items()}
    weights = torch.randn(of["y"].shape, generator=torch.Generator().manual_seed(1)).double()

    def total(*values):
        return (compose(*values, 0.7) * weights).sum()

    found = torch.func.grad(total, tuple(range(len(of))))(*of.values())
    for got, want in zip(found, truth(of)[1], strict=True):
        torch.testing.assert_close(got, want)


def large_ones_kept(of):
    """Addresses of what is kept and has the size of the output, and that of the output."""
    outputs = []
    found = kept(lambda: outputs.append(compose(*of.values(), 0.7)) or outputs[0])
    large = [place for place, nbytes in found.items() if nbytes >= 4 * ROWS * OUT]
    return large, outputs[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("least", [0.5, 1e-3, 0.0])
def test_of_the_large_tensors_only_the_output_is_kept(least):
    of = operands()
    with torch.no_grad():
        of["gain"][3] = least
    large, own = large_ones_kept(of)
    assert large == [own]


def test_a_captured_graph_keeps_y_as_it_cannot_read_the_gain():
    of = operands()
    with (
        mock.patch.object(module.ops, "asks_triton", return_value=True),
        mock.patch.object(module.ops, "is_captured", return_value=True),
    ):
        large, _ = large_ones_kept(of)
    assert large == [of["y"].untyped_storage().data_ptr()]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_repeats_what_is_kept(reentrant):
    of = operands()
    with torch.no_grad():
        of["gain"][3] = 1e-3
    given = [*of.values()]
    out = checkpoint(lambda *v: compose(*v, 0.7), *given, use_reentrant=reentrant)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * weights).sum().backward()
    for found, wanted in zip(given, truth(of)[1], strict=True):
        torch.testing.assert_close(found.grad.double(), wanted, rtol=1e-5, atol=1e-5)


def test_without_gradients_the_bits_are_the_same():
    of = operands()
    with torch.no_grad():
        plain = compose(*of.values(), 0.7)
    assert torch.equal(compose(*of.values(), 0.7), plain)


@pytest.mark.parametrize("mode", ["auto", "reference"])
def test_gain_one_and_update_zero_give_the_bits_of_y(mode):
    of = operands(torch.bfloat16)
    with torch.no_grad(), use(mode):
        of["gain"].fill_(1.0)
        of["b"].zero_()
        assert torch.equal(compose(*of.values(), 0.7), of["y"])


def test_compiled_is_eager():
    of = operands()
    compiled_as_eager(lambda *v: compose(*v, 0.7), [*of.values()], 1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_under_autocast_the_gain_is_not_rounded(bias):
    of = operands(torch.float32, bias)
    plain = compose(*of.values(), 0.7)
    with torch.autocast("cpu", torch.bfloat16):
        cast = compose(*of.values(), 0.7)
        wanted = compose_reference(*of.values(), 0.7)
    assert cast.dtype is torch.float32
    torch.testing.assert_close(cast, plain, rtol=0, atol=0)
    # whose product is in bfloat16
    sizes = 0.7 * of["gain"] * (of["t"].abs() @ of["b"].abs().T)
    near(wanted, plain.double(), rounding(RANK, torch.bfloat16), sizes)


def test_no_rows():
    of = operands()
    of["y"], of["t"] = torch.zeros(0, OUT), torch.zeros(0, RANK, requires_grad=True)
    out = compose(*of.values(), 0.7)
    assert out.shape == (0, OUT)
    out.sum().backward()
    assert of["gain"].grad.tolist() == [0.0] * OUT
