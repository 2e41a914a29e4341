"""What programs of the peer use of transformers 4 and of packages that are not installed.

Everything here stands for a change that its user makes for transformers 5, or for a download; none
of it touches adapterzoo, except that an adapter on the Hub is one that `tiny` makes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .tiny import Hub

# of TrainingArguments, under their names of today; what is in neither list is passed on
_RENAMED = {"evaluation_strategy": "eval_strategy"}
_SHORT = {
    "max_steps": 2, "use_cpu": True, "report_to": "none", "fp16": False, "bf16": False,
    "dataloader_num_workers": 0, "push_to_hub": False, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1, "logging_steps": 1, "save_strategy": "no",
    "load_best_model_at_end": False, "optim": "adamw_torch",
}  # fmt: skip


def install(hub: Hub) -> None:
    """Replace downloads and what transformers 5 has removed, in this process."""
    importlib.import_module("transformers.trainer")
    transformers: Any = importlib.import_module("transformers")
    _names_of_four(transformers)
    _downloads(transformers, hub)
    _trainer(transformers)
    for name in ("evaluate", "nltk", "seqeval", "jiwer", "librosa", "rouge_score", "sacrebleu"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _STUBS.get(name, ModuleType)(name)
    # the bars of notebooks need widgets
    sys.modules["tqdm.notebook"] = importlib.import_module("tqdm.std")


# --- transformers 4 ---


def _names_of_four(transformers: Any) -> None:
    utils: Any = importlib.import_module("transformers.utils")
    for name in ("is_offline_mode", "is_torch_tpu_available", "is_torch_xla_available"):
        if not hasattr(utils, name):
            setattr(utils, name, lambda *_, **__: True)
    if not hasattr(utils, "send_example_telemetry"):
        utils.send_example_telemetry = lambda *_, **__: None
    if not hasattr(transformers, "glue_compute_metrics"):
        transformers.glue_compute_metrics = lambda task, predicted, labels: {
            "acc": float((predicted == labels).mean())
        }
        transformers.glue_output_modes = {"mrpc": "classification"}
        transformers.glue_tasks_num_labels = {"mrpc": 2}


def _trainer(transformers: Any) -> None:
    arguments = transformers.TrainingArguments
    # scripts read these
    arguments.overwrite_output_dir = True
    arguments.logging_dir = property(lambda self: self.output_dir)
    for cls in (arguments, transformers.Seq2SeqTrainingArguments):
        cls.__init__ = _short(cls.__init__)
    trainer = transformers.Trainer
    trainer.__init__ = _renamed(trainer.__init__, tokenizer="processing_class")
    trainer.train = _without(trainer.train, "model_path")


def _short(init: Any) -> Any:
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def short(self: Any, *given: Any, **options: Any) -> None:
        renamed = {_RENAMED.get(name, name): value for name, value in options.items()}
        kept = {name: value for name, value in renamed.items() if name in known}
        init(self, *given, **(kept | _SHORT))

    return short


def _renamed(function: Any, **names: str) -> Any:
    @functools.wraps(function)
    def renamed(*given: Any, **options: Any) -> Any:
        return function(*given, **{names.get(name, name): v for name, v in options.items()})

    return renamed


def _without(function: Any, *names: str) -> Any:
    @functools.wraps(function)
    def without(*given: Any, **options: Any) -> Any:
        return function(*given, **{k: v for k, v in options.items() if k not in names})

    return without


# --- downloads ---


def _downloads(transformers: Any, hub: Hub) -> None:
    import datasets

    from adapterzoo import AdapterModelMixin

    auto = importlib.import_module("transformers.models.auto.auto_factory")
    for cls in (transformers.PreTrainedModel, auto._BaseAutoModelClass, transformers.AutoConfig,
                transformers.PreTrainedConfig):  # fmt: skip
        cls.from_pretrained = classmethod(_local(cls.from_pretrained.__func__, hub))
    for cls in (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer):
        cls.from_pretrained = classmethod(lambda _, name, *__, **___: hub.tokenizer(str(name)))
    load_dataset = datasets.load_dataset

    def load(path: str, name: Any = None, **options: Any) -> Any:
        if path in ("json", "csv", "text"):
            return load_dataset(path, name, **options)
        return hub.dataset(path, name, **options)

    datasets.load_dataset = load
    load_adapter = AdapterModelMixin.load_adapter

    @functools.wraps(load_adapter)
    def load_local(self: Any, name: str, *given: Any, **options: Any) -> Any:
        if not Path(name).is_dir():
            options.pop("source", None)
            name = str(hub.adapter(self, name, options.get("load_as")))
        return load_adapter(self, name, *given, **options)

    AdapterModelMixin.load_adapter = load_local  # type: ignore[method-assign]
    AdapterModelMixin.push_adapter_to_hub = lambda *_, **__: ""  # type: ignore[method-assign]
    hub_client: Any = importlib.import_module("huggingface_hub")
    hub_client.notebook_login = lambda *_, **__: None


def _local(function: Any, hub: Hub) -> Any:
    @functools.wraps(function)
    def local(cls: Any, name: Any = None, *given: Any, **options: Any) -> Any:
        for gone in ("from_tf", "device_map", "token", "cache_dir", "use_auth_token", "revision"):
            options.pop(gone, None)
        return function(cls, hub.local(name), *given, **options)

    return local


# --- packages that are not installed ---


class _Metric:
    """Computes accuracies, and zeros for every other number that is asked for."""

    def compute(self, predictions: Any = (), references: Any = (), **_: Any) -> dict[str, Any]:
        import collections

        result: dict[str, Any] = collections.defaultdict(float)
        for name in ("exact", "f1", "exact_match", "rouge1", "rougeL", "score"):
            result[name] = 0.0
        for name in ("precision", "recall", "f1", "accuracy"):
            result[f"overall_{name}"] = 0.0
        same = [bool(a == b) for a, b in zip(predictions, references, strict=False)
                if not hasattr(a, "__len__")]  # fmt: skip
        result["accuracy"] = sum(same) / len(same) if same else 0.0
        return dict(result)

    def add_batch(self, **_: Any) -> None:
        """Forget the batch."""


class _Evaluate(ModuleType):
    def load(self, *_: Any, **__: Any) -> _Metric:
        return _Metric()


class _Nltk(ModuleType):
    class data:  # noqa: N801
        """Says that all data are there."""

        find = staticmethod(lambda *_: True)

    def download(self, *_: Any, **__: Any) -> bool:
        return True

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]


_STUBS: dict[str, type[ModuleType]] = {"evaluate": _Evaluate, "nltk": _Nltk}
