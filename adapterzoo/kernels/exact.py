"""Arithmetic that autocast must not round: norms, solves and products of small rotations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def exactly(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which autocast changes no dtype; some kinds of device have no autocast.

    Args:
        device: of the operands.
    """
    return torch.autocast(device.type, enabled=False) if is_autocast(device) else nullcontext()


def is_autocast(device: torch.device) -> bool:
    """Return whether autocast changes dtypes on a device; some kinds of device have none."""
    kind = device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
