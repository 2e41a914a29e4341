"""Checks of the environment: shapes, dtypes, devices, replicas, modes, compilers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from adapterzoo.configs import AdapterConfig, ConfigUnion
from adapterzoo.contracts import Adapter
from adapterzoo.errors import ConfigError

from ._case import DTYPES, Case, check, distance, fields_of, require, run, same_bits
from ._host import ATTENTION, Host

_SHAPES = ((), (1,), (3,), (0,), (2, 0), (2, 3), (1, 1), (2, 2, 3), (2, 1, 2, 3))


@check()
def any_leading_shape(case: Case) -> None:
    """Any leading dimensions work, none and empty ones too; strides change nothing.

    An adapter that reads the call counts tokens, so it gets only inputs `[rows, tokens, …]`.
    """
    model = case.trained("a")
    counts_tokens = case.kind == ATTENTION or any(
        part.reads_call
        for _, module in model.adapter_modules("a")
        for part in module.modules()
        if isinstance(part, Adapter)
    )
    for batch in _SHAPES:
        if counts_tokens and (len(batch) != 2 or 0 in batch):
            continue
        x = case.input(*batch)
        model.set_active_adapters(None)
        base = run(model, x)
        model.set_active_adapters("a")
        y = run(model, x)
        require(y.shape == base.shape, f"batch {batch}: output {[*y.shape]}, not {[*base.shape]}")
        require(bool(y.isfinite().all()), f"batch {batch}: the output is not finite")
    x = case.input(3, 4)
    whole = run(model, x)
    for i in range(3):
        error = distance(whole[i : i + 1], run(model, x[i : i + 1]))
        require(error <= 1e-5, f"row {i} of a batch differs from the row alone by {error:.3g}")
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    error = distance(whole, run(model, turned))
    require(error <= 1e-5, f"a non-contiguous input gives an output {error:.3g} off")
    wide = x[:1].expand(5, *x.shape[1:])
    error = distance(run(model, wide.contiguous()), run(model, wide))
    require(error <= 1e-5, f"an expanded input gives an output {error:.3g} off")


@check()
def padding_changes_nothing(case: Case) -> None:
    """Padding on either side does not change the outputs of real tokens."""
    model, x = case.trained("a"), case.input(2, 6)
    model.set_active_adapters("a")
    for side, real in (("before", slice(2, 6)), ("behind", slice(0, 4))):
        mask = torch.ones(2, 6, dtype=torch.long, device=case.device)
        mask[1] = 0
        mask[1, real] = 1
        with torch.no_grad():
            padded = model(x, attention_mask=mask)[1:, real]
        error = distance(padded, run(model, x[1:, real]))
        require(error <= 1e-5, f"two tokens of padding {side} a row change it by {error:.3g}")


@check(*DTYPES)
def dtype_follows(case: Case) -> None:
    """Adapted layers return the base model's dtype, finite and close to float64."""
    model, x = case.trained("a"), case.input(2, 5)
    if "dtype" not in fields_of(case.config):
        for _, module in model.adapter_modules("a"):
            for name, parameter in module.named_parameters():
                require(
                    parameter.dtype is case.dtype, f"parameter {name!r} is of {parameter.dtype}"
                )
    for autocast in (False, True):
        if autocast and case.dtype is not torch.float32:
            continue
        with torch.autocast(case.device, torch.bfloat16, enabled=autocast):
            base = _outputs(model, None, x)
            adapted = _outputs(model, "a", x)
        for path, output in adapted.items():
            require(
                output.dtype is base[path].dtype,
                f"{path or 'the model'!r} gives {output.dtype}, without adapter {base[path].dtype}"
                f"{', under autocast' if autocast else ''}",
            )
            require(bool(output.isfinite().all()), f"{path or 'the model'!r}: not finite")
    y = run(model, x)
    exact = copy.deepcopy(model).double()
    truth = run(exact, x.double() if x.is_floating_point() else x)
    error = distance(y, truth)
    allowed = 64 * torch.finfo(case.dtype).eps * max(1.0, truth.abs().max().item())
    require(error <= allowed, f"{error:.3g} from float64, {allowed:.3g} is allowed")


@check(*DTYPES)
def device_follows(case: Case) -> None:
    """A model built on the meta device or moved there gives shapes and dtypes."""
    expected = run(case.host(), case.input(2, 5))
    born = Case(case.config, case.kind, case.dtype, "meta").host("a")
    moved = case.host("a").to("meta")
    for how, model in (("born", born), ("moved", moved)):
        for name, tensor in model.state_dict().items():
            require(tensor.is_meta, f"{how} on meta: {name!r} is on {tensor.device}")
        model.set_active_adapters("a")
        try:
            y = run(model, case.input(2, 5).to("meta"))
        except RuntimeError as error:
            require(False, f"{how} on meta: the forward meets another device: {error}")
        require(y.is_meta, f"{how} on meta: the output is on {y.device}")
        require(
            y.shape == expected.shape and y.dtype is expected.dtype,
            f"{how} on meta: the output is {y.dtype} {[*y.shape]}",
        )
    there = case.trained("a")
    for name, tensor in there.state_dict().items():
        require(tensor.device.type == case.device, f"{name!r} is on {tensor.device}")


