"""Every way that a model runs, as a function that takes a method and a dtype and raises.

A cell is a method, a dtype and a mode; `cells` runs all cells of a mode. Each builds the same tiny
BERT with two adapters and two classification heads, all in the dtype, trains one adapter for one
step of SGD, and requires of the step whatever `device_steps.require_same` lists.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from device_steps import (
    DTYPES,
    HALVES,
    METHODS,
    RATE,
    UNITS,
    Step,
    batch,
    build,
    is_trained,
    part,
    require,
    require_same,
    subject,
    train,
    truth,
)
from pretend_gpus import DEVICES, pretend_gpus, replicas_on_cpu, replicate_module
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

GREEN = "✓"
# the sign of a note under the table
ONE_DTYPE = "¹"

Cells = dict[str, str]
"""Method and dtype, as in "lora float16", to `GREEN` and maybe the sign of a note, or an error."""


def cells(
    mode: Callable[..., str | None],
    methods: Iterable[str] = METHODS,
    dtypes: Iterable[torch.dtype] = DTYPES,
    **given: Any,
) -> Cells:
    """Run a mode for methods in dtypes.

    Args:
        mode: raises for a cell that is wrong; returns the sign of a note, or nothing.
        methods: names of configs.
        dtypes: of the models.
        given: more arguments of the mode.
    """
    found: Cells = {}
    for method in methods:
        for dtype in dtypes:
            try:
                text = GREEN + (mode(method, dtype, **given) or "")
            except Exception as error:  # noqa: BLE001  every failure is a cell of the table
                text = f"{type(error).__name__}: {error}"[:400]
            found[f"{method} {str(dtype).removeprefix('torch.')}"] = text
    return found


def eager(method: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Against float64; float64 itself against central differences."""
    found = train(subject(method, dtype, device), batch(device))
    require_same(found, truth(method, dtype, device), dtype, UNITS[dtype], dtype)
    if dtype == torch.float64:
        _require_slopes(method, device)


def _require_slopes(method: str, device: str) -> None:
    """Gradients agree with central differences of the loss, one random direction a parameter."""
    model, inputs = subject(method, torch.float64, device), batch(device)
    model(**inputs).loss.backward()
    source, step = torch.Generator().manual_seed(2), 1e-6
    exact = METHODS[method].gradients_are_exact
    for name, parameter in model.named_parameters():
        # a method that holds a part of its formula constant differs by design
        if parameter.grad is None or not (exact or name.startswith("heads.")):
            continue
        drawn = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        direction = drawn.to(device)
        losses = []
        with torch.no_grad():
            for shift in (step, -2 * step):
                parameter.add_(direction, alpha=shift)
                losses.append(model(**inputs).loss.item())
            parameter.add_(direction, alpha=step)
        slope = (losses[0] - losses[1]) / (2 * step)
        error = abs(slope - (parameter.grad * direction).sum().item())
        require(error <= 1e-7 * max(1.0, abs(slope)), f"{name}: the slope is off by {error:.3g}")


