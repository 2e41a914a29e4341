"""Kernels: the arithmetic of adapters on tensors, each with its plain-torch definition."""

from .ops import use

__all__ = ["use"]


def __dir__() -> list[str]:
    return __all__
