"""Tiny models, data sets and adapters in the place of those that PEFT's examples download."""

from __future__ import annotations

import importlib
import string
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from peer import packages, removed, tiny

# what a name on the Hub contains → the type of the tiny model in its place; the first one counts
_TYPES = (
    ("mt0", "mt5"), ("t0", "t5"), ("bloom", "bloom"), ("opt", "opt"), ("e5-", "bert"),
    ("distilbert", "distilbert"), ("mistral", "mistral"), ("gemma", "gemma2"), ("phi", "phi3"),
    *tiny.TYPES, ("granite", "llama"), ("smollm", "llama"), ("base-model", "llama"),
)  # fmt: skip
_LLAMA = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96,
}  # fmt: skip
_FIELDS = {
    **tiny._FIELDS,
    "llama": _LLAMA, "mt5": tiny._FIELDS["t5"], "mistral": _LLAMA, "phi3": _LLAMA,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "opt": {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 37, "word_embed_proj_dim": 32},
    "distilbert": {"dim": 32, "n_heads": 4, "hidden_dim": 37, "n_layers": 2},
    "vit": {**tiny._FIELDS["vit"], "image_size": 32, "patch_size": 8},
}  # fmt: skip
_PAIR = {"sentence1": "text", "sentence2": "text", "label": 2, "idx": 8}
_DATA: dict[str, dict[str, Any]] = {
    **tiny._DATA,
    "parquet": {"Tweet text": "text", "ID": 8, "Label": 3},
    "mrpc": _PAIR, "rte": _PAIR,
    "sst2": {"sentence": "text", "label": 2, "idx": 8},
    "financial-news": {"text": "text", "label": 3},
    "financial_phrasebank": {"sentence": "text", "label": 3},
    "twitter_complaints": {"Tweet text": "text", "ID": 8, "Label": 3},
    "food101": {"image": "image", "label": 4}, "cifar10": {"img": "image", "label": 4},
    "beans": {"image": "image", "labels": 3},
    "imdb": {"text": "text", "label": 2}, "guanaco": {"text": "text"},
    "wikitext": {"text": "text"}, "english_quotes": {"quote": "text", "author": "text"},
    "MetaMathQA": {"query": "text", "response": "text"},
    "alpaca": {"instruction": "text", "input": "text", "output": "text"},
    "task1660": {"input": "text", "output": "text"},
    "gsm8k": {"question": "text", "answer": "text"},
    "conll2003": {"tokens": "words", "ner_tags": 9},
    "chatbot_dataset": {"text": "text"},
}  # fmt: skip


class Hub(tiny.Hub):
    """The tiny models of `peer`, smaller, and adapters that PEFT makes."""

    types, columns, fields, layers, rows = _TYPES, _DATA, _FIELDS, 2, 40

    def __init__(self, folder: Path) -> None:
        """Write the vocabulary of all tokenizers."""
        words = [a + b + c for a in "bdmst" for b in "aeiou" for c in "lnrt"]
        pieces = [*string.ascii_lowercase, *string.digits, *string.punctuation]
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]
        tokens += [f"##{piece}" for piece in pieces] + words
        self.vocabulary, self.folder = folder / "vocab.txt", folder
        self.vocabulary.write_text("\n".join(tokens), encoding="utf-8")

    def tokenizer(self, name: str) -> Any:
        """A tokenizer that also has a template of chats."""
        found = super().tokenizer(name)
        found.chat_template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
        return found

    def dataset(self, path: str, name: Any = None, split: Any = None, **options: Any) -> Any:
        """A data set; `train[:10]` is all of `train`."""
        return super().dataset(path, name, split, **options)

    def adapter(self, name: str) -> Path:  # type: ignore[override]
        """A folder with an adapter of PEFT in the place of one on the Hub."""
        import peft
        import torch
        import transformers

        folder = Path("hub", name).resolve()
        if not (folder / "adapter_config.json").is_file():
            kind = tiny.kind_of(name, self.types) or "llama"
            auto = {"whisper": "SpeechSeq2Seq", "t5": "Seq2SeqLM", "mt5": "Seq2SeqLM"}
            load = getattr(transformers, f"AutoModelFor{auto.get(kind, 'CausalLM')}")
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(sum(map(ord, name)))
                config = peft.LoraConfig(r=4, init_lora_weights=False)
                model = peft.PeftModel(load.from_pretrained(str(self.model(kind))), config)
                model.save_pretrained(str(folder))
            self.tokenizer(kind).save_pretrained(folder)
        return folder


