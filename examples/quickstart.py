"""Trains adapters on a real encoder and real reviews, offline: `make quickstart`.

For each method: load the model, add an adapter and a classification head, train those two alone,
test on movies never seen. The first method is also saved and loaded into a fresh model. With a
network, any encoder and data set of the Hub:

    python examples/quickstart.py --model answerdotai/ModernBERT-base --dataset stanfordnlp/imdb
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, DataCollatorWithPadding, TrainingArguments, set_seed

from _baselines import TOKENS, Result, baselines, batches, device_of, encoder_of, score
from _data import SNIPPETS, DataError, Rows, Task, load_task
from adapterzoo import AdapterTrainer, AutoAdapterModel

# config strings, as add_adapter takes them, and learning rates; one line more is one line more in
# the table. boft only turns weights, and needs larger steps; par_bn scales its update by 4, and
# needs smaller ones
METHODS = {
    'lora[r=8,alpha=16,attn_matrices=["q","k","v","o"]]': 1e-3,
    'dora[r=8,alpha=16,attn_matrices=["q","k","v","o"]]': 1e-3,
    'boft[attn_matrices=["q","k","v","o"]]': 5e-3,
    "seq_bn": 1e-3,
    "par_bn": 2e-4,
}
NAME = "reviews"


@dataclass(frozen=True)
class Options:
    """What the command line said."""

    model: str
    dataset: str
    methods: Sequence[str]
    epochs: float
    batch_size: int
    learning_rate: float | None
    train_rows: int
    test_rows: int
    seed: int
    device: torch.device
    output: Path


def main() -> None:
    """Runs the whole tour and prints the table."""
    options = parse()
    task = load_task(options.dataset, options.train_rows, options.test_rows, options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    print(f"model    {options.model}")
    print(
        f"data     {task.name}: {len(task.train):,} rows to learn from, {len(task.test):,} to test"
    )
    print(f"labels   {', '.join(task.label_names)}\n")

    results = baselines(task, options.model, tokenizer, options.device)
    for method in options.methods:
        print(f"training {method}")
        model, seconds = train(method, task, tokenizer, options)
        logits = predict(model, tokenizer, task.test.texts, method)
        guesses = logits.argmax(-1).tolist()
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        results.append(score(method, trainable, seconds, guesses, task.test))
        if method == options.methods[0]:
            save_and_reload(model, logits, task, tokenizer, options)
            show_examples(logits, task)
    print_table(results)


def train(method: str, task: Task, tokenizer: Any, options: Options) -> tuple[Any, float]:
    """A fresh model with one adapter and one head, trained; and the seconds of the training."""
    set_seed(options.seed)
    model: Any = AutoAdapterModel.from_pretrained(options.model)
    model.add_adapter(NAME, config=method)
    model.add_classification_head(
        NAME,
        num_labels=len(task.label_names),
        id2label=dict(enumerate(task.label_names)),
        # all-MiniLM was pretrained with mean pooling: such a head learns at once
        pooling="mean",
        layers=1,
    )
    model.train_adapter(NAME)

    trainer = trainer_for(model, task.train, tokenizer, options, METHODS.get(method, 1e-3))
    start = time.perf_counter()
    trainer.train()
    return model, time.perf_counter() - start


def trainer_for(
    model: Any, rows: Rows, tokenizer: Any, options: Options, learning_rate: float
) -> AdapterTrainer:
    """A trainer of what is trainable; the learning rate of the options goes before the other."""
    tokens = tokenizer(rows.texts, truncation=True, max_length=TOKENS)
    examples = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            tokens["input_ids"], tokens["attention_mask"], rows.labels, strict=True
        )
    ]
    return AdapterTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output / "trainer"),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate or learning_rate,
            # rows of mixed length would be padding for almost one half
            train_sampling_strategy="group_by_length",
            seed=options.seed,
            use_cpu=options.device.type == "cpu",
            dataloader_pin_memory=options.device.type != "cpu",
            logging_strategy="epoch",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=examples,
        data_collator=DataCollatorWithPadding(tokenizer),
    )


@torch.inference_mode()
def predict(model: Any, tokenizer: Any, texts: Sequence[str], title: str) -> Tensor:
    """Logits of the active head, `[texts, labels]`, on the CPU."""
    model.eval()
    places: list[int] = []
    logits: list[Tensor] = []
    for batch, tokens in batches(tokenizer, texts, title):
        logits.append(model(**tokens.to(model.device)).logits.cpu())
        places.extend(batch)
    return torch.cat(logits)[torch.tensor(places).argsort()]  # [texts, labels]


def save_and_reload(
    model: Any, logits: Tensor, task: Task, tokenizer: Any, options: Options
) -> None:
    """Adapter and head go to disk and into a fresh model, which must predict the same."""
    folder = options.output / NAME
    model.save_adapter(str(folder), NAME)

    fresh: Any = AutoAdapterModel.from_pretrained(options.model)
    base = bytes_of_base(options.model, fresh)
    fresh.load_adapter(str(folder), set_active=True)
    fresh.to(options.device)
    again = predict(fresh, tokenizer, task.test.texts, "reloaded")
    if not torch.equal(again, logits):
        raise SystemExit(f"the adapter reloaded from {folder} predicts something else")

    adapter = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"\nsaved    {folder}: {adapter:,} bytes, {base / adapter:.0f} times less than the model")
    print(f"model    {base:,} bytes")
    print(f"reloaded into a fresh model: all {len(logits):,} predictions identical, bit for bit\n")


def bytes_of_base(name_or_path: str, model: torch.nn.Module) -> int:
    """What the weights of the base model take on disk, or in memory for one of the Hub."""
    files = list(Path(name_or_path).glob("*.safetensors"))
    if files:
        return sum(file.stat().st_size for file in files)
    return sum(parameter.nbytes for parameter in model.parameters())


def show_examples(logits: Tensor, task: Task, count: int = 6) -> None:
    """The first rows of the test: what was said, what the model says, how sure it is."""
    for text, label, row in zip(
        task.test.texts, task.test.labels, logits[:count].softmax(-1), strict=False
    ):
        guess = int(row.argmax())
        verdict = "right" if guess == label else f"wrong, it is {task.label_names[label]}"
        shown = text if len(text) <= 90 else text[:89] + "…"
        print(f"  {task.label_names[guess]:<8} {row[guess]:.2f}  {verdict:<22}  {shown}")
    print()


def print_table(results: Sequence[Result]) -> None:
    """All results side by side."""
    width = max(len(result.name) for result in results)
    print(f"\n{'':<{width}}  {'trainable':>10}  {'seconds':>8}  test accuracy")
    for result in results:
        print(
            f"{result.name:<{width}}  {result.trainable:>10,}  {result.seconds:>8.1f}"
            f"  {result.accuracy:.3f} ± {result.standard_error:.3f}"
        )


def parse() -> Options:
    """Reads the command line.

    Raises:
        DataError: no model is given and the packaged one is not installed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="path or Hub name of an encoder; all-MiniLM-L6-v2 if none")
    parser.add_argument("--dataset", default=SNIPPETS, help="Hub name; %(default)s if none")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), help="config strings of adapters"
    )
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, help="of all methods, instead of their own")
    parser.add_argument("--train-rows", type=int, default=3000)
    parser.add_argument("--test-rows", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda; cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    given = parser.parse_args()
    return Options(
        model=encoder_of(given.model),
        dataset=given.dataset,
        methods=given.methods,
        epochs=given.epochs,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        train_rows=given.train_rows,
        test_rows=given.test_rows,
        seed=given.seed,
        device=device_of(given.device),
        output=given.output,
    )


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"quickstart: {error}")