@check()
def replicas_work(case: Case) -> None:
    """A replica as DataParallel makes it computes the same, and its gradients reach the model."""
    model, x = case.trained("a"), case.input(4, 6)
    model.train_adapter("a")
    model.eval()
    y = model(x)
    y.square().sum().backward()
    mine = [p for _, m in model.adapter_modules("a") for p in m.parameters()]
    expected = [None if p.grad is None else p.grad.clone() for p in mine]
    model.zero_grad()
    replica = _replica(model)
    again = replica(x)
    require(same_bits(y, again), f"a replica's output is {distance(y, again):.3g} off")
    again.square().sum().backward()
    for parameter, grad in zip(mine, expected, strict=True):
        require(_agree(parameter.grad, grad), "another gradient comes back from a replica")


@check()
def modes_reach_dropout(case: Case) -> None:
    """`eval()` is deterministic and equals training without dropout; in training, dropout acts."""
    x = case.input(4, 6)
    model, config = _trained_in_mode(case, 0.0)
    expected = run(model.eval(), x)
    trained = run(model.train(), x)
    require(same_bits(expected, trained), "without dropout, training and evaluation differ")
    if not _random_fields(config):
        return
    try:
        model, _ = _trained_in_mode(case, 0.5)
    except ConfigError:
        # token numbers cannot be dropped
        return
    for _ in range(2):
        require(same_bits(expected, run(model.eval(), x)), "dropout acts in evaluation")
    model.train()
    for _, module in model.adapter_modules("a"):
        require(all(m.training for m in module.modules()), "train() does not reach a module")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        first = run(model, x)
        second = run(model, x)
    require(not torch.equal(first, second), "dropout does not act in training")


@check()
def gradient_checkpointing(case: Case) -> None:
    """Both variants of checkpointing give the gradients of a run without it."""
    variants = (None, False, True) if case.kind != "embedding" else (None, False)
    found: list[list[Tensor | None]] = []
    for variant in variants:
        model, x = case.trained("a"), case.input(2, 5)
        model.train_adapter("a")
        model.eval()
        model.reentrant = variant
        if x.is_floating_point():
            x.requires_grad_()
        model(x).square().sum().backward()
        found.append([p.grad for _, m in model.adapter_modules("a") for p in m.parameters()])
    for variant, grads in zip(variants[1:], found[1:], strict=True):
        agree = all(map(_agree, grads, found[0]))
        require(agree, f"use_reentrant={variant}: a gradient is lost or another one")


@check(kinds=("linear", "conv1d"))
def compiles(case: Case) -> None:
    """`torch.compile(fullgraph=True)` gives the eager output, also after switching adapters."""
    model, x = case.trained("a", "b"), case.input(2, 5)
    torch.compiler.reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(model, backend="eager", fullgraph=True)
    try:
        for setup in ("a", None, "b", "a"):
            model.set_active_adapters(setup)
            expected = run(model, x)
            with torch.no_grad():
                error = distance(expected, compiled(x))
            require(error <= 1e-5, f"compiled with {setup!r} active: {error:.3g} off")
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        require(False, f"does not compile in one graph: {str(error).strip().splitlines()[0]}")
    finally:
        torch.compiler.reset()


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return distance(one, other) <= 1e-5


def _outputs(model: Host, setup: object, x: Tensor) -> dict[str, Tensor]:
    """Return the output of the model and of every layer that 'a' adapts."""
    found: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: object, out: Any) -> None:
            found[path] = out[0] if isinstance(out, tuple) else out

        return hook

    paths = [path for path, _ in model.adapter_modules("a")]
    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    model.set_active_adapters(setup)
    try:
        found[""] = run(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _replica(model: Host) -> Host:
    """Return a shallow copy with tensors as parameters, like `torch.nn.parallel.replicate`."""
    copies: dict[nn.Module, Any] = {
        module: cast("Any", module)._replicate_for_data_parallel() for module in model.modules()
    }
    for module, made in copies.items():
        for name, child in module._modules.items():
            made._modules[name] = None if child is None else copies[child]
        for name, parameter in module._parameters.items():
            if parameter is None:
                made._parameters[name] = None
            else:
                setattr(made, name, parameter.clone())
        for name, buffer in module._buffers.items():
            made._buffers[name] = None if buffer is None else buffer.clone()
    return cast("Host", copies[model])


def _random_fields(config: AdapterConfig) -> set[str]:
    return {f for f in fields_of(config) if f.endswith("dropout") or f == "stochastic_depth"}


def _with_probability(config: AdapterConfig, p: float) -> AdapterConfig:
    if isinstance(config, ConfigUnion):
        return ConfigUnion(*(_with_probability(member, p) for member in config.configs))
    return config.replace(**dict.fromkeys(_random_fields(config), p))


def _trained_in_mode(case: Case, p: float) -> tuple[Host, AdapterConfig]:
    config = _with_probability(case.config, p)
    model = case.trained("a", config=config)
    model.set_active_adapters("a")
    return model, config
