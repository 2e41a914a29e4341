"""The checks: of a config as data, of values, of state, and of the environment."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CellType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import local_torch_dtype

from adapterzoo.composition import BatchSplit, Setup, Stack
from adapterzoo.config import AdapterConfig, ConfigUnion
from adapterzoo.contracts import Adapter, WeightAdapter
from adapterzoo.errors import AdapterZooError, CompositionError, ConfigError, StateError, listing
from adapterzoo.model import AdapterSetup

from ._case import (
    DTYPES,
    Case,
    bits,
    check,
    distance,
    like,
    require,
    run,
    same_bits,
    stir,
)
from ._host import ATTENTION, Host

_HALF_TOO = (torch.float32, torch.bfloat16)
_SHAPES = ((), (1,), (3,), (0,), (2, 0), (2, 3), (1, 1), (2, 2, 3), (2, 1, 2, 3))


# --- a config as data ---


@check(kinds=("linear",))
def repr_is_a_call(case: Case) -> None:
    """`repr(config)` is a constructor call that gives an equal config."""
    config = case.config
    known = {cls.__name__: cls for cls in map(type, (config, *config.members))}
    try:
        # the text is our own: the repr of a dataclass
        made = eval(repr(config), {"__builtins__": {}}, known)
    except (NameError, SyntaxError, TypeError) as error:
        require(False, f"{config!r} cannot be evaluated: {error}")
    require(made == config and type(made) is type(config), f"{config!r} gives another config")


@check(kinds=("linear",))
def dict_round_trip(case: Case) -> None:
    """`to_dict` gives JSON types, and `from_dict` makes an equal config from them."""
    for member in case.config.members:
        changed = _varied(member)
        for one in (member, changed) if changed else (member,):
            document = one.to_dict()
            try:
                text = json.dumps(document, allow_nan=False)
            except (TypeError, ValueError) as error:
                require(False, f"to_dict() holds more than JSON types: {error}")
            back = AdapterConfig.from_dict(json.loads(text))
            require(back == one, f"{document!r} gives {back!r}")
            require(hash(back) == hash(one), "equal configs have different hashes")
            require(back.architecture == one.architecture, "the architecture differs")
        require(changed != member, "configs that differ are equal")


@check(kinds=("linear",))
def unknown_fields_raise(case: Case) -> None:
    """An unknown field raises a `ConfigError` that names it, however it is given."""
    member = case.config.members[0]
    makers: dict[str, Callable[[], AdapterConfig]] = {
        "from_dict": lambda: AdapterConfig.from_dict(member.to_dict() | {"no_such_field": 1}),
        "replace": lambda: member.replace(no_such_field=1),
    }
    for how, make in makers.items():
        try:
            make()
        except ConfigError as error:
            require("no_such_field" in str(error), f"{how}: the message does not name the field")
        else:
            require(False, f"{how}: an unknown field is accepted")


@check(kinds=("linear",))
def config_is_frozen(case: Case) -> None:
    """A config is immutable, and building adapters does not change it."""
    config = case.config
    before = repr(config)
    for field in dataclasses.fields(config):
        try:
            setattr(config, field.name, getattr(config, field.name))
        except dataclasses.FrozenInstanceError:
            continue
        require(False, f"the field {field.name!r} can be assigned")
    case.host("a")
    require(repr(config) == before, "building an adapter changes its config")


def _varied(config: AdapterConfig) -> AdapterConfig | None:
    """Return a config with another value of one field; None if no field takes any of these."""
    names = ("init_weights_seed", *config)
    for name, value in itertools.product(names, (7, (1,), 0.5, True, False)):
        if config.get(name) != value:
            try:
                return config.replace(**{name: value})
            except ConfigError:
                continue
    return None


# --- what an adapter computes ---


@check(*DTYPES)
def identity_at_birth(case: Case) -> None:
    """A fresh adapter keeps the output bit for bit where the config says so, else changes it.

    In half precision a small change may be lost in rounding.
    """
    model = case.host("a")
    for layout, x in _layouts(case.input(4, 6)).items():
        with _Products() as products:
            adapted = _run_with(model, "a", x)
        change = _change(model, x, adapted, products)
        if change and layout and torch.empty_like(x).stride() != x.stride():
            # what an adapter computes from such an input is in dense memory
            with contextlib.ExitStack() as hooks:
                for path, _ in model.adapter_modules("a"):
                    hooks.enter_context(model.get_submodule(path).register_forward_pre_hook(_dense))
                change = _change(model, x, adapted, products)
        if not case.fitted().starts_as_identity:
            require(
                bool(change) or case.dtype.itemsize < 4,
                "a fresh adapter changes nothing, but starts_as_identity is False",
            )
            return
        require(not change, f"a fresh adapter {change}{layout}")


def _dense(_layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


def _change(model: Any, x: Any, adapted: Tensor, products: _Products) -> str:
    """Return how an output differs from that of the model without adapters; empty if not at all."""
    with _Products() as plain:
        base = _run_with(model, None, x)
    # −0 and 0 are equal: a sum with zero turns one into the other
    if adapted.dtype != base.dtype or not torch.equal(adapted, base):
        return f"changes the output by {distance(adapted, base):.3g}: starts_as_identity is True"
    missing = next(iter(plain.seen - products.seen), "")
    other = "does not compute the layer's own {}: its product rounds differently on some processors"
    return other.format(missing) if missing else ""


def _layouts(x: Tensor) -> dict[str, Tensor]:
    """Return an input `[rows, tokens, ...]` with the strides that models give it."""
    if not isinstance(x, Tensor):
        return {"": x}
    layouts = {
        "sequences before rows": x.transpose(0, 1).contiguous().transpose(0, 1),
        "features before tokens": x.mT.contiguous().mT,
        "one row for all (expanded)": x[:1].expand(x.shape),
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
    config = seeded = case.fitted()
    if "init_weights_seed" in config:
        seeded = config.replace(init_weights_seed=3)
        first = _born(case, seeded, global_seed=1)
        _require_equal(first, _born(case, seeded, global_seed=2), "after other random draws")
        _require_equal(first, _born(case, seeded, before=seeded), "when added second")
        # most values occur once, so they are not constant or a pattern
        drawn = {k: v for k, v in first.items() if len(v.unique()) > max(1, v.numel() // 2)}
        for (key, value), (other, compared) in itertools.combinations(drawn.items(), 2):
            require(not same_bits(value, compared), f"{key!r} and {other!r} start as equals")
        second = _born(case, config.replace(init_weights_seed=0), global_seed=1)
        changed = any(not same_bits(first[key], second[key]) for key in first)
        require(changed or not drawn, "init_weights_seed=0 and 3 give the same values")
    first = _born(case, config)
    _require_equal(first, _born(case, config), "a second time with the same torch.manual_seed")
    for chosen in (config, seeded):
        first = _born(case, chosen)
        with torch.device("meta"):
            _require_equal(first, _born(case, chosen), "under torch.device('meta')")
        with local_torch_dtype(torch.float64):
            _require_equal(first, _born(case, chosen), "under another default dtype")
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
    parameters = {
        f"{path}/{key}": parameter
        for path, module in model.adapter_modules("a")
        for key, parameter in module.named_parameters()
    }
    tensors: dict[str, Tensor] = {"the input": x} if x.is_floating_point() else {}
    if case.config.gradients_are_exact:
        tensors |= parameters
    else:
        agree = all(_have_true_gradients(model, x, p) for p in parameters.values())
        require(not agree, "gradients_are_exact is False, but all agree with differences")
    if tensors and not _have_true_gradients(model, x, *tensors.values()):
        wrong = [key for key, t in tensors.items() if not _have_true_gradients(model, x, t)]
        named = listing(wrong or ["all together"])
        require(False, f"the gradients of {named} differ from central differences")


def _have_true_gradients(model: Host, x: Tensor, *tensors: Tensor) -> bool:
    """Compare the gradients of the input or parameters, computed together, in random directions."""
    for tensor in tensors:
        tensor.requires_grad_()
    agree = torch.autograd.gradcheck(
        lambda *_: model(x), tensors, eps=1e-5, atol=5e-11, rtol=1e-5, nondet_tol=1e-12,
        fast_mode=True, check_undefined_grad=False, raise_exception=False,
    )  # fmt: skip
    for tensor in tensors:
        tensor.requires_grad_(False)
    return agree


@check(*DTYPES)
def merge_equals_forward(case: Case) -> None:
    """A merged model is as near to float64 as the unmerged one; `reset_adapter` restores bits.

    If merging is refused, the model does not change.
    """
    model, x = case.trained("a"), case.input(4, 6)
    base = run(model, x)
    before = _copied(model)
    adapted = _run_with(model, "a", x)
    try:
        model.merge_adapter("a")
    except AdapterZooError:
        _require_equal(before, model.state_dict(), "after a refused merge")
        require(same_bits(adapted, run(model, x)), "a refused merge changes the output")
        return
    truth = case.exact("a")
    _require_as_near(run(model, x), adapted, truth(x), "merged", case.margin)
    inactive = _run_with(model, None, x)
    _require_as_near(inactive, adapted, truth(x), "merged and not active", case.margin)
    model.reset_adapter()
    require(same_bits(base, run(model, x)), "reset_adapter() does not restore the base's bits")
    _require_equal(before, model.state_dict(), "after reset_adapter()")


@check()
def stacks(case: Case) -> None:
    """`Stack(a)` equals a; a fresh identity changes no stack; a merged stack equals its forward."""
    model, x = case.trained("a", "b"), case.input(4, 6)
    alone = {name: _run_with(model, name, x) for name in ("a", "b")}
    require(same_bits(alone["a"], _run_with(model, Stack("a"), x)), "Stack('a') is not 'a'")
    both = _run_with(model, Stack("a", "b"), x)
    for name in ("a", "b"):
        require(not torch.equal(both, alone[name]), f"Stack('a', 'b') is {name!r} alone")
    if case.fitted().starts_as_identity:
        case.add(model, "fresh")
        for stack in (Stack("a", "fresh"), Stack("fresh", "a")):
            _require_near(alone["a"], _run_with(model, stack, x), f"{stack!r}")
    modules = [m for name in ("a", "b") for _, m in model.adapter_modules(name)]
    if not all(isinstance(module, WeightAdapter) for module in modules):
        return
    try:
        model.merge_adapter("a")
        model.merge_adapter("b")
    except AdapterZooError:
        # merge_equals_forward has looked at refusals
        return
    merged = _run_with(model, None, x)
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
        mixed = _run_with(model, BatchSplit(*names, batch_sizes=1), x)
    except CompositionError:
        # experts get tokens, and no rows of a batch
        return
    for row, name in enumerate(names):
        alone = _run_with(model, name, x)[row]
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


def _run_with(model: Host, setup: Setup, x: Tensor) -> Tensor:
    """Activate a setup and run the model."""
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


def _require_equal(first: Mapping[str, Tensor], second: Mapping[str, Tensor], when: str) -> None:
    require(set(first) == set(second), f"other tensors {when}: {sorted(set(first) ^ set(second))}")
    for key, value in first.items():
        require(same_bits(value, second[key]), f"{key!r} has other values {when}")


def _require_near(one: Tensor, other: Tensor, what: str) -> None:
    error = distance(one, other)
    require(error <= 1e-5, f"{what}: {error:.3g} off")


def _copied(model: Host) -> dict[str, Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def _train(model: Host, name: str, x: Tensor) -> None:
    """Train an adapter for one step, and return to evaluation mode."""
    model.train_adapter(name)
    model(x).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    model.eval()


# --- state: of the model, of files, of copies and of other adapters ---


@check(*_HALF_TOO)
def take_leaves_no_trace(case: Case) -> None:
    """Adding, using and deleting an adapter restores the model: classes, keys and bits."""
    model, x = case.host(), case.input(2, 5)
    before, base = _census(model), run(model, x)
    fresh = _copied(model)
    case.add(model, "a")
    model.set_active_adapters("a")
    stir(model, "a")
    model(x).sum().backward()
    model.zero_grad()
    model.delete_adapter("a")
    after = _census(model)
    require(list(before) == list(after), "modules are left over or lost")
    for path, (kind, keys) in before.items():
        require(after[path][0] is kind, f"{path!r} is a {after[path][0].__name__} afterwards")
        left = after[path][1] ^ keys
        require(not left, f"{path!r} has other attributes afterwards: {sorted(left)}")
    require(same_bits(base, run(model, x)), "the output of the base model has changed")
    _require_equal(fresh, model.state_dict(), "afterwards")


@check(*_HALF_TOO)
def inactive_is_base(case: Case) -> None:
    """With nothing active, outputs are the base's bit for bit, even after training or errors."""
    model, x = case.host(), case.input(2, 5)
    base = run(model, x)
    case.add(model, "a")
    stir(model, "a")
    require(same_bits(base, run(model, x)), "an adapter that is only there changes the output")
    active, inactive = _run_with(model, "a", x), _run_with(model, None, x)
    require(not torch.equal(base, active), "an active adapter with new values acts nowhere")
    require(same_bits(base, inactive), "the base model is not back after deactivation")
    try:
        with AdapterSetup("a"):
            run(model, x)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        require(same_bits(base, run(model, x)), "a setup outlives its exception")
    _train(model, "a", x)
    with AdapterSetup(None):
        require(same_bits(base, run(model, x)), "training has changed the base model")


