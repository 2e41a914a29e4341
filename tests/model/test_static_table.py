"""Named heads on a backbone's hidden states equal the static models of transformers."""

import pytest
import torch
import transformers
from transformers import AutoModel

from adapterzoo.heads import HeadConfig, InexpressibleError, LMHead
from adapterzoo.model.heads.forward import BaseCall, Call
from adapterzoo.model.hf.backbone import describe
from adapterzoo.model.hf.task_classes import from_static, to_static

_ENCODER = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 40, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
_DECODER = _ENCODER | {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
_VISION = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "image_size": 8, "patch_size": 4, "num_labels": 3,
}  # fmt: skip
_BART = {
    "vocab_size": 60, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": 40, "num_labels": 3, "pad_token_id": 1,
    "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
    "num_labels": 3, "decoder_start_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
_DISTIL = {
    "vocab_size": 60, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "num_labels": 3,
    "max_position_embeddings": 40,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 60, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 40, "num_labels": 3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEEDS = pytest.mark.needs("transformers>=5.24", "the config of ModernBERT had other fields")
_MODERN = _ENCODER | {
    "global_attn_every_n_layers": 1, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
    "sep_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
_XLNET = {
    "d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 8, "vocab_size": 60, "num_labels": 3,
}  # fmt: skip
_SWIN = {
    "image_size": 8, "patch_size": 1, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1],
    "window_size": 2, "num_labels": 3,
}  # fmt: skip
_ELECTRA = _ENCODER | {"embedding_size": 8}
_ROBERTA = _ENCODER | {"pad_token_id": 1}
_DEBERTA = _ENCODER | {"pooler_hidden_size": 16, "relative_attention": True,
                       "pos_att_type": ["c2p", "p2c"]}  # fmt: skip

CASES = [
    ("BertForSequenceClassification", _ENCODER),
    ("BertForSequenceClassification", _ENCODER | {"problem_type": "multi_label_classification"}),
    ("BertForSequenceClassification", _ENCODER | {"num_labels": 1}),
    ("BertForTokenClassification", _ENCODER),
    ("BertForQuestionAnswering", _ENCODER | {"num_labels": 2}),
    ("BertForMultipleChoice", _ENCODER),
    ("BertForMaskedLM", _ENCODER | {"hidden_act": "gelu_new"}),
    ("BertForMaskedLM", _ENCODER | {"tie_word_embeddings": False}),
    ("BertLMHeadModel", _ENCODER | {"is_decoder": True}),
    ("AlbertForMaskedLM", _ELECTRA),
    ("AlbertForSequenceClassification", _ELECTRA),
    ("RobertaForSequenceClassification", _ROBERTA),
    ("RobertaForTokenClassification", _ROBERTA),
    ("RobertaForQuestionAnswering", _ROBERTA | {"num_labels": 2}),
    ("RobertaForMaskedLM", _ROBERTA),
    ("RobertaForCausalLM", _ROBERTA | {"is_decoder": True}),
    ("XLMRobertaForMaskedLM", _ROBERTA),
    ("DistilBertForSequenceClassification", _DISTIL),
    ("DistilBertForTokenClassification", _DISTIL),
    ("DistilBertForQuestionAnswering", _DISTIL | {"num_labels": 2}),
    ("DistilBertForMultipleChoice", _DISTIL),
    ("DistilBertForMaskedLM", _DISTIL),
    ("ElectraForSequenceClassification", _ELECTRA),
    ("ElectraForTokenClassification", _ELECTRA),
    ("ElectraForQuestionAnswering", _ELECTRA | {"num_labels": 2}),
    ("ElectraForMultipleChoice", _ELECTRA),
    ("ElectraForMaskedLM", _ELECTRA),
    ("DebertaV2ForSequenceClassification", _DEBERTA),
    ("DebertaV2ForTokenClassification", _DEBERTA),
    ("RoFormerForSequenceClassification", _ELECTRA),
    pytest.param("ModernBertForMaskedLM", _MODERN, marks=NEEDS),
    ("GPT2ForSequenceClassification", _GPT2),
    ("GPT2ForTokenClassification", _GPT2),
    ("GPT2ForQuestionAnswering", _GPT2 | {"num_labels": 2}),
    ("GPT2LMHeadModel", _GPT2),
    ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),
    ("LlamaForSequenceClassification", _DECODER),
    ("LlamaForTokenClassification", _DECODER),
    ("LlamaForQuestionAnswering", _DECODER | {"num_labels": 2}),
    ("LlamaForCausalLM", _DECODER),
    ("LlamaForCausalLM", _DECODER | {"tie_word_embeddings": True}),
    ("Gemma2ForCausalLM", _DECODER | {"final_logit_softcapping": 0.3}),
    ("CohereForCausalLM", _DECODER | {"logit_scale": 0.3}),
    ("GraniteForCausalLM", _DECODER | {"logits_scaling": 3.0}),
    ("Qwen3ForCausalLM", _DECODER),
    ("T5ForConditionalGeneration", _T5),
    ("T5ForConditionalGeneration", _T5 | {"tie_word_embeddings": False}),
    ("T5ForSequenceClassification", _T5),
    ("T5ForQuestionAnswering", _T5 | {"num_labels": 2}),
    ("MT5ForConditionalGeneration", _T5),
    ("UMT5ForConditionalGeneration", _T5),
    ("BartForConditionalGeneration", _BART),
    ("BartForSequenceClassification", _BART),
    ("BartForQuestionAnswering", _BART | {"num_labels": 2}),
    ("MBartForConditionalGeneration", _BART),
    ("MarianMTModel", _BART),
    ("ViTForImageClassification", _VISION),
    ("DeiTForImageClassification", _VISION),
    ("BeitForImageClassification", _VISION),
    ("SwinForImageClassification", _SWIN),
    ("XLNetForSequenceClassification", _XLNET),
    ("XLNetForSequenceClassification", _XLNET | {"summary_type": "first"}),
    ("FalconH1ForCausalLM", _DECODER | {"lm_head_multiplier": 0.3, "mamba_d_ssm": 16,
                                        "mamba_n_heads": 2, "mamba_d_head": 8}),
]  # fmt: skip

REFUSED = [
    pytest.param(
        "ModernBertForQuestionAnswering", _MODERN | {"num_labels": 2}, "head.norm.weight",
        marks=NEEDS,
    ),
    ("T5ForTokenClassification", _T5, "encoder"),
    ("Dinov2ForImageClassification", _VISION, "16 wide"),
    ("XLNetForSequenceClassification", _XLNET | {"summary_type": "mean"}, "summary_type"),
    ("BertForPreTraining", _ENCODER, "ForMaskedLM"),
]  # fmt: skip


def _static_model(name, config):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**config)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # visible biases and norms, no symmetric zeros
            parameter.add_(torch.randn_like(parameter) * (0.5 if "bias" in key else 0.05))
        if "final_logits_bias" in dict(model.named_buffers()):
            model.final_logits_bias.normal_()
    return model.double()