def autocast(method: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Under autocast to either half, or to its own where the model is of one, against float64.

    float64 is what autocast leaves alone: there the result must be that of float64.
    """
    for to in (dtype,) if dtype in HALVES else HALVES:
        model = subject(method, dtype, device)

        def call(model: Any = model, to: torch.dtype = to, **inputs: Tensor) -> Any:
            with torch.autocast(device, to):
                return model(**inputs)

        unit = dtype if dtype == torch.float64 else to
        found = train(model, batch(device), call)
        require_same(found, truth(method, dtype, device), unit, UNITS[unit], unit)
        for name, gradient in found.gradients.items():
            own = model.get_parameter(name).dtype
            require(gradient.dtype == own, f"{name}: a gradient in {gradient.dtype}")


def compiled(method: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """A block compiled without a break, against eager, and no second graph after the step."""
    expected = train(build(method, dtype, device, layers=1), batch(device))
    model = subject(method, dtype, device, layers=1)
    graphs = 0

    def count(graph: Any, example_inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return aot_eager(graph, example_inputs)

    torch._dynamo.reset()
    model.bert.encoder.layer[0].compile(fullgraph=True, backend=count)
    with warnings.catch_warnings():
        # what enters the block may need a gradient; torch hides the warning that it causes itself,
        # but not from filters that make it an error
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        found = train(model, batch(device))
    torch._dynamo.reset()
    require(graphs == 1, f"{graphs} graphs were compiled for one block and one selection")
    require_same(found, expected, dtype, UNITS[dtype], dtype)


def checkpointed(method: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Gradient checkpointing of both kinds, with dropout, against none: equal bits."""

    def step(reentrant: bool | None) -> tuple[Step, int]:
        model = subject(method, dtype, device).train()
        if reentrant is not None:
            model.activation_checkpointing_enable({"use_reentrant": reentrant})
        calls = 0

        def count(*_: object) -> None:
            nonlocal calls
            calls += 1

        model.bert.encoder.layer[0].attention.register_forward_pre_hook(count)

        def call(**inputs: Tensor) -> Any:
            # the same dropout in each run
            torch.manual_seed(3)
            return model(**inputs)

        with torch.random.fork_rng(range(torch.cuda.device_count())):
            return train(model, batch(device), call), calls

    expected, plain = step(None)
    for reentrant in (True, False):
        found, calls = step(reentrant)
        require(calls == plain + 1, f"{calls - plain} of 1 block ran again in the backward pass")
        require_same(found, expected, dtype, 0, dtype)


def ddp(method: str, dtype: torch.dtype, rank: int, world: int) -> None:
    """Each process has a part of the batch: gradients of the whole, against float64."""
    model = subject(method, dtype)
    found = train(model, part(batch(), rank, world), DistributedDataParallel(model))
    expected = truth(method, dtype).of_part(rank, world)
    require_same(found, expected, dtype, UNITS[dtype], dtype)


def fsdp2(method: str, dtype: torch.dtype, rank: int, world: int) -> str:
    """As `ddp`, with every parameter split over the processes."""
    model, changes = subject(method, dtype), {}
    if len({p.dtype for _, m in model.adapter_modules("a") for p in m.parameters()}) > 1:
        changes["dtype"] = "float32"
        model = subject(method, dtype, **changes)
    keys, mesh = list(model.state_dict()), init_device_mesh("cpu", (world,))
    for block in (*model.bert.encoder.layer, model):
        fully_shard(block, mesh=mesh)
    require(list(model.state_dict()) == keys, "sharding renames keys")
    split = all(isinstance(parameter, DTensor) for parameter in model.parameters())
    require(split, "a parameter is not sharded")
    found = train(model, part(batch(), rank, world))
    expected = truth(method, dtype, **changes).of_part(rank, world)
    require_same(found, expected, dtype, UNITS[dtype], dtype)
    return ONE_DTYPE if changes else ""


def replica(method: str, dtype: torch.dtype) -> None:
    """Replicas as DataParallel makes them: their numbers on the CPU, then two pretend GPUs."""
    model = subject(method, dtype, layers=1)

    def parallel(**inputs: Tensor) -> Any:
        replicas = replicas_on_cpu(model)
        outs = [r(**part(inputs, i, 2)) for i, r in enumerate(replicas)]
        loss = torch.stack([out.loss for out in outs]).mean()
        return SimpleNamespace(loss=loss, logits=torch.cat([out.logits for out in outs]))

    found = train(model, batch(), parallel)
    require_same(found, truth(method, dtype, layers=1), dtype, UNITS[dtype], dtype)
    # made before: some initial values look at what they draw
    model = subject(method, dtype, layers=1)
    with pretend_gpus():
        _on_pretend_gpus(model, dtype)


def _on_pretend_gpus(model: Any, dtype: torch.dtype) -> None:
    """Forward, backward and a step of both replicas: an operand on another device raises.

    Args:
        model: on the CPU.
        dtype: of the logits.
    """
    for module in model.modules():
        own = module._parameters
        for tensors in (own, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    trained = tensor.requires_grad
                    tensors[key] = nn.Parameter(fake, trained) if tensors is own else fake
    model.to(DEVICES[0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    for device, copied in zip(DEVICES, replicate_module.replicate(model, DEVICES), strict=True):
        inputs = {k: torch.ones(v.shape, dtype=v.dtype, device=device) for k, v in batch().items()}
        out = copied(**inputs)
        place = (str(out.logits.device), out.logits.dtype)
        require(place == (device, dtype), f"the logits of the replica on {device} are {place}")
        out.loss.backward()
    for name, parameter in model.named_parameters():
        require(str(parameter.device) == DEVICES[0], f"{name} is on {parameter.device}")
        like = None if parameter.grad is None else (parameter.grad.device, parameter.grad.dtype)
        wanted = (parameter.device, parameter.dtype) if is_trained(name) else None
        require(like == wanted, f"{name}: the gradient is {like}, not {wanted}")
    optimizer.step()


HERE: dict[str, Callable[..., None]] = {
    "eager": eager,
    "autocast": autocast,
    "compiled": compiled,
    "checkpointed": checkpointed,
}
"""The modes of one process; they run on any device that computes."""
