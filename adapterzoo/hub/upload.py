"""Upload an adapter and its model card from a folder, in one commit."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
)
from safetensors import safe_open

from adapterzoo.composition import fusions_of
from adapterzoo.config import AdapterConfig
from adapterzoo.errors import CheckpointError, ConfigError, listing, names_call
from adapterzoo.folders.formats import REVISION, Base, base_in, format_of
from adapterzoo.folders.names import CARD, CONFIG, KNOWN_FILES, NAMES, SETUP, wanted
from adapterzoo.folders.reading import read_json
from adapterzoo.formats import files, native, setup_files
from adapterzoo.formats.checkpoint import Checkpoint, head_document
from adapterzoo.heads import STATIC, head_types

from .names import is_public_name
from .requests import asking

# the base model's name in native and AdapterHub configs, and in PEFT's
BASE_NAMES = ("model_name", "base_model_name_or_path")
# its commit in PEFT's configs
_PEFT_REVISION = "revision"


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


@names_call
def push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    text: CardText | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    overwrite_adapter_card: bool = False,
) -> str:
    """Publish the adapter in a folder: its files and a model card, and no other file.

    The repository is created if it is missing. One commit adds everything and deletes the files of
    an earlier adapter, so that readers see the old adapter or the new one. A base model's local
    path is not sent. The folder does not change.

    Args:
        folder: written by `save_adapter`, in any format.
        repo_id: `user/repository`; without a user, the owner of the token.
        text: the author's texts for the card; its `base_model` goes into the configs too.
        private: whether a new repository is private; None: the account's default.
        token: a token with write access; True or None: the stored one.
        revision: the branch, created if it is missing; None: the default branch.
        create_pr: propose the commit as a pull request.
        commit_message: first line of the commit.
        commit_description: text of the commit.
        overwrite_adapter_card: whether to replace a card in the repository, by the folder's
            `README.md` or else by a generated one.

    Returns:
        The address of the commit or of the pull request.

    Raises:
        CheckpointError: the folder holds no adapter, or a damaged one.
        ConfigError: a field of the card is a text instead of a list, or the base model is not a
            name on the Hub.
        HubError: offline mode, or the Hub refuses; nothing has changed there.
    """
    folder = Path(folder)
    text = text or CardText()
    for name in ("datasets", "tags", "metrics"):
        # a text is a sequence of letters
        if isinstance(value := getattr(text, name), str):
            raise ConfigError(f"{name}={value!r} is one text. Write {name}=[{value!r}].")
    if text.base_model is not None and not is_public_name(text.base_model):
        raise ConfigError(
            f"base_model={text.base_model!r} is not a name of the Hub. Write 'user/model'."
        )
    branch = None if create_pr else revision
    contents = _contents(folder, repo_id, branch, text)
    api = HfApi(token=token, library_name="adapterzoo")
    with asking(repr(repo_id), token):
        made = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if made != repo_id:
            # the card has this name too; all contents come from one state of the folder
            contents = _contents(folder, made, branch, text)
        if branch is not None:
            api.create_branch(made, branch=branch, exist_ok=True)
        there = {*api.list_repo_files(made, revision=revision)}
        owned = {*KNOWN_FILES, SETUP}
        if SETUP in contents:
            owned |= {
                path for path in there if path.count("/") == 1 and path.split("/")[1] in owned
            }
        if CARD in there and not overwrite_adapter_card:
            del contents[CARD]
        info = api.create_commit(
            made,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *(CommitOperationDelete(name) for name in sorted(there & owned - {*contents})),
            ],
            commit_message=commit_message or "Upload adapter",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return info.pr_url or info.commit_url


def _contents(folder: Path, repo_id: str, revision: str | None, text: CardText) -> dict[str, bytes]:
    """Return the files of an adapter, or of a composition and its parts, by name, with a card.

    The base model has the author's name for it in them, or else its own if that is on the Hub.

    Raises:
        CheckpointError: the folder or a part holds no adapter, or a damaged one.
    """
    parts, setup = [""], None
    if (folder / SETUP).is_file():
        setup, heads = setup_files.read(folder)
        fusions = (fusion.name for fusion in fusions_of(setup))
        parts += dict.fromkeys([*setup.flatten(), *fusions, *setup_files.names_of(heads)])
    found: dict[str, bytes] = {}
    for part in parts:
        inner = folder / part
        lacking, hint = f"there is no folder {str(inner)!r}", "Write the folder of an adapter."
        if part:
            lacking = f"{str(folder)!r} lacks the folder {part!r}, which its setup names"
            hint = "Save the setup again."
        if not inner.is_dir():
            raise CheckpointError(f"{lacking}. {hint}")
        there = sorted(file.name for file in inner.glob("*") if file.is_file())
        names = wanted(there)
        if not names and (part or setup is None):
            raise CheckpointError(
                f"{str(inner)!r} holds no adapter in one file; its files: {listing(there)}. {hint}"
            )
        if part == "":
            first = folder if setup is None else folder / setup.flatten()[0]
            shown = None if setup is None else repr(setup)
            found[CARD] = adapter_card(first, repo_id, revision, text, shown).content.encode()
            names += [name for name in (CARD, SETUP) if name in there]
        # another process may save to the folder during the upload
        with files.one_save(inner):
            contents = {name: (inner / name).read_bytes() for name in names}
        for kind, own in NAMES.items():
            if (file := own.config) not in contents:
                continue
            document = read_json(inner / file)
            base = base_name(document, text.base_model)
            others = [key for key in BASE_NAMES if key in document and document[key] != base]
            if others and document.get("format") == native.FORMAT:
                # the native tensor file holds the name too, and a digest
                stored = native.load(inner, kind)
                renamed = _renamed(stored.metadata, others, base)
                contents |= native.encode(Checkpoint(renamed, stored.adapter, stored.head), kind)
            elif others:
                contents[file] = files.json_bytes(_renamed(document, others, base))
        found |= {f"{part}/{name}".lstrip("/"): content for name, content in contents.items()}
    return found


def _renamed(document: Mapping[str, Any], keys: Iterable[str], base: str | None) -> dict[str, Any]:
    """Return a config with another name of the base model, and without the commit of the old one.

    Args:
        document: a config of any format.
        keys: the keys that hold the name.
        base: the name.
    """
    renamed = {**document, **dict.fromkeys(keys, base)}
    renamed.pop(REVISION, None)
    if _PEFT_REVISION in renamed:
        renamed[_PEFT_REVISION] = None
    return renamed


# --- the model card ---


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
    document, head = read_json(folder / CONFIG), head_document(folder)
    head_config = head.get("config")
    head_type = head_config.get("head_type") if isinstance(head_config, Mapping) else None
    base, model_type = base_name(document, text.base_model), document.get("model_type")
    # the type of a head, or the `task_type` of PEFT
    task = head_type or document.get("task_type")
    known = (h for h in head_types.values() if task and task in (h.head_type, h.peft_task))
    pipeline_tag = next((each.pipeline_tag for each in known), None)
    if task == "FEATURE_EXTRACTION":
        pipeline_tag = "feature-extraction"
    inner, peft_type = document.get("config"), document.get("peft_type")
    own = AdapterConfig.from_dict(inner) if isinstance(inner, Mapping) else None
    method = str(peft_type).lower() if own is None else own.architecture
    data = ModelCardData(
        base_model=base,
        datasets=[*text.datasets] or None,
        language=text.language if isinstance(text.language, str | None) else [*text.language],
        library_name="adapterzoo",
        license=text.license,
        metrics=[*dict.fromkeys([*text.results, *text.metrics])] or None,
        pipeline_tag=pipeline_tag,
        tags=[
            *dict.fromkeys(filter(None, ["adapterzoo", "adapter", method, model_type, *text.tags]))
        ],
        base_model_relation="adapter" if base else None,
    )
    name = setup or document.get("name") or repo_id.rpartition("/")[2]
    datasets = " and ".join(
        f"[{each}](https://huggingface.co/datasets/{each})" if is_public_name(each) else _cell(each)
        for each in text.datasets
    )
    trained = f", trained on {datasets}" if datasets else ""
    model = "a base model that its author does not name"
    if base is not None:
        model = f"[{base}](https://huggingface.co/{base})"
    elif model_type:
        model = f"a model of type `{model_type}`"
    format = format_of(folder, "adapter")
    origin = Base(None) if format is None else base_in(folder, format)
    facts = [] if origin.digest is None else [f"digest `{origin.digest}`"]
    if origin.revision is not None and origin.name == base:
        facts.insert(0, f"revision `{origin.revision}`")
    kind = f" with a prediction head for {str(head_type).replace('_', ' ')}" if head_type else ""
    # PEFT's config has the base model's name too, perhaps as a local path
    hidden = (*BASE_NAMES, _PEFT_REVISION)
    outer = {key: value for key, value in document.items() if key not in hidden}
    config = inner if isinstance(inner, Mapping) else outer
    given = json.dumps(base) if base else "base_model"
    code = (
        "from adapterzoo import AutoAdapterModel\n"
        f"model = AutoAdapterModel.from_pretrained({given})"
    )
    if static := head.get(STATIC):
        # the base model's own config may have another number
        own_count = f", num_labels={count}" if (count := len(_labels(head))) else ""
        code = (
            "import adapterzoo, transformers\n"
            f"model = adapterzoo.init(transformers.{static}.from_pretrained({given}{own_count}))"
        )
    where = json.dumps(repo_id) + ("" if revision is None else f", revision={json.dumps(revision)}")
    load = "load_adapter_setup" if setup else "load_adapter"
    usage = [f"```python\n{code}\nmodel.{load}({where}, set_active=True)\n```"]
    if base and (example := _EXAMPLES.get(str(pipeline_tag))):
        usage += [
            "Then use it, for example in a pipeline:",
            (
                "```python\nfrom transformers import AutoTokenizer, pipeline\n"
                f"tokenizer = AutoTokenizer.from_pretrained({given})\n"
                f'run = pipeline("{pipeline_tag}", model=model, tokenizer=tokenizer)\n'
                f"print(run({example}))\n```"
            ),
        ]
    if base and peft_type and (task_class := _OF_PEFT.get(str(document.get("task_type")))):
        width = _width(folder, document.get("modules_to_save") or ())
        labels = f", num_labels={width}" if width and task_class.endswith("Classification") else ""
        usage += [
            "The files are PEFT's, which loads them too:",
            (
                f"```python\nfrom peft import PeftModel\nfrom transformers import {task_class}\n"
                f"model = {task_class}.from_pretrained({given}{labels})\n"
                f"model = PeftModel.from_pretrained(model, {where})\n```"
            ),
        ]
    meta = document.get("meta") or {}
    results = {metric: f"{value:.6g}" for metric, value in text.results.items()}
    parts = [
        f"# `{name}`",
        f"An adapter for {model}{kind}{trained}. Made with adapterzoo.",
        f"The base model that it was trained on: {', '.join(facts)}." if facts else None,
        _table("what", "of this adapter", _facts(folder, own, method, head)),
        "## How to load it",
        "```\npip install adapterzoo\n```",
        *usage,
        "## Config",
        f"```json\n{json.dumps(config, indent=2, sort_keys=True)}\n```",
        "## Training" if text.architecture_training or meta else None,
        text.architecture_training,
        _table("value", "in training", meta) if meta else None,
        "## Results" if results or text.evaluation else None,
        _table("metric", "value", results) if results else None,
        text.evaluation,
        f"## Citation\n\n{text.citation}" if text.citation else None,
    ]
    body = "\n\n".join(filter(None, parts))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")


# an input for the pipelines that take a text
_EXAMPLES = {
    "fill-mask": 'f"a {tokenizer.mask_token} text"',
    "text-classification": '"a text"',
    "text-generation": '"a text"',
    "token-classification": '"a text"',
}
# the class of transformers for each `task_type` of PEFT
_OF_PEFT = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}


def _facts(
    folder: Path, own: AdapterConfig | None, method: str, head: Mapping[str, Any]
) -> dict[str, str]:
    """Return facts from an adapter's files: its method, size and layers, and its head's labels."""
    found = {"method": f"`{method}`" if own is None else f"{method}, `{own!r}`"}
    count, layers = 0, dict[str, None]()
    for key, shape in _tensors(folder):
        count += math.prod(shape)
        path, is_native, rest = key.partition("/")
        if is_native and path and not rest.startswith("/"):
            layers[re.sub(r"(?<=\.)\d+(?=\.)", "*", path)] = None
    names = wanted(file.name for file in folder.iterdir())
    size = sum((folder / name).stat().st_size for name in names)
    numbers = f"{count:,} numbers, " if count else ""
    found["size"] = f"{numbers}{size:,} bytes" + (" with its head" if head else "")
    if layers:
        found["layers"] = listing(layers, show=lambda path: f"`{path}`")
    if labels := _labels(head):
        found["labels"] = listing(labels, limit=20, show=str)
    return found


def _labels(head: Mapping[str, Any]) -> list[str]:
    """Return the labels of a head by their numbers."""
    label2id = (head.get("config") or head).get("label2id") or {}
    return sorted(label2id, key=label2id.__getitem__)


def _tensors(folder: Path) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the keys and shapes of the tensors in the safetensors files of an adapter."""
    for name in wanted(file.name for file in folder.iterdir()):
        if name.endswith(".safetensors"):
            opened: Any = safe_open(folder / name, "pt")
            for key in sorted([*opened.keys()]):
                yield key, opened.get_slice(key).get_shape()


