"""Heads of the type "static": the truth is the task class itself, in float64."""

import copy
import pickle

import pytest
import torch
import transformers
from families import tiny_config
from graphs import Counting
from pretend_gpus import replicas_on_cpu
from snapshots import refused

import adapterzoo
from adapterzoo import AutoAdapterModel
from adapterzoo.errors import CheckpointError, ConfigError
from adapterzoo.heads import StaticConfig

IDS = torch.randint(5, 60, (4, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, 5:] = 0
TEXT = {"input_ids": IDS, "attention_mask": MASK}
CLASSES = {"labels": torch.tensor([0, 1, 2, 1])}
SPANS = {"start_positions": torch.tensor([0, 1, 2, 1]),
         "end_positions": torch.tensor([3, 1, 2, 4])}  # fmt: skip
IMAGES = {"pixel_values": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))}
SOUND = {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(2))}
_ENCODER = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 40, "pad_token_id": 0, "num_labels": 3,
}  # fmt: skip
_MODERN = _ENCODER | {
    "global_attn_every_n_layers": 1, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2, "classifier_dropout": 0.0,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4, "num_labels": 3, "encoder_stride": 4, "mlp_ratio": 2,
}  # fmt: skip
_AUDIO = _ENCODER | {
    "conv_dim": [16, 16], "conv_kernel": [3, 3], "conv_stride": [2, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
    "use_weighted_layer_sum": True, "feat_proj_dropout": 0.0, "hidden_dropout": 0.0,
    "activation_dropout": 0.0, "attention_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "tdnn_dim": [8, 8, 8, 8, 8], "xvector_output_dim": 8,
}  # fmt: skip
_BERT = _ENCODER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "summary_first_dropout": 0.0,
}  # fmt: skip
_CHOICES = {key: tensor.view(2, 2, 7) for key, tensor in TEXT.items()}

# task class, its config, inputs, labels
CASES = [
    ("ModernBertForSequenceClassification", _MODERN, TEXT, CLASSES),
    ("ModernBertForSequenceClassification", _MODERN | {"classifier_pooling": "mean"}, TEXT,
     CLASSES),
    ("ModernBertForSequenceClassification", _MODERN | {"problem_type": "regression"}, TEXT,
     {"labels": torch.randn(4, 3, generator=torch.Generator().manual_seed(3)).double()}),
    ("ModernBertForTokenClassification", _MODERN, TEXT, {"labels": IDS % 3}),
    ("ModernBertForQuestionAnswering", _MODERN | {"num_labels": 2}, TEXT, SPANS),
    ("ModernBertForMultipleChoice", _MODERN, _CHOICES, {"labels": torch.tensor([0, 1])}),
    ("BertForPreTraining", _BERT, TEXT,
     {"labels": IDS, "next_sentence_label": torch.tensor([0, 1, 1, 0])}),
    ("BertForNextSentencePrediction", _BERT, TEXT, {"labels": torch.tensor([0, 1, 1, 0])}),
    ("GPT2DoubleHeadsModel", _GPT2, {"input_ids": IDS.view(2, 2, 7)},
     {"labels": IDS.view(2, 2, 7), "mc_labels": torch.tensor([1, 0])}),
    ("Dinov2ForImageClassification", _VISION, IMAGES, CLASSES),
    ("Wav2Vec2ForSequenceClassification", _AUDIO, SOUND, {"labels": torch.tensor([0, 2])}),
    ("Wav2Vec2ForCTC", _AUDIO, SOUND, {"labels": torch.tensor([[5, 6], [7, 8]])}),
    ("Wav2Vec2ForXVector", _AUDIO, SOUND, {"labels": torch.tensor([0, 2])}),
]  # fmt: skip


def task_model(name, values):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**values)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # no zeros that hide an error
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def loaded(folder):
    return AutoAdapterModel.from_pretrained(folder, dtype=torch.float64).eval()


def double(inputs):
    return {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}


def check_equal(mine, theirs):
    assert type(mine) is type(theirs)
    assert mine.keys() == theirs.keys()
    for key in theirs:
        if isinstance(theirs[key], torch.Tensor):
            torch.testing.assert_close(mine[key], theirs[key], rtol=0, atol=1e-10)


