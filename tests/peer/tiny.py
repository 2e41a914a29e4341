"""Tiny models, data sets and adapters in the place of those that programs of the peer download."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# what a name on the Hub contains → the type of the tiny model in its place; the first one counts
TYPES = (
    ("modernbert", "modernbert"), ("gemma-2", "gemma2"),
    ("xlm-roberta", "xlm-roberta"), ("roberta", "roberta"), ("bart", "bart"), ("bert", "bert"),
    ("gpt2", "gpt2"), ("t5", "t5"), ("llama", "llama"), ("qwen", "qwen2"), ("whisper", "whisper"),
    ("vit", "vit"),
)  # fmt: skip

_BERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 37}
_FIELDS: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 32, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_layers": 2, "decoder_layers": 2, "forced_eos_token_id": None},
    "bert": _BERT, "roberta": _BERT, "xlm-roberta": _BERT,
    "gpt2": {"n_embd": 32, "n_layer": 12, "n_head": 4},
    "llama": {**_BERT, "num_key_value_heads": 2},
    "qwen2": {**_BERT, "num_key_value_heads": 2},
    "gemma2": {**_BERT, "num_key_value_heads": 2, "head_dim": 8},
    "modernbert": _BERT,
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4},
    "vit": _BERT,
    "whisper": {"d_model": 32, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
                "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                "encoder_layers": 2, "decoder_layers": 2},
}  # fmt: skip

# adapters of the old index that have another name than the last part of their id
_NAMES = {"conll2003": "ner", "multinli": "mnli", "siqa": "socialiqa"}
_HEADS = {"ner/conll2003@ukp": "ner_head"}

# columns of a data set: "text", "words", "image", or the number of labels
_DATA: dict[str, dict[str, Any]] = {
    "amazon_polarity": {"label": 2, "title": "text", "content": "text"},
    "common_voice": {"audio": "audio", "sentence": "text", "accent": "text", "age": "text",
                     "client_id": "text", "down_votes": "text", "gender": "text",
                     "locale": "text", "path": "text", "segment": "text", "up_votes": "text"},
    "cifar100": {"img": "image", "fine_label": 100, "coarse_label": 20},
    "conll2003": {"tokens": "words", "ner_tags": 9},
    "copa": {"premise": "text", "question": "text", "choice1": "text", "choice2": "text",
             "label": 2},
    "cb": {"premise": "text", "hypothesis": "text", "label": 3},
    "gsm8k": {"question": "text", "answer": "text"},
    "guanaco": {"text": "text"},
    "mnli": {"premise": "text", "hypothesis": "text", "label": 3, "idx": 8},
    "nli_zh": {"sentence1": "text", "sentence2": "text", "label": 2},
    "poem_sentiment": {"verse_text": "text", "label": 4},
    "universal_dependencies": {"tokens": "words", "head": "heads", "deprel": "relations"},
    "rotten_tomatoes": {"text": "text", "label": 2},
    "rte": {"sentence1": "text", "sentence2": "text", "label": 2},
    "wikiann": {"tokens": "words", "ner_tags": 7},
    "xcopa": {"premise": "text", "question": "text", "choice1": "text", "choice2": "text",
              "label": 2},
    "xsum": {"document": "text", "summary": "text"},
    "yelp_polarity": {"text": "text", "label": 2},
}  # fmt: skip
_ROWS = 8
_SPLITS = ("train", "validation", "test", "validation_matched")


# what notebooks write of a GPU, of the rows of a data set and of Qwen's vocabulary
_HERE = {
    '"cuda"': '"cpu"', "torch.cuda.amp.autocast()": "torch.autocast('cpu', torch.float16)",
    "range(1000)": f"range({_ROWS})", "range(0,32)": f"range({_ROWS})", "151645": "1",
}  # fmt: skip


def local_source(source: str) -> str:
    """The code of a cell, for tiny data and models on a CPU."""
    for there, here in _HERE.items():
        source = source.replace(there, here)
    return source


class NotAtHandError(OSError):
    """A download for which there is nothing tiny."""


def kind_of(name: str, types: tuple[tuple[str, str], ...] = TYPES) -> str | None:
    """The type of the model that stands for a name on the Hub, None if it is not known."""
    return next((kind for part, kind in types if part in name.lower()), None)


class Hub:
    """Makes what is asked for by name, once, in a folder.

    Attributes:
        types: what a name on the Hub contains, and the type of the model in its place.
        columns: of each data set.
        fields: of the config of each type.
        layers: of a model.
        rows: of a data set.
    """

    types, columns, fields, layers, rows = TYPES, _DATA, _FIELDS, 12, _ROWS

    def __init__(self, vocabulary: Path, folder: Path) -> None:
        """Keep the paths: of the vocabulary of all tokenizers, and of a folder for models."""
        from adapterzoo import AdapterModelMixin

        self.vocabulary, self.folder = vocabulary, folder
        # as it is before anything watches it
        self._save_adapter = AdapterModelMixin.save_adapter

    def local(self, name: Any) -> Any:
        """A folder with the tiny model of a name; what is no name on the Hub stays as it is."""
        if not isinstance(name, str) or Path(name).is_dir():
            return name
        kind = kind_of(name, self.types)
        if kind is None:
            raise NotAtHandError(f"{name!r}: there is no tiny model for it")
        return str(self.model(kind))

    def tokenizer(self, name: str) -> Any:
        """A tokenizer with the special tokens of all families, and segments for BERT alone."""
        from transformers import BertTokenizer

        tokenizer = BertTokenizer(vocab=str(self.vocabulary), model_max_length=512)
        tokenizer.add_special_tokens(
            {"eos_token": "</s>", "bos_token": "<s>", "additional_special_tokens": ["<end>"]}
        )
        if kind_of(name, self.types) != "bert":
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        return tokenizer

    @functools.cache  # noqa: B019  one hub lives as long as its process
    def model(self, kind: str) -> Path:
        """The folder of a tiny model with its tokenizer or image processor."""
        import torch
        import transformers

        folder = self.folder / kind
        tokenizer = self.tokenizer(kind)
        fields = {"num_hidden_layers": self.layers, "vocab_size": len(tokenizer)}
        fields |= self.fields[kind]
        if kind != "vit":
            fields |= {
                f"{name}_token_id": getattr(tokenizer, f"{name}_token_id")
                for name in ("pad", "bos", "eos")
            }
            fields["decoder_start_token_id"] = tokenizer.eos_token_id
        config = transformers.AutoConfig.for_model(kind, **fields)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            table = transformers.models.auto.modeling_auto
            maps = (table.MODEL_FOR_CAUSAL_LM_MAPPING, table.MODEL_FOR_MASKED_LM_MAPPING,
                    table.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
                    table.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, table.MODEL_MAPPING)  # fmt: skip
            # of several, BART's is for sequences, Whisper's for speech, and BERT's no causal one
            first = {
                "bart": 2,
                "whisper": 3,
                "bert": 1,
                "roberta": 1,
                "xlm-roberta": 1,
                "modernbert": 1,
            }
            own = maps[first.get(kind, 0) :]
            made = next(each[type(config)] for each in own if type(config) in each)
            made(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    def adapter(self, model: Any, name: str, load_as: str | None) -> Path:
        """A folder with an adapter, in the peer's format, that fits a model."""
        from adapterzoo import AutoAdapterModel

        config = copy.deepcopy(model.config)
        config.prediction_heads = {}
        twin = AutoAdapterModel.from_config(config)
        last = re.split(r"[/@]", name)[1] if "@" in name else name.rpartition("/")[2]
        known_as = _NAMES.get(last, "en" if "/wiki" in name else last)
        if "/wiki" in name:
            known_as = name.partition("/")[0]
            config: Any = "seq_bn_inv[reduction_factor=2]"
        else:
            config = "lora" if "lora" in name else "seq_bn"
        twin.add_adapter(known_as, config)
        self._add_head(twin, name, known_as)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        with_head = known_as in twin.heads
        self._save_adapter(twin, folder, known_as, with_head=with_head, format="adapterhub")
        if name in _HEADS:
            _rename_head(folder, known_as, _HEADS[name])
        return folder

    def _add_head(self, twin: Any, name: str, known_as: str) -> None:
        makers: tuple[tuple[str, Callable[[], None]], ...] = (
            ("squad", lambda: twin.add_qa_head(known_as)),
            ("wiki", lambda: None),
            ("-lm-", lambda: None),
            ("conll|wikiann|ner", lambda: twin.add_tagging_head(known_as, num_labels=7)),
            ("sts-b", lambda: twin.add_classification_head(known_as, num_labels=1)),
            ("", lambda: twin.add_classification_head(known_as, num_labels=2)),
        )
        next(make for part, make in makers if re.search(part, name))()

    def dataset(self, path: str, name: Any = None, split: Any = None, **_: Any) -> Any:
        """A data set with the columns of the one on the Hub, and a few rows of random words."""
        import datasets

        keys = (str(name), path.rpartition("/")[2])
        key = next((known for known in self.columns if any(known in each for each in keys)), None)
        if key is None:
            raise NotAtHandError(f"load_dataset({path!r}, {name!r}): there is nothing tiny for it")
        columns = self.columns[key]
        if split is not None:
            return self._split(columns, 0)
        return datasets.DatasetDict({each: self._split(columns, 1) for each in _SPLITS})

    def _split(self, columns: dict[str, Any], seed: int) -> Any:
        import datasets

        draw, rows, features = random.Random(seed), [], {}
        words = [w for w in self.vocabulary.read_text(encoding="utf-8").split() if w.isalpha()]
        for _ in range(self.rows):
            sentence = draw.sample(words, 6)
            row: dict[str, Any] = {}
            for column, kind in columns.items():
                value, features[column] = _cell(column, kind, sentence, draw)
                row[column] = value
            rows.append(row)
        made = datasets.Dataset.from_list(rows, features=datasets.Features(features))
        # decoded sounds are arrays
        sounds = [column for column, kind in columns.items() if kind == "audio"]
        return made.with_format("numpy", sounds, output_all_columns=True) if sounds else made


