"""A head that classifies whole images.

Differs from AdapterHub: `pooling` chooses the tokens; labels of −100 do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from adapterzoo.config_base import config_class
from adapterzoo.fields import field

from ._adding import Labels, Model, adds_head
from ._layers import COUNT
from ._pooling import Pooling
from .base import head_types
from .pooled import PooledConfig, is_multilabel
from .task_classes import InexpressibleError, Static

# the pooling before the single layer, by type of model
_POOLING: Mapping[str, str] = {
    model_type: pooling
    for pooling, model_types in (
        ("cls", "deit vit vit_msn pvt"),
        ("mean", "ijepa levit"),
        (
            "pooler",
            (
                "beit convnext convnextv2 data2vec-vision focalnet mobilevit mobilevitv2 regnet "
                "resnet swin swinv2"
            ),
        ),
    )
    for model_type in model_types.split()
}


@head_types.register("image_classification")
@config_class
class ImageClassificationConfig(PooledConfig):
    """A head that gives images a class; with `multilabel`, a yes or no for each class."""

    head_type: ClassVar[str] = "image_classification"
    output_class: ClassVar[str] = "ImageClassifierOutput"
    pipeline_tag: ClassVar[str | None] = "image-classification"
    peft_classes: ClassVar[str | None] = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    task_classes: ClassVar[tuple[str, ...]] = ("ForImageClassification",)

    num_labels: int = field(2, COUNT)
    multilabel: bool = False
    bias: bool = True

    @property
    def problem_type(self) -> str:
        """As for text; with a single label, a regression."""
        several = self.multilabel and self.num_labels > 1
        return "multi_label_classification" if several else super().problem_type

    @classmethod
    def pooling_of(cls, static: Static) -> str:
        """Return the pooling before the single layer of an image classifier.

        Raises:
            InexpressibleError: it is unknown.
        """
        model_type = str(static.config.get("model_type"))
        if model_type not in _POOLING:
            raise InexpressibleError(f"the pooling of a {model_type} is unknown")
        return _POOLING[model_type]

    @classmethod
    def labels_of(cls, static: Static, outputs: int) -> dict[str, Any]:
        """Return the fields for the labels, and whether each is a yes or no."""
        return {**super().labels_of(static, outputs), "multilabel": is_multilabel(static)}


@adds_head(ImageClassificationConfig)
def add_image_classification_head(
    self: Model,
    head_name: str,
    num_labels: int = 2,
    layers: int = 1,
    activation_function: str | None = "tanh",
    overwrite_ok: bool = False,
    multilabel: bool = False,
    id2label: Labels = None,
    use_pooler: bool = False,
    pooling: Pooling = "auto",
) -> None:
    """Add a head that classifies images; arguments as of `add_classification_head`."""
