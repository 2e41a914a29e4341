"""Where kernels run: one helper launches them, on the device of their operands; and the modes."""

import ast
import contextlib
import functools
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import adapterzoo
from adapterzoo import kernels
from adapterzoo.errors import KernelError
from adapterzoo.kernels import (
    bottleneck_triton,
    butterfly_triton,
    cayley_fold_triton,
    compose_triton,
    grouped_triton,
    low_rank_triton,
    ops,
    row_norm_triton,
    tiles_triton,
)
from adapterzoo.kernels.grouped import Groups

PACKAGE = Path(adapterzoo.__file__).parent
MODULES = (
    low_rank_triton,
    compose_triton,
    row_norm_triton,
    butterfly_triton,
    cayley_fold_triton,
    bottleneck_triton,
    grouped_triton,
)


def launches(source):
    """Lines that launch: `name[grid](…)` on a name that ends as kernels do, `.run`, `.warmup`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Subscript):
            name = ast.unparse(called.value)
            typed = name in ("dict", "tuple")
            grid = isinstance(called.slice, ast.Tuple) and not typed
            if name.rpartition(".")[2].endswith("kernel") or grid:
                found.append(node.lineno)
        elif isinstance(called, ast.Attribute) and any(k.arg == "grid" for k in node.keywords):
            found.append(node.lineno)
    return found


def test_only_the_helper_launches():
    files = {str(p.relative_to(PACKAGE)): launches(p.read_text()) for p in PACKAGE.rglob("*.py")}
    assert {path for path, lines in files.items() if lines} == {"kernels/ops.py"}


@pytest.mark.parametrize(
    "line", ["shrink_kernel[grid](x)", "k.kernel[(1,)](x)", "f[1, 2](x)", "f.run(x, grid=(1,))"]
)
def test_the_lint_bites(line):
    assert launches(line) == [1]
    assert launches("table[key](x); LAYOUTS[name](site); dict[str, None]()") == []


def kernels_of(*modules):
    """Every kernel of these modules by name, also under the names that they import."""
    return [(m, name) for m in modules for name in sorted(vars(m)) if name.endswith("_kernel")]


def test_every_module_of_kernels_is_recorded():
    files = {path.stem for path in (PACKAGE / "kernels").glob("*_triton.py")} - {"tiles_triton"}
    assert files == {module.__name__.rpartition(".")[2] for module in MODULES}
    assert len({name for _, name in kernels_of(*MODULES)}) == 10


class Recorder:
    """In place of a kernel: notes under which device it was launched, and checks its operands."""

    def __init__(self, kernel, current, log):
        self.fn, self.arg_names = kernel.fn, kernel.arg_names
        self._current, self._log = current, log

    def __getitem__(self, grid):
        assert all(n > 0 for n in grid)

        def run(*operands, **constants):
            devices = {str(t.device) for t in operands if isinstance(t, torch.Tensor)}
            assert devices == {self._current[-1]}, f"{devices} launched on {self._current[-1]}"
            self._log.append(f"{self.fn.__name__} on {self._current[-1]}")
            self.constants = constants

        return run


@pytest.fixture
def recorded():
    """Launches on pretend CUDA devices, of which the current one is always cuda:0."""
    current, log = ["cuda:0"], []

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(str(tensor.device))
        yield
        current.pop()

    with contextlib.ExitStack() as stack:
        for module, name in kernels_of(*MODULES):
            recorder = Recorder(getattr(module, name), current, log)
            stack.enter_context(mock.patch.object(module, name, recorder))
        stack.enter_context(mock.patch.object(torch.cuda, "device_of", device_of))
        stack.enter_context(mock.patch.object(ops, "_capability", return_value=(9, 0)))
        stack.enter_context(mock.patch.object(tiles_triton, "shared_memory", return_value=232_448))
        stack.enter_context(FakeTensorMode())
        yield log


def low_rank(empty, rows):
    x, y, a, b = empty(rows, 40), empty(rows, 24), empty(8, 40), empty(24, 8)
    seed = empty(1, dtype=torch.int64)
    t = low_rank_triton.shrink(x, a, 0.1, seed)
    out = low_rank_triton.expand(y, t, b, 0.5)
    grads = low_rank_triton.expand_backward(out, t, b, 0.5)
    grads += low_rank_triton.shrink_backward(grads[0], x, a, 0.1, seed)
    # of no rows too there are gradients of the factors, and they are written
    names = ["shrink", "compose", "compose_backward", "finish", "compose", "outer"]
    return {t: (rows, 8), out: y.shape}, grads, (t, b, x, a), names if rows else ["finish", "outer"]


def of_dora(empty, rows):
    y, t, w = empty(rows, 40), empty(rows, 8), empty(rows, 30)
    gain, b, a = empty(40), empty(40, 8), empty(8, 30)
    out = compose_triton.compose(y, gain, gain, t, b, 0.5)
    grads = compose_triton.compose_backward(out, y, gain, gain, t, b, 0.5, False, *[True] * 5)
    norm = row_norm_triton.row_norm(w, a, empty(rows, 8), 0.5)
    # a aᵀ has rows of its own
    names = ["compose", "compose_backward", "finish", "shrink", "row_norm"]
    names = names if rows else ["finish", "shrink"]
    return {out: y.shape, norm: (rows,)}, grads, (y, gain, gain, t, b), names


def of_boft(empty, rows):
    # in float32 it is torch's
    x, blocks = empty(rows, 48, dtype=torch.float16), empty(3, 16, 16)
    y = butterfly_triton.rotate(x, blocks)
    grads = butterfly_triton.rotate_backward(y, x, blocks)
    # of no rows too there is a gradient of the blocks, and it is written
    return {y: x.shape}, grads, (x, blocks), ["rotate", "rotate"]


def of_rotations(empty, rows):
    R, dropped = empty(rows, 2, 6, 4, 4), empty(rows, 2, 6, dtype=torch.bool)
    whole, Q = cayley_fold_triton.cayley_fold(R, dropped)
    grads = (cayley_fold_triton.cayley_fold_backward(whole, whole, Q, dropped),)
    names = ["cayley_fold", "cayley_fold_backward"] if rows else []
    return {whole: (rows, 3, 8, 8), Q: R.shape}, grads, (R,), names


def of_bottlenecks(empty, rows, same=False):
    x, to, down, up = empty(rows, 40), empty(rows, 40), empty(8, 40), empty(40, 8)
    biases = empty(8), empty(40)
    given = (None if same else x, down, biases[0], up, biases[1], 0.5, "relu", True)
    out, h = bottleneck_triton.bottleneck(to, *given)
    grads = bottleneck_triton.bottleneck_backward(out, x, h, down, up, 0.5, "relu", same)
    names = ["bottleneck", "compose_backward", "finish", *["compose"] * same]
    likes = (x, down, biases[0], up, biases[1])
    return {out: to.shape, h: (rows, 8)}, grads, likes, names if rows else ["finish"]


def of_bottlenecks_that_read_what_they_add_to(empty, rows):
    return of_bottlenecks(empty, rows, same=True)


def of_mixed_batches(empty, rows):
    x, y, a, b = empty(rows, 2, 40), empty(rows, 2, 24), empty(3, 8, 40), empty(3, 24, 8)
    seed = empty(1, dtype=torch.int64)
    groups = Groups.of([i % 4 - 1 for i in range(rows)])
    plan = groups.plan(2, 3, x.device)
    scales = groups.scales((0.5, 1.0, 2.0), x.device, torch.float32)
    t = grouped_triton.shrink(x, a, 0.1, seed, plan)
    out = grouped_triton.expand(y, t, b, scales, plan)
    grads = grouped_triton.expand_backward(out, t, b, scales, plan)
    grads += grouped_triton.shrink_backward(grads[0], x, a, 0.1, seed, plan)
    # of no rows too there are gradients of the factors, and they are written
    names = ["shrink", "compose", "shrink", "outer", "compose", "outer"] if rows else ["outer"] * 2
    return {t: (rows, 2, 8), out: y.shape, plan: plan.shape}, grads, (t, b, x, a), names


@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
@pytest.mark.parametrize("rows", [0, 5, 300])
@pytest.mark.parametrize(
    "run",
    [low_rank, of_dora, of_boft, of_rotations, of_bottlenecks,
     of_bottlenecks_that_read_what_they_add_to, of_mixed_batches],
)  # fmt: skip
def test_every_kernel_runs_on_the_device_of_its_operands(recorded, run, device, rows):
    made, grads, likes, names = run(functools.partial(torch.empty, device=device), rows)
    for tensor, shape in made.items():
        assert tensor.shape == shape
    assert [g.shape for g in grads] == [v.shape for v in likes]
    assert {str(v.device) for v in (*made, *grads)} == {device}
    # a grid without programs is an error of CUDA
    assert recorded == [f"{name}_kernel on {device}" for name in names]


class Largest(TorchDispatchMode):
    """Notes the most bytes that a result has."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("rank", [16, 64, 384])
