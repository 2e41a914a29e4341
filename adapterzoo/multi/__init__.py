"""Train many adapters over one base model in one process."""

from .trainer import AdapterRun, MultiAdapterTrainer

__all__ = ["AdapterRun", "MultiAdapterTrainer"]
