"""The whole way of one adapter: trained, looked at, converted, merged, served by others."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from peft_world import QUIET
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

pytestmark = [pytest.mark.filterwarnings(warning) for warning in QUIET]


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_tour(run, trained, base, table, rows, tmp_path):
    folder, texts = trained["folder"], [text for text, _ in rows]
    lines = run("predict", folder, "--file", table, "--json").stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    ours = torch.tensor([list(a["probabilities"].values()) for a in answers])
    right = [a["label"] == label for a, (_, label) in zip(answers, rows, strict=True)]
    assert sum(right) / len(right) == trained["accuracy"]
    tokens = AutoTokenizer.from_pretrained(base)(texts, padding=True, return_tensors="pt")

    # PEFT serves it
    run("convert", folder, tmp_path / "peft", "--to", "peft")
    assert json.loads(run("info", tmp_path / "peft", "--json").stdout)["method"] == "LORA"
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    served = peft.PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    with torch.no_grad():
        close(served(**tokens).logits.softmax(-1), ours)

    # transformers alone serves it
    name = "BertForSequenceClassification"
    result = run("merge", base, folder, tmp_path / "merged", "--as", name)
    assert (result.stdout, result.stderr) == (f"{tmp_path / 'merged'}: a {name}\n", "")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        close(merged(**tokens).logits.softmax(-1), ours)
    classify = pipeline("text-classification", str(tmp_path / "merged"), device="cpu")
    found = [answer["label"] for answer in classify(texts)]
    assert found == [answer["label"] for answer in answers]
