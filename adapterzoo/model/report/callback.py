"""A callback for transformers' `Trainer` that reports on the adapters in training."""

from __future__ import annotations

import warnings
from typing import Any, cast

from torch import nn
from tqdm import tqdm
from transformers import TrainerCallback

from adapterzoo.anatomy import unwrapped
from adapterzoo.composition import fusions_of
from adapterzoo.model.state import AdaptedModel

from . import AdapterReport, coverage


class ReportCallback(TrainerCallback):
    """Prints three lines on each trained adapter, and warns about blocks and sites without effect.

    `AdapterTrainer` includes it; for another trainer, write `callbacks=[ReportCallback()]`. The
    first process prints how large the adapter is, where it is, and where it is not. It warns about
    blocks that have none of the layers that the adapter reaches, and, after the first backward
    pass, about sites that got no gradient.
    """

    def __init__(self) -> None:
        """Start with gradients still to check."""
        self._looks = True

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Print the three lines.

        Args:
            args: of the trainer.
            state: tells whether this is the first process.
            control: not changed.
            model: with adapters.
            **kwargs: not used.

        Warns:
            UserWarning: some blocks have none of the layers that an adapter reaches.
        """
        self._looks = True
        for report in _reports(model) if state.is_world_process_zero else ():
            for line in report.summary:
                # above the progress bar
                tqdm.write(line)
            _warn(report, report.unreached())

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Check the first gradients.

        Args:
            args: of the trainer.
            state: tells whether this is the first process.
            control: not changed.
            model: with adapters.
            **kwargs: not used.

        Warns:
            UserWarning: a site or a head got no gradient.
        """
        if not self._looks:
            return
        # in all processes, since gradients may be sharded
        reports = _reports(model)
        known = [site.is_dead is not None for report in reports for site in report.sites]
        # DeepSpeed keeps its gradients elsewhere
        self._looks = not any(known) and any(p.grad is not None for p in model.parameters())
        for report in reports if state.is_world_process_zero else ():
            _warn(report, report.without_gradient())


def _reports(model: nn.Module) -> list[AdapterReport]:
    """Return the coverage of the active adapters and fusions that are trainable."""
    adapted = cast("AdaptedModel", unwrapped(model))
    setup = adapted._active.plan.setup
    names = [] if setup is None else [*setup.flatten(), *(f.name for f in fusions_of(setup))]
    reports = (coverage(adapted, name) for name in dict.fromkeys(names))
    return [report for report in reports if report.is_trainable]


def _warn(report: AdapterReport, fault: str) -> None:
    if fault:
        warnings.warn(f"adapter {report.adapter!r}: {fault}", UserWarning, stacklevel=3)
