"""The rows of `compare.py`: each method that the library has a name for, and a few options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapterzoo.config import config_strings
from adapterzoo.contracts import Adapter, AttentionAdapter, PromptAdapter, WeightAdapter

REFERENCE = "lora"
# names that get no row, and why
LEFT_OUT = {
    "union": "joins configs, and is none by itself",
    "scaled_par_bn": "`par_bn` with a learned scaling",
    "double_seq_bn_inv": "`double_seq_bn` with the invertible layers of `seq_bn_inv`",
}


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        label: short name, for the plot.
        config: the config string; None: no adapter.
        trains_all: whether the base model is trained.
        loraplus_ratio: the learning rate of B divided by that of A.
        needs_data: whether initial values come from the training rows.
    """

    label: str
    config: str | None = None
    trains_all: bool = False
    loraplus_ratio: float | None = None
    needs_data: bool = False


HEAD_ONLY = Row("head only")
FULL = Row("full fine-tuning", trains_all=True)
# options of methods that are methods of their own in papers
OPTIONS = [
    Row("lora, all layers", 'lora[target_modules="all-linear"]'),
    Row("lora, rank 64", "lora[r=64,alpha=64,use_rslora=True]"),
    Row("lora+", "lora", loraplus_ratio=16),
    Row("pissa", 'lora[init_weights="pissa"]'),
    Row("olora", 'lora[init_weights="olora"]'),
    Row("eva", 'lora[init_weights="eva"]', needs_data=True),
    Row("miss, bat", 'miss[r=16,init_weights="bat"]'),
]


def rows(labels: Sequence[str] = ()) -> list[Row]:
    """Return the two baselines and the rows with these labels; with none given, all rows."""
    found = [Row(name, name) for name in named_configs() if name not in LEFT_OUT]
    known = {row.label: row for row in (*found, *OPTIONS)}
    # any other config string is a row too
    chosen = [known.get(label, Row(label, label)) for label in labels or known]
    return [HEAD_ONLY, FULL, *chosen]


def named_configs() -> dict[str, object]:
    """Return the config of each name in the registry; of several names for one, the first."""
    found: dict[str, object] = {}
    for name, make in config_strings.items():
        if name == "union":
            continue
        config = make()
        if config not in found.values():
            found[name] = config
    return found


def family(modules: Iterable[object]) -> str:
    """Return what the modules of an adapter change, for the colour of its row.

    A module that layers share changes nothing by itself.
    """
    kinds = {_kind(module) for module in modules if isinstance(module, Adapter)}
    return kinds.pop() if len(kinds) == 1 else "several" if kinds else "baseline"


def _kind(adapter: Adapter) -> str:
    if isinstance(adapter, WeightAdapter):
        return "weights"
    return "input" if isinstance(adapter, AttentionAdapter | PromptAdapter) else "stream"