@check()
def two_adapters_do_not_meet(case: Case) -> None:
    """Adding, training, using and deleting one adapter changes no bit of another."""
    model, x = case.trained("a"), case.input(2, 5)
    values, first = bits(model, "a"), _run_with(model, "a", x)
    case.add(model, "b")
    stir(model, "b", seed=7)

    def unchanged(when: str) -> None:
        _require_equal(values, bits(model, "a"), when)
        require(same_bits(first, run(model, x)), f"the output of 'a' has changed {when}")

    unchanged("when 'b' was added")
    shared = _storages(model, "a") & _storages(model, "b")
    require(not shared, "two adapters share memory")
    other = _run_with(model, "b", x)
    require(not torch.equal(first, other), "'b' gives the output of 'a'")
    model.set_active_adapters("a")
    unchanged("when 'b' was active")
    _train(model, "b", x)
    model.set_active_adapters("a")
    unchanged("when 'b' was trained")
    model.delete_adapter("b")
    unchanged("when 'b' was deleted")


@check(*_HALF_TOO)
def save_and_load(case: Case) -> None:
    """A file loads with the same bits under another name; it has no name and no base weights."""
    model, x = case.trained("n4me"), case.input(2, 5)
    model.set_active_adapters("n4me")
    values = bits(model, "n4me")
    with tempfile.TemporaryDirectory() as folder:
        model.save_adapter(Path(folder) / "one", "n4me")
        model.save_adapter(Path(folder) / "two", "n4me")
        files = [(Path(folder) / k / "adapter.safetensors").read_bytes() for k in ("one", "two")]
        require(files[0] == files[1], "saving twice writes other bytes")
        other = case.host("b")
        state = torch.random.get_rng_state()
        other.load_adapter(Path(folder) / "one", load_as="renamed", set_active=True)
        drawn = not torch.equal(state, torch.random.get_rng_state())
        require(not drawn, "loading draws from torch's random numbers")
    loaded = bits(other, "renamed")
    _require_equal(values, loaded, "after loading")
    require(not any("n4me" in key for key in values), "the adapter's name stands in a key")
    require(
        other.adapters_config["renamed"] == model.adapters_config["n4me"],
        "the config differs after loading",
    )
    require(same_bits(run(model, x), run(other, x)), "the output differs after loading")


