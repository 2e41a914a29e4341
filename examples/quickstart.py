"""Trains two adapters on a real encoder and real reviews, offline: `make quickstart`.

For each method: load the model, add an adapter and a classification head, train those two alone,
test on movies never seen. The first adapter is saved, loaded into a fresh model, and answers a
sentence of yours, from then on without training:

    make quickstart ARGS='--text "Two hours I will not get back."'

`make compare` measures all methods on these reviews. With a network, any encoder and data set of
the Hub:

    python examples/quickstart.py --model answerdotai/ModernBERT-base --dataset stanfordnlp/imdb
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import adapterzoo
from _baselines import (
    BASELINES,
    TOKENS,
    Result,
    baselines,
    batches,
    device_of,
    encoder_of,
    score,
)
from _data import SNIPPETS, DataError, Rows, Task, load_task
from adapterzoo import AdapterTrainer, AutoAdapterModel

# config strings, as add_adapter takes them, and learning rates; one line more is one line more in
# the table of `--methods all`. boft only turns weights, and needs larger steps; par_bn scales its
# update by 4, and needs smaller ones
METHODS = {
    'lora[r=8,alpha=16,attn_matrices=["q","k","v","o"]]': 1e-3,
    'dora[r=8,alpha=16,attn_matrices=["q","k","v","o"]]': 1e-3,
    'boft[attn_matrices=["q","k","v","o"]]': 5e-3,
    "seq_bn": 1e-3,
    "par_bn": 2e-4,
}
# one that changes weights, and one that adds layers
TWO = ('lora[r=8,alpha=16,attn_matrices=["q","k","v","o"]]', "seq_bn")
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
    text: str | None = None
    packaged: bool = False


class Bar(TrainerCallback):
    """One bar of steps, gone when they are done."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show it."""
        self._bar = tqdm(total=state.max_steps, desc="training", leave=False, unit="step")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move it on."""
        self._bar.update(1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take it away."""
        self._bar.close()


def main() -> None:
    """Answers with the adapter of an earlier run, or runs the whole tour."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options = parse()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    folder = options.output / NAME
    if options.text is not None and is_fresh(folder, options):
        print(f"adapter  {folder}, of an earlier run")
        answer(reloaded(folder, options), tokenizer, options.text)
        return
    tour(tokenizer, folder, options)


def tour(tokenizer: Any, folder: Path, options: Options) -> None:
    """Baselines, then adapters, a line for each; the first adapter is saved and loaded."""
    task = load_task(options.dataset, options.train_rows, options.test_rows, options.seed)
    print(f"model    {options.model}")
    print(
        f"data     {task.name}: {len(task.train):,} rows to learn from, {len(task.test):,} to test"
    )
    print(f"labels   {', '.join(task.label_names)}\n")

    width = print_titles((*BASELINES, *options.methods))
    for result in baselines(task, options.model, tokenizer, options.device):
        print_result(result, width)
    trained: dict[str, tuple[Any, Tensor]] = {}
    for method in options.methods:
        model, seconds = train(method, task, tokenizer, options)
        logits = predict(model, tokenizer, task.test.texts, "testing")
        guesses = logits.argmax(-1).tolist()
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        print_result(score(method, trainable, seconds, guesses, task.test), width)
        trained.setdefault("first", (model, logits))
    print("± is the standard error, by movie; a difference below two of them may be chance")

    model, logits = trained["first"]
    fresh = save_and_reload(model, logits, task, tokenizer, folder, options)
    show_examples(logits, task)
    if options.text is not None:
        answer(fresh, tokenizer, options.text)


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
    trainer = AdapterTrainer(
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
            disable_tqdm=True,
        ),
        train_dataset=examples,
        data_collator=DataCollatorWithPadding(tokenizer),
        callbacks=[Bar()],
    )
    # it prints every log
    trainer.remove_callback(PrinterCallback)
    return trainer


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
    model: Any, logits: Tensor, task: Task, tokenizer: Any, folder: Path, options: Options
) -> Any:
    """Adapter and head go to disk and into a fresh model, which must predict the same."""
    model.save_adapter(folder, NAME, meta_dict={"recipe": recipe(options)})
    fresh = reloaded(folder, options)
    again = predict(fresh, tokenizer, task.test.texts, "reloaded")
    if not torch.equal(again, logits):
        raise SystemExit(f"the adapter reloaded from {folder} predicts something else")

    adapter = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    base = bytes_of_base(options.model, fresh)
    print(
        f"\nsaved    {folder}: {adapter:,} bytes; the model has {base:,}, "
        f"{base / adapter:.0f} times as many"
    )
    print(f"reloaded into a fresh model: all {len(logits):,} predictions identical, bit for bit\n")
    return fresh


def reloaded(folder: Path, options: Options) -> Any:
    """A fresh model with the adapter and the head of the folder."""
    fresh: Any = AutoAdapterModel.from_pretrained(options.model)
    fresh.load_adapter(folder, set_active=True)
    return fresh.to(options.device)


def is_fresh(folder: Path, options: Options) -> bool:
    """Whether the adapter in the folder is the one that these options would train again."""
    file = folder / "adapter_config.json"
    if not options.packaged or not file.is_file():
        # what the Hub has may change
        return False
    meta = json.loads(file.read_text("utf-8")).get("meta") or {}
    return bool(meta.get("recipe") == recipe(options))


def recipe(options: Options) -> str:
    """A digest of all that decides what the first method learns: options, code and versions."""
    said = {**vars(options), "methods": options.methods[0], "text": None, "output": None}
    digest = hashlib.sha256(f"{said} {torch.__version__} {transformers.__version__}".encode())
    folders = Path(__file__).parent, Path(adapterzoo.__file__).parent
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def answer(model: Any, tokenizer: Any, text: str) -> None:
    """What the adapter says of a text, and how sure it is."""
    shares = predict(model, tokenizer, [text], "answering")[0].softmax(-1)
    guess = int(shares.argmax())
    print(f"answer   {model.config.id2label[guess]} ({shares[guess]:.2f}): {text}")


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


def print_titles(names: Iterable[str]) -> int:
    """The first line of the table; how wide its first column is."""
    width = max(map(len, names))
    print(f"{'':<{width}}  {'trainable':>10}  {'seconds':>8}  test accuracy")
    return width


def print_result(result: Result, width: int) -> None:
    """One line of the table."""
    print(
        f"{result.name:<{width}}  {result.trainable:>10,}  {result.seconds:>8.1f}"
        f"  {result.accuracy:.3f} ± {result.standard_error:.3f}",
        flush=True,
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
        "--methods", nargs="+", default=list(TWO), help="config strings of adapters, or all"
    )
    parser.add_argument("--text", help="a sentence to judge, by the first adapter")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, help="of all methods, instead of their own")
    parser.add_argument("--train-rows", type=int, default=1500)
    parser.add_argument("--test-rows", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda; cuda if there is one")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    given = parser.parse_args()
    return Options(
        model=encoder_of(given.model),
        dataset=given.dataset,
        methods=list(METHODS) if given.methods == ["all"] else given.methods,
        epochs=given.epochs,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        train_rows=given.train_rows,
        test_rows=given.test_rows,
        seed=given.seed,
        device=device_of(given.device),
        output=given.output,
        text=given.text,
        packaged=given.model is None and given.dataset == SNIPPETS,
    )


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        sys.exit(f"quickstart: {error}")
