"""`AutoPeftModelFor…`: the base model of an adapter's folder, with the adapter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import transformers

from adapterzoo.errors import ConfigError, StateError
from adapterzoo.formats import files
from adapterzoo.formats.peft.config import CONFIG
from adapterzoo.model.hf import adapter_folders
from adapterzoo.model.peft.switching import DEFAULT

from .model import PeftModel


class AutoPeftModel:
    """Loads a base model of the class in the adapter's config, and the adapter.

    Attributes:
        auto_class: of transformers; empty: the class in the config.
        task_type: PEFT's name of the task.
    """

    auto_class: ClassVar[str] = ""
    task_type: ClassVar[str | None] = None

    def __init__(self) -> None:
        """Raise: the class has no instances.

        Raises:
            StateError: always.
        """
        name = type(self).__name__
        raise StateError(f"{name}(): it chooses the class. Write {name}.from_pretrained(folder).")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        adapter_name: str = DEFAULT,
        is_trainable: bool = False,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Load the base model that an adapter was trained on, and the adapter, which is active.

        Args:
            pretrained_model_name_or_path: the folder of an adapter in any format, or
                `user/repository`.
            adapter_name: to give it.
            is_trainable: whether it is trained; otherwise it is only used.
            revision: of the adapter.
            **kwargs: as the class's `from_pretrained` takes them.

        Raises:
            CheckpointError: the adapter does not name its base model, or does not fit it.
            ConfigError: there is no adapter, or it belongs to another task.
        """
        path = os.fspath(pretrained_model_name_or_path)
        found = adapter_folders.find(
            path, {**kwargs, **({"revision": revision} if revision else {})}
        )
        if found is None:
            raise ConfigError(
                f"{cls.__name__}.from_pretrained({path!r}): there is no adapter without a model. "
                f"Write the folder that save_pretrained of a PeftModel, or save_adapter, wrote."
            )
        config = found.path / CONFIG
        values = files.read_json(config) if config.is_file() else {}
        load = cls._class(values, path)
        at = {} if found.revision is None else {"revision": found.revision}
        model = load.from_pretrained(found.base, **{**kwargs, **at})
        _make_room(model, found.path)
        dtype = model.dtype if {"dtype", "torch_dtype"} & kwargs.keys() else None
        return PeftModel.from_pretrained(
            model,
            found.path,
            adapter_name,
            is_trainable,
            **({} if dtype is None else {"dtype": dtype}),
        )

    @classmethod
    def _class(cls, values: dict[str, Any], path: str) -> Any:
        """Return the class of the base model.

        Raises:
            ConfigError: the adapter belongs to another task, or to a class that is not known.
        """
        task = values.get("task_type")
        if task is not None and task != cls.task_type:
            fitting = next((c for c in _CLASSES if c.task_type == task), AutoPeftModel)
            raise ConfigError(
                f"{cls.__name__}.from_pretrained({path!r}): {CONFIG} says task_type={task!r}. "
                f"Write {fitting.__name__}.from_pretrained({path!r})."
            )
        if cls.auto_class:
            return getattr(transformers, cls.auto_class)
        mapping = values.get("auto_mapping")
        name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        # only models of transformers: a config must not import anything
        found: Any = getattr(transformers, str(name), None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        if not is_model or found.config_class is None:
            raise ConfigError(
                f"{cls.__name__}.from_pretrained({path!r}): {CONFIG} names the class {name!r}, "
                f"which is not a model of transformers. Write a class for a task: "
                f"{_CLASSES[0].__name__}."
            )
        return found


def _make_room(model: Any, folder: Path) -> None:
    """Add rows to the table of tokens if the tokenizer beside an adapter has more of them."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    tokens = len(transformers.AutoTokenizer.from_pretrained(folder))
    if tokens > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(tokens)


class AutoPeftModelForCausalLM(AutoPeftModel):
    """Loads an adapter of a causal language model."""

    auto_class = "AutoModelForCausalLM"
    task_type = "CAUSAL_LM"


class AutoPeftModelForSeq2SeqLM(AutoPeftModel):
    """Loads an adapter of a sequence-to-sequence model."""

    auto_class = "AutoModelForSeq2SeqLM"
    task_type = "SEQ_2_SEQ_LM"


class AutoPeftModelForSequenceClassification(AutoPeftModel):
    """Loads an adapter of a model that classifies sequences."""

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"


class AutoPeftModelForTokenClassification(AutoPeftModel):
    """Loads an adapter of a model that classifies tokens."""

    auto_class = "AutoModelForTokenClassification"
    task_type = "TOKEN_CLS"


class AutoPeftModelForQuestionAnswering(AutoPeftModel):
    """Loads an adapter of a model that finds answers."""

    auto_class = "AutoModelForQuestionAnswering"
    task_type = "QUESTION_ANS"


class AutoPeftModelForFeatureExtraction(AutoPeftModel):
    """Loads an adapter of a base model."""

    auto_class = "AutoModel"
    task_type = "FEATURE_EXTRACTION"


_CLASSES = AutoPeftModel.__subclasses__()