@check()
def copies_are_independent(case: Case) -> None:
    """A deepcopy and an unpickled model give the same bits and share nothing."""
    model, x = case.trained("a"), case.input(2, 5)
    first = _run_with(model, "a", x)
    # pickled right here, so safe to load
    for how, made in (
        ("deepcopy", copy.deepcopy(model)),
        ("pickle", pickle.loads(pickle.dumps(model))),
    ):
        require(same_bits(first, run(made, x)), f"{how}: the copy gives another output")
        require(not _storages(model, "a") & _storages(made, "a"), f"{how}: memory is shared")
        stir(made, "a", seed=5)
        require(same_bits(first, run(model, x)), f"{how}: a change of the copy is seen")
        require(not torch.equal(first, run(made, x)), f"{how}: the copy uses the original")
        made.set_active_adapters(None)
        require(same_bits(first, run(model, x)), f"{how}: the copy switches the original")
        base = _run_with(model, None, x)
        made.set_active_adapters("a")
        require(same_bits(base, run(model, x)), f"{how}: the copy switches the original")
        made.delete_adapter("a")
        again = _run_with(model, "a", x)
        require(same_bits(first, again), f"{how}: deleting from the copy hits the original")


@check()
def state_is_registered(case: Case) -> None:
    """Every tensor of an adapter is a parameter or a buffer, so that it moves and is saved."""
    model, x = case.trained("a"), case.input(2, 5)
    model.set_active_adapters("a")
    model(x).sum().backward()
    for path, module in model.adapter_modules("a"):
        for name, part in module.named_modules():
            where = f"{path}.{name}".rstrip(".")
            kept = {k: v for k, v in vars(part).items() if k not in _REGISTERED}
            for owner in type(part).__mro__:
                if issubclass(owner, Adapter) and owner is not Adapter:
                    kept |= {f"{owner.__name__}.{k}": v for k, v in vars(owner).items()}
            for attribute, value in kept.items():
                found = next(_tensors_in(value), None)
                require(found is None, f"{where!r} keeps a tensor in the attribute {attribute!r}")


