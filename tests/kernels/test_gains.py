"""The smallest gain of a site: when the host waits for it, and when it is forgotten."""

import copy
import io
import pickle
from unittest import mock

import pytest
import torch
from measured import kept, near
from torch.utils.checkpoint import checkpoint

from adapterzoo import kernels
from adapterzoo.kernels import _launch, compose, mode
from adapterzoo.kernels.gains import Arriving, SmallestGain

OUT = 6


@pytest.fixture
def as_cuda(monkeypatch):
    """The decisions of a GPU, on this CPU, where torch operations compute."""
    monkeypatch.setattr(_launch, "INTERPRETED", True)
    monkeypatch.setattr(mode, "takes_triton", lambda *args, **single: False)
    with kernels.use("triton"):
        yield


@pytest.fixture
def waits(monkeypatch):
    """Whether copies arrive by themselves, and how often the host has read one."""
    state = {"there": True, "reads": 0}
    value = Arriving.value

    def counted(self):
        state["reads"] += 1
        return value(self)

    monkeypatch.setattr(Arriving, "is_there", lambda self: state["there"])
    monkeypatch.setattr(Arriving, "value", counted)
    return state


def gain(least):
    values = torch.linspace(1.0, 2.0, OUT)
    values[2] = -least
    return values.requires_grad_()


def test_the_host_waits_once_and_then_reads_what_has_arrived(waits):
    smallest = SmallestGain()
    waits["there"] = False
    # the first call waits; until something arrives, its answer stands
    assert [smallest.of(gain(x)) for x in (0.5, 0.25, 0.125)] == [0.5, 0.5, 0.5]
    assert waits["reads"] == 1
    waits["there"] = True
    # the call of 0.25 had started the copy that has arrived now; this one starts its own
    assert smallest.of(gain(0.0625)) == 0.25
    assert smallest.of(gain(1.0)) == 0.0625
    assert waits["reads"] == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.train(),
        lambda m: m.double(),
        lambda m: m.load_state_dict(m.state_dict()),
        lambda m: m[0].forget(),
    ],
)
def test_it_is_forgotten_when_weights_may_have_been_set(change, waits):
    module = torch.nn.ModuleList([SmallestGain()])
    waits["there"] = False
    module[0].of(gain(0.5))
    change(module)
    assert module[0].of(gain(0.25)) == 0.25


def test_copies_start_empty(waits):
    smallest = SmallestGain()
    waits["there"] = False
    smallest.of(gain(0.5))
    buffer = io.BytesIO()
    torch.save(smallest, buffer)
    buffer.seek(0)
    others = (
        copy.deepcopy(smallest),
        copy.copy(smallest),
        pickle.loads(pickle.dumps(smallest)),
        torch.load(buffer, weights_only=False),
        smallest._replicate_for_data_parallel(),
    )
    assert [other.of(gain(0.25)) for other in others] == [0.25] * 5
    assert smallest.of(gain(0.25)) == 0.5
    assert not smallest.state_dict()


def test_compiled_captured_fake_and_empty_gains_are_unknown():
    smallest = SmallestGain()
    assert smallest.of(torch.empty(0)) is None
    with torch._subclasses.FakeTensorMode():
        assert smallest.of(torch.ones(3)) is None
    for where in ("torch.compiler.is_compiling", "adapterzoo.kernels._launch.is_captured"):
        with mock.patch(where, return_value=True):
            assert smallest.of(torch.ones(3)) is None


def operands(least, bias, dtype=torch.float32):
    source = torch.Generator().manual_seed(0)
    y = torch.randn(5, 4, OUT, generator=source).to(dtype).requires_grad_()
    own = torch.randn(OUT, generator=source).to(dtype).requires_grad_() if bias else None
    t = torch.randn(5, 4, 2, generator=source).to(dtype).requires_grad_()
    b = torch.randn(OUT, 2, generator=source).to(dtype).requires_grad_()
    return y, gain(least), own, t, b


def run(values, smallest):
    return compose.compose(*values, 0.5, smallest)


def is_output_kept(values, smallest):
    outputs = []
    found = kept(lambda: outputs.append(run(values, smallest)) or outputs[0])
    places = [v[0].untyped_storage().data_ptr() for v in (outputs, values)]
    assert sum(place in found for place in places) == 1
    return places[0] in found


def gain_gradient(values, out):
    return torch.autograd.grad((out * out.detach().cos()).sum(), values[1])[0]


def true_gradient(values):
    y, g, bias, t, b = (None if v is None else v.detach().double() for v in values)
    g.requires_grad_()
    own = 0.0 if bias is None else bias
    out = (y + 0.5 * t @ b.T - own) * g + own
    return gain_gradient((y, g), out)


CASES = [
    # has_bias, dtype, smallest gain, whether the output is kept
    (True, torch.float32, 1 / 16, True),
    (True, torch.float32, 1 / 17, False),
    (True, torch.bfloat16, 1 / 2, True),
    (True, torch.bfloat16, 1 / 3, False),
    (True, torch.float16, 1 / 3, False),
    (False, torch.float32, 1e-6, True),
    (False, torch.bfloat16, 1e-6, True),
    (False, torch.float16, 1 / 16, True),
    (False, torch.float16, 1e-3, False),
    (False, torch.float32, 1e-30, False),
    (False, torch.float32, 0.0, False),
]


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize(("bias", "dtype", "least", "of_output"), CASES)
def test_what_is_kept_follows_from_the_smallest_gain(bias, dtype, least, of_output):
    values, smallest = operands(least, bias, dtype), SmallestGain()
    assert is_output_kept(values, smallest) == of_output
    assert not is_output_kept(values, None)
    found, wanted = gain_gradient(values, run(values, smallest)), true_gradient(values)
    near(found, wanted, 16 * torch.finfo(dtype).eps)
    # also of the small one alone, as far as the output's rounding allows
    near(found[2:3], wanted[2:3], 64 * torch.finfo(dtype).eps / min(1.0, least or 1.0) ** bias)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("now", [0.0, 1e-30])
def test_a_gain_that_vanishes_unseen_gives_no_wrong_number(waits, bias, now):
    smallest = SmallestGain()
    run(operands(0.5, bias), smallest)
    waits["there"] = False
    values = operands(now, bias)
    assert is_output_kept(values, smallest)
    found, wanted = gain_gradient(values, run(values, smallest)), true_gradient(values)
    assert not found[2].isfinite()
    near(found[[0, 1, 3, 4, 5]], wanted[[0, 1, 3, 4, 5]], 1e-5)
    waits["there"] = True
    # it has been seen since
    near(gain_gradient(values, run(values, smallest)), wanted, 1e-5)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("steps", [(0.5, 0.01), (0.01, 0.5)])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_repeated_forward_may_decide_otherwise(steps, reentrant):
    """A checkpoint repeats the forward in the backward; by then another gain has arrived."""
    smallest = SmallestGain()
    run(operands(steps[0], True), smallest)
    values = operands(steps[1], True)
    # the forward decides by the earlier gain, the repeated one by its own
    out = checkpoint(lambda *v: run(v, smallest), *values, use_reentrant=reentrant)
    if reentrant:
        out.backward(out.detach().cos())
        found = values[1].grad
    else:
        found = gain_gradient(values, out)
    near(found, true_gradient(values), 1e-5)
