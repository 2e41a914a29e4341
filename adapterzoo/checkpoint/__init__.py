"""Checkpoints: the native format of adapters and heads, and atomic files."""