@check()
def counts_parameters(case: Case) -> None:
    """The added parameters equal those in the summary and those on the meta device."""
    base = {n for n, _ in case.host().named_parameters()}
    counts = {}
    for device in (case.device, "meta"):
        model = Case(case.config, case.kind, case.dtype, device).host("a")
        added = {n: p for n, p in model.named_parameters() if n not in base}
        strangers = [n for n in added if ".a." not in n]
        require(not strangers, f"parameters outside of the adapter: {strangers}")
        own = {n for n, _ in model.named_parameters()}
        require(base < own, "the adapter adds no parameter, or a base parameter has another name")
        row = model.adapter_summary(as_dict=True)[0]
        count = sum(p.numel() for p in added.values())
        require(row["#param"] == count, f"adapter_summary says {row['#param']}, it adds {count}")
        empty = [n for n, p in added.items() if p.numel() == 0]
        require(not empty, f"empty parameters: {empty}")
        counts[device] = {n: tuple(p.shape) for n, p in added.items()}
    require(len({str(c) for c in counts.values()}) == 1, "other shapes on the meta device")


@check()
def leaves_input_alone(case: Case) -> None:
    """A forward or backward does not change a layer's input, weight or bias in place."""
    model, x = case.trained("a"), case.input(2, 5)
    model.set_active_adapters("a")
    seen: list[tuple[Tensor, Tensor]] = []

    layers = [model.get_submodule(path) for path, _ in model.adapter_modules("a")]

    def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if module in layers:
            seen.append((args[0], args[0].detach().clone()))

    before = _copied(model)
    with register_module_forward_pre_hook(remember):
        run(model, x)
    require(bool(seen), "no adapted layer was run")
    for given, was in seen:
        require(same_bits(given, was), "the input of a layer was changed in place")
    _require_equal(before, model.state_dict(), "after a forward")


