"""Models with several towers (CLIP, SigLIP, CLAP): features of each, no common hidden states."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _get_model_class
from transformers.utils.generic import ModelOutput

from adapterzoo.errors import ConfigError, listing
from adapterzoo.heads import PredictionHead

_FEATURES = re.compile(r"get_\w+_features")
_READS = ("last_hidden_state", "pooler_output")


def feature_names(cls: type) -> tuple[str, ...]:
    """Return the methods of a class for the features of one tower, such as `get_text_features`.

    Args:
        cls: a `PreTrainedModel` class.
    """
    return tuple(n for n in dir(cls) if _FEATURES.fullmatch(n) and callable(getattr(cls, n)))


def refuse_unreadable(model: Any, head: PredictionHead | None = None) -> None:
    """Refuse a head that could never run, as the base model lacks the outputs that it reads.

    Args:
        model: with named heads.
        head: not yet in the model; None: any head.

    Raises:
        ConfigError: the base model lacks these outputs.
    """
    backbone = model.backbone_class
    fields = _output_fields(backbone)
    if fields is None:
        return
    pooled = head is not None and head.pooling == "pooler"
    needed = _READS if head is None else _READS[1:] if pooled else _READS[:1]
    if any(name in fields for name in needed):
        return
    what = f"a {backbone.__name__} gives {listing(sorted(fields), limit=6)}, but not "
    what += f"{' or '.join(needed)}, which a head reads."
    if any(name in fields for name in _READS):
        other = "False" if pooled else "True"
        raise ConfigError(f"{what} Write add_classification_head(…, use_pooler={other}).")
    towers = list(_towers(model.config))
    if not towers:
        raise ConfigError(
            f"{what} Write model.set_active_adapters(…) and use its outputs without a head."
        )
    raise ConfigError(
        f"{what} Load one tower and add the head there. Write "
        f"{' or '.join(f'{name}.from_pretrained(…)' for name in towers)}."
    )


def _towers(config: Any) -> Iterator[str]:
    """Yield the classes with named heads for the parts of a model, by their configs."""
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig) and type(part) in modeling_auto.MODEL_MAPPING:
            cls = _get_model_class(part, modeling_auto.MODEL_MAPPING)
            if "last_hidden_state" in (_output_fields(cls) or ()):
                yield f"{cls.__name__.removesuffix('Model')}AdapterModel"


@functools.cache
def _output_fields(cls: Any) -> frozenset[str] | None:
    """Return the fields of the outputs of a class's forward; None if it is not annotated."""
    try:
        annotation = typing.get_type_hints(inspect.unwrap(cls.forward)).get("return")
    except (NameError, TypeError, ImportError):
        return None
    given = typing.get_args(annotation) or (annotation,)
    outputs = [t for t in given if isinstance(t, type) and issubclass(t, ModelOutput)]
    fields = frozenset(
        f.name
        for t in outputs
        if dataclasses.is_dataclass(t)
        for f in dataclasses.fields(typing.cast("Any", t))
    )
    several = "get_text_features" in dir(cls) and len(feature_names(cls)) > 1
    # some base models are annotated with the output of their language model
    return None if not fields or ("logits" in fields and not several) else fields
