"""AdapterFusion on real reviews, offline: two adapters trained apart, then fused.

Pfeiffer et al. 2020, arXiv:2005.00247: first each adapter learns its task alone, then a fusion
learns which of them to hear, while both stay as they are. Here one adapter learns critics'
verdicts, the other tells plots from what critics say; the target is verdicts on other movies, with
fewer rows to learn from. Tested are movies that none of them has seen.

    python examples/fusion.py --seeds 0 1 2
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from transformers import AutoTokenizer, set_seed

import quickstart
from _baselines import batches, device_of, encode, encoder_of, score
from _data import (
    SNIPPETS,
    DataError,
    Rows,
    load_kinds,
    load_task,
    split_by_group,
    take,
)
from adapterzoo import AutoAdapterModel, Fuse

SOURCES = ("verdicts", "kinds")
BOTH = Fuse(*SOURCES)
TARGET = "target"
# of the head of frozen features, as in the quickstart's baseline
STRENGTH = 0.1


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    model: str
    config: str
    source_rows: int
    target_rows: int
    test_rows: int
    epochs: float
    learning_rate: float
    seeds: Sequence[int]
    device: torch.device
    output: Path


@dataclass(frozen=True)
class Data:
    """What each adapter learns from, what target rows are drawn from, and the test."""

    sources: dict[str, Rows]
    pool: Rows
    test: Rows


def main() -> None:
    """Trains the two adapters, then for each seed heads and a fusion, and prints the table."""
    options = parse()
    data = load(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for name, rows in data.sources.items():
        print(f"{name:<9} {len(rows):,} rows to learn from, {len(set(rows.groups)):,} movies")
    print(f"target    {min(options.target_rows, len(data.pool)):,} rows for each seed")
    print(f"test      {len(data.test):,} rows, {len(set(data.test.groups)):,} movies\n")

    set_seed(options.seeds[0])
    model: Any = AutoAdapterModel.from_pretrained(options.model).to(options.device)
    for name, rows in data.sources.items():
        print(f"training {name}")
        train_source(model, name, rows, tokenizer, options)

    own = predict_with(model, "verdicts", "verdicts", data.test, tokenizer)
    found: dict[str, list[list[int]]] = {"verdicts, with its own head": [own]}
    found |= frozen(model, data, tokenizer, options)
    fused = found["AdapterFusion of both, new head"] = []
    for seed in options.seeds:
        print(f"training the fusion, seed {seed}")
        rows = take(data.pool, drawn(data.pool, options.target_rows, seed))
        train_fusion(model, rows, tokenizer, seed, options)
        fused.append(predict_with(model, BOTH, TARGET, data.test, tokenizer))
    print_table(found, data.test)
    print_shares(model, data.test, tokenizer)


def load(options: Options) -> Data:
    """Rows of movies that never meet: those of the sources, of the target, and of the test."""
    pool_rows = options.target_rows * 2
    aside = pool_rows + options.test_rows
    task = load_task(SNIPPETS, options.source_rows, aside, seed=0)
    pool, test = split_by_group(task.test, pool_rows, options.test_rows, seed=0)
    # all there are, of the movies that are left to the sources
    halves = load_kinds(10**6, 10**6, seed=0)
    rows = [r for half in (halves.train, halves.test) for r in zip_rows(half)]
    left = Rows(
        *map(list, zip(*(r for r in rows if r[2] not in set(task.test.groups)), strict=True))
    )
    kinds = take(left, drawn(left, options.source_rows, seed=0))
    return Data({"verdicts": task.train, "kinds": kinds}, pool, test)


def zip_rows(rows: Rows) -> list[tuple[str, int, str]]:
    """Text, label and group of each row."""
    return list(zip(rows.texts, rows.labels, rows.groups, strict=True))


def drawn(rows: Rows, count: int, seed: int) -> list[int]:
    """The places of some rows, at most `count`."""
    return random.Random(seed).sample(range(len(rows)), min(count, len(rows)))


def train_source(model: Any, name: str, rows: Rows, tokenizer: Any, options: Options) -> None:
    """An adapter and a head of its own learn their task."""
    model.add_adapter(name, config=options.config)
    add_head(model, name)
    model.train_adapter(name)
    run(model, rows, tokenizer, 1e-3, 1.0, options.seeds[0], options)


def train_fusion(model: Any, rows: Rows, tokenizer: Any, seed: int, options: Options) -> None:
    """Fresh fusion layers and a fresh head learn the target; the adapters stay as they are."""
    set_seed(seed)
    model.add_adapter_fusion(BOTH, "dynamic", overwrite_ok=True)
    add_head(model, TARGET)
    model.active_head = TARGET
    model.train_adapter_fusion(BOTH)
    run(model, rows, tokenizer, options.learning_rate, options.epochs, seed, options)


def add_head(model: Any, name: str) -> None:
    """A linear head on the mean of the hidden states."""
    model.add_classification_head(name, num_labels=2, pooling="mean", layers=1, overwrite_ok=True)


def run(
    model: Any,
    rows: Rows,
    tokenizer: Any,
    learning_rate: float,
    epochs: float,
    seed: int,
    options: Options,
) -> None:
    """One training."""
    given = quickstart.Options(
        model=options.model,
        dataset=SNIPPETS,
        methods=(),
        epochs=epochs,
        batch_size=16,
        learning_rate=None,
        train_rows=len(rows),
        test_rows=0,
        seed=seed,
        device=options.device,
        output=options.output,
    )
    quickstart.trainer_for(model, rows, tokenizer, given, learning_rate).train()


def frozen(model: Any, data: Data, tokenizer: Any, options: Options) -> dict[str, list[list[int]]]:
    """Guesses of a linear head, fitted for each seed, on what the frozen model says."""
    found: dict[str, list[list[int]]] = {}
    model.eval()
    for name in (None, *SOURCES):
        model.set_active_adapters(name)
        # the hidden states, and no head's answer
        model.active_head = None
        learnt, tested = (encode(model, tokenizer, rows.texts) for rows in (data.pool, data.test))
        guesses = found[f"{name or 'no adapter'}, new head"] = []
        for seed in options.seeds:
            places = drawn(data.pool, options.target_rows, seed)
            head = LogisticRegression(C=STRENGTH, max_iter=1000)
            head.fit(learnt[places], take(data.pool, places).labels)
            guesses.append(head.predict(tested).tolist())
    return found


def predict_with(model: Any, setup: Any, head: str, rows: Rows, tokenizer: Any) -> list[int]:
    """What a head says of each row when a setup is active."""
    model.set_active_adapters(setup)
    model.active_head = head
    guesses: list[int] = quickstart.predict(model, tokenizer, rows.texts, head).argmax(-1).tolist()
    return guesses


def print_table(found: dict[str, list[list[int]]], test: Rows) -> None:
    """Mean accuracy with its standard error over the test, and the spread over the seeds."""
    width = max(map(len, found))
    print(f"\n{'':<{width}}  test accuracy   spread over seeds")
    for name, runs in found.items():
        results = [score(name, 0, 0.0, guesses, test) for guesses in runs]
        accuracies = [result.accuracy for result in results]
        error = statistics.mean(result.standard_error for result in results)
        spread = f"{statistics.stdev(accuracies):.3f}" if len(runs) > 1 else "one run"
        print(f"{name:<{width}}  {statistics.mean(accuracies):.3f} ± {error:.3f}   {spread}")


@torch.inference_mode()
def print_shares(model: Any, rows: Rows, tokenizer: Any, count: int = 64) -> None:
    """How much the last fusion hears of each adapter, by block, in the mean over tokens."""
    _, tokens = next(batches(tokenizer, rows.texts[:count], "shares"))
    model.set_active_adapters(BOTH)
    model.active_head = TARGET
    outputs = model(**tokens.to(model.device), output_adapter_fusion_attentions=True)
    mask = tokens["attention_mask"].bool()
    print(f"\nshare of {SOURCES[0]!r} in the fusion, the rest is {SOURCES[1]!r}'s:")
    for block, at in outputs.adapter_fusion_attentions[BOTH.name].items():
        share = torch.cat([shares[mask][:, 0] for shares in at.values()]).mean()
        print(f"  block {block}  {share:.2f}")


def parse() -> Options:
    """Reads the command line.

    Raises:
        DataError: no model is given and the packaged one is not installed.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="path or Hub name of an encoder; all-MiniLM-L6-v2 if none")
    parser.add_argument("--config", default="seq_bn", help="of both adapters; a bottleneck")
    parser.add_argument("--source-rows", type=int, default=2000, help="for each adapter")
    parser.add_argument("--target-rows", type=int, default=500, help="for heads and the fusion")
    parser.add_argument("--test-rows", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=2.0, help="of the fusion")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the fusion")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", help="cpu or cuda; cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/fusion"))
    given = parser.parse_args()
    return Options(
        model=encoder_of(given.model),
        config=given.config,
        source_rows=given.source_rows,
        target_rows=given.target_rows,
        test_rows=given.test_rows,
        epochs=given.epochs,
        learning_rate=given.learning_rate,
        seeds=given.seeds,
        device=device_of(given.device),
        output=given.output,
    )


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"fusion: {error}")
