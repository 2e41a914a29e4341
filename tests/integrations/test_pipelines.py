"""`transformers.pipeline` on models with named heads: the answers of transformers' own classes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from families import tiny_config
from PIL import Image
from snapshots import stir
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
    LayoutLMConfig,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
    pipeline,
)
from transformers.models.vit import ViTImageProcessorPil
from transformers.pipelines.base import SUPPORTED_PEFT_TASKS
from words import SENTENCES, plain, tokenizer

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import StateError
from adapterzoo.heads import HeadConfig

NAMES = {0: "contradiction", 1: "neutral", 2: "entailment"}
LABELS: dict[str, Any] = {"id2label": NAMES, "label2id": {n: i for i, n in NAMES.items()}}
ONE: dict[str, Any] = {"id2label": {0: "stars"}, "label2id": {"stars": 0}}
SOUND = np.random.default_rng(0).standard_normal(1600).astype("float32")


@pytest.fixture
def logged(caplog):
    """What transformers logs, which no warning filter sees."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def images() -> list[Image.Image]:
    source = np.random.default_rng(0)
    return [Image.fromarray(source.integers(0, 255, (8, 8, 3), "uint8")) for _ in range(2)]


def of_text(pairs: bool = True) -> dict[str, Any]:
    return {"tokenizer": tokenizer(pairs)}


def of_bare_text() -> dict[str, Any]:
    return of_text(pairs=False)


def of_images() -> dict[str, Any]:
    return {"image_processor": ViTImageProcessorPil(size={"height": 8, "width": 8})}


