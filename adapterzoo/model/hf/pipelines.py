"""Register models with named heads for the pipelines of transformers."""

from __future__ import annotations

# pipelines that check class names, for tasks of named heads
_TASKS = (
    "audio-classification",
    "document-question-answering",
    "image-classification",
    "ner",
    "sentiment-analysis",
    "text-classification",
    "token-classification",
    "video-classification",
)
_GENERATING_TASKS = ("image-text-to-text", "text-generation")


def enter_pipelines(class_name: str, generates: bool) -> None:
    """Add a class to the table of adapter models that pipelines look up.

    A pipeline logs an error for a class that is missing from its tables. Only pipelines read this
    one, so that `AutoModelFor…` and `Trainer` do not change.

    Args:
        class_name: such as `BertAdapterModel`.
        generates: whether it has `generate`.
    """
    # late: this import is slow
    from transformers.pipelines.base import SUPPORTED_PEFT_TASKS

    for task in (*_TASKS, *(_GENERATING_TASKS if generates else ())):
        known = SUPPORTED_PEFT_TASKS.setdefault(task, [])
        if class_name not in known:
            known.append(class_name)
