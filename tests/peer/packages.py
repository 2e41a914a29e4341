"""Packages that programs of the peer use and that are not installed, and pipelines.

transformers 5 has no pipelines for question answering and summarization; those here read the
outputs of the same models.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any


def install(transformers: Any) -> None:
    """Answer imports of these packages, and of these names of transformers and datasets."""
    for name in ("evaluate", "nltk", "seqeval", "jiwer", "librosa", "rouge_score", "sacrebleu"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _STUBS.get(name, ModuleType)(name)
    # the bars of notebooks need widgets
    sys.modules["tqdm.notebook"] = importlib.import_module("tqdm.std")
    datasets: Any = importlib.import_module("datasets")
    datasets.load_metric = _Evaluate.load
    # sounds of `tiny` are decoded, and sampled as Whisper reads them
    cast = datasets.DatasetDict.cast_column
    datasets.DatasetDict.cast_column = lambda self, column, feature: (
        self if isinstance(feature, datasets.Audio) else cast(self, column, feature)
    )
    # datasets 5 gives a column where it gave a tensor
    datasets.arrow_dataset.Column.squeeze = lambda self, *given: self[:].squeeze(*given)
    transformers.WhisperFeatureExtractor.from_pretrained = _feature_extractor
    transformers.WhisperProcessor.from_pretrained = _Processor
    transformers.QuestionAnsweringPipeline = _QuestionAnswering
    transformers.SummarizationPipeline = _Summarization
    importlib.import_module("trl").DataCollatorForCompletionOnlyLM = _completions


# --- pipelines, processors and collators ---


def _feature_extractor(*_: Any, **__: Any) -> Any:
    import transformers

    return transformers.WhisperFeatureExtractor()


class _Processor:
    def __init__(self, name: str, **_: Any) -> None:
        import transformers

        self.feature_extractor = _feature_extractor()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # what the pipeline asks of Whisper's own tokenizer: the text, and nothing optional
        self.tokenizer._decode_asr = lambda found, **_: (
            self.tokenizer.batch_decode(found[0]["tokens"])[0], {},
        )  # fmt: skip

    def get_decoder_prompt_ids(self, **_: Any) -> None:
        """None are forced: the tiny vocabulary has no languages."""


class _Pipeline:
    def __init__(self, model: Any, tokenizer: Any, **_: Any) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer


class _QuestionAnswering(_Pipeline):
    def __call__(self, question: str, context: str) -> dict[str, str]:
        inputs = self.tokenizer(question, context, return_tensors="pt", truncation=True)
        outputs = self.model(**inputs)
        start, end = (int(each.argmax()) for each in (outputs.start_logits, outputs.end_logits))
        return {"answer": self.tokenizer.decode(inputs["input_ids"][0][start : end + 1])}


class _Summarization(_Pipeline):
    def __call__(self, text: str) -> list[dict[str, str]]:
        inputs = self.tokenizer(text, return_tensors="pt", truncation=True)
        inputs.pop("token_type_ids", None)
        tokens = self.model.generate(**inputs, max_new_tokens=8)
        return [{"summary_text": self.tokenizer.decode(tokens[0])}]


def _completions(response_template: str, tokenizer: Any) -> Any:
    """Learn all tokens: the template is not found in a vocabulary of other words."""
    from transformers import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


# --- packages that are not installed ---


class _Numbers(dict[str, float]):
    """Has a zero for every number that is not computed here."""

    def __missing__(self, name: str) -> float:
        return self["accuracy"] if name == "overall_accuracy" else 0.0


class _Metric:
    """Computes the share of equal values, whatever its name is."""

    def compute(self, predictions: Any = (), references: Any = (), **_: Any) -> _Numbers:
        pairs = list(_pairs(predictions, references))
        return _Numbers(accuracy=sum(bool(a == b) for a, b in pairs) / max(len(pairs), 1))

    def add_batch(self, **_: Any) -> None:
        """Forget the batch."""


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    for a, b in zip(first, second, strict=False):
        if isinstance(a, (list, tuple)):
            yield from _pairs(a, b)
        elif isinstance(a, dict):
            yield a["prediction_text"], b["answers"]["text"][:1]
        else:
            yield a, b


class _Evaluator:
    """Computes the accuracy of a model on the rows of a data set."""

    def compute(
        self, model_or_pipeline: Any, tokenizer: Any, data: Any, input_column: str,
        label_column: str, **_: Any,
    ) -> dict[str, Any]:  # fmt: skip
        texts, labels = list(data[input_column]), list(data[label_column])
        inputs = tokenizer(texts, return_tensors="pt", padding=True, truncation=True)
        outputs = model_or_pipeline.eval()(**inputs)
        return _Metric().compute(outputs.logits.argmax(-1).tolist(), labels)


class _Evaluate(ModuleType):
    @staticmethod
    def load(name: str, *_: Any, **__: Any) -> Any:
        # the one metric that is a number
        return SimpleNamespace(add_batch=dict, compute=float) if name == "wer" else _Metric()

    @staticmethod
    def evaluator(*_: Any) -> _Evaluator:
        return _Evaluator()


class _Nltk(ModuleType):
    class data:  # noqa: N801
        """Says that all data are there."""

        find = staticmethod(lambda *_: True)

    def download(self, *_: Any, **__: Any) -> bool:
        return True

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]


_STUBS: dict[str, type[ModuleType]] = {"evaluate": _Evaluate, "nltk": _Nltk}