@pytest.fixture
def modern(tmp_path):
    model = task_model("ModernBertForSequenceClassification", _MODERN)
    model.save_pretrained(tmp_path / "task")
    return model, tmp_path / "task"


@pytest.mark.parametrize(("name", "values", "inputs", "labels"), CASES)
def test_a_head_of_any_task_class_is_loaded_and_trained(name, values, inputs, labels, tmp_path):
    static, inputs = task_model(name, values), double(inputs)
    static.save_pretrained(tmp_path / "task")
    model, info = AutoAdapterModel.from_pretrained(
        tmp_path / "task", dtype=torch.float64, output_loading_info=True
    )
    model.eval()
    assert not info["unexpected_keys"]
    assert model.get_head("default").config.head_type == "static"
    with torch.no_grad():
        check_equal(model(**inputs), static(**inputs))
        check_equal(model(**inputs, **labels), static(**inputs, **labels))
        # one step of training gives what training the class gives
    model.add_adapter("a", "seq_bn")
    model.train_adapter("a")
    model.set_active_adapters(None)
    named, own = dict(model.heads["default"].named_parameters()), dict(static.named_parameters())
    static.base_model.requires_grad_(False)
    for each in (model, static):
        output = each(**inputs, **labels)
        sum(value for key, value in output.items() if "loss" in key).backward()
    trained = {key for key, parameter in named.items() if parameter.grad is not None}
    assert trained
    for key in trained:
        torch.testing.assert_close(named[key].grad, own[key].grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("format", ["native", "adapterhub", "adapterhub-safetensors", "peft"])
def test_every_format_gives_the_same_head_back(modern, format, tmp_path):
    static, folder = modern
    model = loaded(folder)
    model.add_adapter("a", "lora")
    model.save_adapter(tmp_path / "a", "a", format=format)
    again = loaded(folder)
    again.delete_head("default")
    assert again.active_head is None
    again.load_adapter(tmp_path / "a", load_as="b", set_active=True)
    again.set_active_adapters(None)
    again.active_head = "b"
    assert again.get_labels() == model.get_labels()
    check_equal(again(**TEXT, **CLASSES), static(**TEXT, **CLASSES))


def test_a_head_alone_and_a_whole_model_come_back(modern, tmp_path):
    static, folder = modern
    model = loaded(folder)
    model.save_head(tmp_path / "head", "default")
    model.load_head(tmp_path / "head", load_as="copy")
    model.save_pretrained(tmp_path / "whole")
    again = loaded(tmp_path / "whole")
    assert [*again.heads] == ["default", "copy"]
    for each in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        check_equal(each(**TEXT, head="copy"), static(**TEXT))
        check_equal(each(**TEXT, **CLASSES, head="default"), static(**TEXT, **CLASSES))
    plain = again.unload()
    assert type(plain) is type(static)
    check_equal(plain(**TEXT), static(**TEXT))
    again.delete_head("default")
    assert [*again.heads] == ["copy"]


def test_a_native_head_keeps_the_config_that_it_was_trained_with(modern, tmp_path):
    _, folder = modern
    static = task_model(
        "ModernBertForSequenceClassification", _MODERN | {"classifier_pooling": "mean"}
    )
    adapterzoo.init(static).save_head(tmp_path / "head")
    model = loaded(folder)
    model.load_head(tmp_path / "head", load_as="mean")
    assert model.get_head("mean").config.fields == {"classifier_pooling": "mean"}
    model.base_model.load_state_dict(static.base_model.state_dict())
    check_equal(model(**TEXT, head="mean"), static(**TEXT))
    with pytest.raises(CheckpointError, match=r"fields=\{'classifier_pooling': 'mean'\}.*native"):
        model.save_head(tmp_path / "other", "mean", format="adapterhub")


def test_rows_and_lists_of_heads_give_what_each_head_gives(modern):
    static, folder = modern
    model = loaded(folder)
    for name in ("a", "b"):
        model.add_adapter(name, "lora")
        config = StaticConfig(model_class=type(static).__name__, num_labels=3)
        model.add_prediction_head_from_config(name, config)
        model.heads[name].double()
    model.add_tagging_head("tags", num_labels=2)
    alone = {name: model(**TEXT, head=name).logits for name in ("a", "b", "tags", "default")}
    mixed = model(**TEXT, adapter_names=["a", "b", "b", "a"]).logits
    wanted = torch.stack([alone[n][row] for row, n in enumerate("abba")])
    torch.testing.assert_close(mixed, wanted, rtol=0, atol=1e-10)
    model.active_head = ["a", "tags"]
    for got, name in zip(model(**TEXT), ("a", "tags"), strict=True):
        torch.testing.assert_close(got.logits, alone[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "name"), [("gpt2", "GPT2LMHeadModel"), ("bart", "BartForConditionalGeneration")]
)
def test_a_head_that_generates_gives_the_tokens_of_its_class(family, name):
    config = tiny_config(family)
    torch.manual_seed(0)
    static = getattr(transformers, name)(config).eval()
    model = AutoAdapterModel.from_config(config).eval()
    model.load_state_dict(static.state_dict(), strict=False)
    model.add_prediction_head_from_config("lm", StaticConfig(model_class=name))
    # the class ties its output layer
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    ids = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), static.generate(ids, **options))