def test_a_backward_needs_no_more_memory_than_two_of_its_inputs(recorded, rank, p):
    of = functools.partial(torch.empty, device="cuda:0", dtype=torch.bfloat16)
    x, a, dt = of(8192, 14336), of(rank, 14336), of(8192, rank)
    seed = torch.empty(1, dtype=torch.int64, device="cuda:0") if p else None
    with Largest() as seen:
        low_rank_triton.shrink_backward(dt, x, a, p, seed)
    assert seen.bytes <= 2 * x.nbytes


def test_tiles_follow_the_shared_memory_of_the_device(recorded):
    half = functools.partial(torch.empty, device="cuda:0", dtype=torch.float16)
    x, blocks, a = half(300, 256), half(2, 128, 128), half(8, 256)
    warps = []
    for limit, kernels_run in ((232_448, 2), (101_376, 1)):
        recorded.clear()
        with mock.patch.object(tiles_triton, "shared_memory", return_value=limit):
            assert butterfly_triton.rotate_backward(x, x, blocks)[0].shape == x.shape
            low_rank_triton.shrink(x, a, 0.0, None)
        # sums of 128 × 128 features spill there: a product for torch
        assert len(recorded) == kernels_run
        warps.append(low_rank_triton.shrink_kernel.constants["num_warps"])
    assert warps == [4, 8]


