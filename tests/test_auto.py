"""`AutoAdapterModel`: classes, static checkpoints that keep their head, copies, signatures."""

from __future__ import annotations

import inspect
import logging
import re

import pytest
import torch
import transformers
from families import tiny_config, tiny_inputs
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertModel,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.auto import adapter_class
from adapterzoo.errors import CheckpointError, ConfigError

STATIC = {
    AutoModelForSequenceClassification: (
        "bert", "roberta", "distilbert", "deberta-v2", "electra", "albert", "xlm-roberta", "gpt2",
        "gpt_neox", "llama", "mistral", "qwen2", "gemma2", "phi3", "mixtral", "bart", "mbart",
    ),
    AutoModelForTokenClassification: (
        "bert", "roberta", "distilbert", "deberta-v2", "electra", "albert", "gpt2", "llama",
    ),
    AutoModelForQuestionAnswering: ("bert", "roberta", "distilbert", "electra", "albert", "bart"),
    AutoModelForMaskedLM: ("bert", "roberta", "distilbert", "xlm-roberta"),
    AutoModelForMultipleChoice: ("bert", "roberta"),
    AutoModelForImageClassification: ("vit", "beit"),
}  # fmt: skip


@pytest.fixture
def reports():
    """What transformers' loader says, and what is said in its place."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("auto", "family"), [(auto, family) for auto, names in STATIC.items() for family in names]
)
def test_a_static_checkpoint_keeps_its_head(auto, family, tmp_path, reports):
    config = tiny_config(family)
    if auto is AutoModelForSequenceClassification:
        config.id2label = {0: "bad", 1: "so-so", 2: "good"}
        config.label2id = {label: i for i, label in config.id2label.items()}
    torch.manual_seed(0)
    static = auto.from_config(config).eval()
    static.save_pretrained(tmp_path)
    model = AutoAdapterModel.from_pretrained(tmp_path)
    assert model.active_head == "default"
    assert not [text for text in reports if "UNEXPECTED" in text or "does not use" in text]
    inputs = tiny_inputs(family)
    inputs.pop("decoder_input_ids", None)
    if family in {"bart", "mbart"}:
        # transformers wants as many ends of sequence in each row
        inputs["input_ids"][:, -1] = config.eos_token_id
        inputs["attention_mask"][:] = 1
    if auto is AutoModelForMultipleChoice:
        inputs = {name: tensor.unsqueeze(1).repeat(1, 2, 1) for name, tensor in inputs.items()}
    if family in {"gpt2", "gpt_neox", "llama", "mistral", "qwen2", "gemma2", "phi3", "mixtral"}:
        # transformers looks for padding in the tokens, and not in the mask
        inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 0)
    with torch.no_grad():
        ours, theirs = model(**inputs), static(**inputs)
    assert type(ours).__name__ == type(theirs).__name__
    for name in ("logits", "start_logits", "end_logits"):
        if name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)
    if auto is AutoModelForSequenceClassification:
        assert model.get_labels() == ["bad", "so-so", "good"]


def test_tensors_that_a_task_class_does_not_have_do_not_hide_its_head(tmp_path, reports):
    static = transformers.DebertaV2ForMaskedLM(tiny_config("deberta-v2"))
    static.lm_predictions = torch.nn.Linear(3, 3)
    static.save_pretrained(tmp_path)
    model, info = AutoAdapterModel.from_pretrained(tmp_path, output_loading_info=True)
    said = [text for text in reports if "does not use" in text]
    assert len(said) == 1
    assert "'lm_predictions.bias', 'lm_predictions.weight'." in said[0]
    assert model.get_head("default").config.head_type == "masked_lm"
    assert {*info["unexpected_keys"]} == {"lm_predictions.weight", "lm_predictions.bias"}


def test_a_head_around_another_base_model_is_left_out_with_the_reason(tmp_path, caplog):
    static = transformers.T5ForTokenClassification(tiny_config("t5"))
    static.save_pretrained(tmp_path)
    model = AutoAdapterModel.from_pretrained(tmp_path)
    assert model.active_head is None
    assert "left out" in caplog.text
    assert "T5EncoderModel" in caplog.text


def test_classes_are_made_once_and_belong_to_the_family():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    assert type(model).__name__ == "BertAdapterModel"
    assert type(model) is adapterzoo.BertAdapterModel
    assert isinstance(model, PreTrainedModel)
    assert isinstance(model, transformers.BertPreTrainedModel)
    # a subclass, with the adapter methods of the model around it
    assert isinstance(model.bert, BertModel)
    assert type(model.bert).__name__ == "BertModel"
    assert model.base_model is model.bert
    assert isinstance(model, adapterzoo.AdapterModelMixin)


def test_types_of_configs_that_share_a_base_model_have_a_class_each(monkeypatch):
    class SharingConfig(transformers.LlamaConfig):
        model_type = "sharing"

    shared = modeling_auto.MODEL_MAPPING._extra_content
    monkeypatch.setitem(shared, SharingConfig, transformers.LlamaModel)
    for config in (transformers.LlamaConfig(), SharingConfig()):
        made = adapter_class(config)
        assert made.config_class is type(config)
        assert made is adapter_class(config)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "vit"])
def test_forward_shows_the_arguments_of_the_base_model_and_the_labels(family):
    model = AutoAdapterModel.from_config(tiny_config(family))
    shown = inspect.signature(model.forward).parameters
    theirs = inspect.signature(model.base_model.forward).parameters
    wanted = {n for n, p in theirs.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    assert wanted <= set(shown)
    assert {"labels", "start_positions", "end_positions", "head", "return_dict"} <= set(shown)


def test_inputs_by_position_are_inputs_by_name():
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    model.add_tagging_head("tags", num_labels=3)
    inputs = tiny_inputs("bert")
    by_name = model(**inputs).logits
    assert torch.equal(model(inputs["input_ids"], inputs["attention_mask"]).logits, by_name)
    loss, logits = model(**inputs, labels=torch.zeros(2, 7).long(), return_dict=False)[:2]
    assert torch.equal(logits, by_name)
    assert loss.dim() == 0


def test_more_inputs_than_have_a_position_are_an_error():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    with pytest.raises(ConfigError, match=r"40 inputs .*'input_ids', 'attention_mask'"):
        model(*[None] * 40)
    # a place that only **kwargs would fill is none
    with pytest.raises(ConfigError, match="inputs by position"):
        model(*[None] * (len(model.input_names) + 1))
    assert "kwargs" not in model.input_names


def test_an_input_by_position_and_by_name_is_an_error():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    ids = tiny_inputs("bert")["input_ids"]
    with pytest.raises(ConfigError, match=r"'input_ids' by position and by name.*once"):
        model(ids, input_ids=ids)


def test_without_a_head_the_output_is_that_of_the_base_model():
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    inputs = tiny_inputs("bert")
    out = model(**inputs)
    assert torch.equal(out.last_hidden_state, model.bert(**inputs).last_hidden_state)
    assert isinstance(model(**inputs, return_dict=False), tuple)


def test_dtype_is_that_which_was_asked_for(tmp_path):
    AutoAdapterModel.from_config(tiny_config("llama")).base_model.save_pretrained(tmp_path)
    model = AutoAdapterModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.add_adapter("a", "lora")
    model.add_adapter("b", "seq_bn")
    model.add_causal_lm_head("lm")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.set_active_adapters(["a", "b"])
    assert model(**tiny_inputs("llama")).logits.dtype is torch.bfloat16


def test_load_model_takes_a_class_that_chooses_another(tmp_path):
    transformers.BertForSequenceClassification(tiny_config("bert")).save_pretrained(tmp_path)
    model = adapterzoo.load_model(tmp_path, AutoModelForSequenceClassification)
    assert type(model).__name__ == "BertForSequenceClassification"
    model.add_adapter("a", "lora")
    with pytest.raises(TypeError):
        adapterzoo.load_model(tmp_path, "BertModel")


def test_load_model_leaves_the_class_to_auto_adapter_model(tmp_path, tiny):
    model = tiny("bert")
    model.add_adapter("a", "lora", set_active=True)
    model.save_pretrained(tmp_path)
    again, info = adapterzoo.load_model(
        tmp_path, adapterzoo.AutoAdapterModel, output_loading_info=True
    )
    assert type(again) is type(model)
    assert again.active_adapters == model.active_adapters
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_a_static_model_with_adapters_comes_back_by_load_model(tmp_path):
    torch.manual_seed(0)
    static = transformers.BertForSequenceClassification(tiny_config("bert")).eval()
    model = adapterzoo.init(static)
    model.add_adapter("a", "lora[init_weights='bert']", set_active=True)
    inputs = tiny_inputs("bert")
    before = model(**inputs).logits
    model.save_pretrained(tmp_path)
    cls = transformers.BertForSequenceClassification
    again = adapterzoo.load_model(tmp_path, cls).eval()
    again.set_active_adapters("a")
    assert torch.equal(again(**inputs).logits, before)
    # and plain transformers loads the base model from the same folder
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["BertForSequenceClassification"]


def test_what_was_active_is_active_after_a_round_trip(tmp_path):
    torch.manual_seed(0)
    model = AutoAdapterModel.from_config(tiny_config("bert")).eval()
    for name in ("z", "a"):
        model.add_adapter(name, "lora[init_weights='bert']")
        model.add_tagging_head(name, num_labels=3)
    model.add_tagging_head("m", num_labels=3)
    model.set_active_adapters(["z", "a"])
    model.active_head = ["z", "m"]
    model.save_pretrained(tmp_path)
    again = AutoAdapterModel.from_pretrained(tmp_path)
    assert again.active_adapters == model.active_adapters
    assert again.active_head == ["z", "m"]
    assert list(again.adapters_config) == ["z", "a"]
    inputs = tiny_inputs("bert")
    ours, theirs = model(**inputs), again(**inputs)
    assert all(torch.equal(x.logits, y.logits) for x, y in zip(ours, theirs, strict=True))


def test_a_type_without_base_model_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match="PreTrainedConfig"):
        AutoAdapterModel.from_config(transformers.PreTrainedConfig())


def test_an_adapter_beside_its_model(tmp_path):
    """As the peer's quickstart saves them; transformers would load the adapter through PEFT."""
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    model.add_adapter("a")
    model.save_adapter(tmp_path, "a")
    model.delete_adapter("a")
    model.save_pretrained(tmp_path)
    loaded = AutoAdapterModel.from_pretrained(tmp_path)
    assert not loaded.adapters_config
    assert loaded.load_adapter(tmp_path) == "a"


def test_a_folder_of_folders_of_adapters_says_what_it_holds(tiny, tmp_path):
    """As `AdapterTrainer.save_model` and `save_all_adapters` write it."""
    model = tiny("bert")
    for name in ("reviews", "news"):
        model.add_adapter(name, "lora")
    model.save_all_adapters(tmp_path)
    with pytest.raises(CheckpointError, match="holds 'news', 'reviews'") as error:
        AutoAdapterModel.from_pretrained(tmp_path)
    (advice,) = re.findall(r"Write from_pretrained\('(.*)'\)", str(error.value))
    with pytest.raises(CheckpointError, match=r"does not name its base model"):
        AutoAdapterModel.from_pretrained(advice)
    # other files of a model than `config.json`, which may stand beside adapters
    with pytest.raises(OSError, match=r"none\.gguf"):
        AutoAdapterModel.from_pretrained(tmp_path, gguf_file="none.gguf")
