"""Checks of what an adapter computes: initial values, gradients, merged weights and stacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adapterzoo.composition import BatchSplit, Stack
from adapterzoo.configs import AdapterConfig
from adapterzoo.contracts import WeightAdapter
from adapterzoo.errors import AdapterZooError, CompositionError, StateError

from ._case import DTYPES, Case, bits, check, distance, fields_of, like, require, run, same_bits
from ._host import ATTENTION, Host


@check(*DTYPES)
def identity_at_birth(case: Case) -> None:
    """A fresh adapter keeps the output bit for bit where the config says so, else changes it.

    In half precision a small change may be lost in rounding.
    """
    model = case.host("a")
    for layout, x in _layouts(case.input(4, 6)).items():
        model.set_active_adapters(None)
        with _Products() as plain:
            base = run(model, x)
        model.set_active_adapters("a")
        with _Products() as products:
            adapted = run(model, x)
        if not case.fitted().starts_as_identity:
            require(
                not torch.equal(adapted, base) or case.dtype.itemsize < 4,
                "a fresh adapter changes nothing, but starts_as_identity is False",
            )
            return
        require(
            # −0 and 0 are equal: a sum with zero turns one into the other
            adapted.dtype == base.dtype and torch.equal(adapted, base),
            f"a fresh adapter changes the output by {distance(adapted, base):.3g}, but "
            f"starts_as_identity is True{layout}",
        )
        missing = plain.seen - products.seen
        require(
            not missing,
            f"a fresh adapter computes {next(iter(missing), '')} in another way, which rounds "
            f"differently on some processors{layout}",
        )


def _layouts(x: Tensor) -> dict[str, Tensor]:
    """Return an input `[rows, tokens, ...]` with the strides that models give it."""
    if not isinstance(x, Tensor):
        return {"": x}
    layouts = {
        "sequences before rows": x.transpose(0, 1).contiguous().transpose(0, 1),
        "features before tokens": x.mT.contiguous().mT,
        "one row for all": x[:1].expand(x.shape),
        "a slice of wider features": torch.cat([x, x], -1)[..., : x.shape[-1]],
        "every second token": torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
    }
    return {"": x} | {f"; the input is in memory as {name}": x for name, x in layouts.items()}


class _Products(TorchDispatchMode):
    """Count the matrix products of a forward by operation, shapes and strides.

    Equal bits on one processor do not show that two forwards are the same computation. Two
    products of the same operation on the same shapes and strides are, on every processor.
    """

    _NAMES = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "convolution"})

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self._NAMES:
            operands = [
                f"{[*t.shape]} strides {[*t.stride()]}" for t in args if isinstance(t, Tensor)
            ]
            self.seen[f"{name}({', '.join(operands)})"] += 1
        return func(*args, **(kwargs or {}))


@check()
def initial_values(case: Case) -> None:
    """Initial values depend only on a seed: not on dtype, default device or order."""
    config = case.fitted()
    if "init_weights_seed" in fields_of(config):
        seeded = config.replace(init_weights_seed=3)
        first = _born(case, seeded, global_seed=1)
        _require_equal(first, _born(case, seeded, global_seed=2), "after other random draws")
        _require_equal(first, _born(case, seeded, before=seeded), "when added second")
        _require_apart(first)
        other = _born(case, config.replace(init_weights_seed=0), global_seed=1)
        _require_seed_matters(first, other)
        config = seeded
    plain = case.fitted()
    first = _born(case, plain)
    _require_equal(first, _born(case, plain), "a second time with the same torch.manual_seed")
    for chosen in (plain, config):
        first = _born(case, chosen)
        with torch.device("meta"):
            _require_equal(first, _born(case, chosen), "under torch.device('meta')")
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            _require_equal(first, _born(case, chosen), "under another default dtype")
        finally:
            torch.set_default_dtype(default)
        for dtype in DTYPES:
            there = _born(Case(case.config, case.kind, dtype, case.device), chosen)
            for key, value in first.items():
                # a value may be computed from the base's weights, in its dtype
                near = 4 * torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).eps
                error = distance(value, there[key])
                bound = near * max(1.0, value.abs().max().item())
                require(error <= bound, f"{key!r} differs by {error:.3g} in a {dtype} model")


@check()
def gradients(case: Case) -> None:
    """`train_adapter` sends a gradient to every parameter of the adapter and to no other."""
    model, x = case.trained("a", "b"), case.input(4, 6)
    model.train_adapter("a")
    model.eval()
    silent = case.silent(model)
    modules = list(model.adapter_modules("a"))
    mine = {id(p) for _, m in modules for p in m.parameters()}
    unheard = {id(p) for path, m in modules if path in silent for p in m.parameters()}
    # what the layers of one location share, such as those of a tower that is not called
    for name, shared in (pair for path, m in modules if not path for pair in m.named_modules()):
        if f"/{name.rpartition('.')[2]}" in silent:
            unheard |= {id(p) for p in shared.parameters()}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    y = model(x)
    (y * like(y)).sum().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if id(parameter) not in mine:
            require(grad is None, f"{name!r} is not of the adapter and has a gradient")
            continue
        if id(parameter) in unheard:
            continue
        require(grad is not None, f"{name!r} gets no gradient")
        if grad is not None:
            require(bool(grad.isfinite().all()), f"{name!r} gets a gradient that is not finite")
            require(bool(grad.count_nonzero()), f"{name!r} gets a gradient of zeros")
    # its step is as large for small gradients, which the last bit would swallow
    torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1, eps=1e-30).step()
    for name, parameter in model.named_parameters():
        if id(parameter) in unheard:
            continue
        changed = not same_bits(before[name], parameter)
        require(
            changed == (id(parameter) in mine),
            f"{name!r} has {'' if changed else 'not '}changed in an optimizer step",
        )


@check(torch.float64)
def gradcheck(case: Case) -> None:
    """Gradients of input and parameters agree with central differences, in float64.

    If `gradients_are_exact` is False, those of some parameters must differ.
    """
    model, x = case.trained("a"), case.input(2, 3)
    model.set_active_adapters("a")
    model.requires_grad_(False)
    places: dict[str, Tensor] = {
        f"{path}/{key}": parameter
        for path, module in model.adapter_modules("a")
        for key, parameter in module.named_parameters()
    }
    if x.is_floating_point():
        places["the input"] = x
    for tensor in places.values():
        tensor.requires_grad_()
    weights = like(run(model, x))
    (model(x) * weights).sum().backward()
    step = 1e-6
    wrong: dict[str, str] = {}
    for seed, (key, tensor) in enumerate(places.items()):
        direction = like(tensor, seed)
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                tensor.add_(direction, alpha=sign * step)
            values.append((run(model, x) * weights).sum().item())
            with torch.no_grad():
                tensor.add_(direction, alpha=-sign * step)
        numeric = (values[0] - values[1]) / (2 * step)
        exact = 0.0 if tensor.grad is None else (tensor.grad * direction).sum().item()
        if not abs(numeric - exact) <= 1e-5 * max(1.0, abs(numeric)):
            wrong[key] = f"is {exact:.8g} in a direction where it should be {numeric:.8g}"
    if not case.config.gradients_are_exact:
        require(bool(wrong), "gradients_are_exact is False, but all agree with differences")
        wrong = {key: how for key, how in wrong.items() if key == "the input"}
    for key, how in wrong.items():
        require(False, f"the gradient of {key!r} {how}")


@check(*DTYPES)
def merge_equals_forward(case: Case) -> None:
    """A merged model is as near to float64 as the unmerged one; `reset_adapter` restores bits.

    If merging is refused, the model does not change.
    """
    model, x = case.trained("a"), case.input(4, 6)
    base = run(model, x)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    model.set_active_adapters("a")
    adapted = run(model, x)
    try:
        model.merge_adapter("a")
    except AdapterZooError:
        for key, tensor in model.state_dict().items():
            require(same_bits(before[key], tensor), f"a refused merge has changed {key!r}")
        require(same_bits(adapted, run(model, x)), "a refused merge changes the output")
        return
    truth = case.exact("a")
    _require_as_near(run(model, x), adapted, truth(x), "merged", case.margin)
    model.set_active_adapters(None)
    _require_as_near(run(model, x), adapted, truth(x), "merged and not active", case.margin)
    model.reset_adapter()
    require(same_bits(base, run(model, x)), "reset_adapter() does not restore the base's bits")
    for key, tensor in model.state_dict().items():
        require(same_bits(before[key], tensor), f"reset_adapter() does not restore {key!r}")


@check()
def stacks(case: Case) -> None:
    """`Stack(a)` equals a; a fresh identity changes no stack; a merged stack equals its forward."""
    model, x = case.trained("a", "b"), case.input(4, 6)
    alone = {name: _active(model, name, x) for name in ("a", "b")}
    require(same_bits(alone["a"], _active(model, Stack("a"), x)), "Stack('a') is not 'a'")
    both = _active(model, Stack("a", "b"), x)
    for name in ("a", "b"):
        require(not torch.equal(both, alone[name]), f"Stack('a', 'b') is {name!r} alone")
    if case.fitted().starts_as_identity:
        with torch.random.fork_rng(devices=()):
            model.add_adapter("fresh", case.fitted())
        for stack in (Stack("a", "fresh"), Stack("fresh", "a")):
            error = distance(alone["a"], _active(model, stack, x))
            require(error <= 1e-5, f"{stack!r} differs from 'a' by {error:.3g}")
    modules = [m for name in ("a", "b") for _, m in model.adapter_modules(name)]
    if not all(isinstance(module, WeightAdapter) for module in modules):
        return
    try:
        model.merge_adapter("a")
        model.merge_adapter("b")
    except AdapterZooError:
        # merge_equals_forward has looked at refusals
        return
    merged = _active(model, None, x)
    _require_as_near(merged, both, case.exact("a", "b")(x), "Stack('a', 'b') merged")


@check()
def mixed_rows(case: Case) -> None:
    """Rows with different adapters equal the same rows alone; rows without one have base bits.

    Where adapters act on attention, rows without one have padding beside their keys, so their sums
    are rounded in another order.
    """
    model, x = case.trained("a", "b"), case.input(5, 6)
    names = ("b", None, "a", "b", None)
    try:
        mixed = _active(model, BatchSplit(*names, batch_sizes=1), x)
    except CompositionError:
        # experts get tokens, and no rows of a batch
        return
    for row, name in enumerate(names):
        alone = _active(model, name, x)[row]
        if name is None and case.kind != ATTENTION:
            require(same_bits(mixed[row], alone), f"row {row} without adapter is not the base's")
            continue
        error, allowed = distance(mixed[row], alone), 1e-5 * max(1.0, alone.abs().max().item())
        require(
            error <= allowed,
            f"row {row} with {name!r} in a mixed batch differs by {error:.3g} from it alone",
        )


@check()
def not_finite_refuses_to_merge(case: Case) -> None:
    """Merging an adapter with NaN raises `StateError` and keeps the base model's bits."""
    model, x = case.trained("a"), case.input(2, 5)
    base = run(model, x)
    with torch.no_grad():
        for _, module in model.adapter_modules("a"):
            for parameter in module.parameters():
                parameter.fill_(float("nan"))
    try:
        model.merge_adapter("a")
    except AdapterZooError as error:
        refused = isinstance(error, (StateError, ValueError))
        require(refused, f"the refusal is a {type(error).__name__}, not a StateError")
    else:
        require(False, "an adapter of NaN was merged")
    require(same_bits(base, run(model, x)), "a refused merge changes the base")


