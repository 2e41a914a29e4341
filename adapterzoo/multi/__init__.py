"""Train many adapters over one base model in one run."""

from .sweeping import Sweep, sweep
from .trainer import AdapterRun, MultiAdapterTrainer

__all__ = ["AdapterRun", "MultiAdapterTrainer", "Sweep", "sweep"]