_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _tensors_in(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in a value, its items, attributes and closure."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.state_dict().values()
    elif depth and not isinstance(value, type):
        inside = [getattr(value, "__dict__", None), getattr(value, "__closure__", None)]
        if isinstance(value, Mapping):
            inside = list(value.values())
        elif isinstance(value, list | tuple | set):
            inside = list(value)
        elif isinstance(value, CellType):
            inside = [value.cell_contents]
        for item in inside:
            if item is not None:
                yield from _tensors_in(item, depth - 1)


def _storages(model: Host, name: str) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for _, module in model.adapter_modules(name)
        for tensor in module.state_dict().values()
        if tensor.numel()
    }


def _census(model: Host) -> dict[str, tuple[type, set[str]]]:
    """Return the class and attributes of every module."""
    return {path: (type(m), set(vars(m))) for path, m in model.named_modules()}


# --- shapes, dtypes, devices, replicas, modes, compilers ---


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
        base = _run_with(model, None, x)
        y = _run_with(model, "a", x)
        require(y.shape == base.shape, f"batch {batch}: output {[*y.shape]}, not {[*base.shape]}")
        require(bool(y.isfinite().all()), f"batch {batch}: the output is not finite")
    x = case.input(3, 4)
    whole = run(model, x)
    for i in range(3):
        _require_near(whole[i : i + 1], run(model, x[i : i + 1]), f"row {i} of a batch, alone")
    for layout, strided in _layouts(x).items():
        _require_near(run(model, strided.contiguous()), run(model, strided), f"the output{layout}")


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
        _require_near(padded, run(model, x[1:, real]), f"two tokens of padding {side} a row")