def _split(model):
    """The base model alone, and the tensors of the checkpoint that are not its."""
    base = AutoModel.from_config(model.config).double().eval()
    prefix = model.base_model_prefix + "."
    own = base.state_dict()
    theirs = {k.removeprefix(prefix): v for k, v in model.state_dict().items()}
    missing, _ = base.load_state_dict({k: v for k, v in theirs.items() if k in own}, strict=False)
    rest = {
        key: tensor
        for key, tensor in model.state_dict().items()
        if key.removeprefix(prefix) not in own and key not in model.all_tied_weights_keys
    }
    return base, rest, not missing and any("pooler" in k for k in own)


def _convert(model, base, tensors, pooler):
    text = model.config.get_text_config(decoder=True)
    config = text.to_dict() | model.config.to_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return from_static(type(model).__name__, shapes, config, describe(base), pooler)


def _inputs(model):
    torch.manual_seed(1)
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(4, 3, 8, 8).double()}
    ids = torch.randint(5, 60, (4, 7))
    mask = torch.ones_like(ids)
    # XLNet takes the last token whatever it is, so its padding is on the left
    left = model.config.model_type == "xlnet"
    padded = slice(0, 2) if left else slice(5, 7)
    ids[1, padded], mask[1, padded] = model.config.pad_token_id or 0, 0
    ids[[0, 1, 2, 3], [6, 6 if left else 4, 6, 6]] = 2  # end of sequence
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(("name", "config"), CASES)
@torch.no_grad()
def test_a_static_head_and_its_named_head_give_the_same_logits(name, config):
    model = _static_model(name, config)
    base, tensors, pooler = _split(model)
    static = _convert(model, base, tensors, pooler)
    made = static.config
    assert HeadConfig.from_dict(made.to_dict()) == made
    assert to_static(static, made) == static.keys

    if choice := made.head_type == "multiple_choice":
        made = made.replace(num_choices=2, label2id=None)
    head = made.build(describe(base)).double().eval()
    language_model = isinstance(head, LMHead)
    tied = language_model and model.config.tie_word_embeddings
    if tied:
        assert head.tie(base.get_input_embeddings().weight)
    filled = {static.keys[key]: tensor for key, tensor in tensors.items()}
    missing, surplus = head.load_state_dict(filled, strict=False)
    assert (len(missing), surplus) == (int(tied), [])

    inputs = _inputs(model)
    given = {k: v.view(2, 2, 7) if choice else v for k, v in inputs.items()}
    if model.config.is_encoder_decoder:
        shifted = inputs["input_ids"].roll(1, dims=1)
        shifted[:, 0] = model.config.decoder_start_token_id
        inputs["decoder_input_ids"] = shifted
        if made.head_type != "classification":
            given["decoder_input_ids"] = shifted
    expected = model(**given)
    mask = None if model.config.is_encoder_decoder else inputs.get("attention_mask")
    outputs = base(**inputs, return_dict=True)
    read = {"attention_mask": mask, "input_ids": inputs.get("input_ids")}
    call = Call(model=base, base=BaseCall(base, outputs), inputs={}, given=read, rows=None)
    got = head(*call.features(head.pooling))
    if made.head_type == "question_answering":
        wanted = (expected.start_logits, expected.end_logits)
    else:
        got, wanted = (got,), (expected.logits,)
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "config", "reason"), REFUSED)
def test_what_cannot_be_expressed_says_why(name, config, reason):
    model = _static_model(name, config)
    base, tensors, pooler = _split(model)
    with pytest.raises(InexpressibleError) as refused:
        _convert(model, base, tensors, pooler)
    assert str(refused.value).startswith(name)
    assert reason in str(refused.value)


def test_a_head_with_other_layers_does_not_go_back():
    model = _static_model("BertForSequenceClassification", _ENCODER)
    base, tensors, pooler = _split(model)
    static = _convert(model, base, tensors, pooler)
    other = static.config.replace(layers=2, use_pooler=False)
    with pytest.raises(InexpressibleError) as refused:
        to_static(static, other)
    assert str(refused.value) == "layers: 2 here, 1 there; use_pooler: False here, True there"


@pytest.mark.parametrize("number", ["x", None, float("inf")])
def test_labels_without_a_number_are_a_reason(number):
    cls, config = transformers.BertForSequenceClassification, transformers.BertConfig(**_ENCODER)
    named = AutoModel.from_config(config)
    values = config.to_dict() | {"label2id": {"a": 0, "b": number, "c": 2}}
    tensors = {"classifier.weight": (3, 16), "classifier.bias": (3,)}
    with pytest.raises(
        InexpressibleError, match=r"^BertForSequenceClassification: its config "
    ) as refused:
        from_static(cls.__name__, tensors, values, describe(named), pooler=True)
    assert f"'b': {number!r}" in str(refused.value)
