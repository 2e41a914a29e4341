"""Kernels: the arithmetic of adapters as functions of tensors, each with its plain-torch definition."""
