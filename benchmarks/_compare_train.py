"""One training of `compare.py`: the rows it reads, the model it makes, its loop and predictions."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, get_linear_schedule_with_warmup, set_seed
from transformers.utils import logging

from _compare_rows import FULL, Row, family
from _data import Rows, load_task, split_by_group, take
from _measure import ratios, saved_bytes, settled
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import AdapterZooError
from adapterzoo.loraplus import create_loraplus_optimizer

TOKENS = 64
NAME = "reviews"
# what EVA looks at before training
_BATCHES_OF_DATA = 8


@dataclass(frozen=True)
class Setting:
    """What decides the result of a training, beside the row, the learning rate and the seed."""

    model: str
    dataset: str
    train_rows: int
    validation_rows: int
    test_rows: int
    seeds: int
    batch_size: int
    device: str


@dataclass(frozen=True)
class Part:
    """Rows with their tokens."""

    rows: Rows
    ids: list[list[int]]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Reviews:
    """The rows of a comparison; no movie is in two of its parts.

    Attributes:
        tokenizer: of the model.
        label_names: of the classes.
        pool: each seed draws its training rows from it.
        validation: chooses learning rates.
        tests: a part for each seed.
    """

    tokenizer: Any
    label_names: tuple[str, ...]
    pool: Part
    validation: Part
    tests: list[Part]

    def train(self, setting: Setting, seed: int) -> Part:
        """Return the training rows of a seed."""
        count = min(setting.train_rows, len(self.pool))
        chosen = random.Random(seed).sample(range(len(self.pool)), count)
        return Part(take(self.pool.rows, chosen), [self.pool.ids[i] for i in chosen])

    def batch(self, part: Part, indices: Sequence[int], device: str) -> dict[str, Tensor]:
        """Return the padded tokens and the labels of some rows of a part."""
        tokens = self.tokenizer.pad(
            {"input_ids": [part.ids[i] for i in indices]}, return_tensors="pt"
        )
        labels = torch.tensor([part.rows.labels[i] for i in indices])
        return {k: v.to(device) for k, v in {**tokens, "labels": labels}.items()}


@cache
def reviews(setting: Setting) -> Reviews:
    """Load and tokenize the rows."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(setting.model)
    # three times as many as a seed takes, so that the seeds draw different ones
    wanted = 3 * setting.train_rows + setting.validation_rows
    task = load_task(setting.dataset, wanted, setting.test_rows, seed=0)
    pool, validation = split_by_group(
        task.train, len(task.train) - setting.validation_rows, setting.validation_rows, seed=0
    )

    def part(rows: Rows) -> Part:
        tokens = tokenizer(rows.texts, truncation=True, max_length=TOKENS)
        return Part(rows, tokens["input_ids"])

    tests = [part(rows) for rows in divided(task.test, setting.seeds)]
    return Reviews(tokenizer, task.label_names, part(pool), part(validation), tests)


def divided(rows: Rows, parts: int) -> list[Rows]:
    """Return parts of about the same size that share no group."""
    groups = sorted(set(rows.groups))
    random.Random(0).shuffle(groups)
    sizes, place = [0] * parts, {}
    for group in groups:
        place[group] = sizes.index(min(sizes))
        sizes[place[group]] += rows.groups.count(group)
    return [
        take(rows, [i for i, group in enumerate(rows.groups) if place[group] == part])
        for part in range(parts)
    ]


def made(row: Row, setting: Setting, seed: int) -> Any:
    """Return a fresh model with the adapter of the row and a head, ready to be trained.

    With one seed, the heads of all rows start with the same values.

    Raises:
        AdapterZooError: the model cannot have the adapter.
    """
    data = reviews(setting)
    set_seed(seed)
    model: Any = AutoAdapterModel.from_pretrained(setting.model).to(setting.device)
    model.add_classification_head(
        NAME,
        num_labels=len(data.label_names),
        id2label=dict(enumerate(data.label_names)),
        # all-MiniLM was pretrained with mean pooling
        pooling="mean",
        layers=1,
    )
    set_seed(seed)
    if row.config is None:
        model.requires_grad_(row.trains_all)
        model.heads[NAME].requires_grad_(True)
    else:
        init_data = _first_batches(setting, seed) if row.needs_data else None
        model.add_adapter(NAME, row.config, init_data=init_data)
        model.train_adapter(NAME)
    return model.to(setting.device).train()


def _first_batches(setting: Setting, seed: int) -> list[dict[str, Tensor]]:
    data = reviews(setting)
    part = data.train(setting, seed)
    count, size = min(32 * _BATCHES_OF_DATA, len(part)), 32
    found = [
        data.batch(part, range(i, min(i + size, count)), setting.device)
        for i in range(0, count, size)
    ]
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in found]


def trained(row: Row, setting: Setting, rate: float, seed: int) -> Any:
    """Return a model of the row after one epoch.

    The learning rate rises for a tenth of the steps and then falls, both linearly.
    """
    model = made(row, setting, seed)
    data = reviews(setting)
    part = data.train(setting, seed)
    batches = batches_of(part, setting.batch_size, seed)
    optimizer = optimizer_of(model, row, rate)
    schedule = get_linear_schedule_with_warmup(optimizer, len(batches) // 10, len(batches))
    for indices in batches:
        step(model, optimizer, data.batch(part, indices, setting.device))
        schedule.step()
    return model.eval()


def batches_of(part: Part, size: int, seed: int) -> list[list[int]]:
    """Return the batches of an epoch: rows of similar length together, in random order."""
    draw = random.Random(seed)
    order = draw.sample(range(len(part)), len(part))
    order.sort(key=lambda index: len(part.ids[index]))
    found = [order[i : i + size] for i in range(0, len(order), size)]
    draw.shuffle(found)
    return found


def optimizer_of(model: Any, row: Row, rate: float) -> torch.optim.Optimizer:
    """Return AdamW for what is trained, without weight decay."""
    if row.loraplus_ratio is not None:
        return create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=rate, loraplus_lr_ratio=row.loraplus_ratio
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)


def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> None:
    """Do one training step, with gradients clipped to a norm of 1."""
    model(**batch).loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad()


@torch.inference_mode()
def predicted(model: Any, setting: Setting, part: Part) -> Tensor:
    """Return the logits of a part, `[rows, labels]`."""
    order = sorted(range(len(part)), key=lambda index: len(part.ids[index]))
    data, found = reviews(setting), []
    for i in range(0, len(order), 64):
        batch = data.batch(part, order[i : i + 64], setting.device)
        del batch["labels"]
        found.append(model(**batch).logits.float().cpu())
    return torch.cat(found)[torch.tensor(order).argsort()]  # [rows, labels]


def loss_of(model: Any, setting: Setting, part: Part) -> float:
    """Return the mean cross-entropy of a part; infinite if it is not a number."""
    loss = F.cross_entropy(predicted(model, setting, part), torch.tensor(part.rows.labels))
    return float(loss.nan_to_num(float("inf")))


# --- what a training step costs: time, memory, and the size of its file ---


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