def _rename_head(folder: Path, name: str, new: str) -> None:
    """Give the saved head of an adapter another name than the adapter's."""
    import torch

    config, weights = folder / "head_config.json", folder / "pytorch_model_head.bin"
    document = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**document, "name": new}), encoding="utf-8")
    tensors = torch.load(weights, weights_only=True)
    renamed = {key.replace(f"heads.{name}.", f"heads.{new}."): t for key, t in tensors.items()}
    torch.save(renamed, weights)


def _cell(column: str, kind: Any, words: list[str], draw: random.Random) -> tuple[Any, Any]:
    """One value of a column, and the column's feature."""
    import datasets
    from PIL import Image

    if kind == "text":
        return " ".join(draw.sample(words, len(words))), datasets.Value("string")
    if kind == "words":
        return words, datasets.List(datasets.Value("string"))
    if kind == "audio":
        sound = {"array": [draw.uniform(-1, 1) for _ in range(1600)], "sampling_rate": 16000}
        numbers = {"array": datasets.List(datasets.Value("float32"))}
        return sound, numbers | {"sampling_rate": datasets.Value("int32")}
    if kind == "heads":
        return [str(number) for number in range(len(words))], datasets.List(
            datasets.Value("string")
        )
    if kind == "relations":
        names = [draw.choice(("root", "nsubj", "obj")) for _ in words]
        return names, datasets.List(datasets.Value("string"))
    if kind == "image":
        return Image.effect_noise((32, 32), 64).convert("RGB"), datasets.Image()
    label = datasets.ClassLabel(num_classes=kind)
    if column.endswith("tags"):
        return [draw.randrange(kind) for _ in words], datasets.List(label)
    return draw.randrange(kind), label
