"""Heads of task classes by `adapterzoo.peft`: what is trained is saved, or refused before."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
import transformers
from peft_world import CONFIG, QUIET
from safetensors.torch import load_file
from transformers import AutoConfig, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import adapterzoo
import adapterzoo.peft
from adapterzoo import LoRAConfig
from adapterzoo.errors import CheckpointError
from adapterzoo.peft import PeftModel, get_peft_model, get_peft_model_state_dict

pytestmark = [
    *(pytest.mark.filterwarnings(warning) for warning in QUIET),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True. and a tied layer"),
]

IDS = torch.tensor([[5, 6, 7, 2]])
SIZES = {
    "vocab_size": 64, "d_model": 32, "hidden_size": 32, "embedding_size": 32, "dim": 32,
    "encoder_layers": 1, "decoder_layers": 1, "num_hidden_layers": 1, "n_layers": 1,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_attention_heads": 4,
    "n_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "intermediate_size": 48,
    "hidden_dim": 48, "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
# class → model type, a layer for LoRA, and what PEFT saves of the head
CLASSES: dict[str, tuple[str, str, list[str] | None]] = {
    "BartForConditionalGeneration": ("bart", "q_proj", None),
    "MBartForConditionalGeneration": ("mbart", "q_proj", None),
    "MarianMTModel": ("marian", "q_proj", None),
    "PegasusForConditionalGeneration": ("pegasus", "q_proj", None),
    "BlenderbotForConditionalGeneration": ("blenderbot", "q_proj", None),
    "PLBartForConditionalGeneration": ("plbart", "q_proj", None),
    "M2M100ForConditionalGeneration": ("m2m_100", "q_proj", None),
    "BertForMaskedLM": ("bert", "query", ["cls.predictions.transform"]),
    "BertForPreTraining": (
        "bert", "query", ["cls.predictions.transform", "cls.seq_relationship"]),
    "RobertaForMaskedLM": ("roberta", "query", ["lm_head.dense", "lm_head.layer_norm"]),
    "DistilBertForMaskedLM": ("distilbert", "q_lin", ["vocab_layer_norm", "vocab_transform"]),
    "ElectraForMaskedLM": ("electra", "query", ["generator_predictions"]),
    "AlbertForMaskedLM": ("albert", "query", ["predictions.LayerNorm", "predictions.dense"]),
    "ModernBertForMaskedLM": ("modernbert", "Wqkv", ["head"]),
    "DebertaV2ForMaskedLM": ("deberta-v2", "query_proj", ["cls.predictions.transform"]),
    "MPNetForMaskedLM": ("mpnet", "q", ["lm_head.dense", "lm_head.layer_norm"]),
}  # fmt: skip


def built(name: str) -> Any:
    model_type = CLASSES[name][0] if name in CLASSES else "bert"
    own = AutoConfig.for_model(model_type).to_dict()
    config = AutoConfig.for_model(model_type, **{k: v for k, v in SIZES.items() if k in own})
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    # a buffer that belongs to the base checkpoint
    if "final_logits_bias" in dict(model.named_buffers()):
        model.final_logits_bias.normal_()
    return model


def stirred(model: Any) -> Any:
    """Give all that is trained other values."""
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    decoder = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **decoder)[0]


@pytest.mark.parametrize("name", CLASSES)
def test_what_is_trained_is_saved_as_peft_reads_it(name, tmp_path):
    _, layer, saved = CLASSES[name]
    model = adapterzoo.init(built(name))
    model.add_adapter("a", LoRAConfig(r=2, target_modules=[layer]))
    model.train_adapter("a")
    right = logits(stirred(model))
    assert (right - logits(built(name))).abs().max() > 1e-4
    model.save_adapter(tmp_path, "a", format="peft")
    assert json.loads((tmp_path / CONFIG).read_text())["modules_to_save"] == saved
    for library in (PeftModel, peft.PeftModel):
        again = library.from_pretrained(built(name), tmp_path).eval()
        torch.testing.assert_close(logits(again), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        *((name, None) for name in (*CLASSES, "BertForSequenceClassification")),
        ("BertForSequenceClassification", "SEQ_CLS"),
    ],
)
def test_what_pefts_config_trains_is_what_peft_trains(name, task, tmp_path):
    """A head only where the task has one; the file has no other either."""
    layer = CLASSES.get(name, ("", "query"))[1]
    counts, files = [], []
    for library in (adapterzoo.peft, peft):
        config = library.LoraConfig(r=2, target_modules=[layer], task_type=task)
        model = library.get_peft_model(built(name), config)
        counts.append(sum(p.numel() for p in model.parameters() if p.requires_grad))
        model.save_pretrained(tmp_path / library.__name__)
        files.append({*load_file(tmp_path / library.__name__ / "adapter_model.safetensors")})
    assert counts[0] == counts[1]
    assert files[0] == files[1]


def test_rows_of_tokens_are_saved_beside_a_tied_decoder(tmp_path):
    model = adapterzoo.init(built("BertForMaskedLM"))
    model.add_adapter("a", LoRAConfig(r=2, trainable_token_indices=[5, 7]), set_active=True)
    for _, module in model.adapter_modules("a"):
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.3)
    right = logits(model.eval())
    model.save_adapter(tmp_path, "a", format="peft")
    again = adapterzoo.init(built("BertForMaskedLM"))
    again.load_adapter(tmp_path, set_active=True)
    theirs = peft.PeftModel.from_pretrained(built("BertForMaskedLM"), tmp_path)
    for other in (again, theirs):
        torch.testing.assert_close(logits(other.eval()), right, rtol=0, atol=1e-5)


def test_heads_are_left_out_where_save_pretrained_is_told_so(tmp_path):
    model = stirred(get_peft_model(built("BertForMaskedLM"), peft.LoraConfig(r=2)))
    model.save_pretrained(tmp_path, with_head=False)
    assert all("lora" in key for key in load_file(tmp_path / "adapter_model.safetensors"))


SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
UNSAVABLE = {
    "prompt": (
        lambda: built("BertForMaskedLM"),
        peft.PromptTuningConfig(num_virtual_tokens=3),
        adapterzoo.PromptTuningConfig(prompt_length=3),
        "not for a BertForMaskedLM",
    ),
    "boft": (
        lambda: GPT2LMHeadModel(GPT2Config(**SMALL)),
        peft.BOFTConfig(boft_block_size=4, target_modules=["c_attn"]),
        adapterzoo.BOFTConfig(boft_block_size=4, target_modules=["c_attn"]),
        "PEFT has no BOFT",
    ),
}


@pytest.mark.parametrize("case", UNSAVABLE)
def test_what_the_format_cannot_hold_is_refused_before_training(case, tmp_path):
    """PEFT itself cannot add these."""
    make, config, mine, words = UNSAVABLE[case]
    model = make()
    before = [*model.state_dict()]
    says = rf"{words}.*Write save_adapter\(.*To train it, write adapterzoo\.{type(mine).__name__}\("
    with pytest.raises(CheckpointError, match=rf"get_peft_model\(.*{says}"):
        get_peft_model(model, config)
    assert not hasattr(model, "adapters_config")
    assert [*model.state_dict()] == before
    made = get_peft_model(model, LoRAConfig(r=2), "a")
    before = {key: tensor.clone() for key, tensor in made.state_dict().items()}
    for add in (
        lambda: made.add_adapter("b", config),
        lambda: made.add_adapter(config, "b"),
        lambda: made.add_adapter(config),
        lambda: made.add_adapter("a", config, overwrite_ok=True),
        lambda: get_peft_model(made, config, "b"),
    ):
        with pytest.raises(CheckpointError, match=says):
            add()
        assert [*made.adapters_config] == ["a"]
        assert made.active_adapter == "a"
        after = made.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    # the hint; and a model whose files are not those of PEFT takes the config
    made.add_adapter("b", mine)
    made.save_pretrained(tmp_path, format="native")
    plain = adapterzoo.init(make())
    plain.add_adapter("b", config)
    plain.load_adapter(tmp_path / "b", load_as="b", overwrite_ok=True)


def test_hints_name_a_call_that_takes_the_argument(tmp_path):
    """A head whose tensors are in no whole module, and differ from those of the base model."""
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    base = BertForMaskedLM(BertConfig(vocab_size=64, num_attention_heads=4, **small))
    base.save_pretrained(tmp_path / "base")
    model = adapterzoo.AutoAdapterModel.from_pretrained(tmp_path / "base")
    model.add_adapter("a", "lora")
    model.add_masked_lm_head("a")
    with pytest.raises(CheckpointError, match=r"Write with_head=False") as found:
        model.save_adapter(tmp_path / "a", "a", format="peft")
    assert "save_adapter(…" not in str(found.value)
    model.save_adapter(tmp_path / "a", "a", format="peft", with_head=False)
    for call in (
        lambda: model.get_adapter_state_dict("a"),
        lambda: get_peft_model_state_dict(model, adapter_name="a"),
    ):
        with pytest.raises(CheckpointError, match=r"Write save_adapter\(…, with_head=False\)"):
            call()
