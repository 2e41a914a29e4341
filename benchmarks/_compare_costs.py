"""What a training step of each row of `compare.py` costs: time, memory, and the size of its file.

Time is CPU time of one thread, in rounds over all rows, relative to full fine-tuning in the same
round. Memory is counted, not measured: what autograd keeps for the backward pass, gradients, the
moments of AdamW, and what the adapter adds to the weights of the base model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _compare_rows import FULL, Row, family
from _compare_train import NAME, TOKENS, Setting, made, optimizer_of, reviews, step
from _measure import ratios, saved_bytes, settled
from adapterzoo.errors import AdapterZooError

# gradient and two moments, in bytes per trained value
_TRAINING_BYTES = 3 * 4


def costs(rows: list[Row], setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
    """Return the costs by label; a row that the model refuses has only the reason, as "refused".

    Args:
        rows: full fine-tuning among them.
        setting: of the comparison.
        rounds: of the time.
    """
    torch.set_num_threads(1)
    setting = Setting(**{**vars(setting), "device": "cpu"})
    batch = full_batch(setting)
    base = made(FULL, setting, 0)
    base_bytes = sum(p.nbytes for p in base.base_model.parameters())
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for row in rows:
        try:
            model = made(row, setting, 0)
        except AdapterZooError as error:
            found[row.label] = {"refused": str(error)}
            continue
        if row != FULL:
            share(model, base)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        tensors = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        kept = saved_bytes(model, lambda model=model: model(**batch).loss)  # type: ignore[misc]
        modules = [module for _, module in model.adapter_modules(NAME)] if row.config else []
        found[row.label] = {
            "trainable": trained,
            "family": family(modules),
            "memory": kept + _TRAINING_BYTES * trained + tensors - base_bytes,
            "file": file_size(model, row),
        }
        # a rate of 0: the step costs the same, and the shared weights stay as they are
        optimizer = optimizer_of(model, row, 0.0)
        steps[row.label] = lambda model=model, o=optimizer: step(model, o, batch)  # type: ignore[misc]
        steps[row.label]()
    floor = steps.pop(FULL.label)
    with settled():
        times = ratios(floor, steps, rounds)
    for label, time in times.items():
        found[label]["step"] = [round(v, 4) for v in (time.median, time.low, time.high)]
    found[FULL.label]["step"] = [1.0, 1.0, 1.0]
    return found


def full_batch(setting: Setting) -> dict[str, Tensor]:
    """Return a batch without padding, of random tokens."""
    draw = torch.Generator().manual_seed(0)
    data, size = reviews(setting), setting.batch_size
    ids = torch.randint(999, len(data.tokenizer), (size, TOKENS), generator=draw)
    labels = torch.randint(len(data.label_names), (size,), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def share(model: nn.Module, base: nn.Module) -> None:
    """Give the model the storages of the base model's parameters, to hold many at once."""
    theirs = dict(base.named_parameters())
    for name, parameter in model.named_parameters():
        if name in theirs and not parameter.requires_grad:
            parameter.data = theirs[name].data


def file_size(model: Any, row: Row) -> int:
    """Return the bytes of the saved weights."""
    with tempfile.TemporaryDirectory() as folder:
        if row.config:
            model.save_adapter(folder, NAME)
        elif row.trains_all:
            model.save_pretrained(folder)
        else:
            model.save_head(folder, NAME)
        return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
