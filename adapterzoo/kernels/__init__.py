"""Kernels: the arithmetic of adapters on tensors, each with its plain-torch definition."""

from .ops import use

__all__ = ["use"]
