"""Methods with low-rank factors: LoRA, DoRA, MTL-LoRA, VeRA and DVoRA, and their files."""

from . import formats as formats
from .dora import DoRA, DoRAConfig
from .lora import LoRA, LoRAConfig
from .mtl_lora import MTLLoRA, MTLLoRAConfig
from .vera import DvoRA, DvoRAConfig, Vera, VeraConfig

__all__ = [
    "DoRA",
    "DoRAConfig",
    "DvoRA",
    "DvoRAConfig",
    "LoRA",
    "LoRAConfig",
    "MTLLoRA",
    "MTLLoRAConfig",
    "Vera",
    "VeraConfig",
]
