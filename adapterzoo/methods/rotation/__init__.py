"""Methods that rotate features: OFT and BOFT."""

from .boft import BOFT, BOFTConfig
from .oft import OFT, OFTConfig

__all__ = ["BOFT", "OFT", "BOFTConfig", "OFTConfig"]
