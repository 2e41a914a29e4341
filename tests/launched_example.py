"""`examples/distributed.py` on a CPU, under an engine that the launcher has asked for."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from training_rank import check_sharded, engine_on_a_cpu

import distributed
from adapterzoo import AdapterTrainer


def main(engine: str) -> None:
    """Run the example, and check in each step that the engine has sharded the model."""

    class Checked(AdapterTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            if not engine.startswith("ZeRO"):
                check_sharded(engine, self.model)
            # stage 3 partitions no parameters as small as these
            elif self.model_wrapped.zero_optimization_stage() != int(engine[-1]):
                raise RuntimeError(f"{engine} is not on")
            return super().training_step(*args, **kwargs)

    # accelerate would open one for GPUs
    dist.init_process_group("gloo")
    with engine_on_a_cpu(engine), mock.patch.object(distributed, "AdapterTrainer", Checked):
        distributed.main()


if __name__ == "__main__":
    main(sys.argv.pop(1))