MASKED = ["the film was [MASK] .", "a [MASK] plot"]
# task, class, family, config, what makes the inputs, the inputs, arguments of the call
TASKS: list[tuple[Any, ...]] = [
    ("text-classification", AutoModelForSequenceClassification, "bert", LABELS,
     of_text, SENTENCES, {"top_k": None}),
    ("sentiment-analysis", AutoModelForSequenceClassification, "distilbert", LABELS,
     of_text, SENTENCES, {}),
    ("text-classification", AutoModelForSequenceClassification, "gpt2", LABELS,
     of_bare_text, SENTENCES, {"top_k": 2}),
    ("text-classification", AutoModelForSequenceClassification, "bert",
     {**LABELS, "problem_type": "multi_label_classification"}, of_text, SENTENCES, {"top_k": None}),
    ("text-classification", AutoModelForSequenceClassification, "bert",
     {**ONE, "problem_type": "regression"}, of_text, SENTENCES, {}),
    ("zero-shot-classification", AutoModelForSequenceClassification, "bert", LABELS,
     of_text, SENTENCES, {"candidate_labels": ["good", "bad"]}),
    ("token-classification", AutoModelForTokenClassification, "bert", LABELS,
     of_text, SENTENCES, {"ignore_labels": []}),
    ("ner", AutoModelForTokenClassification, "roberta", LABELS,
     of_text, SENTENCES, {"aggregation_strategy": "simple", "ignore_labels": []}),
    ("fill-mask", AutoModelForMaskedLM, "bert", {}, of_text, MASKED, {}),
    ("fill-mask", AutoModelForMaskedLM, "roberta", {}, of_text, MASKED, {"top_k": 3}),
    ("text-generation", AutoModelForCausalLM, "gpt2", {}, of_bare_text, SENTENCES,
     {"max_new_tokens": 5, "do_sample": False}),
    ("text-generation", AutoModelForCausalLM, "llama", {}, of_bare_text, SENTENCES,
     {"max_new_tokens": 5, "num_beams": 2, "do_sample": False}),
    ("feature-extraction", AutoModel, "bert", {}, of_text, SENTENCES, {}),
    ("image-feature-extraction", AutoModel, "vit", {}, of_images, images(), {}),
    ("image-classification", AutoModelForImageClassification, "vit", LABELS,
     of_images, images(), {"top_k": 3}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "cls", "family", "config", "processing", "inputs", "asked"),
    TASKS,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pipeline_answers_as_with_the_class_of_the_task(
    tmp_path, logged, task, cls, family, config, processing, inputs, asked
):
    theirs = plain(cls, family, **config)
    theirs.save_pretrained(tmp_path)
    ours = AutoAdapterModel.from_pretrained(tmp_path)
    expected = pipeline(task, model=theirs, device="cpu", **processing())(inputs, **asked)
    logged.clear()
    found = pipeline(task, model=ours, device="cpu", **processing())(inputs, **asked)
    same(found, expected)
    assert not complaints(logged)


def same(found: Any, expected: Any) -> None:
    """Equal labels, words and places; numbers that differ by rounding at most."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            same(mine, theirs)
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ([{"label": "a", "score": 0.5}], [{"label": "b", "score": 0.5}]),
        ([{"label": "a", "score": 0.5}], [{"label": "a", "score": 0.51}]),
        ([[1.0, 2.0]], [[1.0]]),
        ({"a": 1}, {"a": 1, "b": 2}),
        (["x"], ("x",)),
    ],
)
def test_the_comparison_of_answers_bites(mine, theirs):
    with pytest.raises(AssertionError):
        same(mine, theirs)


def complaints(logged: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage()[:200] for r in logged.records if r.levelno >= logging.WARNING]


def test_speech_is_written_down_as_with_the_class_of_the_task(tmp_path, logged):
    theirs = plain(AutoModelForSpeechSeq2Seq, "whisper")
    theirs.save_pretrained(tmp_path)
    ours = AutoAdapterModel.from_pretrained(tmp_path)
    shapes: dict[str, Any] = {"feature_size": 8, "chunk_length": 1, "hop_length": 500}
    processing = {"feature_extractor": WhisperFeatureExtractor(**shapes), "tokenizer": Words()}
    asked = {"generate_kwargs": {"max_new_tokens": 6, "num_beams": 1}}
    task = "automatic-speech-recognition"
    expected = pipeline(task, model=theirs, device="cpu", **processing)(SOUND.copy(), **asked)
    logged.clear()
    found = pipeline(task, model=ours, device="cpu", **processing)(SOUND.copy(), **asked)
    assert found == expected
    assert len(found["text"].split()) == 6
    assert "not supported" not in logged.text


class Words:
    """As much of Whisper's tokenizer as the pipeline asks for."""

    pad_token_id = 1

    def _decode_asr(self, outputs: list[dict[str, Any]], **_: Any) -> tuple[str, dict[str, Any]]:
        return " ".join(str(i) for i in outputs[0]["tokens"].flatten().tolist()), {}


def test_sound_is_classified_by_the_active_head(tiny, logged):
    model = tiny("wav2vec2")
    model.add_classification_head("tone", num_labels=3, id2label=NAMES)
    extractor = Wav2Vec2FeatureExtractor()
    found = pipeline("audio-classification", model=model, feature_extractor=extractor,
                     device="cpu")(SOUND.copy(), top_k=3)  # fmt: skip
    values = extractor(SOUND, sampling_rate=16000, return_tensors="pt")
    with torch.no_grad():
        shares = model(**values).logits.softmax(-1)[0]
    assert {a["label"]: pytest.approx(a["score"], rel=1e-5) for a in found} == {
        NAMES[i]: shares[i].item() for i in range(3)
    }
    assert not complaints(logged)


def test_an_answer_is_found_in_a_document(logged):
    bert = tiny_config("bert").to_dict()
    config = LayoutLMConfig(**{k: v for k, v in bert.items() if k not in ("model_type", "dtype")})
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(config).eval()
    model.add_qa_head("qa")
    words = ["the", "film", "was", "good"]
    boxes = [(word, [10 * i, 0, 10 * i + 9, 10]) for i, word in enumerate(words)]
    answer = pipeline("document-question-answering", model=model, tokenizer=tokenizer(),
                      device="cpu")  # fmt: skip
    (found,) = answer(image=None, question="was the plot", word_boxes=boxes)
    # [CLS] was the plot [SEP] the film was good [SEP]
    encoded = tokenizer()("was the plot", " ".join(words), return_tensors="pt")
    bbox = torch.zeros(1, 10, 4, dtype=torch.long)
    bbox[0, 5:9] = torch.tensor([box for _, box in boxes])
    bbox[0, [4, 9]] = 1000
    with torch.no_grad():
        out = model(**encoded, bbox=bbox)
    start, end = (logits[0].softmax(-1) for logits in (out.start_logits, out.end_logits))
    spans = {(i, j): (start[5 + i] * end[5 + j]).item() for i in range(4) for j in range(i, 4)}
    i, j = max(spans, key=spans.__getitem__)
    assert (found["start"], found["end"], found["answer"]) == (i, j, " ".join(words[i : j + 1]))
    assert not complaints(logged)


# --- several heads on one model ---


def two_tasks(tiny: Any) -> Any:
    model = tiny("bert")
    labels = {"mood": ["sad", "glad"], "topic": ["film", "food", "art"]}
    for seed, (name, named) in enumerate(labels.items()):
        model.add_adapter(name, "seq_bn")
        stir(model, name, seed, std=0.5)
        model.add_classification_head(name, len(named), id2label=dict(enumerate(named)))
        for parameter in model.get_head(name).parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def by_hand(model: Any, text: str) -> dict[str, float]:
    with torch.no_grad():
        shares = model(**tokenizer()(text, return_tensors="pt")).logits.softmax(-1)[0]
    return dict(zip(model.get_labels(), shares.tolist(), strict=True))


def test_the_active_adapter_and_its_head_answer_with_their_own_labels(tiny):
    model = two_tasks(tiny)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    seen = []
    for name in ("mood", "topic", "mood"):
        model.set_active_adapters(name)
        found = {a["label"]: a["score"] for a in classify(SENTENCES[0], top_k=None)}
        assert set(found) == set(model.get_labels(name))
        assert found == pytest.approx(by_hand(model, SENTENCES[0]), rel=1e-5)
        seen.append(found)
    assert seen[0] == seen[2]
    # the head alone: labels change with it, the adapter stays
    model.active_head = "topic"
    found = {a["label"]: a["score"] for a in classify(SENTENCES[0], top_k=None)}
    assert found == pytest.approx(by_hand(model, SENTENCES[0]), rel=1e-5)
    assert found != pytest.approx(seen[1], rel=1e-3)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({"num_labels": 3}, "single_label_classification"),
        ({"num_labels": 3, "multilabel": True}, "multi_label_classification"),
        ({"num_labels": 1, "multilabel": True}, "multi_label_classification"),
        ({"num_labels": 1}, "regression"),
    ],
)
def test_the_kind_of_labels_decides_what_becomes_of_the_logits(tiny, head, expected):
    model = tiny("bert")
    model.add_classification_head("other", num_labels=2)
    model.add_classification_head("task", **head)
    assert model.config.problem_type == expected
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    found = sorted(classify(SENTENCES[0], top_k=None), key=lambda a: a["label"])
    with torch.no_grad():
        logits = model(**tokenizer()(SENTENCES[0], return_tensors="pt")).logits[0]
    act = {
        "regression": torch.nn.Identity(),
        "multi_label_classification": torch.sigmoid,
        "single_label_classification": lambda x: x.softmax(-1),
    }[expected]
    assert [a["score"] for a in found] == pytest.approx(act(logits).tolist(), rel=1e-5)