def install(hub: Hub, library: Any) -> None:
    """Replace downloads and packages that are not installed, in this process.

    Args:
        hub: gives what is asked for by name.
        library: `peft` or `adapterzoo.peft`, whose adapters on the Hub are folders.
    """
    import torch

    importlib.import_module("transformers.trainer")
    transformers: Any = importlib.import_module("transformers")
    removed.downloads(transformers, hub)
    auto = importlib.import_module("transformers.models.auto.auto_factory")
    for cls in (transformers.PreTrainedModel, auto._BaseAutoModelClass):
        cls.from_pretrained = classmethod(_named(cls.from_pretrained.__func__))
    removed.short_trainings(transformers, _SHORT)
    packages.install(transformers)
    transformers.AutoImageProcessor.from_pretrained = lambda *_, **__: _ImageProcessor()
    sys.modules["torchvision"] = torchvision = ModuleType("torchvision")
    sys.modules["torchvision.transforms"] = torchvision.transforms = _Transforms("transforms")  # type: ignore[attr-defined]
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    torch.accelerator.current_device_index = lambda: 0
    for owner, method, place in (
        (library.PeftModel, "from_pretrained", 1), (library.PeftModel, "load_adapter", 0),
        (library.PeftConfig, "from_pretrained", 0), (library.AutoPeftModel, "from_pretrained", 0),
    ):  # fmt: skip
        _localize(hub, owner, method, place)
    library.PeftModel.push_to_hub = lambda self, name, **_: self.save_pretrained(f"hub/{name}")


_SHORT = {
    "max_steps": 4, "use_cpu": True, "report_to": "none", "fp16": False, "bf16": False,
    "dataloader_num_workers": 0, "push_to_hub": False, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1, "logging_steps": 1, "eval_steps": 2, "save_steps": 2,
    "optim": "adamw_torch", "disable_tqdm": True,
}  # fmt: skip


def _named(load: Any) -> Any:
    """Load a model that keeps its name on the Hub; `max_length` is an argument of long ago."""

    def from_pretrained(cls: Any, name: Any, *given: Any, **options: Any) -> Any:
        options.pop("max_length", None)
        model = load(cls, name, *given, **options)
        if isinstance(name, str) and not Path(name).is_dir():
            model.config._name_or_path = model.name_or_path = name
        return model

    return from_pretrained


def _localize(hub: Hub, owner: Any, method: str, place: int) -> None:
    # a base class may have it
    owner = next(cls for cls in owner.__mro__ if method in vars(cls))
    found = vars(owner)[method]
    plain = getattr(found, "__func__", found)

    def local(self: Any, *given: Any, **options: Any) -> Any:
        key = next((k for k in ("model_id", "pretrained_model_name_or_path") if k in options), "")
        name = str(options[key] if key else given[place])
        if not Path(name).is_dir():
            options.pop("token", None), options.pop("use_auth_token", None)
            folder = str(hub.adapter(name))
            if key:
                options[key] = folder
            else:
                given = (*given[:place], folder, *given[place + 1 :])
        return plain(self, *given, **options)

    setattr(owner, method, classmethod(local) if isinstance(found, classmethod) else local)


class _ImageProcessor:
    """Of 32 × 32 pixels."""

    image_mean, image_std, size = [0.5] * 3, [0.5] * 3, {"height": 32, "width": 32}

    def __call__(self, image: Any, return_tensors: str = "pt") -> Any:
        import transformers

        pixels = _to_tensor(image.resize((32, 32)))[None]  # [1, 3, height, width]
        return transformers.BatchEncoding({"pixel_values": pixels})

    def save_pretrained(self, folder: Any, **_: Any) -> None:
        """There is nothing to keep."""


def _to_tensor(image: Any) -> Any:
    import numpy as np
    import torch

    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32).copy()) / 255
    return pixels.permute(2, 0, 1)  # [3, height, width]


class _Transforms(ModuleType):
    """Those that scale and convert; what is cut or turned at random stays as it is."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "Compose":
            return lambda steps: lambda image: _applied(steps, image)
        if name == "ToTensor":
            return lambda: _to_tensor
        return lambda *_, **__: lambda image: image


def _applied(steps: Any, image: Any) -> Any:
    for step in steps:
        image = step(image)
    return image
