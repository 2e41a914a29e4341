"""The model card of an adapter: description, code to load it, config and results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from adapterzoo.errors import ConfigError, in_python, listing
from adapterzoo.formats.files import read_json
from adapterzoo.heads import head_types

from .names import ADAPTER_CONFIG, is_public_name

# the base model's name in native and AdapterHub configs, and in PEFT's
BASE_NAMES = ("model_name", "base_model_name_or_path")
_INSTALL = "pip install adapterzoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardText:
    """The author's texts for a model card.

    Attributes:
        base_model: name on the Hub; None: the one in the checkpoint, if it is on the Hub.
        datasets: names on the Hub.
        results: metric names and values.
        language: codes such as `"en"`.
        license: the Hub's identifier, such as `"apache-2.0"`.
        tags: further tags.
        metrics: names of metrics besides those in `results`.
        architecture_training: text about the training.
        evaluation: text after the results.
        citation: text, BibTeX for example.
    """

    base_model: str | None = None
    datasets: Sequence[str] = ()
    results: Mapping[str, float] = field(default_factory=dict)
    language: str | Sequence[str] | None = None
    license: str | None = None
    tags: Sequence[str] = ()
    metrics: Sequence[str] = ()
    architecture_training: str | None = None
    evaluation: str | None = None
    citation: str | None = None


def check_card(text: CardText) -> None:
    """Check that a card can be written from these texts.

    Raises:
        ConfigError: a result is not a finite number, a metric has no name, a field is a text
            instead of a list, or the base model is not a Hub name.
    """
    for field_name in ("datasets", "tags", "metrics"):
        # a text is a sequence of letters
        if isinstance(value := getattr(text, field_name), str):
            raise ConfigError(
                f"{field_name}={value!r} is one text instead of a list. Write "
                f"{field_name}=[{value!r}]."
            )
    for metric in (*text.results, *text.metrics):
        if not isinstance(metric, str) or not metric.strip():
            raise ConfigError(
                f"metrics has the name {metric!r}. Write a text, such as "
                f"metrics={{'accuracy': 0.91}}."
            )
    for metric, value in text.results.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ConfigError(
                f"metrics[{metric!r}]={value!r} is not a finite number. Write one, such as "
                f"metrics={{'accuracy': 0.91}}, or leave it out."
            )
    if text.base_model is not None and not is_public_name(text.base_model):
        raise ConfigError(
            f"base_model={text.base_model!r} is not a name of the Hub. Write it as "
            f"'google-bert/bert-base-uncased', or leave it out."
        )


def adapter_card(
    folder: Path, repo_id: str, revision: str | None, text: CardText, setup: str | None = None
) -> ModelCard:
    """Return the card for an adapter's folder.

    Args:
        folder: holds `adapter_config.json` of the native format, AdapterHub's or PEFT's.
        repo_id: the repository of the card.
        revision: the branch; None: the default one.
        text: the author's texts.
        setup: the composition of which this is the first adapter; None: the adapter is alone.

    Raises:
        CheckpointError: the folder has no readable config.
    """
    hint = in_python("Write a folder that save_adapter wrote", "Write the folder of an adapter")
    document = read_json(folder / ADAPTER_CONFIG, hint)
    head = document.get("head")
    if head is None and (folder / "head_config.json").is_file():
        head = read_json(folder / "head_config.json", hint)
    head_config = head.get("config") if isinstance(head, Mapping) else None
    head_type = head_config.get("head_type") if isinstance(head_config, Mapping) else None
    base = base_name(document, text.base_model)
    model_type = document.get("model_type")
    language = text.language
    if language is not None and not isinstance(language, str):
        language = list(language)
    more: dict[str, Any] = {"base_model_relation": "adapter"} if base else {}
    data = ModelCardData(
        base_model=base,
        datasets=list(text.datasets) or None,
        language=language,
        library_name="adapterzoo",
        license=text.license,
        metrics=list(dict.fromkeys([*text.results, *text.metrics])) or None,
        pipeline_tag=_pipeline_tag(head_type or document.get("task_type")),
        tags=list(
            dict.fromkeys(["adapterzoo", "adapter", *([model_type] if model_type else []),
                           *text.tags])
        ),
        **more,
    )  # fmt: skip
    name = setup or document.get("name") or repo_id.rpartition("/")[2]
    trained = f", trained on {' and '.join(map(_dataset, text.datasets))}" if text.datasets else ""
    kind = f" with a prediction head for {str(head_type).replace('_', ' ')}" if head_type else ""
    inner = document.get("config")
    # PEFT's config has the base model's name too, perhaps as a local path
    outer = {key: value for key, value in document.items() if key not in BASE_NAMES}
    config = inner if isinstance(inner, Mapping) else outer
    parts = [
        f"# `{name}`",
        f"An adapter for {_model(base, document)}{kind}{trained}. Made with adapterzoo.",
        "## How to load it",
        f"```\n{_INSTALL}\n```",
        f"```python\n{load_code(repo_id, base, head, revision, '_setup' if setup else '')}\n```",
        "## Config",
        f"```json\n{json.dumps(config, indent=2, sort_keys=True)}\n```",
    ]
    if text.architecture_training:
        parts += ["## Training", text.architecture_training]
    if text.results or text.evaluation:
        parts += ["## Results"]
        if text.results:
            rows = [f"| {_cell(metric)} | {value:.6g} |" for metric, value in text.results.items()]
            parts += ["\n".join(["| metric | value |", "| --- | --- |", *rows])]
        parts += [text.evaluation] if text.evaluation else []
    if text.citation:
        parts += ["## Citation", text.citation]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def base_name(document: Mapping[str, Any], given: str | None) -> str | None:
    """Return the name of the base model on the Hub; None if it is unknown.

    Args:
        document: a config of any format.
        given: the author's name for it, which takes precedence.
    """
    written = next((document[key] for key in BASE_NAMES if document.get(key)), None)
    return given or (written if is_public_name(written) else None)


def load_code(
    repo_id: str,
    base: str | None,
    head: Mapping[str, Any] | None,
    revision: str | None,
    what: str = "",
) -> str:
    """Return the lines that load an adapter from the Hub.

    Args:
        repo_id: the adapter's repository.
        base: name of the base model; None: unknown.
        head: description of the head.
        revision: the branch; None: the default one.
        what: "_setup" for a composition.
    """
    name = json.dumps(base) if base else "base_model"
    where = json.dumps(repo_id) + ("" if revision is None else f", revision={json.dumps(revision)}")
    load = f"model.load_adapter{what}({where}, set_active=True)"
    if isinstance(head, Mapping) and head.get("static"):
        cls = str(head["static"])
        lines = [
            "import adapterzoo, transformers",
            f"model = adapterzoo.init(transformers.{cls}.from_pretrained({name}))",
        ]
    else:
        lines = [
            "from adapterzoo import AutoAdapterModel",
            f"model = AutoAdapterModel.from_pretrained({name})",
        ]
    return "\n".join([*lines, load])


def card_text(words: Mapping[str, Any], **more: Any) -> CardText:
    """Read the author's texts from a mapping with AdapterHub's keys.

    Args:
        words: tags, language, license, metrics, architecture_training, results, citation.
        **more: fields of `CardText`.

    Raises:
        ConfigError: a key is unknown.
    """
    same = ("tags", "language", "license", "metrics", "architecture_training", "citation")
    # "results" is a text there
    names = {name: name for name in same} | {"results": "evaluation"}
    if unknown := sorted(set(words) - set(names)):
        raise ConfigError(
            f"adapter_card_kwargs has the unknown key {listing(unknown)}. Legal are "
            f"{listing(sorted(names))}."
        )
    return CardText(**{names[key]: value for key, value in words.items()}, **more)


def _model(base: str | None, document: Mapping[str, Any]) -> str:
    if base is not None:
        return f"[{base}](https://huggingface.co/{base})"
    kind = document.get("model_type")
    return f"a model of type `{kind}`" if kind else "a base model that its author does not name"


def _dataset(name: str) -> str:
    if is_public_name(name):
        return f"[{name}](https://huggingface.co/datasets/{name})"
    return _cell(name)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _pipeline_tag(task: object) -> str | None:
    """Return the Hub's name for a type of head, or for a `task_type` of PEFT."""
    if task == "FEATURE_EXTRACTION":
        return "feature-extraction"
    tags = (t.pipeline_tag for t in head_types.values() if task in (t.head_type, t.peft_task))
    return None if task is None else next(tags, None)
