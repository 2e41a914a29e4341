"""Checks of state: that of the model, of files, of copies and of other adapters."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

from adapterzoo.contracts import Adapter
from adapterzoo.model import AdapterSetup

from ._case import Case, bits, check, require, run, same_bits, stir
from ._host import Host

_HALF_TOO = (torch.float32, torch.bfloat16)


@check(*_HALF_TOO)
def take_leaves_no_trace(case: Case) -> None:
    """Adding, using and deleting an adapter restores the model: classes, keys and bits."""
    model, x = case.host(), case.input(2, 5)
    before, base = _census(model), run(model, x)
    fresh = {key: tensor.clone() for key, tensor in model.state_dict().items()}
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
    for key, tensor in model.state_dict().items():
        require(key in fresh and same_bits(fresh[key], tensor), f"{key!r} has changed")


@check(*_HALF_TOO)
def inactive_is_base(case: Case) -> None:
    """With nothing active, outputs are the base's bit for bit, even after training or errors."""
    model, x = case.host(), case.input(2, 5)
    base = run(model, x)
    case.add(model, "a")
    stir(model, "a")
    require(same_bits(base, run(model, x)), "an adapter that is only there changes the output")
    model.set_active_adapters("a")
    require(not torch.equal(base, run(model, x)), "an active adapter with new values acts nowhere")
    model.set_active_adapters(None)
    require(same_bits(base, run(model, x)), "the base model is not back after deactivation")
    try:
        with AdapterSetup("a"):
            run(model, x)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        require(same_bits(base, run(model, x)), "a setup outlives its exception")
    model.train_adapter("a")
    model(x).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    model.eval()
    with AdapterSetup(None):
        require(same_bits(base, run(model, x)), "training has changed the base model")


@check()
def two_adapters_do_not_meet(case: Case) -> None:
    """Adding, training, using and deleting one adapter changes no bit of another."""
    model, x = case.trained("a"), case.input(2, 5)
    model.set_active_adapters("a")
    values, first = bits(model, "a"), run(model, x)
    with torch.random.fork_rng(devices=()):
        model.add_adapter("b", case.fitted())
    stir(model, "b", seed=7)

    def unchanged(when: str) -> None:
        for key, tensor in bits(model, "a").items():
            require(same_bits(values[key], tensor), f"{key!r} of 'a' has changed {when}")
        require(same_bits(first, run(model, x)), f"the output of 'a' has changed {when}")

    unchanged("when 'b' was added")
    shared = _storages(model, "a") & _storages(model, "b")
    require(not shared, "two adapters share memory")
    model.set_active_adapters("b")
    require(not torch.equal(first, run(model, x)), "'b' gives the output of 'a'")
    model.set_active_adapters("a")
    unchanged("when 'b' was active")
    model.train_adapter("b")
    model(x).square().sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    model.eval()
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
    require(set(loaded) == set(values), f"other tensors: {sorted(set(loaded) ^ set(values))}")
    for key, tensor in values.items():
        require("n4me" not in key, f"the adapter's name stands in {key!r}")
        require(same_bits(tensor, loaded[key]), f"{key!r} has other bits after loading")
    require(
        other.adapters_config["renamed"] == model.adapters_config["n4me"],
        "the config differs after loading",
    )
    require(same_bits(run(model, x), run(other, x)), "the output differs after loading")


@check()
def copies_are_independent(case: Case) -> None:
    """A deepcopy and an unpickled model give the same bits and share nothing."""
    model, x = case.trained("a"), case.input(2, 5)
    model.set_active_adapters("a")
    first = run(model, x)
    # pickled right here, so safe to load
    for how, made in (
        ("deepcopy", copy.deepcopy(model)),
        ("pickle", pickle.loads(pickle.dumps(model))),
    ):
        require(same_bits(first, run(made, x)), f"{how}: the copy gives another output")
        require(not _storages(model, "a") & _storages(made, "a"), f"{how}: memory is shared")
        stir(made, "a", seed=5)
        require(same_bits(first, run(model, x)), f"{how}: a change of the copy is seen")
        require(
            not torch.equal(first, run(made, x)), f"{how}: the copy does not use its own parameters"
        )
        made.set_active_adapters(None)
        require(same_bits(first, run(model, x)), f"{how}: the copy switches the original")
        model.set_active_adapters(None)
        base = run(model, x)
        made.set_active_adapters("a")
        require(same_bits(base, run(model, x)), f"{how}: the copy switches the original")
        made.delete_adapter("a")
        model.set_active_adapters("a")
        require(same_bits(first, run(model, x)), f"{how}: deleting from the copy hits the original")


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
                found = next(_tensors(value), None)
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
    seen: list[tuple[str, Tensor, Tensor]] = []

    def remember(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append((path, args[0], args[0].detach().clone()))

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(remember(path))
        for path, _ in model.adapter_modules("a")
    ]
    before = {key: t.clone() for key, t in model.state_dict().items()}
    run(model, x)
    for handle in handles:
        handle.remove()
    require(bool(seen), "no adapted layer was run")
    for path, given, was in seen:
        require(same_bits(given, was), f"the input of {path!r} was changed in place")
    for key, tensor in model.state_dict().items():
        require(same_bits(before[key], tensor), f"a forward has changed {key!r}")


_REGISTERED = {"_parameters", "_buffers", "_modules"}


def _tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
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
                yield from _tensors(item, depth - 1)


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
