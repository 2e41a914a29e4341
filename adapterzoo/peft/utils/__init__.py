"""PEFT's modules of helpers."""