def test_a_launch_without_the_guard_is_seen(recorded):
    x = torch.empty(3, 4, device="cuda:1")
    with pytest.raises(AssertionError, match="launched on cuda:0"):
        low_rank_triton.shrink_kernel[(1,)](x)


def test_rotations_in_float32_are_those_of_torch(recorded):
    x, blocks = torch.empty(300, 48, device="cuda:0"), torch.empty(3, 16, 16, device="cuda:0")
    with mock.patch.object(butterfly_triton, "butterfly") as operations:
        y = butterfly_triton.rotate(x, blocks)
        grads = butterfly_triton.rotate_backward(x, x, blocks, True, False)
    assert y is operations.rotate.return_value
    operations.rotate.assert_called_once_with(x, blocks)
    assert grads is operations.rotate_backward.return_value
    operations.rotate_backward.assert_called_once_with(x, x, blocks, True, False)
    assert recorded == []


def test_operands_on_two_devices_are_named(recorded):
    x, a = torch.empty(5, 40, device="cuda:1"), torch.empty(8, 40, device="cuda:0")
    with pytest.raises(KernelError, match=r"shrink_kernel: .*'x on cuda:1', 'a on cuda:0'.*\.to"):
        low_rank_triton.shrink(x, a, 0.0, None)
    assert recorded == []


