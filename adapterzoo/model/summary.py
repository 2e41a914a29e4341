"""The table of a model's adapters."""

from __future__ import annotations

from typing import Any, Literal, overload

from adapterzoo.inject.quantised import count

from .adapters import AdaptersMixin

_COLUMNS = ("name", "architecture", "#param", "%param", "active", "train")


class SummaryMixin(AdaptersMixin):
    """`adapter_summary`."""

    @overload
    def adapter_summary(self, as_dict: Literal[True]) -> list[dict[str, Any]]: ...
    @overload
    def adapter_summary(self, as_dict: Literal[False] = False) -> str: ...

    def adapter_summary(self, as_dict: bool = False) -> str | list[dict[str, Any]]:
        """All adapters: name, architecture, parameters, their share, active, trained.

        Of an active adapter the table also names the blocks that `skip_layers` leaves out.

        Args:
            as_dict: whether to return the rows as dicts instead of a table. The share is in
                percent of the base model's parameters; the last row is the base model. A
                quantised weight counts as the numbers that it stands for. `skip_layers` is there
                where an active adapter has any.
        """
        plan = self._active.plan
        active = () if plan.setup is None else plan.setup.flatten()
        rows: list[dict[str, Any]] = []
        for name, config in self.adapters_config.items():
            parameters = list(self._parameters_of(name))
            rows.append(
                {
                    "name": name,
                    "architecture": config.architecture,
                    "#param": sum(p.numel() for p in parameters),
                    "active": name in active,
                    "train": all(p.requires_grad for p in parameters),
                }
            )
            if name in active and plan.skip_layers:
                rows[-1]["skip_layers"] = list(plan.skip_layers)
        adapters = {id(p) for name in self.adapters_config for p in self._parameters_of(name)}
        own = [p for p in self._backbone.parameters() if id(p) not in adapters]
        total = sum(map(count, own))
        for row in rows:
            row["%param"] = 100.0 * row["#param"] / total
        trained = any(p.requires_grad for p in own)
        rows.append({"name": "Full model", "#param": total, "%param": 100.0, "train": trained})
        return rows if as_dict else _table(rows)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [list(_COLUMNS), *([_cell(row, c) for c in _COLUMNS] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            # numbers to the right
            text.rjust(width) if column.endswith("param") else text.ljust(width)
            for text, width, column in zip(line, widths, _COLUMNS, strict=True)
        ).rstrip()
        for line in lines
    ]
    rule = "-" * max(map(len, texts))
    return "\n".join([texts[0], rule, *texts[1:]])


def _cell(row: dict[str, Any], column: str) -> str:
    text = _shown(row.get(column, ""))
    if column == "active" and (skipped := row.get("skip_layers")):
        return f"{text}, not in blocks {', '.join(map(str, skipped))}"
    return text


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
