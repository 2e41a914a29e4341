"""Each task of `train`, from its data to what `predict` prints, against the library itself."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config
from PIL import Image
from stand_ins import BAD, FILLER, GOOD, add_tokenizer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    ViTImageProcessor,
)

from adapterzoo import AutoAdapterModel
from adapterzoo.cli.rows import read
from adapterzoo.cli.tasks import spans, tasks

WORDS = FILLER.split()
NAMES = [*GOOD.split(), *BAD.split()]
ENDS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "w70"}
# the model of each task: family, class, tokens of its tokenizer
BASES: dict[str, tuple[str, Any, dict[str, str] | None]] = {
    "text-classification": ("bert", AutoModel, {}),
    "token-classification": ("bert", AutoModel, {}),
    "question-answering": ("bert", AutoModel, {}),
    "text-generation": ("gpt2", AutoModelForCausalLM, ENDS),
    "seq2seq": ("t5", AutoModelForSeq2SeqLM, ENDS),
    "image-classification": ("vit", AutoModel, None),
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes the tiny model of a task."""
    made: dict[str, Path] = {}

    def make(task: str) -> Path:
        family, cls, tokens = BASES[task]
        if family not in made:
            folder = made[family] = tmp_path_factory.mktemp(family)
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                model = cls.from_config(tiny_config(family))
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        torch.nn.init.normal_(parameter, std=0.2)
            model.save_pretrained(folder)
            if tokens is None:
                size = {"height": model.config.image_size, "width": model.config.image_size}
                ViTImageProcessor(size=size).save_pretrained(folder)
            else:
                add_tokenizer(folder, **tokens)
        return made[family]

    return make


def sentence(n: int) -> list[str]:
    words = [WORDS[(n * 3 + k) % len(WORDS)] for k in range(3 + n % 4)]
    return [*words[: n % 3], NAMES[n % len(NAMES)], *words[n % 3 :]]


def write_rows(task: str, folder: Path) -> Path:
    """Data of the task that a tiny model can learn."""
    file = folder / "rows.jsonl"
    if task == "image-classification":
        for label, color in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
            (folder / "images" / label).mkdir(parents=True)
            for n in range(8):
                image = Image.new("RGB", (8 + n, 8), color)
                image.save(folder / "images" / label / f"{n}.png")
        return folder / "images"
    rows: list[dict[str, Any]] = []
    for n in range(32):
        words = sentence(n)
        name = next(word for word in words if word in NAMES)
        text = " ".join(words)
        rows.append(
            {
                "text-classification": {
                    "text": text,
                    "label": [word for word in ("film", *GOOD.split()) if word in words],
                },
                "token-classification": {
                    "tokens": words, "ner_tags": ["B-X" if word in NAMES else "O" for word in words]
                },
                "question-answering": {
                    "question": "the film was", "context": text,
                    "answers": {"text": [name], "answer_start": [text.index(name)]},
                },
                "text-generation": {"prompt": f"{name} film", "completion": " was so plot"},
                "seq2seq": {"source": text, "target": name},
            }[task]
        )  # fmt: skip
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


SETTINGS = (
    "--method",
    "seq_bn|lora[r=8,alpha=16]",
    "--epochs",
    24,
    "--lr",
    1e-2,
    "--batch-size",
    8,
    "--device",
    "cpu",
)
METRICS = {
    "text-classification": ("accuracy", 0.7),
    "token-classification": ("f1", 0.95),
    "question-answering": ("f1", 0.9),
    "text-generation": ("perplexity", 1.5),
    # logits of the tiny embedding are small
    "seq2seq": ("perplexity", 60),
    "image-classification": ("accuracy", 0.95),
}


