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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    ViTImageProcessor,
)

from adapterzoo import AutoAdapterModel
from adapterzoo.cli.rows import read
from adapterzoo.cli.tasks import Bench, spans, tasks
from adapterzoo.errors import ConfigError

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


# --- data ---


def of(task: str, path: Path, **columns: str) -> list[dict[str, Any]]:
    return tasks[task].read(read(path), columns)


def test_json_and_csv_give_the_same_rows(tmp_path):
    rows = [{"tokens": ["a", "b"], "ner_tags": ["O", "B-X"]}] * 2
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.csv").write_text("words,tags\na b,O B-X\na b,O B-X\n")
    found = [of("token-classification", tmp_path / name) for name in ("a.json", "b.json", "c.csv")]
    assert found == [[{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 2] * 3


def test_answers_are_written_in_three_ways(tmp_path):
    ways = [
        {"answers": {"text": ["b"], "answer_start": [4]}},
        {"answer": "b", "start": 4},
        {"answers": {"text": "b", "start": 4}},
    ]
    for way in ways:
        file = tmp_path / "a.jsonl"
        file.write_text(json.dumps({"question": "q", "context": "b a b", **way}))
        (row,) = of("question-answering", file)
        assert tasks["question-answering"]._answer(row) == ("b", 4)
    file.write_text(json.dumps({"question": "q", "context": "b a b", "answers": "b"}))
    assert tasks["question-answering"]._answer(*of("question-answering", file)) == ("b", 0)


def test_a_data_set_of_datasets_has_names_of_classes(tmp_path, run):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {
            "tokens": datasets.Sequence(datasets.Value("string")),
            "ner_tags": datasets.Sequence(datasets.ClassLabel(names=["O", "B-X"])),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "text": datasets.Value("string"),
        }
    )
    data = {"tokens": [["a", "b"]], "ner_tags": [[0, 1]], "label": [1], "text": ["a b"]}
    made = datasets.Dataset.from_dict(data, features=kinds)
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "all")
    part = tmp_path / "all" / "train"
    assert of("token-classification", part) == [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}]
    assert of("text-classification", part) == [{"text": "a b", "label": "yes"}]
    said = run("train", "--model", "x", "--train", tmp_path / "all", "--output", "y", code=1).stderr
    assert f"Write one: {str(part)!r}." in said


REFUSED = {
    "a tag is missing": (
        "token-classification", {"tokens": ["a", "b"], "tags": ["O"]}, "has 2 words and 1 tags"
    ),
    "another answer": (
        "question-answering", {"question": "q", "context": "a", "answers": "b"},
        "has the answer 'b', which is not in its context. Write the answer as",
    ),
    "an answer elsewhere": (
        "question-answering", {"question": "q", "context": "a b", "answer": "b", "start": 1},
        "which is not in its context at character 1. Write the answer as",
    ),
    "a place without an answer": (
        "question-answering",
        {"question": "q", "context": "a", "answers": {"text": [], "answer_start": [0]}},
        "has no texts with starts in the column 'answers'",
    ),
    "answers without places": (
        "question-answering",
        {"question": "q", "context": "a", "answers": {"text": ["a"], "answer_start": []}},
        "has no texts with starts in the column 'answers'",
    ),
    "no completion": ("text-generation", {"prompt": "a"}, "neither a text nor a prompt with"),
    "no image": ("image-classification", {"image": "b.png", "label": "x"}, "Did you mean"),
    "no target": ("seq2seq", {"source": "a", "tarjet": "b"}, "Did you mean --column target=tarjet"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_a_task_cannot_take_are_refused(tmp_path, case):
    task, row, message = REFUSED[case]
    (tmp_path / "a.png").touch()
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError) as error:
        of(task, tmp_path / "a.jsonl")
    assert message in str(error.value)
    assert str(error.value).startswith("line 1 of ")


def test_predict_says_which_options_an_adapter_takes(run, trained):
    said = run("predict", trained["folder"], "--image", "a.png", code=1).stderr
    assert "predicts the label of each text. Write --text, or --file" in said


@torch.no_grad()
def test_long_texts_are_tagged_in_parts(run, base_of, tmp_path):
    task = "token-classification"
    base, file, folder = base_of(task), write_rows(task, tmp_path), tmp_path / "a"
    with torch.enable_grad():
        run("train", "--task", task, "--model", base, "--train", file, "--output", folder,
            *SETTINGS)  # fmt: skip
    words = [word for n in range(30) for word in sentence(n)]
    assert len(words) > 2 * 64
    said = run("predict", folder, "--text", " ".join(words), "--json").stdout
    parts = [words[n : n + 64] for n in range(0, len(words), 64)]
    expected = [tag for part in parts for tag in truth(task, base, folder, {"tokens": part})]
    assert json.loads(said)["tags"] == expected
    assert {*expected} == {"O", "B-X"}


@pytest.fixture
def pieces() -> Bench:
    """A tokenizer whose words have several pieces, and texts of at most 12 of them."""
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "a": 3, "b": 4, "##a": 5, "##b": 6}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    processor = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    return Bench(model=None, processor=processor, length=12, labels=["x", "y"])


