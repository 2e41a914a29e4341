"""Which pipelines of transformers know the models with named heads."""

from __future__ import annotations

# pipelines that check the class name and whose task some named head performs
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
    """Enter a class where pipelines look up the models of libraries of adapters.

    A pipeline logs an error for a class that stands in none of its tables; this one is asked by
    no one else, so that `AutoModelFor…` and `Trainer` see what they saw before.

    Args:
        class_name: as `BertAdapterModel`.
        generates: whether it has `generate`.
    """
    # a third of what importing this library may take
    from transformers.pipelines.base import SUPPORTED_PEFT_TASKS

    for task in (*_TASKS, *(_GENERATING_TASKS if generates else ())):
        known = SUPPORTED_PEFT_TASKS.setdefault(task, [])
        if class_name not in known:
            known.append(class_name)