def test_the_config_names_no_kind_of_labels_where_the_head_has_none(tiny):
    model = tiny("bert")
    model.add_classification_head("class")
    model.add_tagging_head("tags")
    assert model.config.problem_type is None
    model.active_head = "class"
    assert model.config.problem_type == "single_label_classification"
    image = {"head_type": "image_classification", "multilabel": True}
    assert HeadConfig.from_dict(image).problem_type == "multi_label_classification"
    assert HeadConfig.from_dict({**image, "num_labels": 1}).problem_type == "regression"


def test_without_one_head_that_answers_there_is_no_score(tiny):
    """A pipeline sees what the base model or several heads answer, and finds no logits in it."""
    model = two_tasks(tiny)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer(), device="cpu")
    model.active_head = ["mood", "topic"]
    with pytest.raises(KeyError, match="logits"):
        classify(SENTENCES[0])
    model.delete_head("mood")
    assert model.active_head == "topic"
    classify(SENTENCES[0])
    model.delete_head("topic")
    with pytest.raises(KeyError, match="logits"):
        classify(SENTENCES[0])


def test_generation_without_a_head_says_what_to_add(tiny):
    model = tiny("gpt2")
    model.add_causal_lm_head("lm")
    write = pipeline("text-generation", model=model, tokenizer=tokenizer(False), device="cpu")
    write(SENTENCES[0], max_new_tokens=2)
    model.active_head = None
    with pytest.raises(StateError, match=r"no head is active.*'lm'"):
        write(SENTENCES[0], max_new_tokens=2)
    model.delete_head("lm")
    with pytest.raises(StateError, match=r"no head is active.*add_causal_lm_head"):
        model.generate(torch.tensor([[5, 6]]))


def test_only_pipelines_know_the_class(tiny):
    """Entering it anywhere else would change what `AutoModelFor…` and `Trainer` do."""
    name = type(tiny("bert")).__name__
    tiny("gpt2")
    of = {task: names.count(name) for task, names in SUPPORTED_PEFT_TASKS.items() if name in names}
    assert of["text-classification"] == of["token-classification"] == 1
    assert "GPT2AdapterModel" in SUPPORTED_PEFT_TASKS["text-generation"]
    assert "ViTAdapterModel" not in SUPPORTED_PEFT_TASKS["text-generation"]
    theirs = AutoModelForSequenceClassification.from_config(tiny_config("bert"))
    assert type(theirs).__name__ == "BertForSequenceClassification"
