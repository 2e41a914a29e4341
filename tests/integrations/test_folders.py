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
from PIL import Image
from transformers.models.vit import ViTImageProcessorPil
from words import SENTENCES, plain, tokenizer

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError
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

TOKEN: dict[str, Any] = {"num_labels": 3, "layers": 1, "id2label": LABELS}
IMAGE: dict[str, Any] = {**TOKEN, "use_pooler": False}
# family, what follows "AutoModelFor", and the method that adds such a head with its arguments
TASKS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "token-classification": ("bert", "TokenClassification", "add_tagging_head", TOKEN),
    # no pipeline of transformers
    "": ("bert", "QuestionAnswering", "add_qa_head", {}),
    "fill-mask": ("bert", "MaskedLM", "add_masked_lm_head", {}),
    "text-generation": ("gpt2", "CausalLM", "add_causal_lm_head", {"layers": 1}),
    "image-classification": ("vit", "ImageClassification", "add_image_classification_head", IMAGE),
}
# PEFT loads its own files, without named heads
FOLDERS = (("named", "native"), ("named", "adapterhub"), ("static", "native"), ("static", "peft"))
OF_TASK = """
import torch, transformers
from transformers import pipeline
from adapterzoo import AutoAdapterModel
inputs, expected = torch.load("expected.pt")

def check(model):
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs)[0], expected, rtol=0, atol=1e-5)

check(transformers.AutoModelFor{cls}.from_pretrained("{folder}"))
check(AutoAdapterModel.from_pretrained("{folder}"))
if "{task}":
    run = pipeline("{task}", model="{folder}")
    check(run.model)
    assert run({given})
"""


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


@pytest.mark.sweep
def test_folders_of_other_tasks(tmp_path):
    pieces = []
    for task, (family, name, add, options) in TASKS.items():
        is_image = family == "vit"
        size = {"height": 8, "width": 8}
        # GPT-2 takes bare text
        reader = ViTImageProcessorPil(size=size) if is_image else tokenizer(family == "bert")
        given: Any = "the [MASK] was good ." if name == "MaskedLM" else SENTENCES[0]
        if is_image:
            given = Image.linear_gradient("L").convert("RGB")
            given.save(tmp_path / "image.png")
        cls = getattr(transformers, f"AutoModelFor{name}")
        labels = {"id2label": LABELS, "label2id": {n: i for i, n in LABELS.items()}}
        labels = labels if "id2label" in options else {}
        models = tmp_path / f"{name}-base", tmp_path / f"{name}-task"
        for folder, each, own in zip(
            models, (transformers.AutoModel, cls), ({}, labels), strict=True
        ):
            # a pipeline generates 256 tokens
            longer = {"n_positions": 512} if family == "gpt2" else {}
            plain(each, family, **own, **longer).save_pretrained(folder)
            reader.save_pretrained(folder)
        named = AutoAdapterModel.from_pretrained(models[0])
        static = adapterzoo.init(cls.from_pretrained(models[1]))
        named.add_adapter("a", "lora[r=4]")
        getattr(named, add)("a", **options)
        static.add_adapter("a", "lora[r=4]")
        for kind, model in (("named", named), ("static", static)):
            model.train_adapter("a")
            for parameter in model.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.3)
            inputs = dict(reader(given, return_tensors="pt"))
            with torch.no_grad():
                expected = model.eval()(**inputs)[0]
            for format in [format for own, format in FOLDERS if own == kind]:
                if (name, format) == ("MaskedLM", "adapterhub"):
                    # its file has the output matrix, which the class takes from its embeddings
                    continue
                folder = f"{name}-{kind}-{format}"
                model.save_adapter(tmp_path / folder, "a", format=format)
                torch.save((inputs, expected), tmp_path / f"{folder}.pt")
                shown = repr("image.png" if is_image else given)
                shown += ", max_new_tokens=2" if name == "CausalLM" else ""
                piece = OF_TASK.format(cls=name, folder=folder, task=task, given=shown)
                pieces.append(piece.replace("expected.pt", f"{folder}.pt"))
                if format == "native" and (kind == "named" or labels):
                    # the base model has no head, and another number of labels
                    text = CardText(base_model=models[0].name)
                    card = adapter_card(tmp_path / folder, folder, None, text).content
                    pieces.append("\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL)))
    wrong = [
        f"{piece}\n{output}"
        for piece, (status, output) in zip(
            pieces, fresh.run(pieces, tmp_path, HF_HUB_OFFLINE="1"), strict=True
        )
        if status
    ]
    assert not wrong, "\n".join(wrong)


def test_a_native_folder_needs_no_config(folders, tmp_path):
    shutil.copy(folders / "named-native" / "adapter.safetensors", tmp_path)
    expected = json.loads((folders / "expected.json").read_text())
    words = tokenizer()(expected["text"], return_tensors="pt")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    piped = transformers.pipeline("text-classification", model=str(tmp_path)).model
    for model in (loaded, piped):
        with torch.no_grad():
            logits = model(**words).logits[0]
        torch.testing.assert_close(logits, torch.tensor(expected["named"]), rtol=0, atol=1e-5)


def test_a_head_that_a_class_cannot_have_is_left_out(folders):
    hint = r"Write AutoAdapterModel.from_pretrained\(…\), or load_adapter\(…, with_head=False\)\.$"
    with pytest.warns(UserWarning, match=rf"(?s)without its head: .*{hint}"):
        transformers.BertForTokenClassification.from_pretrained(folders / "named-native")


def test_transformers_takes_a_name_with_a_fingerprint(folders):
    for format in ("native", "peft"):
        folder = folders / f"named-{format}"
        model = AutoAdapterModel.from_pretrained(folders / "base")
        name = model.load_adapter(folder, with_head=False)
        mark = model.adapter_fingerprint(name)
        found = transformers.AutoModel.from_pretrained(f"{folder}@{mark[:12]}")
        assert found.adapter_fingerprint(name) == mark
        with pytest.raises(CheckpointError, match="has the fingerprint"):
            transformers.AutoModel.from_pretrained(f"{folder}@{'0' * 8}")


def test_other_ways_to_call_from_pretrained_are_those_of_transformers(folders):
    base = str(folders / "base")
    want = transformers.BertModel.from_pretrained(base).state_dict()
    given = [base, Path(base), transformers.AutoConfig.from_pretrained(base)]
    for config in given:
        found = transformers.BertModel.from_pretrained(base, config=config).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in want.items())
    with pytest.raises(OSError, match="nowhere"):
        transformers.BertModel.from_pretrained(str(folders / "nowhere"))
