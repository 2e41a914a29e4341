"""Every task class of transformers whose head becomes a named one computes the same with it."""

import pytest
import torch
import transformers
from architectures.tiny_models import NoTinyModelError, tiny_model
from transformers.models.auto import modeling_auto

from adapterzoo import AutoAdapterModel
from adapterzoo.errors import ConfigError, StateError
from adapterzoo.heads import InexpressibleError
from adapterzoo.model.heads import named, store
from adapterzoo.model.hf.info import ModelInfo
from adapterzoo.model.hf.task_classes import head_tensors

TASKS = ("SEQUENCE_CLASSIFICATION", "MASKED_LM", "CAUSAL_LM", "TOKEN_CLASSIFICATION",
         "QUESTION_ANSWERING", "IMAGE_CLASSIFICATION")  # fmt: skip
MAPPINGS = {task: getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS}
# a tiny one computes NaN
LEFT_OUT = {"canine"}
# activations, and classes that differ from others in what they compute
QUICK = ("convbert", "distilbert", "electra", "esmc", "got_ocr2", "longformer", "neomme", "vit")
TYPES = sorted({name for found in MAPPINGS.values() for name in found} - LEFT_OUT)


def error_of(tiny, cls, task):
    """The largest difference of the logits; None if the class cannot be compared or loaded."""
    config = tiny.model.config
    config.num_labels = 2 if task == "QUESTION_ANSWERING" else 3
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in tiny.inputs.items()}
    torch.manual_seed(0)
    try:
        static = cls(config).eval()
        with torch.no_grad():
            for parameter in static.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
            expected = static.double()(**inputs)
    except Exception:  # noqa: BLE001  classes refuse configs and inputs in every way
        return None
    model = AutoAdapterModel.from_config(config).eval().double()
    if type(static.base_model) is not model.backbone_class:
        # a decoder alone
        return None
    model.base_model.load_state_dict(static.base_model.state_dict(), strict=False)
    pooler = "pooler" in dict(model._backbone.named_children())
    labels = config.label2id
    try:
        info, tensors = ModelInfo(model), head_tensors(static)
        head = info.equal_head(cls.__name__, tensors, labels, pooler)
        found, own = info.values_of(head, tensors)
        store.add(model, "x", named.config_from(model, found))
    except (InexpressibleError, ConfigError):
        # left out with a warning
        return None
    filled = named.find(model, "x").state_dict(keep_vars=True)
    try:
        with torch.no_grad():
            for key, tensor in own.items():
                filled[key].copy_(tensor)
            given = model(**inputs, head="x")
    except StateError:
        # the base model pools nothing
        return None
    # LXMERT chooses among answers, and gives a score to each
    keys = ("logits", "start_logits", "question_answering_score")
    key = next(key for key in keys if key in expected)
    return float((given[key] - expected[key]).abs().max())


def check(model_types):
    wrong, compared = {}, 0
    for model_type in model_types:
        try:
            tiny = tiny_model(model_type)
        except NoTinyModelError:
            continue
        for task, mapping in MAPPINGS.items():
            names = mapping.get(model_type, ())
            for name in (names,) if isinstance(names, str) else names:
                error = error_of(tiny, getattr(transformers, name), task)
                compared += error is not None
                # some classes compute logits in float32; a NaN is wrong too
                if error is not None and not error < 1e-6:
                    wrong[name] = error
    assert not wrong
    return compared


@pytest.mark.needs("transformers>=5.24", "it had fewer families")
def test_heads_of_task_classes_compute_the_same_as_named_ones():
    assert check(QUICK) > 20


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
def test_heads_of_all_task_classes_compute_the_same_as_named_ones(part):
    assert check(TYPES[part::4]) > 40
