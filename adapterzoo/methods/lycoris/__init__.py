"""Methods of LyCORIS: LoHa and LoKr."""

from .loha import LoHa, LoHaConfig
from .lokr import LoKr, LoKrConfig

__all__ = ["LoHa", "LoHaConfig", "LoKr", "LoKrConfig"]
