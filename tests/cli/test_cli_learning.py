"""`train` and `predict`, from rows in a file to labels in a file."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_config
from stand_ins import add_tokenizer
from transformers import AutoTokenizer, BertModel

from adapterzoo import AutoAdapterModel
from adapterzoo.cli import app, training
from adapterzoo.cli.models import tokens_of_text
from adapterzoo.cli.rows import read
from adapterzoo.cli.tasks import tasks
from adapterzoo.errors import ConfigError


def test_train_learns_and_says_so(trained):
    assert trained["accuracy"] >= 0.95
    assert trained["labels"] == ["fresh", "rotten"]
    assert (trained["train_rows"], trained["eval_rows"], trained["steps"]) == (48, 48, 72)
    assert trained["name"] == "reviews"
    assert trained["train_loss"] > 0


def test_train_saves_the_adapter_with_its_head_and_settings(trained, base):
    model = AutoAdapterModel.from_pretrained(base)
    assert model.load_adapter(trained["folder"]) == "reviews"
    assert model.adapter_fingerprint("reviews") == trained["fingerprint"]
    assert model.get_labels("reviews") == ["fresh", "rotten"]
    document = json.loads((trained["folder"] / "adapter_config.json").read_text())
    assert document["meta"]["train"] == {
        "accuracy": trained["accuracy"], "batch_size": 8, "epochs": 12.0, "eval_rows": 48,
        "lr": 5e-3, "max_length": 64, "seed": 1, "task": "text-classification", "train_rows": 48,
    }  # fmt: skip


def test_a_seed_gives_the_same_bits(run, base, table, tmp_path):
    found = [
        json.loads(
            run("train", "--model", base, "--train", table, "--output", tmp_path / name,
                "--epochs", 0.2, "--seed", seed, "--device", "cpu", "--json").stdout
        )["fingerprint"]
        for name, seed in [("a", 3), ("b", 3), ("c", 4)]
    ]  # fmt: skip
    assert found[0] == found[1] != found[2]


def test_several_files_are_several_adapters_as_each_alone(run, base, rows, tmp_path):
    for name, part in (("first", rows[:24]), ("second", rows[20:])):
        lines = [f"{text},{label}\n" for text, label in part]
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(lines))
    options = ("--model", base, "--epochs", 2, "--device", "cpu", "--batch-size", 8)
    files = [part for name in ("first", "second") for part in ("--train", tmp_path / f"{name}.csv")]
    tests = [part if n % 2 else "--eval" for n, part in enumerate(files)]
    said = run("train", *files, *tests, "--output", tmp_path / "many", *options).stdout
    assert [line.split()[0] for line in said.splitlines()] == ["name", "first", "second"]
    model = AutoAdapterModel.from_pretrained(base)
    for name in ("first", "second"):
        assert model.load_adapter(tmp_path / "many" / name) == name
    alone = run("train", *files[:2], *tests[:2], "--output", tmp_path / "one", *options, "--json")
    settings = [
        json.loads((tmp_path / folder / "adapter_config.json").read_text())["meta"]["train"]
        for folder in ("many/first", "one")
    ]
    assert json.loads(alone.stdout)["steps"] == 6
    assert settings[0] == settings[1]


def test_a_sweep_saves_the_best_of_its_runs(run, base, table, tmp_path):
    result = run(
        "train", "--model", base, "--train", table, "--eval", table, "--output", tmp_path / "best",
        "--sweep", "lr=1e-6,5e-3", "--sweep", "method=lora[r=2,alpha=4],seq_bn", "--epochs", 6,
        "--device", "cpu", "--json",
    )  # fmt: skip
    found = json.loads(result.stdout)
    assert [(m["name"], m["method"]) for m in found] == [
        ("best-1", "lora[r=2,alpha=4]"), ("best-2", "seq_bn"),
        ("best-3", "lora[r=2,alpha=4]"), ("best-4", "seq_bn"),
    ]  # fmt: skip
    best = max(found, key=lambda m: m["accuracy"])
    assert [m["name"] for m in found if "output" in m] == [best["name"]]
    assert found[3]["accuracy"] > found[1]["accuracy"]
    model = AutoAdapterModel.from_pretrained(base)
    assert model.load_adapter(tmp_path / "best") == "best"
    assert model.adapter_fingerprint("best") == best["fingerprint"]
    said = run("predict", tmp_path / "best", "--text", "dull").stdout
    assert said.startswith("text,label,fresh,rotten")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--sweep", "rate=1"], "--sweep rate=1: the options are method, epochs"),
        (["--sweep", "lr=fast"], "Write --sweep lr=1e-4,1e-3"),
        (["--train", "other.csv", "--name", "a"], "leave out --name"),
        (["--train", "rows.csv"], "would name their adapter 'rows'"),
        (["--eval", "a.csv", "--eval", "b.csv"], "Write --eval as often as --train"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, table, base, tmp_path, more, says):
    more = [table.parent / each if each == "rows.csv" else each for each in more]
    if "other.csv" in more:
        (tmp_path / "other.csv").write_text(table.read_text())
        more = [tmp_path / each if each == "other.csv" else each for each in more]
    result = run(
        "train", "--model", base, "--train", table, "--output", tmp_path / "x", *more, code=2
    )
    assert says in " ".join(result.stderr.split())


def expected(trained: dict[str, Any], base: Path, texts: list[str]) -> torch.Tensor:
    """Probabilities by the library itself, one text at a time."""
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.load_adapter(trained["folder"], set_active=True)
    tokenizer = AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        logits = [model(**tokenizer([text], return_tensors="pt")).logits for text in texts]
    return torch.cat(logits).softmax(-1)


def test_predict_gives_what_the_library_gives(run, trained, base, table, rows):
    texts = [text for text, _ in rows]
    truth = expected(trained, base, texts)
    result = run("predict", trained["folder"], "--file", table, "--json", "--batch-size", 7)
    assert result.stderr == ""
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["text"] for row in found] == texts
    values = torch.tensor([list(row["probabilities"].values()) for row in found])
    torch.testing.assert_close(values, truth, rtol=0, atol=1e-5)
    labels = [trained["labels"][n] for n in truth.argmax(-1).tolist()]
    assert [row["label"] for row in found] == labels
    assert {tuple(row["probabilities"]) for row in found} == {("fresh", "rotten")}


def test_predict_writes_csv_too(run, trained, base, tmp_path):
    texts = ['so "lovely", the end', "dull"]
    options = [part for text in texts for part in ("--text", text)]
    printed = run("predict", trained["folder"], *options).stdout
    found = list(csv.DictReader(io.StringIO(printed)))
    assert [row["text"] for row in found] == texts
    truth = expected(trained, base, texts)
    values = torch.tensor([[float(row[name]) for name in ("fresh", "rotten")] for row in found])
    torch.testing.assert_close(values, truth, rtol=0, atol=1e-5)
    file = tmp_path / "out.csv"
    run("predict", trained["folder"], *options, "--output", file)
    assert file.read_text() == printed


@pytest.mark.parametrize("ending", ["jsonl", "tsv"])
def test_other_files_and_columns_are_read(run, base, rows, tmp_path, ending):
    file = tmp_path / f"rows.{ending}"
    lines = [json.dumps({"review": text, "stars": len(label)}) for text, label in rows]
    if ending == "tsv":
        lines = ["review\tstars", *(f"{text}\t{len(label)}" for text, label in rows)]
    file.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    columns = ("--column", "text=review", "--column", "label=stars")
    said = run("train", "--model", base, "--train", file, "--output", tmp_path / "a",
               "--epochs", 0.1, "--device", "cpu", *columns).stdout  # fmt: skip
    assert "accuracy" not in said
    lines = run("predict", tmp_path / "a", "--file", file).stdout
    assert lines.splitlines()[0] == "text,label,5,6"
    assert len(lines.splitlines()) == 49


def test_a_model_with_a_static_head_gets_the_new_one(run, trained, base, table, tmp_path):
    """`predict` and `train` on a base that was fine-tuned for another task."""
    run("merge", base, trained["folder"], tmp_path / "tuned", "--as",
        "BertForSequenceClassification")  # fmt: skip
    run("train", "--model", tmp_path / "tuned", "--train", table, "--output", tmp_path / "b",
        "--epochs", 0.1, "--device", "cpu")  # fmt: skip
    assert run("predict", tmp_path / "b", "--text", "dull").stdout.startswith("text,label,")


CASES = {
    "no such file": (None, "there is no file 'rows.csv'"),
    "empty": ("", "'rows.csv' has no rows"),
    "names alone": ("text,label\n", "'rows.csv' has no rows"),
    "no labels": (
        "text\nfine\n",
        "line 2 of 'rows.csv' has nothing in the column 'label' ('text')",
    ),
    "no texts": (
        "label\nfresh\n",
        "line 2 of 'rows.csv' has nothing in the column 'text' ('label')",
    ),
    "no names": ("fine,a\ndull,b\n", "Write that name in the first line, or --column text=NAME."),
    "semicolons": ("text;label\nfine;a\n", "Write ',' between the columns, not ';'."),
    "an empty text": ("text,label\nfine,a\n ,b\n", "line 3 of 'rows.csv' has no text"),
    "a long row": (
        "text,label\nfine,a\ndull, really,b\n",
        "line 3 of 'rows.csv' has more values than columns. Write",
    ),
    "a short row": ("text,label\nfine,a\ndull\n", "line 3 of 'rows.csv' has nothing"),
    "one label": ("text,label\nfine,a\ndull,a\n", "has only the label 'a'. Add rows with"),
    "values": ("text,label\nfine,0.25\ndull,1\n", "has the labels '0.25', which are values"),
    "long values": (
        "text,label\nfine,0.5488135039273248\ndull,1e-05\n",
        "has the labels '1e-05', '0.5488135039273248', which are values",
    ),
    "an open quote": ('text,label\nfine,a\n"dull,b\n', "is damaged after line"),
    "no UTF-8": (b"text,label\nf\xfcn,a\n", "is damaged after line 0"),
    "no JSON": ("{\n", "'rows.jsonl' is damaged after line 0"),
    "no object": (
        '{"text": "a", "label": 1}\n[1]\n',
        "line 2 of 'rows.jsonl' has nothing in the column 'text' (a value of type list)",
    ),
    "no text": ('{"text": [1], "label": 1}\n', "line 1 of 'rows.jsonl' has no text"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_rows_are_refused(run, monkeypatch, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    content, message = CASES[case]
    file = "rows.jsonl" if "rows.jsonl" in message else "rows.csv"
    if content is not None:
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("train", "--model", "none", "--train", file, "--output", "a", code=1)
    assert result.stderr.startswith("adapterzoo: train: ")
    assert message in result.stderr
    assert result.stdout == ""
    assert not Path("a").exists()


REFUSED = {
    "an unknown method": (["--method", "lore"], "there is no config string 'lore'"),
    "an unknown field": (["--method", "lora[rank=2]"], "rank"),
    "an unknown device": (["--device", "abacus"], "abacus"),
    "a name of a path": (["--name", "../up"], "'../up'"),
    "no model": (["--model", "no/such/folder"], "the base model 'no/such/folder' cannot be loaded"),
    "no folder": (["--output", "rows.csv", "--name", "a"], "rows.csv' is a file. Write a folder"),
    "another format": (["--output", "peft"], "in the format 'peft'"),
    "a new label": (["--eval", "new.csv"], "has the labels 'c', which the training data lack"),
    "another ending": (["--train", "more.xlsx"], "its name ends in none of '.csv'"),
    "an encoder that generates": (
        ["--task", "text-generation"],
        "'bert' reads a text in both directions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_choices_are_refused_before_training(run, monkeypatch, base, tmp_path, case):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("text,label\nfine,a\ndull,b\n")
    Path("new.csv").write_text("text,label\nfine,a\ndull,c\n")
    Path("more.xlsx").touch()
    Path("peft").mkdir()
    Path("peft/adapter_config.json").write_text('{"peft_type": "LORA"}')
    monkeypatch.setattr(training, "MultiAdapterTrainer", None)
    options, message = REFUSED[case]
    usual = ["--model", base, "--train", "rows.csv", "--output", "a"]
    result = run("train", *usual, *options, code=1)
    assert result.stderr.startswith("adapterzoo: ")
    assert message in result.stderr
    assert not Path("a").exists()


def test_predict_says_that_it_rounds(run, trained, base, tmp_path):
    BertModel.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    given = ["predict", trained["folder"], "--text", "a fine plot", "--model"]
    result = run(*given, tmp_path)
    assert "has been rounded from torch.float32 to torch.bfloat16" in result.stderr
    assert result.stdout.splitlines()[1].startswith("a fine plot,fresh,")
    assert run(*given, base).stderr == ""


def test_predict_asks_for_a_text_or_a_file(run, tmp_path):
    assert "Write one of --text" in run("predict", tmp_path, code=2).stderr
    both = run("predict", tmp_path, "--text", "a", "--file", "b.csv", code=2)
    assert "Write one of --text" in both.stderr


@pytest.mark.parametrize("name", ["none/out.csv", "."])
def test_predict_looks_at_its_output_before_the_work(run, tmp_path, name):
    # there is no adapter: the first to read it would say so
    said = run("predict", tmp_path, "--text", "a", "--output", tmp_path / name, code=1).stderr
    assert str(tmp_path / name) in said


def test_predict_refuses_an_adapter_without_a_head(run, base, tmp_path):
    model = AutoAdapterModel.from_pretrained(base)
    model.add_adapter("bare", "seq_bn")
    model.save_adapter(tmp_path / "bare", "bare")
    said = run("predict", tmp_path / "bare", "--text", "fine", code=1).stderr
    assert "has no head. Write an adapter with a head for one of 'text-classification'" in said


@pytest.mark.parametrize(("multilabel", "count"), [(True, 3), (False, 1)])
def test_heads_of_several_labels_and_of_numbers(run, base, tmp_path, multilabel, count):
    model = AutoAdapterModel.from_pretrained(base).eval()
    model.add_adapter("a", "seq_bn")
    model.add_classification_head("a", num_labels=count, multilabel=multilabel)
    model.set_active_adapters("a")
    model.save_adapter(tmp_path / "a", "a")
    tokens = AutoTokenizer.from_pretrained(base)(["fine plot"], return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits[0]
    row = json.loads(run("predict", tmp_path / "a", "--text", "fine plot", "--json").stdout)
    if multilabel:
        truth = logits.sigmoid()
        values = torch.tensor(list(row["probabilities"].values()))
        torch.testing.assert_close(values, truth, rtol=0, atol=1e-5)
        likely = [name for name, share in zip(row["probabilities"], truth, strict=True)
                  if share > 0.5]  # fmt: skip
        assert row["label"] == likely
    else:
        assert row == {"text": "fine plot", "value": pytest.approx(logits.item(), abs=1e-5)}
        assert run("predict", tmp_path / "a", "--text", "fine plot").stdout.startswith(
            "text,value\n"
        )


def test_progress_is_for_people_and_on_standard_error(run, monkeypatch, base, table, tmp_path):
    arguments = ["train", "--model", base, "--train", table, "--eval", table, "--epochs", 0.2]
    arguments += ["--output", tmp_path / "a", "--device", "cpu"]
    said = run(*arguments, "--batch-size", 1).stderr.splitlines()
    assert len(said) == 10
    assert re.fullmatch(r"a: step 10 of 10, loss 0\.\d{4}", said[-1])
    # what a terminal would make of it
    monkeypatch.setattr(app, "wants_progress", lambda as_json: "" if as_json else "bar")
    result = run(*arguments)
    assert "100%|" in result.stderr
    assert "predicting: " in result.stderr
    assert "%|" not in result.stdout
    assert result.stdout.splitlines()[0].split() == ["name", "a"]
    assert run(*arguments, "--json").stderr == ""


def classes(folder: Path, labels: list[str], task: str = "text-classification") -> list[str]:
    """The classes that a task finds in rows with these labels."""
    file = folder / "rows.csv"
    text, label = ("tokens", "tags") if task == "token-classification" else ("text", "label")
    file.write_text(f"{text},{label}\n" + "".join(f"a,{each}\n" for each in labels))
    return tasks[task].classes(file, tasks[task].read(read(file), {}))


def test_labels_that_are_numbers_are_sorted_as_numbers(tmp_path):
    assert classes(tmp_path, ["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert classes(tmp_path, ["10", "9", "--1"]) == ["--1", "10", "9"]
    ids = ["98765432101234567", "98765432101234568", "123456789012345678"]
    assert classes(tmp_path, [*reversed(ids), "1e2", "1.0"]) == ["1.0", "1e2", *ids]


def test_values_are_classes_if_they_are_few_or_written_as_text(tmp_path):
    grades, values = [str(n / 2) for n in range(10)], [str(n / 2) for n in range(30)]
    assert classes(tmp_path, [*grades, *grades]) == grades
    for labels in (grades, [*values, *values]):
        with pytest.raises(ConfigError, match="Write classes as text"):
            classes(tmp_path, labels)
    named = [f"{value} stars" for value in values]
    assert classes(tmp_path, named) == sorted(named)
    # a tag is always a class
    assert classes(tmp_path, ["1.5", "2"], "token-classification") == ["1.5", "2"]


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("deberta-v2", "'deberta-v2' reads a text in both directions"),
        ("t5", "'t5' has an encoder and a decoder. Write --task seq2seq."),
        ("mixtral", ""),
    ],
)
def test_only_models_that_do_not_see_later_tokens_learn_them(run, table, tmp_path, family, says):
    base = tmp_path / "base"
    model = AutoAdapterModel.from_config(tiny_config(family)).base_model
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(base)
    add_tokenizer(base)
    options = ["--method", "lora", "--epochs", 0.1, "--device", "cpu", "--json"]
    result = run(
        "train", "--model", base, "--train", table, "--task", "text-generation",
        "--output", tmp_path / "a", *options, code=1 if says else 0,
    )  # fmt: skip
    assert says in result.stderr


def test_decoders_pad_with_the_end_of_texts(run, table, tmp_path):
    """A row of a batch says what it says alone."""
    base = tmp_path / "base"
    AutoAdapterModel.from_config(tiny_config("gpt2")).base_model.save_pretrained(base)
    add_tokenizer(base, eos_token="[UNK]")
    run("train", "--model", base, "--train", table, "--output", tmp_path / "a", "--epochs", 1,
        "--device", "cpu", "--method", "seq_bn")  # fmt: skip
    options = ["--text", "fine", "--text", "so dull was the film and its plot", "--json"]
    batch = run("predict", tmp_path / "a", *options).stdout
    alone = run("predict", tmp_path / "a", *options, "--batch-size", 1).stdout
    found, expected = (
        torch.tensor([list(json.loads(line)["probabilities"].values()) for line in text.split("\n")
                      if line])
        for text in (batch, alone)
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_tokenizer_that_cannot_pad_is_refused(run, table, tmp_path):
    base = tmp_path / "base"
    AutoAdapterModel.from_config(tiny_config("gpt2")).base_model.save_pretrained(base)
    add_tokenizer(base, pad_token=None)
    arguments = ["train", "--model", base, "--train", table, "--output", tmp_path / "a"]
    assert "no token to pad with" in run(*arguments, code=1).stderr


def test_texts_are_cut_to_what_the_model_takes():
    config = tiny_config("bert")
    config.max_position_embeddings = 40
    model = AutoAdapterModel.from_config(config).eval()
    # a tokenizer that does not say, as transformers makes one of a folder without its settings
    tokenizer = SimpleNamespace(model_max_length=int(1e30))
    assert tokens_of_text(model, tokenizer, None) == tokens_of_text(model, tokenizer, 41) == 40
    assert tokens_of_text(model, tokenizer, 7) == 7


def test_predict_cuts_texts_where_the_training_did(run, base, table, tmp_path):
    run("train", "--model", base, "--train", table, "--output", tmp_path / "a", "--epochs", 0.2,
        "--max-length", 3, "--device", "cpu")  # fmt: skip

    def shares(text: str, *options: object) -> list[float]:
        said = run("predict", tmp_path / "a", "--text", text, "--json", *options).stdout
        return list(json.loads(said)["probabilities"].values())

    cut = shares("the film plot was dull")
    assert cut == pytest.approx(shares("the film plot"), abs=1e-6)
    assert cut != pytest.approx(shares("the film plot was dull", "--max-length", 64), abs=1e-4)
