"""The dtype in which weights are computed."""

from __future__ import annotations

import torch
from torch import Tensor

# kind of device → whether it has float64; torch has no question for it, so that others are tried
_HAVE_FLOAT64 = {"cpu": True, "cuda": True, "meta": True, "mps": False}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, solves and merges: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without it, as Apple's.

    Args:
        device: that computes.
    """
    kind = device.type
    if kind not in _HAVE_FLOAT64:
        try:
            torch.ones(1, dtype=torch.float64, device=device).add(1)
            _HAVE_FLOAT64[kind] = True
        except (RuntimeError, TypeError):
            _HAVE_FLOAT64[kind] = False
    return torch.float64 if _HAVE_FLOAT64[kind] else torch.float32


def upcast(t: Tensor, like: Tensor) -> Tensor:
    """Return the values on another tensor's device, in the dtype for computing there."""
    wide = t.dtype is torch.float64
    return t.detach().to(like.device, widest(like.device) if wide else compute_dtype(t.dtype))