def test_the_first_piece_of_each_word_has_its_label(pieces):
    row = {"tokens": ["ab", "abb", "a", "bab"] * 4, "tags": ["x", "y", "y", "x"] * 4}
    found = tasks["token-classification"].features([row], pieces)
    assert len(found) == 3
    assert all(len(each["input_ids"]) <= 12 for each in found)
    labelled = [(t, n) for f in found for t, n in zip(f["input_ids"], f["labels"], strict=True)]
    assert [n for _, n in labelled if n != -100] == [0, 1, 1, 0] * 4
    # a first piece is a letter without ##
    assert {t for t, n in labelled if n != -100} == {3, 4}
    assert {t for t, n in labelled if n == -100} == {5, 6}


def test_an_answer_is_in_each_part_that_has_all_of_it(pieces):
    context = "a ab a a bab ab a b a b a b"
    row = {"question": "a b", "context": context, "answers": [("bab ab", None)]}
    found = tasks["question-answering"].features([row], pieces)
    assert len(found) > 1
    answers = []
    for each in found:
        ids, first, last = each["input_ids"], each["start_positions"], each["end_positions"]
        assert len(ids) <= 12
        answers.append(pieces.processor.decode(ids[first : last + 1]) if last > first else None)
    assert {*answers} == {"b ##a ##b a ##b", None}


def test_questions_without_an_answer(run, base_of, tmp_path):
    """The first token is learned as the answer, and "" is predicted where its scores are higher."""
    base, folder = base_of("question-answering"), tmp_path / "a"
    rows: list[dict[str, Any]] = []
    for n in range(32):
        words, lacks = sentence(n), n % 4 == 0
        name = next(word for word in words if word in NAMES)
        text = " ".join("plot" if lacks and word == name else word for word in words)
        answers = {"text": [name], "answer_start": [text.find(name)]}
        answers = {"text": [], "answer_start": []} if lacks else answers
        rows.append({"question": "the film was", "context": text, "answers": answers})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = run("train", "--task", "question-answering", "--model", base, "--train", file, "--eval",
               file, "--output", folder, *SETTINGS, "--json").stdout  # fmt: skip
    assert json.loads(said)["exact_match"] >= 0.9
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.load_adapter(folder, set_active=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    found = run("predict", folder, "--file", file, "--batch-size", 5, "--json").stdout.splitlines()
    empty = 0
    for row, line in zip(rows, found, strict=True):
        inputs = tokenizer([row["question"]], [row["context"]], return_tensors="pt")
        with torch.no_grad():
            output = model(**inputs)
        start, end = output.start_logits[0], output.end_logits[0]
        context = range(len(start) - len(row["context"].split()), len(start))
        pairs = itertools.combinations_with_replacement(context, 2)
        score = max(float(start[first] + end[last]) for first, last in pairs)
        is_empty = float(start[0] + end[0]) > score
        assert (json.loads(line)["answer"] == "") is is_empty
        empty += is_empty
    assert 0 < empty < len(rows)
    # an adapter that has seen no such question never says so
    config = folder / "adapter_config.json"
    assert json.loads(config.read_text())["meta"]["train"]["no_answer"] is True


def test_the_scores_of_questions_without_an_answer():
    """As SQuAD v2 counts them: 1 for an empty answer to such a question, else 0."""

    class Known(type(tasks["question-answering"])):  # type: ignore[misc]
        def predict(self, rows: Any, bench: Any) -> Any:
            return [{"answer": text} for text in ("", "a b", "", "b c")]

    rows = [{"answers": []}, {"answers": []}, {"answers": [("b", None)]},
            {"answers": [("b", None), ("c d", 1)]}]  # fmt: skip
    found = Known().measure(rows, None)
    assert found == {"exact_match": 1 / 4, "f1": pytest.approx((1 + 0 + 0 + 2 / 3) / 4)}


def test_several_files_of_another_task(run, base_of, tmp_path):
    """Two taggers in one run, each with the tags of its file."""
    base, task = base_of("token-classification"), "token-classification"
    for name, tag in (("one", "X"), ("two", "Y")):
        rows = [{"tokens": sentence(n), "tags": [tag if w in NAMES else "O" for w in sentence(n)]}
                for n in range(32)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    given = ("train", "--task", task, "--model", base, *SETTINGS, "--json")
    many = [part for file in files for part in ("--train", file)]
    tests = [part for file in files for part in ("--eval", file)]
    found = json.loads(run(*given, *many, *tests, "--output", tmp_path / "many").stdout)
    assert [each["labels"] for each in found] == [["O", "X"], ["O", "Y"]]
    assert all(each["f1"] >= 0.9 for each in found)
    said = run("predict", tmp_path / "many" / "two", "--text", " ".join(sentence(1)), "--json")
    assert {*json.loads(said.stdout)["tags"]} == {"O", "Y"}
