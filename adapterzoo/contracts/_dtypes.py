"""The dtype in which weights are computed."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for norms, solves and merges: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def upcast(t: Tensor, like: Tensor) -> Tensor:
    """Return the values on another tensor's device, in the dtype for computing."""
    return t.detach().to(like.device, compute_dtype(t.dtype))
