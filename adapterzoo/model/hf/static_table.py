"""How the heads of transformers' own task classes become named heads, and back.

A task class such as `BertForSequenceClassification` is a base model and a few tensors. The end of
its name says the task, the names and shapes of the tensors say the layers, and tables say
what neither tells: which activation stands between them, and which tokens answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from adapterzoo.errors import ConfigError
from adapterzoo.heads import (
    Backbone,
    CausalLMConfig,
    ClassificationConfig,
    HeadConfig,
    ImageClassificationConfig,
    MaskedLMConfig,
    MultilabelClassificationConfig,
    MultipleChoiceConfig,
    QuestionAnsweringConfig,
    Seq2SeqLMConfig,
    TaggingConfig,
)

from .static_facts import (
    ENCODER_TAGGING,
    IMAGE_POOLING,
    STRANGE,
    InexpressibleError,
    Shapes,
    Static,
    activation_after,
    logit_fields,
    summary_pooling,
)


@dataclass(frozen=True, slots=True)
class StaticHead:
    """A static head as a named one.

    Attributes:
        config: of the named head.
        keys: of the static head's tensors, to those of the named head; two may go to one, where
            the static head shares them.
    """

    config: HeadConfig
    keys: Mapping[str, str]


def from_static(
    architecture: str,
    tensors: Shapes,
    config: Mapping[str, Any],
    backbone: Backbone,
    pooler: bool,
) -> StaticHead | str:
    """A static head as a named head, or the reason why it has no equivalent.

    Args:
        architecture: name of the transformers class.
        tensors: names and shapes of its tensors that are not the base model's. The layer onto the
            vocabulary may be missing: then it is tied to the embedding.
        config: dict of its config; for composite ones with that of the text part on top.
        backbone: the base model.
        pooler: whether the base model has a pooler.
    """
    task = next((end for end in _TASKS if architecture.endswith(end)), None)
    if task is None:
        return f"{architecture}: none of the tasks that have heads: {', '.join(_TASKS)}"
    try:
        return _TASKS[task](Static(tensors, config, backbone, pooler))
    except InexpressibleError as reason:
        return f"{architecture}: {reason}"
    except ConfigError as error:
        return f"{architecture}: {error}"


def is_task(architecture: str) -> bool:
    """Whether a transformers class, by its name, is a base model with a head."""
    return architecture.endswith(tuple(_TASKS))


def to_static(static: StaticHead, config: HeadConfig) -> Mapping[str, str] | str:
    """Tensors of a static head to those of a named head that has the same layers.

    Args:
        static: what `from_static` made of the static head that shall be filled.
        config: of the named head.

    Returns:
        Names in the static head to names in the named head, or the reason why they differ.
    """
    theirs, mine = (_layers(c) for c in (static.config, config))
    differ = sorted(k for k in theirs.keys() | mine.keys() if theirs.get(k) != mine.get(k))
    if differ:
        return "; ".join(f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in differ)
    return static.keys


def _layers(config: HeadConfig) -> dict[str, Any]:
    fields = config.to_dict()
    # whose weight the last layer has, the tensors tell
    beside = {"label2id", "dropout_prob", "shift_labels", "tie_word_embeddings"}
    # what stands between layers is nowhere where there is one
    if fields.get("layers") == 1:
        beside |= {"activation_function", "dense_bias", "layer_norm", "norm_bias", "layer_norm_eps"}
    return {k: v for k, v in fields.items() if k not in beside and v is not None}


def _classification(static: Static) -> StaticHead:
    if static.config.get("problem_type") == "multi_label_classification":
        return _pooled(static, MultilabelClassificationConfig, "num_labels")
    return _pooled(static, ClassificationConfig, "num_labels")


def _image(static: Static) -> StaticHead:
    multilabel = static.config.get("problem_type") == "multi_label_classification"
    return _pooled(static, ImageClassificationConfig, "num_labels", multilabel=multilabel)


def _choice(static: Static) -> StaticHead:
    return _pooled(static, MultipleChoiceConfig, "num_choices")


def _pooled(static: Static, kind: type[Any], counts: str, **fields: Any) -> StaticHead:
    out, dense, keys = _linears(static)
    pooling = "cls"
    activation = None
    if dense is not None:
        activation = activation_after(dense, static.config)
        if dense.startswith("classification_head."):
            pooling = "eos"
        elif dense.startswith("sequence_summary."):
            pooling = summary_pooling(static.config)
    elif kind is ImageClassificationConfig:
        model_type = str(static.config.get("model_type"))
        if model_type not in IMAGE_POOLING:
            raise InexpressibleError(f"it is not known what the head of a {model_type} looks at")
        pooling = IMAGE_POOLING[model_type]
    elif out == "score":
        pooling = "last"
    elif static.pooler:
        pooling = "pooler"
    else:
        raise InexpressibleError("its base model has no pooler")
    if kind is MultipleChoiceConfig:
        labels = static.config.get("id2label") or {0: "", 1: ""}
        count = len(labels)
    else:
        count = static.shape(out)[0]
        if count > 1 and static.config.get("problem_type") == "regression":
            raise InexpressibleError(f"it is a regression of {count} numbers at once")
        fields["label2id"] = _label_names(static, count)
    config = kind(
        **{counts: count},
        layers=1 if dense is None else 2,
        activation_function=activation,
        use_pooler=pooling == "pooler",
        pooling="auto" if pooling in (static.backbone.pooling, "pooler") else pooling,
        bias=static.has_bias(out),
        dropout_prob=_dropout(static, "seq_classif_dropout"),
        **fields,
    )
    return StaticHead(config, keys)


def _tagging(static: Static) -> StaticHead:
    if static.config.get("model_type") in ENCODER_TAGGING:
        raise InexpressibleError("it labels the encoder's tokens, named heads the decoder's")
    out, keys = _one_linear(static)
    count = static.shape(out)[0]
    config = TaggingConfig(
        num_labels=count,
        activation_function=None,
        label2id=_label_names(static, count),
        bias=static.has_bias(out),
        dropout_prob=_dropout(static),
    )
    return StaticHead(config, keys)


def _span(static: Static) -> StaticHead:
    out, keys = _one_linear(static)
    config = QuestionAnsweringConfig(
        num_labels=static.shape(out)[0],
        activation_function=None,
        bias=static.has_bias(out),
        dropout_prob=static.config.get("qa_dropout", 0.0),
    )
    return StaticHead(config, keys)


def _masked_lm(static: Static) -> StaticHead:
    return _lm(static, MaskedLMConfig)


def _causal_lm(static: Static) -> StaticHead:
    return _lm(static, CausalLMConfig)


def _conditional(static: Static) -> StaticHead:
    return _lm(static, Seq2SeqLMConfig if static.backbone.encoder_decoder else CausalLMConfig)


def _lm(static: Static, kind: type[Any]) -> StaticHead:
    config = static.config
    if strange := [name for name in STRANGE if config.get(name) not in (None, False, 1)]:
        raise InexpressibleError(f"its config says {strange[0]}={config[strange[0]]!r}")
    out, dense, norm = (static.module(role) for role in ("output", "dense", "norm"))
    modules = [path for path in (dense, norm, out) if path is not None]
    if norm is not None and dense is None:
        raise InexpressibleError(f"it has the norm {norm} without a layer in front of it")
    keys = {}
    # dense 0, activation 1, norm 2, output behind them
    places = {dense: 0, norm: 2, out: 0 if dense is None else 2 if norm is None else 3}
    for path in modules:
        for end in ("weight", "bias"):
            if f"{path}.{end}" in static.tensors:
                keys[f"{path}.{end}"] = f"{places[path]}.{end}"
    # BERT and RoBERTa keep the bias of the output beside it
    lone = [k for k in static.tensors if k not in keys and re.search(r"(^|\.)bias$", k)]
    keys.update(dict.fromkeys(lone, f"{places[out]}.bias"))
    added = "final_logits_bias" in static.tensors
    if added:
        keys["final_logits_bias"] = "final_logits_bias"
    _all_used(static, keys)
    rows = static.backbone.vocab_size if out is None else static.shape(out)[0]
    width = static.backbone.embedding_size or static.backbone.hidden_size
    if out is not None and static.shape(out)[1] != width:
        raise InexpressibleError(f"{out} takes {static.shape(out)[1]} features, not {width}")
    fields: dict[str, Any] = {}
    if dense is not None:
        fields["activation_function"] = activation_after(dense, config)
        fields["dense_bias"] = static.has_bias(dense)
    if norm is not None:
        fields["norm_bias"] = static.has_bias(norm)
        if "layer_norm_eps" not in config:
            fields["layer_norm_eps"] = config.get("norm_eps")
    made = kind(
        **{"activation_function": None} | fields,
        vocab_size=None if rows == static.backbone.vocab_size else rows,
        layers=1 if dense is None else 2,
        layer_norm=norm is not None,
        bias=f"{places[out]}.bias" in keys.values(),
        added_bias=added,
        **logit_fields(config),
    )
    return StaticHead(made, keys)


def _linears(static: Static) -> tuple[str, str | None, dict[str, str]]:
    """The last layer, the one before it if any, and the names of all tensors in a named head."""
    out, dense = static.module("output"), static.module("dense")
    if out is None:
        raise InexpressibleError("it has no output layer")
    # dropout 0, dense 1, activation 2, dropout 3, output 4; or dropout 0, output 1
    places = {out: 1} if dense is None else {dense: 1, out: 4}
    keys = {
        f"{path}.{end}": f"{place}.{end}"
        for path, place in places.items()
        for end in ("weight", "bias")
        if f"{path}.{end}" in static.tensors
    }
    _all_used(static, keys)
    d = static.backbone.hidden_size
    if static.shape(out)[1:] != (d,) or (dense is not None and static.shape(dense) != (d, d)):
        raise InexpressibleError(f"its layers are not {d} wide")
    if dense is not None and not static.has_bias(dense):
        raise InexpressibleError(f"{dense} has no bias")
    return out, dense, keys


def _one_linear(static: Static) -> tuple[str, dict[str, str]]:
    out, dense, keys = _linears(static)
    if dense is not None:
        raise InexpressibleError(f"it has the layer {dense} before the last")
    return out, keys


def _all_used(static: Static, keys: Mapping[str, str]) -> None:
    if rest := sorted(set(static.tensors) - set(keys)):
        raise InexpressibleError(f"it has tensors of unknown use: {', '.join(rest[:5])}")


def _dropout(static: Static, *names: str) -> float | None:
    config = static.config
    for name in (*names, "classifier_dropout", "hidden_dropout_prob"):
        if config.get(name) is not None:
            # None: what heads of this model do by themselves
            return None if config[name] == static.backbone.dropout else float(config[name])
    return 0.0


def _label_names(static: Static, count: int) -> dict[str, int] | None:
    names = static.config.get("label2id")
    if not isinstance(names, Mapping) or len(names) != count:
        return None
    try:
        return {str(label): int(number) for label, number in names.items()}
    except (TypeError, ValueError) as error:
        shown = ", ".join(f"{label!r}: {number!r}" for label, number in list(names.items())[:10])
        raise InexpressibleError(f"its config has label2id={{{shown}}}, not all numbers") from error


_TASKS: Mapping[str, Callable[[Static], StaticHead]] = {
    "ForSequenceClassification": _classification,
    "ForImageClassification": _image,
    "ForMultipleChoice": _choice,
    "ForTokenClassification": _tagging,
    "ForQuestionAnswering": _span,
    "ForMaskedLM": _masked_lm,
    "ForCausalLM": _causal_lm,
    "LMHeadModel": _causal_lm,
    "GenerationDecoder": _causal_lm,
    "ForConditionalGeneration": _conditional,
    "MTModel": _conditional,
}
