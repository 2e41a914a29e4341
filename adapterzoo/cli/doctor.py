"""The work of `doctor`: versions, devices, dtypes, kernels and the Hub's cache."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement

from adapterzoo import __version__
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
            problems.append(f"{name} is not installed. Write pip install {requirement}.")
        elif not requirement.specifier.contains(version, prereleases=True):
            problems.append(
                f"{name} {version} is installed, and {requirement.specifier} is needed. Write "
                f"pip install '{name}{requirement.specifier}'."
            )
    devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    devices += ["mps"] if torch.backends.mps.is_available() else []
    return {
        "versions": {"python": platform.python_version(), _OWN: __version__} | versions,
        "peers": {name: _obstacle(name) for name in _PEERS if versions[name] is not None},
        "devices": [_device(torch.device(name)) for name in devices],
        "hub": hub_settings(),
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


def hub_settings() -> dict[str, Any]:
    """Return the settings of the Hub, and the state of its cache."""
    has_token = False
    # a token may belong to another user
    with contextlib.suppress(PermissionError):
        has_token = get_token() is not None
    cache = Path(constants.HF_HUB_CACHE)
    # unlike Path.exists, os.access does not raise if a parent is not accessible
    there = next(p for p in (cache, *cache.absolute().parents) if os.access(p, os.F_OK))
    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "token": has_token,
        "cache": str(cache),
        "cache exists": there == cache and cache.is_dir(),
        "cache writable": os.access(there, os.W_OK | os.X_OK),
        "free space": f"{shutil.disk_usage(there).free / 2**30:.1f} GiB",
    }


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
    """Return the implementation of the kernels on a device."""
    x = torch.zeros(1, device=device)
    if ops.is_reference():
        return "their definitions (mode 'reference')"
    if not ops.asks_triton(x):
        return "torch operations"
    why = ops.obstacle(x)
    return "Triton" if why is None else f"torch operations ({why})"