def test_nothing_runs_without_triton_or_on_an_old_gpu():
    with mock.patch.object(ops, "INSTALLED", False):
        assert ops.obstacle(torch.ones(1)) == "triton is not installed"
    with FakeTensorMode(), mock.patch.object(ops, "_capability", return_value=(7, 5)):
        reason = ops.obstacle(torch.empty(1, device="cuda:0"))
    assert reason == "cuda:0 is older than compute capability 8.0"


def test_a_compiler_takes_the_capability_without_a_warning():
    with mock.patch.object(ops, "_read_capability", return_value=(9, 0)):
        assert ops._capability(torch.device("cuda:0")) == (9, 0)
        run = torch.compile(
            lambda x: x * ops._capability(x.device)[0], backend="eager", fullgraph=True
        )
        assert run(torch.ones(1)).item() == 9
    torch._dynamo.reset()


def test_torch_computes_on_amd_gpus():
    with (
        FakeTensorMode(),
        mock.patch.object(ops, "ROCM", True),
        mock.patch.object(ops, "_capability", return_value=(9, 4)),
    ):
        x = torch.empty(2, 8, dtype=torch.bfloat16, device="cuda:0")
        assert ops.obstacle(x) == (
            "cuda:0 is an AMD GPU, on which the kernels have not been tested"
        )
        assert not ops.takes_triton("shrink", x)
        # the same operations as on any other device
        assert ops.is_plain(x)
        with (
            mock.patch.object(ops, "_mode", "triton"),
            pytest.raises(KernelError, match=r"shrink: cuda:0 is an AMD GPU.*use\('auto'\)"),
        ):
            ops.takes_triton("shrink", x)


def test_a_mode_holds_until_its_block_ends():
    with kernels.use("reference"):
        assert ops.is_reference()
        with kernels.use("auto"):
            assert not ops.is_reference()
        assert ops.is_reference()
    assert not ops.is_reference()
    with pytest.raises(ZeroDivisionError), kernels.use("reference"):
        raise ZeroDivisionError
    assert not ops.is_reference()
    try:
        kernels.use("reference")
        assert ops.is_reference()
    finally:
        kernels.use("auto")
    assert not ops.is_reference()


def test_other_modes_are_refused():
    with pytest.raises(KernelError, match=r"use\('cuda'\).*'auto', 'reference', 'triton'"):
        kernels.use("cuda")
    assert not ops.is_reference()


def test_auto_takes_triton_on_cuda_for_the_dtypes_it_knows():
    with FakeTensorMode(), mock.patch.object(ops, "_capability", return_value=(9, 0)):
        half = torch.empty(2, dtype=torch.bfloat16, device="cuda:0")
        assert ops.takes_triton("shrink", half, half.float())
        assert not ops.takes_triton("shrink", half, half.double())
        assert not ops.takes_triton("shrink", torch.empty(2))
        with kernels.use("reference"):
            assert not ops.takes_triton("shrink", half)
        assert not ops.takes_triton("shrink", half.float(), half.float())
        assert ops.takes_triton("row_norm", half.float(), half.float(), single=True)
        with mock.patch.object(ops, "_mode", "triton"):
            with pytest.raises(KernelError, match=r"shrink: it leaves .* float32 to torch"):
                ops.takes_triton("shrink", half.float(), half.float())
            with pytest.raises(KernelError, match=r"shrink: it does not compute in torch\.float64"):
                ops.takes_triton("shrink", half, half.double())
            with pytest.raises(KernelError, match="operands are on cpu"):
                ops.takes_triton("shrink", torch.empty(2))


def test_triton_is_not_imported_before_it_is_needed():
    code = (
        "import sys, adapterzoo; assert not {'torch', 'triton'} & set(sys.modules);"
        "import torch; before = 'triton' in sys.modules; import adapterzoo.kernels.low_rank;"
        "assert before or 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
