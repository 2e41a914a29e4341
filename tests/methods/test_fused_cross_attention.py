"""Cross-attention whose fused layer holds keys and values, with queries in a layer of its own."""

import pytest
import torch
from snapshots import refused, stir
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from adapterzoo import LoRAConfig, init
from adapterzoo.errors import CheckpointError

WIDTH = 32
SIZES = {"n_embd": WIDTH, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 99}
SIZES |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODERS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(add_cross_attention=True, **SIZES)),
    "gpt_bigcode": (
        GPTBigCodeForCausalLM,
        GPTBigCodeConfig(add_cross_attention=True, multi_query=False, **SIZES),
    ),
    "imagegpt": (
        ImageGPTForCausalImageModeling,
        ImageGPTConfig(add_cross_attention=True, **SIZES),
    ),
}
KEYS, VALUES = list(range(WIDTH)), list(range(WIDTH, 2 * WIDTH))
CHANGED = {"q": {"q_attn": KEYS}, "k": {"c_attn": KEYS}, "v": {"c_attn": VALUES}}


def captioner():
    """A ViT and a GPT-2, with inputs."""
    torch.manual_seed(0)
    encoder = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64,
        image_size=8, patch_size=4,
    )  # fmt: skip
    decoder = GPT2Config(add_cross_attention=True, **SIZES)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = VisionEncoderDecoderModel(config=config).double().eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    return model, {"pixel_values": images, "decoder_input_ids": torch.randint(3, 60, (2, 5))}


def logits(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("matrix", CHANGED)
@pytest.mark.parametrize("model_type", DECODERS)
def test_a_matrix_is_its_features(model_type, matrix):
    """GPT2Attention splits c_attn's output of cross-attention in two."""
    cls, config = DECODERS[model_type]
    model = init(cls(config).double())
    model.add_adapter("a", LoRAConfig(r=4, attn_matrices=[matrix]), set_active=True)
    stir(model, "a", std=1.0)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    attention = model.base_model.h[0].crossattention
    for name in ("c_attn", "q_attn"):
        layer = getattr(attention, name)
        acting = layer(x)
        model.set_active_adapters(None)
        changed = (acting - layer(x)).abs().sum(0).nonzero().flatten().tolist()
        model.set_active_adapters("a")
        assert changed == CHANGED[matrix].get(name, [])


PREFIXES = [
    "prefix_tuning_flat[prefix_length=3]",
    "prefix_tuning[prefix_length=3]",
    "mam",
    "unipelt",
]


@pytest.mark.parametrize("config", PREFIXES)
def test_a_captioner_has_prefixes(config):
    """Those of cross-attention act, and a cache changes nothing."""
    model, inputs = captioner()
    model = init(model)
    model.add_adapter("a", config, set_active=True)
    stir(model, "a", std=0.3)
    before = logits(model, inputs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "cross_prefix" in name:
                parameter.mul_(2)
    assert (logits(model, inputs) - before).abs().max() > 1e-5
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    options |= {"decoder_start_token_id": 1, "pad_token_id": 0}
    images = inputs["pixel_values"]
    expected = torch.stack(model.generate(images, use_cache=False, **options).logits)
    found = torch.stack(model.generate(images, **options).logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


# PEFT has one flag for the layers of both towers
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_a_captioner_with_lora_is_what_peft_computes(tmp_path):
    peft = pytest.importorskip("peft")
    model, inputs = captioner()
    model = init(model)
    model.add_adapter("a", "lora[attn_matrices=['q', 'k', 'v']]", set_active=True)
    stir(model, "a", std=0.3)
    acting = logits(model, inputs)
    model.save_adapter(tmp_path, "a", format="peft")
    other = peft.PeftModel.from_pretrained(captioner()[0], tmp_path)
    torch.testing.assert_close(logits(other, inputs), acting, rtol=1e-9, atol=1e-9)
    model.merge_adapter("a")
    torch.testing.assert_close(logits(model, inputs), acting, rtol=1e-9, atol=1e-9)


def test_adapterhub_has_no_lora_in_the_cross_attention_of_gpt2(tmp_path):
    """Its files of a GPT-2 load into one with cross-attention, whose LoRA it cannot say."""
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(**SIZES)).double().eval()
    crossing = GPT2LMHeadModel(DECODERS["gpt2"][1]).double().eval()
    crossing.load_state_dict(plain.state_dict(), strict=False)
    plain, crossing = init(plain), init(crossing)
    plain.add_adapter("a", "lora[intermediate_lora=True]", set_active=True)
    stir(plain, "a", std=0.3)
    plain.save_adapter(tmp_path, "a", format="adapterhub")
    crossing.load_adapter(tmp_path, load_as="b", set_active=True)
    inputs = {"input_ids": torch.randint(3, 60, (2, 5))}
    torch.testing.assert_close(logits(crossing, inputs), logits(plain, inputs))
    crossing.add_adapter("c", "lora")
    with refused(crossing, CheckpointError, "no name for an adapter", "crossattention.q_attn"):
        crossing.save_adapter(tmp_path / "c", "c", format="adapterhub")