@pytest.mark.parametrize(("name", "values", "inputs", "labels"), CASES)
def test_replicas_of_a_static_head_have_all_its_parameters(name, values, inputs, labels, tmp_path):
    task_model(name, values).save_pretrained(tmp_path / "task")
    model, inputs = loaded(tmp_path / "task"), double(inputs)
    expected = model(**inputs, **labels)
    for replica in replicas_on_cpu(model):
        check_equal(replica(**inputs, **labels), expected)


@pytest.mark.parametrize("number", [0, 6, 8, 9])
def test_a_static_head_compiles_once(number, tmp_path):
    name, values, inputs, labels = CASES[number]
    task_model(name, values).save_pretrained(tmp_path / "task")
    model, inputs = loaded(tmp_path / "task"), double(inputs)
    # the class writes the kind of labels to its config, at which the compiler looks
    expected = model(**inputs, **labels)
    torch._dynamo.reset()
    backend = Counting()
    run = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        check_equal(run(**inputs, **labels), expected)
    assert backend.graphs == 1
    torch._dynamo.reset()


def test_what_cannot_be_a_head_says_why():
    model = AutoAdapterModel.from_config(tiny_config("bert"))
    for name, reason in (
        ("RobertaForSequenceClassification", "RobertaModel"),
        ("NoSuchModel", "transformers has no model"),
        ("BertModel", "no base model"),
    ):
        with refused(model, ConfigError, reason, "Write"):
            model.add_prediction_head_from_config("x", StaticConfig(model_class=name))
    with pytest.raises(ConfigError, match="model_class"):
        StaticConfig()


# --- static models ---

NAMED = [
    ("BertForSequenceClassification", _BERT, TEXT, CLASSES),
    ("BertForMaskedLM", _BERT, TEXT, {"labels": IDS}),
    ("GPT2LMHeadModel", _GPT2, TEXT, {"labels": IDS}),
    ("LlamaForCausalLM", _ENCODER | {"num_key_value_heads": 1}, TEXT, {"labels": IDS}),
]


@pytest.mark.parametrize(("name", "values", "inputs", "labels"), NAMED)
@pytest.mark.parametrize("format", ["native", "adapterhub"])
def test_the_head_of_a_task_class_becomes_a_named_one_and_goes_back(
    name, values, inputs, labels, format, tmp_path
):
    static = adapterzoo.init(task_model(name, values))
    static.save_head(tmp_path / "head", format=format)
    model = AutoAdapterModel.from_config(static.config, dtype=torch.float64).eval()
    model.load_state_dict(static.state_dict(), strict=False)
    model.load_head(tmp_path / "head", load_as="x")
    assert model.get_head("x").config.head_type != "static"
    wanted = static(**inputs, **labels)
    got = model(**inputs, **labels)
    torch.testing.assert_close(got.logits, wanted.logits, rtol=0, atol=1e-10)
    # transformers computes the loss of language models in float32
    torch.testing.assert_close(got.loss.float(), wanted.loss.float(), rtol=0, atol=1e-6)
    model.save_head(tmp_path / "back", "x")
    other = task_model(name, values)
    other.load_state_dict(static.state_dict())
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            if key.startswith(("classifier", "cls.predictions.transform")):
                parameter.zero_()
    adapterzoo.init(other).load_head(tmp_path / "back")
    torch.testing.assert_close(other(**inputs).logits, wanted.logits, rtol=0, atol=1e-10)
