"""PEFT's optimizers that are here."""

from adapterzoo.loraplus import create_loraplus_optimizer

__all__ = ["create_loraplus_optimizer"]
