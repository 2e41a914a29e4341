"""What programs of the peer use of transformers 4 and of the Hub.

Everything here stands for a change that its user makes for transformers 5, or for a download; none
of it touches adapterzoo, except that an adapter on the Hub is one that `tiny` makes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import packages
from .tiny import Hub

# of TrainingArguments, under their names of today; what is in neither list is passed on
_RENAMED = {"evaluation_strategy": "eval_strategy"}
_SHORT = {
    "max_steps": 2, "use_cpu": True, "report_to": "none", "fp16": False,
    "dataloader_num_workers": 0, "push_to_hub": False, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1, "logging_steps": 1, "save_strategy": "no",
    "load_best_model_at_end": False, "optim": "adamw_torch",
}  # fmt: skip


def install(hub: Hub) -> None:
    """Replace downloads and what transformers 5 has removed, in this process."""
    importlib.import_module("transformers.trainer")
    transformers: Any = importlib.import_module("transformers")
    _names_of_four(transformers)
    downloads(transformers, hub)
    _adapters(hub)
    short_trainings(transformers, _SHORT)
    packages.install(transformers)


# --- transformers 4 ---


def _names_of_four(transformers: Any) -> None:
    utils: Any = importlib.import_module("transformers.utils")
    for name in ("is_offline_mode", "is_torch_tpu_available", "is_torch_xla_available"):
        if not hasattr(utils, name):
            setattr(utils, name, lambda *_, **__: True)
    # of models that it does not have any more; run_generation.py lists them
    for name in ("BloomTokenizerFast", "TransfoXLLMHeadModel", "TransfoXLTokenizer"):
        if not hasattr(transformers, name):
            setattr(transformers, name, None)
    # run_generation.py reads args.device, which it does not set
    argparse.Namespace.device = "cpu"  # type: ignore[attr-defined]
    if not hasattr(utils, "send_example_telemetry"):
        utils.send_example_telemetry = lambda *_, **__: None
    if not hasattr(transformers, "glue_compute_metrics"):
        transformers.glue_compute_metrics = lambda task, predicted, labels: {
            "acc": float((predicted == labels).mean())
        }
        transformers.glue_output_modes = {"mrpc": "classification"}
        transformers.glue_tasks_num_labels = {"mrpc": 2}


def short_trainings(transformers: Any, short: Mapping[str, Any]) -> None:
    """Give all `TrainingArguments` these values, and arguments their names of today."""
    arguments = transformers.TrainingArguments
    # scripts read these
    arguments.overwrite_output_dir = True
    arguments.use_legacy_prediction_loop = False
    arguments.logging_dir = property(lambda self: self.output_dir)
    for cls in (arguments, transformers.Seq2SeqTrainingArguments):
        cls.__init__ = _short(cls.__init__, short)
    trainer = transformers.Trainer
    for cls in (trainer, transformers.Seq2SeqTrainer):
        cls.__init__ = _renamed(_positional(cls.__init__), tokenizer="processing_class")
    trainer.train = _without(trainer.train, "model_path")


def _short(init: Any, values: Mapping[str, Any]) -> Any:
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    def short(self: Any, *given: Any, **options: Any) -> None:
        renamed = {_RENAMED.get(name, name): value for name, value in options.items()}
        kept = {name: value for name, value in renamed.items() if name in known}
        init(self, *given, **{**kept, **values})

    return short


# of Trainer, before transformers 4.46; run_udp.py passes them by position
_POSITIONS = ("tokenizer", "model_init", "compute_metrics", "callbacks", "optimizers")


def _positional(init: Any) -> Any:
    @functools.wraps(init)
    def named(self: Any, *given: Any, **options: Any) -> None:
        # model, args, data_collator and the two data sets are where they were
        five, rest = given[:5], dict(zip(_POSITIONS, given[5:], strict=False))
        kept = {name: value for name, value in rest.items() if value is not None}
        init(self, *five, **{**options, **kept})

    return named


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


def downloads(transformers: Any, hub: Hub) -> None:
    """Give models, tokenizers and data sets of a hub for what would be downloaded."""
    import datasets

    auto = importlib.import_module("transformers.models.auto.auto_factory")
    for cls in (transformers.PreTrainedModel, auto._BaseAutoModelClass, transformers.AutoConfig,
                transformers.PreTrainedConfig):  # fmt: skip
        cls.from_pretrained = classmethod(_local(cls.from_pretrained.__func__, hub))
    for cls in (transformers.PreTrainedTokenizerBase, transformers.AutoTokenizer):
        cls.from_pretrained = classmethod(lambda _, name, *__, **___: hub.tokenizer(str(name)))
    load_dataset = datasets.load_dataset

    def load(path: str, name: Any = None, **options: Any) -> Any:
        if path in ("json", "csv", "text"):
            # pandas 3 reads large strings, and datasets 5 keeps that type for what replaces them
            return _plain_strings(load_dataset(path, name, **options))
        return hub.dataset(path, name, **options)

    datasets.load_dataset = load
    hub_client: Any = importlib.import_module("huggingface_hub")
    hub_client.notebook_login = lambda *_, **__: None


def _adapters(hub: Hub) -> None:
    """Give adapters of a hub for what would be downloaded, and upload none."""
    from adapterzoo import AdapterModelMixin

    load_adapter = AdapterModelMixin.load_adapter

    @functools.wraps(load_adapter)
    def load_local(self: Any, name: str, *given: Any, **options: Any) -> Any:
        if not Path(name).is_dir():
            options.pop("source", None)
            name = str(hub.adapter(self, name, options.get("load_as")))
        return load_adapter(self, name, *given, **options)

    AdapterModelMixin.load_adapter = load_local  # type: ignore[method-assign]
    for name in ("push_adapter_to_hub", "push_adapter_setup_to_hub"):
        setattr(AdapterModelMixin, name, lambda *_, **__: "")


def _plain_strings(found: Any) -> Any:
    import datasets

    kinds = dict(next(iter(found.values())).features)
    large = [name for name, kind in kinds.items() if getattr(kind, "dtype", "") == "large_string"]
    for name in large:
        found = found.cast_column(name, datasets.Value("string"))
    return found


def _local(function: Any, hub: Hub) -> Any:
    @functools.wraps(function)
    def local(cls: Any, name: Any = None, *given: Any, **options: Any) -> Any:
        for gone in ("from_tf", "device_map", "token", "cache_dir", "use_auth_token", "revision"):
            options.pop(gone, None)
        return function(cls, hub.local(name), *given, **options)

    return local
