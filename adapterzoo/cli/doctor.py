"""The work of `doctor`: versions, devices, dtypes, kernels and the Hub's cache."""

from __future__ import annotations

import importlib
import os
import platform
from importlib import metadata
from typing import Any

import torch
from packaging.requirements import Requirement

from adapterzoo import __version__
from adapterzoo.hub.requests import settings
from adapterzoo.kernels import ops

_OWN = "adapterzoo"
# libraries that are not required
_OPTIONAL = ("bitsandbytes", "torchao")
_PEERS = ("adapters", "peft")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def examine() -> dict[str, Any]:
    """Collect all facts, as JSON types."""
    required = {requirement.name: requirement for requirement in _required()}
    versions = {name: _version(name) for name in (*required, *_OPTIONAL, *_PEERS)}
    problems = []
    for name, requirement in required.items():
        version = versions[name]
        if version is None:
            problems.append(f"{name} is not installed. Write pip install '{requirement}'.")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{name} {version} is installed, but {requirement.specifier} is needed. Write "
                f"pip install '{name}{requirement.specifier}'."
            )
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "versions": {"python": platform.python_version(), _OWN: __version__} | versions,
        "peers": {name: _obstacle(name) for name in _PEERS if versions[name] is not None},
        "devices": [_device(torch.device(name)) for name in devices],
        "hub": settings(),
        "problems": problems,
    }


def _required() -> list[Requirement]:
    """Return the requirements of the installed package on this system, without extras."""
    try:
        asked = metadata.requires(_OWN) or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(text) for text in asked]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _obstacle(name: str) -> str | None:
    """Return why a package cannot be imported; None if it can."""
    try:
        importlib.import_module(name)
    # a package for another release of transformers may raise any of these
    except (ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return None


def _device(device: torch.device) -> dict[str, Any]:
    what = f"{torch.get_num_threads()} threads of {os.cpu_count()}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        what = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, compute capability "
            f"{properties.major}.{properties.minor}"
        )
    elif device.type != "cpu":
        what = platform.machine()
    return {
        "name": str(device),
        "what": what,
        "dtypes": [str(d).removeprefix("torch.") for d in _DTYPES if _computes(device, d)],
        "kernels": _kernels(device),
    }


def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        x = torch.ones(8, 8, device=device, dtype=dtype)
        return bool((x @ x == 8).all())
    except (RuntimeError, TypeError):
        return False


def _kernels(device: torch.device) -> str:
    """Return what computes the kernels on a device."""
    x = torch.zeros(1, device=device)
    if ops.is_reference():
        return "their definitions (mode 'reference')"
    if not ops.asks_triton(x):
        return "torch operations"
    why = ops.obstacle(x)
    return "Triton" if why is None else f"torch operations ({why})"