@check(*DTYPES)
def dtype_follows(case: Case) -> None:
    """Adapted layers return the base model's dtype, finite and close to float64."""
    model, x = case.trained("a"), case.input(2, 5)
    if "dtype" not in case.config:
        for _, module in model.adapter_modules("a"):
            for name, parameter in module.named_parameters():
                require(parameter.dtype is case.dtype, f"parameter {name!r} has {parameter.dtype}")
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
    y, again = model(x), _replica(model)(x)
    require(same_bits(y, again), f"a replica's output is {distance(y, again):.3g} off")
    agree = all(map(_agree, _gradients(model, y), _gradients(model, again)))
    require(agree, "another gradient comes back from a replica")


@check()
def modes_reach_dropout(case: Case) -> None:
    """`eval()` is deterministic and equals training without dropout; in training, dropout acts."""
    x = case.input(4, 6)
    config = _with_dropout(case.config, 0.0)
    model = case.trained("a", config=config)
    expected = _run_with(model, "a", x)
    trained = run(model.train(), x)
    require(same_bits(expected, trained), "without dropout, training and evaluation differ")
    try:
        random = _with_dropout(case.config, 0.5)
        model = case.trained("a", config=random)
    except ConfigError:
        # token numbers cannot be dropped
        return
    if random == config:
        return
    model.set_active_adapters("a")
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
        found.append(_gradients(model, model(x)))
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
            expected = _run_with(model, setup, x)
            with torch.no_grad():
                _require_near(expected, compiled(x), f"compiled with {setup!r} active")
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        require(False, f"does not compile in one graph: {str(error).strip().splitlines()[0]}")
    finally:
        torch.compiler.reset()


def _gradients(model: Host, output: Tensor) -> list[Tensor | None]:
    """Return the gradients of the parameters of 'a' for the squares of an output."""
    model.zero_grad()
    output.square().sum().backward()
    return [p.grad for _, m in model.adapter_modules("a") for p in m.parameters()]


def _agree(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return distance(one, other) <= 1e-5


def _outputs(model: Host, setup: Setup, x: Tensor) -> dict[str, Tensor]:
    """Return the output of the model and of every layer that 'a' adapts."""
    found: dict[str, Tensor] = {}
    paths = {model.get_submodule(path): path for path, _ in model.adapter_modules("a")}

    def keep(module: nn.Module, args: object, out: Any) -> None:
        if module in paths:
            found[paths[module]] = out[0] if isinstance(out, tuple) else out

    with register_module_forward_hook(keep):
        found[""] = _run_with(model, setup, x)
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


def _with_dropout(config: AdapterConfig, p: float) -> AdapterConfig:
    """Return the config with this probability wherever it drops something."""
    members = []
    for member in config.members:
        names = [n for n in member if n.endswith(("dropout", "stochastic_depth"))]
        members.append(member.replace(**dict.fromkeys(names, p)))
    return ConfigUnion(*members) if len(members) > 1 else members[0]
