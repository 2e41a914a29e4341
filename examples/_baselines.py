"""What an adapter has to beat: classifiers that leave the encoder as it is, or do without one."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModel

from _data import Rows, Task, packaged_model

TOKENS = 64
BASELINES = (
    "majority class",
    "TF-IDF + logistic regression",
    "frozen encoder + logistic regression",
)


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    name: str
    trainable: int
    seconds: float
    accuracy: float
    standard_error: float


def encoder_of(given: str | None) -> str:
    """The path or Hub name that the user gave, else the path of the packaged encoder.

    Raises:
        DataError: none is given and the packaged one is not installed.
    """
    return given or str(packaged_model())


def device_of(given: str | None) -> torch.device:
    """The device that the user gave, else the GPU if there is one."""
    return torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))


def score(
    name: str, trainable: int, seconds: float, predicted: Sequence[int], rows: Rows
) -> Result:
    """Accuracy on the rows with its standard error by group."""
    correct = [float(guess == label) for guess, label in zip(predicted, rows.labels, strict=True)]
    return Result(name, trainable, seconds, *mean_by_group(correct, rows.groups))


def mean_by_group(values: Sequence[float], groups: Sequence[str]) -> tuple[float, float]:
    """Return the mean and its standard error.

    Verdicts on one movie go together, so that the error is summed over movies, not over rows:
    se² = Σ_g (Σ_{i in g} (value_i − mean))² / n², which is p(1 − p)/n for groups of one.
    """
    mean = sum(values) / len(values)
    by_group: dict[str, float] = defaultdict(float)
    for value, group in zip(values, groups, strict=True):
        by_group[group] += value - mean
    return mean, math.sqrt(sum(total**2 for total in by_group.values())) / len(values)


def batches(tokenizer: Any, texts: Sequence[str], title: str) -> Iterator[tuple[list[int], Any]]:
    """Texts of similar length together: the places of a batch in the list, and its tokens."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    for start in tqdm(range(0, len(order), 64), title, leave=False, mininterval=1, unit="batch"):
        places = order[start : start + 64]
        yield (
            places,
            tokenizer(
                [texts[place] for place in places],
                truncation=True,
                max_length=TOKENS,
                padding=True,
                return_tensors="pt",
            ),
        )


def majority(task: Task) -> Result:
    """Always the label that most training rows have."""
    label = Counter(task.train.labels).most_common(1)[0][0]
    return score(BASELINES[0], 0, 0.0, [label] * len(task.test), task.test)


def tfidf(task: Task) -> Result:
    """Logistic regression on TF-IDF of words and of pairs of words."""
    start = time.perf_counter()
    classifier = tfidf_classifier(task.train)
    seconds = time.perf_counter() - start
    predicted = classifier.predict(task.test.texts)
    return score(BASELINES[1], _size(classifier[-1]), seconds, predicted, task.test)


def tfidf_classifier(train: Rows) -> Any:
    """Fit the classifier of `tfidf`.

    Its settings, and those of `frozen`, are the best of five-fold cross-validation by movie on the
    training rows of the packaged snippets.
    """
    classifier = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True),
        LogisticRegression(C=10.0, max_iter=1000),
    )
    return classifier.fit(train.texts, train.labels)


def frozen(task: Task, path: str, tokenizer: Any, device: torch.device) -> Result:
    """Logistic regression on the mean of the encoder's last hidden states."""
    model = AutoModel.from_pretrained(path).to(device).eval()
    start = time.perf_counter()
    classifier = LogisticRegression(C=0.1, max_iter=1000)
    classifier.fit(encode(model, tokenizer, task.train.texts), task.train.labels)
    seconds = time.perf_counter() - start
    predicted = classifier.predict(encode(model, tokenizer, task.test.texts))
    return score(BASELINES[2], _size(classifier), seconds, predicted, task.test)


@torch.inference_mode()
def encode(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """The mean of the last hidden states of each text, a NumPy array `[texts, width]`."""
    features = torch.empty(len(texts), model.config.hidden_size)
    for places, tokens in batches(tokenizer, texts, "frozen encoder"):
        hidden = model(**tokens.to(model.device)).last_hidden_state
        features[places] = _mean(hidden, tokens["attention_mask"]).float().cpu()
    return features.numpy()


def baselines(task: Task, path: str, tokenizer: Any, device: torch.device) -> Iterator[Result]:
    """All three as they are done, in the order of what they know."""
    yield majority(task)
    yield tfidf(task)
    yield frozen(task, path, tokenizer, device)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(hidden.dtype)  # [batch, length, 1]
    return (hidden * weights).sum(1) / weights.sum(1)  # [batch, width]


def _size(classifier: Any) -> int:
    return int(classifier.coef_.size + classifier.intercept_.size)