def truth(task: str, base: Path, folder: Path, row: dict[str, Any]) -> Any:
    """What the library itself says of a row, alone."""
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.load_adapter(folder, set_active=True)
    if task == "image-classification":
        pixels = ViTImageProcessor.from_pretrained(base)(
            Image.open(folder.parent / "images" / row["image"]), return_tensors="pt"
        )
        return model(**pixels).logits[0].softmax(-1)
    tokenizer = AutoTokenizer.from_pretrained(base)
    if task == "text-classification":
        return model(**tokenizer([row["text"]], return_tensors="pt")).logits[0].sigmoid()
    if task == "token-classification":
        # each word is one token
        inputs = tokenizer([" ".join(row["tokens"])], return_tensors="pt")
        return [model.get_labels()[n] for n in model(**inputs).logits[0].argmax(-1).tolist()]
    if task == "question-answering":
        words = row["context"].split()
        inputs = tokenizer([row["question"]], [row["context"]], return_tensors="pt")
        output = model(**inputs)
        start, end = (x[0, -len(words) :] for x in (output.start_logits, output.end_logits))
        pairs = itertools.combinations_with_replacement(range(len(words)), 2)
        first, last = max(pairs, key=lambda pair: float(start[pair[0]] + end[pair[1]]))
        return " ".join(words[first : last + 1])
    inputs = tokenizer([row.get("source") or row["prompt"]], return_tensors="pt")
    ends = [model.config.eos_token_id, tokenizer.eos_token_id]
    tokens = model.generate(**inputs, max_new_tokens=5, do_sample=False, eos_token_id=ends)
    new = tokens[0] if task == "seq2seq" else tokens[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def perplexity(task: str, base: Path, folder: Path, file: Path) -> float:
    """Exp of the mean loss over the tokens of all completions and their ends, one row at a time."""
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.load_adapter(folder, set_active=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    losses = []
    for row in map(json.loads, file.read_text().splitlines()):
        end = [tokenizer.eos_token_id]
        source = tokenizer(row.get("source") or row["prompt"])["input_ids"]
        target = tokenizer(row.get("target") or row["completion"])["input_ids"]
        if task == "seq2seq":
            logits = model(input_ids=torch.tensor([source]),
                           decoder_input_ids=torch.tensor([[0, *target]])).logits[0]  # fmt: skip
            logits, target = logits[:-1], target
        else:
            logits = model(input_ids=torch.tensor([[*source, *target]])).logits[0]
            logits, target = logits[len(source) - 1 :], target + end
        losses += (-logits.log_softmax(-1)[range(len(target)), target]).tolist()
    return math.exp(sum(losses) / len(losses))


EXPECTED = {"text-classification": "probabilities", "token-classification": "tags",
            "question-answering": "answer", "text-generation": "completion", "seq2seq": "target",
            "image-classification": "probabilities"}  # fmt: skip


@pytest.mark.parametrize("task", tasks)
@torch.no_grad()
def test_a_task_from_its_data_to_its_predictions(run, base_of, tmp_path, task):
    base, file, folder = base_of(task), write_rows(task, tmp_path), tmp_path / "a"
    with torch.enable_grad():
        said = run("train", "--task", task, "--model", base, "--train", file, "--eval", file,
                   "--output", folder, *SETTINGS, "--json")  # fmt: skip
    assert said.stderr == ""
    found = json.loads(said.stdout)
    metric, limit = METRICS[task]
    good = found[metric] <= limit if metric == "perplexity" else found[metric] >= limit
    assert good, found[metric]
    if metric == "perplexity":
        assert found[metric] == pytest.approx(perplexity(task, base, folder, file), rel=1e-4)
    info = json.loads(run("info", folder, "--json").stdout)
    assert info["meta"]["train"]["task"] == task
    assert json.loads(run("verify", folder, "--model", base, "--json").stdout)["ok"] is True
    options = ("--file", file, "--max-new-tokens", 5, "--batch-size", 7)
    rows = list(map(json.loads, run("predict", folder, *options, "--json").stdout.splitlines()))
    given = read(file).rows
    assert len(rows) == len(given)
    for row, source in zip(rows[:5], given, strict=False):
        value, expected = row[EXPECTED[task]], truth(task, base, folder, source)
        if isinstance(expected, torch.Tensor):
            assert list(value.values()) == pytest.approx(expected.tolist(), abs=1e-5)
        else:
            assert value == expected
    printed = list(csv.DictReader(io.StringIO(run("predict", folder, *options).stdout)))
    assert [row[next(iter(row))] for row in printed][:1] == [
        " ".join(rows[0]["tokens"]) if "tokens" in rows[0] else next(iter(rows[0].values()))
    ]


def test_spans_of_tags():
    tags = ["O", "B-A", "I-A", "B-A", "I-B", "O", "I-A", "A"]
    assert list(spans(tags)) == [("A", 1, 3), ("A", 3, 4), ("B", 4, 5), ("A", 6, 7), ("A", 7, 8)]