def _active(model: Host, setup: object, x: Tensor) -> Tensor:
    model.set_active_adapters(setup)
    return run(model, x)


def _require_as_near(
    merged: Tensor, forward: Tensor, truth: Tensor, what: str, margin: float = Case.margin
) -> None:
    # of float64 the truth is rounded as often as what is compared with it
    steps = 64 if forward.dtype is torch.float64 else 8
    eps = steps * torch.finfo(forward.dtype).eps * max(1.0, truth.abs().max().item())
    error, allowed = distance(merged, truth), margin * distance(forward, truth) + eps
    require(
        error <= allowed,
        f"{what}: {error:.3g} from the adapted model in float64, {allowed:.3g} is allowed",
    )


def _born(
    case: Case, config: AdapterConfig, *, global_seed: int = 0, before: AdapterConfig | None = None
) -> dict[str, Tensor]:
    """Return the initial values of an adapter that is added after something else has happened."""
    model = case.host()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(global_seed)
        if before is not None:
            model.add_adapter("before", before)
        model.add_adapter("a", config)
    return bits(model, "a")


def _require_equal(first: dict[str, Tensor], second: dict[str, Tensor], when: str) -> None:
    require(set(first) == set(second), f"other parameters {when}")
    for key, value in first.items():
        require(same_bits(value, second[key]), f"{key!r} starts with other values {when}")


def _require_apart(values: dict[str, Tensor]) -> None:
    """Check that random values differ from place to place."""
    drawn = [(key, value) for key, value in values.items() if _is_drawn(value)]
    for i, (key, value) in enumerate(drawn):
        for other, compared in drawn[:i]:
            require(not same_bits(value, compared), f"{other!r} and {key!r} start as equals")


def _require_seed_matters(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    changed = any(not same_bits(first[key], second[key]) for key in first)
    drawn = any(map(_is_drawn, first.values()))
    require(changed or not drawn, "init_weights_seed=0 and 3 give the same values")


def _is_drawn(values: Tensor) -> bool:
    """Return whether most values occur once, so that they are not constant or a pattern."""
    return values.numel() > 1 and len(values.unique()) > values.numel() // 2
