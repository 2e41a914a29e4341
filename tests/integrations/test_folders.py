"""What each way of loading makes of each folder with an adapter, in a fresh process."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
import transformers
from words import SENTENCES, plain, tokenizer

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.hub.upload import CardText, adapter_card

LABELS = {0: "bad", 1: "so", 2: "good"}
# format of the folder, or "whole" for `save_pretrained` of the model
FORMATS = ("native", "adapterhub", "peft", "whole")
# kind of head: of `AutoAdapterModel` or of the class of the task
KINDS = ("named", "static")

START = """
import json, torch, transformers
from transformers import (
    AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline,
)
import adapterzoo
from adapterzoo import AutoAdapterModel, load_model
expected = json.load(open("expected.json"))
text, folder = expected["text"], FOLDER
words = AutoTokenizer.from_pretrained("base")(text, return_tensors="pt")

def check(model):
    with torch.no_grad():
        logits = model.eval()(**words).logits[0]
    torch.testing.assert_close(logits, torch.tensor(expected[KIND]), rtol=0, atol=1e-5)
"""
ENTRIES = {
    "auto": "check(AutoModelForSequenceClassification.from_pretrained(folder))",
    "class": "check(transformers.BertForSequenceClassification.from_pretrained(folder))",
    "adapters": "check(AutoAdapterModel.from_pretrained(folder))",
    "load_model": "check(load_model(folder, AutoModelForSequenceClassification))",
    "base": """
        with torch.no_grad():
            hidden = AutoModel.from_pretrained(folder).eval()(**words).last_hidden_state[0, 0]
        torch.testing.assert_close(
            hidden, torch.tensor(expected[KIND + " hidden"]), rtol=0, atol=1e-5)""",
    "config": """
        labels = AutoConfig.from_pretrained(folder).id2label
        assert list(labels.values()) == ["bad", "so", "good"], labels""",
    "tokenizer": "assert AutoTokenizer.from_pretrained(folder)(text).input_ids "
    "== words.input_ids[0].tolist()",
    "pipeline": """
        run = pipeline("text-classification", model=folder)
        check(run.model)
        scores = torch.tensor(expected[KIND]).softmax(-1)
        assert run(text)[0]["label"] == ["bad", "so", "good"][int(scores.argmax())]""",
    "features": """
        found = pipeline("feature-extraction", model=folder)(text)[0][0]
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected[KIND + " hidden"]), rtol=0, atol=1e-5)""",
}
# what a folder cannot do, and what it says then; PEFT's format knows no names of labels, and PEFT,
# which is installed, loads its own folders
REFUSED = {
    ("named", "whole", "auto"): "Write AutoAdapterModel.from_pretrained",
    ("named", "whole", "class"): "Write AutoAdapterModel.from_pretrained",
    ("named", "whole", "load_model"): "Write AutoAdapterModel.from_pretrained",
    ("named", "peft", "auto"): "ignore_mismatched_sizes",
    ("named", "peft", "class"): "ignore_mismatched_sizes",
    ("named", "peft", "load_model"): "file [3]",
    ("named", "peft", "config"): "AssertionError",
    ("named", "peft", "pipeline"): "has no attribute 'logits'",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders of both kinds of heads in all formats, and the outputs of the models."""
    root: Path = tmp_path_factory.mktemp("folders")
    words = tokenizer()
    labels: dict[str, Any] = {"id2label": LABELS, "label2id": {n: i for i, n in LABELS.items()}}
    plain(transformers.AutoModel, "bert").save_pretrained(root / "base")
    task = transformers.AutoModelForSequenceClassification
    plain(task, "bert", **labels).save_pretrained(root / "classifier")
    for name in ("base", "classifier"):
        words.save_pretrained(root / name)
    named = AutoAdapterModel.from_pretrained(root / "base")
    named.add_adapter("a", "lora[r=4]")
    named.add_classification_head("a", num_labels=3, layers=1, use_pooler=True, id2label=LABELS)
    static = adapterzoo.init(task.from_pretrained(root / "classifier"))
    static.add_adapter("a", "lora[r=4]")
    expected: dict[str, Any] = {"text": SENTENCES[0]}
    inputs = dict(words(SENTENCES[0], return_tensors="pt"))
    for kind, model in (("named", named), ("static", static)):
        model.train_adapter("a")
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        with torch.no_grad():
            expected[kind] = model.eval()(**inputs).logits[0].tolist()
            hidden = model.base_model(**inputs).last_hidden_state[0, 0]
        expected[f"{kind} hidden"] = hidden.tolist()
        for format in FORMATS[:-1]:
            model.save_adapter(root / f"{kind}-{format}", "a", format=format)
        model.save_pretrained(root / f"{kind}-whole")
        words.save_pretrained(root / f"{kind}-whole")
    (root / "expected.json").write_text(json.dumps(expected), "utf-8")
    return root


@pytest.mark.sweep
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_entry_gives_the_adapter_or_says_what_to_write(folders, kind, format):
    pieces = [
        START.replace("FOLDER", repr(str(folders / f"{kind}-{format}"))).replace("KIND", repr(kind))
        + textwrap.dedent(code).replace("KIND", repr(kind))
        for code in ENTRIES.values()
    ]
    results = fresh.run(pieces, folders, HF_HUB_OFFLINE="1")
    for entry, (status, output) in zip(ENTRIES, results, strict=True):
        message = REFUSED.get((kind, format, entry))
        assert (status == 0) == (message is None), f"{entry}: {output}"
        assert message is None or message in output, f"{entry}: {output}"


@pytest.mark.parametrize("format", FORMATS[:-1])
def test_the_code_of_a_card_runs(folders, format):
    """Each block by itself after the first one, as it stands there."""
    text = CardText(base_model="ann/base")
    card = adapter_card(folders / f"named-{format}", "ann/adapter", None, text).content
    blocks = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(blocks) == (3 if format == "peft" else 2)
    for name, source in (("base", "base"), ("adapter", f"named-{format}")):
        shutil.copytree(folders / source, folders / "cards" / format / "ann" / name)
    shutil.copy(folders / "expected.json", folders / "cards" / format)
    check = START.replace("FOLDER", "''").replace("KIND", "'named'").replace('"base"', '"ann/base"')
    pieces = ["\n".join([check, *blocks[:2], "check(model)"])]
    if format == "peft":
        pieces.append("\n".join([check, blocks[2], "check(model)"]))
    for status, output in fresh.run(pieces, folders / "cards" / format, HF_HUB_OFFLINE="1"):
        assert status == 0, output


def test_other_ways_to_call_from_pretrained_are_those_of_transformers(folders):
    base = str(folders / "base")
    want = transformers.BertModel.from_pretrained(base).state_dict()
    given = [base, Path(base), transformers.AutoConfig.from_pretrained(base)]
    for config in given:
        found = transformers.BertModel.from_pretrained(base, config=config).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
    with pytest.raises(OSError, match="nowhere"):
        transformers.BertModel.from_pretrained(str(folders / "nowhere"))
