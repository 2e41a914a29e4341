"""`sweep`: train one adapter for each combination of configs and training arguments, in one run."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from adapterzoo.config import AdapterConfig
from adapterzoo.errors import ConfigError, columns, listing
from adapterzoo.model.report.picture import displayed

from .trainer import MultiAdapterTrainer

# the grid's key for configs; all other keys are fields of the training arguments
CONFIG = "config"


@dataclasses.dataclass
class Sweep:
    """The results of a sweep.

    Attributes:
        trainer: the trainer of its runs.
        keys: the keys of the grid.
        metric: the metric by which the runs are ranked.
        rows: a dict for each run, the best first: `name`, the values of the keys, `parameters`,
            `steps`, `train_loss`, and all metrics.
    """

    trainer: MultiAdapterTrainer
    keys: tuple[str, ...]
    metric: str
    rows: list[dict[str, Any]]

    @property
    def best(self) -> str:
        """The name of the best adapter."""
        return str(self.rows[0]["name"])

    def __str__(self) -> str:
        """Return a table, the best run first."""
        titles = ["name", *self.keys, "parameters", "steps", "train_loss"]
        titles += [self.metric] if self.metric not in titles else []
        shown = [[_shown(row.get(title)) for title in titles] for row in self.rows]
        numbers = [not isinstance(self.rows[0].get(title), str) for title in titles]
        return "\n".join(columns([titles, *shown], numbers))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the metric of each run.

        The horizontal axis is the numeric key with the most values, with a line for each
        combination of the other keys; without a numeric key, each run is a bar.

        Args:
            path: the image file to write, such as `sweep.svg`.

        Returns:
            The matplotlib figure.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("a plot needs matplotlib. Write pip install matplotlib.") from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        across = self._across()
        if across is None:
            names = [_label(row, self.keys) for row in self.rows]
            axes.barh(names[::-1], [row[self.metric] for row in self.rows][::-1], color="#4477aa")
            axes.set_xlabel(self.metric)
        else:
            others = tuple(key for key in self.keys if key != across)
            lines: dict[str, list[tuple[float, float]]] = {}
            for row in sorted(self.rows, key=lambda row: row["name"]):
                points = lines.setdefault(_label(row, others), [])
                points.append((row[across], row[self.metric]))
            markers = itertools.cycle("osD^vPX")
            for (label, points), marker in zip(sorted(lines.items()), markers, strict=False):
                axes.plot(*zip(*sorted(points), strict=True), marker=marker, label=label)
            values = sorted({row[across] for row in self.rows})
            if values[0] > 0 and values[-1] >= 10 * values[0]:
                axes.set_xscale("log")
            axes.set_xticks(values, [_shown(value) for value in values])
            axes.minorticks_off()
            axes.set_xlabel(across)
            axes.set_ylabel(self.metric)
            if len(lines) > 1:
                axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path)
        return displayed(figure)

    def _across(self) -> str | None:
        """Return the numeric key with the most values; None if none has two values."""
        found = {key: {_shown(row[key]) for row in self.rows} for key in self.keys}
        numeric = [
            key
            for key in self.keys
            if len(found[key]) > 1 and all(type(row[key]) in (int, float) for row in self.rows)
        ]
        return max(numeric, key=lambda key: len(found[key]), default=None)


def sweep(
    model: nn.Module,
    args: Any,
    train_dataset: Any,
    eval_dataset: Any = None,
    *,
    grid: Mapping[str, Sequence[Any]],
    add_head: Callable[[Any, str], object] | None = None,
    metric: str | None = None,
    greater_is_better: bool | None = None,
    name: str = "sweep",
    at_once: int | None = None,
    **kwargs: Any,
) -> Sweep:
    """Train an adapter for each combination of a grid, all of them in one run.

    ```python
    found = sweep(model, args, train, test, grid={
        "config": ["lora[r=4]", "lora[r=16]", "seq_bn"], "learning_rate": [1e-4, 1e-3],
    })
    print(found)
    found.plot("sweep.svg")
    model.set_active_adapters(found.best)
    ```

    The adapters stay in the model; each is saved in a sub-folder of `args.output_dir`.

    Args:
        model: a model with adapters.
        args: `TrainingArguments` that all runs have in common.
        train_dataset: rows to train on.
        eval_dataset: rows to evaluate on; None: the runs are ranked by their training loss.
        grid: maps `"config"` to config strings or configs, and fields of `args` to their values.
        add_head: a function that adds a head, given the model and the name of an adapter; None: no
            head is added.
        metric: the metric by which the runs are ranked; None: `eval_loss`, or `train_loss` without
            `eval_dataset`.
        greater_is_better: whether a greater metric is better; None: unless its name ends with
            "loss".
        name: the prefix of the adapters' names, which end with a number.
        at_once: as in `MultiAdapterTrainer`.
        **kwargs: other arguments of `MultiAdapterTrainer.add`.

    Raises:
        ConfigError: the grid is empty or has an unknown key, or a metric is unknown.
    """
    fields = {field.name for field in dataclasses.fields(args)}
    unknown = [key for key in grid if key != CONFIG and key not in fields]
    if unknown or not grid or not all(len(values) for values in grid.values()):
        raise ConfigError(
            f"grid={dict(grid)!r}: the keys are {CONFIG!r} and fields of {type(args).__name__}, "
            f"each with a list of values{f', not {listing(unknown)}' if unknown else ''}. Write "
            "grid={'config': ['lora', 'seq_bn'], 'learning_rate': [1e-4, 1e-3]}."
        )
    many = MultiAdapterTrainer(model, at_once=at_once)
    combinations = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    digits = len(str(len(combinations)))
    rows: list[dict[str, Any]] = []
    for number, values in enumerate(combinations, 1):
        own = f"{name}-{number:0{digits}}"
        many.model.add_adapter(own, AdapterConfig.load(values.get(CONFIG)))
        if add_head is not None:
            add_head(many.model, own)
        given = copy.copy(args)
        for key, value in values.items():
            if key != CONFIG:
                setattr(given, key, value)
        given.output_dir = str(Path(args.output_dir) / own)
        many.add(own, given, train_dataset, eval_dataset, **kwargs)
        row: dict[str, Any] = {
            key: value if isinstance(value, (int, float)) else str(value)
            for key, value in values.items()
        }
        count = sum(p.numel() for p in many.runs[own].parameters.values())
        rows.append({"name": own, **row, "parameters": count})
    results, metrics = many.train(), many.evaluate()
    for row in rows:
        result = results[row["name"]]
        row |= {"steps": result.global_step, "train_loss": result.training_loss}
        row |= metrics.get(row["name"], {})
    metric = metric or ("eval_loss" if metrics else "train_loss")
    for row in rows:
        if metric not in row:
            raise ConfigError(f"metric={metric!r}: there are {listing(row)}. Write one of them.")
    if greater_is_better is None:
        greater_is_better = not metric.endswith("loss")
    rows.sort(key=lambda row: row[metric], reverse=greater_is_better)
    return Sweep(many, tuple(grid), metric, rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _label(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    shown = [str(row[key]) if key == CONFIG else f"{key}={_shown(row[key])}" for key in keys]
    return ", ".join(shown) or str(row["name"])
