"""State-space and hybrid models: blocks that have a mixer where others have attention."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from architectures.tiny_configs import tiny_configs
from architectures.tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

import adapterzoo
from adapterzoo import AdapterConfig, LoRAConfig
from adapterzoo.errors import SiteError
from adapterzoo.formats import native

_TWO = ["linear_attention", "full_attention"]
_FOUR = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
# what the smallest config lacks: blocks of both kinds
HYBRID: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": _TWO},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"layers_block_type": _FOUR, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": _FOUR, "num_hidden_layers": 4},
}
TYPES = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
    "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2",
)  # fmt: skip
# its smallest config has no shared block
ZAMBA2 = {
    "vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 128, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_headdim": 32,
    "num_mem_blocks": 1, "adapter_rank": 4, "chunk_size": 8, "max_position_embeddings": 64,
}  # fmt: skip
# all of its blocks with attention have the same weights, which merging refuses to change
SHARED = {"zamba": (1, 3), "zamba2": (1, 3)}
# computed, or given by `HYBRID`
UNSET = {"model_type", "transformers_version", "layer_types", "layers_block_type"}
METHODS = ("lora", "ia3", "seq_bn", "par_bn", "double_seq_bn")
IDS = torch.arange(10, 34).reshape(2, 12)


def model_of(model_type: str) -> nn.Module:
    """Return a tiny model with blocks of all kinds, of float64, in evaluation mode."""
    changes = HYBRID.get(model_type, {})
    if model_type == "zamba2":
        config = AutoConfig.for_model(model_type, **ZAMBA2, **changes)
    else:
        fields = next(tiny_configs(model_type)).to_dict()
        kept = {n: v for n, v in fields.items() if n not in UNSET}
        config = AutoConfig.for_model(model_type, **kept | changes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModel.from_config(config).double().eval().requires_grad_(False)
    source = torch.Generator().manual_seed(0)
    # some are zero at first, and no gradient passes
    for module in model.modules():
        if isinstance(module, nn.Linear):
            noise = torch.randn(module.weight.shape, generator=source, dtype=torch.float64)
            module.weight.copy_(noise / module.in_features**0.5)
    return model


def adapted(model_type: str, config: Any) -> Any:
    """Return the model with an active adapter of random values."""
    model: Any = adapterzoo.init(model_of(model_type))
    model.add_adapter("a", config, set_active=True)
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".a." in name:
                noise = torch.randn(parameter.shape, generator=source, dtype=parameter.dtype)
                parameter.add_(noise, alpha=0.2)
    return model.eval()


def states(model: Any) -> Tensor:
    return model(input_ids=IDS, use_cache=False).last_hidden_state


# --- where adapters go ---


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_default_adapter_reaches_every_block(model_type, method):
    model: Any = adapterzoo.init(model_of(model_type))
    model.add_adapter("a", method)
    assert sorted(n for n in model.get_adapter("a") if n >= 0) == [*range(len(blocks(model)))]


def blocks(model: Any) -> Any:
    return model.blocks if hasattr(model, "blocks") else model.layers


def test_lora_at_mixers_follows_the_matrices():
    model: Any = adapterzoo.init(model_of("bamba"))

    def paths(**fields: Any) -> set[str]:
        model.add_adapter("a", LoRAConfig(**fields), overwrite_ok=True)
        names = (name.split(".loras.")[0] for name, _ in model.named_parameters() if ".a." in name)
        return {*names}

    first, second = "layers.0.mamba", "layers.1.self_attn"
    inputs = {f"{first}.in_proj", f"{second}.q_proj", f"{second}.v_proj"}
    assert paths() == inputs
    assert paths(mixers=False) == {f"{second}.q_proj", f"{second}.v_proj"}
    outputs = {f"{first}.out_proj", f"{second}.o_proj"}
    assert paths(attn_matrices=["q", "v", "o"]) == inputs | outputs
    assert paths(attn_matrices=["o"]) == outputs
    assert paths(leave_out=[1]) == {f"{first}.in_proj"}
    assert paths(exclude_modules=["in_proj"]) == {f"{second}.q_proj", f"{second}.v_proj"}


def test_a_model_of_mixers_alone_has_no_attention_to_choose():
    model: Any = adapterzoo.init(model_of("mamba"))
    with pytest.raises(SiteError, match="no layer with the role 'query'"):
        model.add_adapter("a", LoRAConfig(mixers=False))
    with pytest.raises(SiteError, match="no layer with the role 'mlp_in'"):
        model.add_adapter("a", LoRAConfig(selfattn_lora=False, intermediate_lora=True))
    with pytest.raises(SiteError, match="takes no keys and values"):
        model.add_adapter("a", "prefix_tuning")


# --- what they compute ---


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", ["lora", "ia3", "lora[attn_matrices=['q','o']]"])
@pytest.mark.parametrize("model_type", TYPES)
def test_merged_equals_unmerged(model_type, method, training):
    config = AdapterConfig.load(method).replace(leave_out=SHARED.get(model_type, ()))
    model = adapted(model_type, config).train(training)
    with torch.no_grad():
        without = states(model_of(model_type).train(training))
        before = states(model)
        model.merge_adapter("a")
        assert (before - without).abs().max() > 1e-3
        # parts of the models compute in float32
        torch.testing.assert_close(states(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", TYPES)
def test_a_gradient_comes_to_every_site(model_type, method):
    model = adapted(model_type, method)
    model.train_adapter("a")
    states(model.train()).square().sum().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert not [n for n, p in trained.items() if p.grad is None or not p.grad.count_nonzero()]


# --- files ---


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", TYPES)
def test_an_adapter_is_loaded_as_it_was_saved(model_type, method, tmp_path):
    model = adapted(model_type, method)
    model.save_adapter(tmp_path, "a")
    again: Any = adapterzoo.init(model_of(model_type))
    again.load_adapter(tmp_path, set_active=True)
    with torch.no_grad():
        assert torch.equal(states(again.eval()), states(model))


@pytest.mark.parametrize("model_type", TYPES)
def test_peft_loads_a_default_lora(model_type, tmp_path):
    model = adapted(model_type, "lora")
    model.save_adapter(tmp_path, "a", format="peft")
    theirs = peft.PeftModel.from_pretrained(model_of(model_type), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(states(theirs.eval()), states(model))


@pytest.mark.parametrize("model_type", ["nemotron_h", "rwkv"])
def test_a_default_lora_of_peft_is_loaded(model_type, tmp_path):
    config = peft.LoraConfig(r=4, init_lora_weights=False)
    theirs = peft.get_peft_model(model_of(model_type), config)
    theirs.save_pretrained(tmp_path)
    model: Any = adapterzoo.init(model_of(model_type))
    model.load_adapter(tmp_path, set_active=True)
    with torch.no_grad():
        torch.testing.assert_close(states(model.eval()), states(theirs.eval()))


@pytest.mark.parametrize("method", ["lora", "ia3", "double_seq_bn"])
@pytest.mark.parametrize("model_type", ["bamba", "jamba", "lfm2", "recurrent_gemma", "zamba"])
def test_a_file_of_a_release_without_mixers_is_loaded(model_type, method, tmp_path):
    model = adapted(model_type, f"{method}[mixers=False]")
    model.save_adapter(tmp_path, "a")
    stored = native.load(tmp_path, "adapter")
    del stored.metadata["config"]["mixers"]
    for name, written in native.encode(stored, "adapter").items():
        (tmp_path / name).write_bytes(written)
    again: Any = adapterzoo.init(model_of(model_type))
    again.load_adapter(tmp_path, set_active=True)
    with torch.no_grad():
        assert torch.equal(states(again.eval()), states(model))
    again.save_adapter(tmp_path / "again", "a")
    assert native.load(tmp_path / "again", "adapter").metadata["config"]["mixers"] is False


# --- all linear layers, and named ones, where there is no attention ---


@pytest.mark.parametrize(
    "model_type", ["convnext", "fnet", "focalnet", "mamba", "mamba2", "patchtsmixer"]
)
def test_all_linear_needs_no_attention(model_type):
    tiny = tiny_model(model_type)
    model: Any = adapterzoo.init(copy.deepcopy(tiny.model))
    model.add_adapter("a", LoRAConfig(target_modules="all-linear"))
    reached = {n.split(".loras.")[0] for n, _ in model.named_parameters() if ".a." in n}
    linear = {n for n, m in tiny.model.named_modules() if isinstance(m, nn.Linear)}
    # Mamba only reads this one
    assert reached == {name for name in linear if not name.endswith("dt_proj")}


def test_all_linear_of_a_plain_module():
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 4)))
    model: Any = adapterzoo.init(plain)
    model.add_adapter("a", LoRAConfig(r=2, target_modules="all-linear"))
    reached = {n.split(".loras.")[0] for n, _ in model.named_parameters() if ".a." in n}
    assert reached == {"0", "2.0"}


def test_all_linear_of_a_model_without_linear_layers_says_what_can_be_named():
    model: Any = adapterzoo.init(copy.deepcopy(tiny_model("resnet").model))
    with pytest.raises(SiteError, match="some of these names: 'convolution'"):
        model.add_adapter("a", LoRAConfig(target_modules="all-linear"))
    model.add_adapter("a", LoRAConfig(r=2, target_modules=["convolution"]))