def _width(folder: Path, modules: Iterable[str]) -> int | None:
    """Return the number of outputs of the last layer in the modules of a head, in PEFT's files."""
    inside = tuple(f".{module}." for module in modules)
    weights = [shape for key, shape in _tensors(folder) if any(part in key for part in inside)]
    return weights[-1][0] if weights else None


def _table(first: str, second: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {_cell(str(key))} | {_cell(str(value))} |" for key, value in rows.items()]
    return "\n".join([f"| {first} | {second} |", "| --- | --- |", *lines])


def base_name(document: Mapping[str, Any], given: str | None) -> str | None:
    """Return the name of the base model on the Hub; None if it is unknown.

    Args:
        document: a config of any format.
        given: the author's name for it, which takes precedence.
    """
    written = next((document[key] for key in BASE_NAMES if document.get(key)), None)
    return given or (written if is_public_name(written) else None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def completed_card(file: Path, fields: Mapping[str, Any], tags: Iterable[str], text: str) -> bytes:
    """Return a model card with metadata added; what an existing card has is kept.

    Args:
        file: the existing card, if there is one.
        fields: fields of the metadata.
        tags: tags to add.
        text: the text of a new card.
    """
    card = ModelCard.load(file) if file.is_file() else ModelCard("---\n{}\n---\n" + text)
    given: Any = card.data
    every = dict.fromkeys((*(given.tags or ()), *tags))
    data = ModelCardData(**{**given.to_dict(), **fields, "tags": [*every]})
    return f"---\n{data.to_yaml()}\n---\n{card.text}".encode()
