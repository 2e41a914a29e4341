"""What the notebooks share: the packaged model and reviews, how many rows, how figures look."""

from __future__ import annotations

import importlib
import os
import sys
import urllib.parse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in ("examples", "benchmarks", "tests/hub")]
# before any of these libraries is imported: bars and logs would be kept in the notebook
for _name, _value in {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)

from _commands import TOPICS as TOPICS_OF_COMMANDS  # noqa: E402
from _commands import load_commands  # noqa: E402
from _data import SNIPPETS, Task, load_kinds, load_task, packaged_model, take  # noqa: E402

if TYPE_CHECKING:
    from _baselines import Result
    from _data import Rows
    from adapterzoo import AdapterTrainer

# all-MiniLM-L6-v2: 6 layers, 384 wide, 22.7M parameters
MODEL = str(packaged_model())
# CI runs the same cells on few rows
QUICK = os.environ.get("NOTEBOOKS_QUICK") == "1"
# of Okabe and Ito, which people with any kind of colour vision tell apart
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
# the labels of `commands`, by number
TOPICS = tuple(TOPICS_OF_COMMANDS)
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)


def reviews(train_rows: int, test_rows: int, seed: int = 0) -> Task:
    """Critics' snippets, rotten or fresh; those to learn from and those to test on share no movie.

    Args:
        train_rows: how many to learn from, at most.
        test_rows: how many to test on, at most.
        seed: of the draw.
    """
    return load_task(SNIPPETS, *_few(train_rows, test_rows), seed)


def kinds(train_rows: int, test_rows: int, seed: int = 0) -> Task:
    """Snippets of critics and first sentences of plots, parted by movie too.

    Args:
        train_rows: how many to learn from, at most.
        test_rows: how many to test on, at most.
        seed: of the draw.
    """
    return load_kinds(*_few(train_rows, test_rows), seed)


def commands(language: str, rows: int, part: str = "train", seed: int = 0) -> Rows:
    """Voice commands for a home, by topic; the texts of the two parts come from other templates.

    Args:
        language: "en", "de" or "es".
        rows: how many, at most.
        part: "train" or "test".
        seed: of the draw.
    """
    return load_commands(language, _few(rows, 0)[0], part, seed)


def without(rows: Rows, groups: Collection[str]) -> Rows:
    """The rows of other groups.

    Args:
        rows: to choose from.
        groups: to leave out.
    """
    return take(rows, [i for i, group in enumerate(rows.groups) if group not in groups])


def _few(train_rows: int, test_rows: int) -> tuple[int, int]:
    if not QUICK:
        return train_rows, test_rows
    return max(train_rows // 40, 32), max(test_rows // 40, 32)


def fit(
    model: Any,
    rows: Rows,
    tokenizer: Any,
    learning_rate: float = 1e-3,
    seed: int = 0,
    epochs: float = 1.0,
) -> AdapterTrainer:
    """Train with the trainer of `examples/quickstart.py`, without its bars and prints.

    Args:
        model: what is trainable in it is trained.
        rows: to learn from.
        tokenizer: of the model.
        learning_rate: at the start; it falls to zero.
        seed: of the order of the rows and of dropout.
        epochs: how often it reads the rows.
    """
    from transformers import PrinterCallback, set_seed

    from quickstart import trainer_for

    set_seed(seed)
    trainer = trainer_for(model, rows, tokenizer, options(seed, epochs), learning_rate)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer


def judge(name: str, model: Any, rows: Rows, tokenizer: Any) -> Result:
    """Accuracy of the active head on the rows, with its standard error over movies.

    Args:
        name: of the line in a table.
        model: with an active head.
        rows: to test on.
        tokenizer: of the model.
    """
    from _baselines import score
    from quickstart import predict

    guesses = predict(model, tokenizer, rows.texts, name).argmax(-1).tolist()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return score(name, trainable, 0.0, guesses, rows)


def options(seed: int = 0, epochs: float = 1.0) -> Any:
    """Those of the quickstart, on the CPU."""
    import torch

    from quickstart import Options

    return Options(
        model=MODEL, dataset=SNIPPETS, methods=(), epochs=epochs, batch_size=16, learning_rate=None,
        train_rows=0, test_rows=0, seed=seed, device=torch.device("cpu"), output=Path("runs"),
    )  # fmt: skip


def panels(count: int = 1, width: float = 5.0, height: float = 3.2) -> tuple[Any, Sequence[Any]]:
    """A figure and its panels side by side, of one look.

    Args:
        count: of panels; they share the vertical axis.
        width: of one, in inches.
        height: in inches.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, count, figsize=(width * count, height), dpi=90, layout="constrained", sharey=True,
        squeeze=False,
    )  # fmt: skip
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
    return figure, list(axes[0])


def loopback_hub() -> Any:
    """The Hub of `tests/hub`, which answers on this machine only; where it is, all libraries learn.

    Returns:
        The server, with its `repos`. Its one user is "ann", whose token is set.

    Raises:
        RuntimeError: `huggingface_hub`, which reads its address once, is imported already.
    """
    if "huggingface_hub" in sys.modules:
        raise RuntimeError(
            "loopback_hub(): huggingface_hub is imported already, and has read where its Hub is. "
            "Restart the kernel and call loopback_hub() first."
        )
    server, pages = importlib.import_module("server"), importlib.import_module("pages")
    hub = server.Hub(pages.Pages)
    # a proxy could not reach this machine
    local = ",".join(str(urllib.parse.urlsplit(url).hostname) for url in (hub.url, hub.cdn))
    home = Path("runs", "hub-home").resolve()
    os.environ |= {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": server.OWNER,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": local,
        "no_proxy": local,
    }
    return hub
